"""Optimisations of SGLang's scheduler on a machine without an accelerator.

``install.py`` applies them, in the scheduler's process only, before SGLang builds its scheduler. Each replaces a
function of SGLang 0.5.23 whose parameters are checked first, so another version of SGLang is an error at the start and
never a silent difference.

====================================== ===========================================================================
attention                              a few calls per layer for a whole batch (``attention.py``)
layers of dense models                 plain PyTorch (``forward.py``)
equal prompts in a batch               computed once (``attention.py``, ``forward.py``)
prompts that share a prefix            computed once, if long: the others wait for the first (``admission.py``)
requests to an idle engine             start together: it waits 3 ms after the first (``admission.py``)
entries of the prefix cache            only if they save more than they cost (``prefix_cache.py``)
results of a step                      a running request costs two appends (``results.py``)
sampling without a seed                one random number per request, not per vocabulary entry (``install.py``)
inputs                                 not copied to buffers at fixed addresses, which only CUDA graphs need
environment variables                  cached; SGLang reads them some sixty times per step (``install.py``)
process groups                         share one gloo device, whose thread polls (``install.py``)
====================================== ===========================================================================

The overlap scheduler is off on such a machine. Tests turn it on to reproduce the behaviour of GPUs: then SGLang handles
the results of a step and prompts that share a prefix itself, and everything else is as above.
"""

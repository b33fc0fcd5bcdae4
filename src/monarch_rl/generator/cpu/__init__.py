"""What makes SGLang's scheduler lean on a machine without an accelerator.

Applied in the scheduler's process only, by ``install.py``, before SGLang builds its scheduler. Each change is made to
a function of SGLang 0.5.23 whose parameters are checked first: another SGLang is an error at the start, never a silent
difference.

====================================== ===========================================================================
attention                              few calls a layer for a whole batch (``attention.py``)
layers of dense models                 plain PyTorch (``forward.py``)
prompts that share a prefix            computed once: those that would compute much of it beside each other wait
                                       for the first of them (``admission.py``)
requests that come to an idle engine   start together: it waits 3 ms after the first
entries of the prefix cache            only those that are worth their price (``prefix_cache.py``)
tokens of a step                       a request that goes on costs two appends (``results.py``)
draws without a seed                   by one number a request, not one for every entry of the vocabulary
                                       (``install.py``)
inputs                                 not copied to buffers of fixed addresses, which only graphs of a GPU need
environment variables                  read from the environment some sixty times a step: once each
process groups                         share one device of gloo, whose thread polls (``install.py``)
====================================== ===========================================================================

The overlap scheduler is off on such a machine. Tests turn it on, to see there what GPUs do: then tokens of a step and
prompts that share a prefix are left to SGLang, and all else is as above.
"""

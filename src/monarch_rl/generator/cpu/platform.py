"""SGLang on a machine without an accelerator, through SGLang's own plug-in entry points.

SGLang's in-tree CPU platform needs a build of ``sgl-kernel`` with AVX512 or AMX, and much of its code assumes
CUDA. This module is an out-of-tree platform (entry point ``sglang.srt.platforms``) and a set of hooks (entry
point ``sglang.srt.plugins``) that run the released wheel on any CPU with PyTorch operations alone. Both do
nothing where torch sees an accelerator. SGLang loads them in each of its processes.

What is replaced (the reason is in a comment or docstring at each replacement):

====================================== ===========================================================================
the platform                           PyTorch operators, attention by ``torch_native``, gloo between ranks;
                                       no pinned memory, no graphs
``torchvision``, if not installed      an inert stand-in
images, video, audio                   refused
pinned memory                          ignored
``_cuda_host_register``                does nothing
``multinomial_with_seed``              the same hash and the same samples, in PyTorch
seeds in ``SamplingBatchInfo``         always honoured
attention of DeepSeek-V3               always over the compressed cache
loading DeepSeek-V3                    on the caller's thread
free memory                            the machine's memory minus this process's own
waiting while paused                   sleeps until the next message
====================================== ===========================================================================

Tested in ``tests/generator``: dense and mixture-of-experts models, log-probs, routed experts, sampling masks, LoRA
adapters from tensors, weight updates in flight. Optimisations are in ``install.py``.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from monarch_rl.runtime.machine_memory import memory_limit, own_memory

IMAGES_UNSUPPORTED = (
    "images, video and audio are not supported on a machine without an accelerator: torchvision, which SGLang's "
    "processors need, is not part of monarch_rl's CPU environment, and a text model would ignore them. Send token "
    "ids only, or run on a GPU machine with SGLang's full set of packages."
)
UNSEEDED = -(1 << 63)
"""Seed value of a request without a seed in a batch, see ``seeds_of_batch``; no request can have it."""


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Any CPU, with PyTorch's own operators."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the name of the platform's class; None if there is an accelerator."""
    if torch.accelerator.is_available():
        return None
    _stand_in_for_torchvision()
    return f"{__name__}.CpuPlatform"


def hooks() -> None:
    """Entry point ``sglang.srt.plugins``: registers the replacements that the module docstring lists."""
    if torch.accelerator.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang pins the memory of LoRA batches, routed experts and log-probs unconditionally. A CPU build of torch raises
    # an error for that, and there is no device to copy to.
    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    register = HookRegistry.register
    # Would register host pools with the CUDA driver.
    register("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _nothing, HookType.REPLACE)
    register(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", _refuse_images, HookType.BEFORE
    )
    sampler = "sglang.srt.layers.sampler."
    register(sampler + "multinomial_with_seed", multinomial_with_seed, HookType.REPLACE)
    register(sampler + "sampling_from_probs_torch", _sample, HookType.AROUND)
    register(sampler + "top_k_top_p_min_p_sampling_from_probs_torch", _sample_truncated, HookType.AROUND)
    register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", seeds_of_batch, HookType.AFTER
    )
    register("sglang.srt.utils.common.get_free_cpu_memory", own_free_memory, HookType.REPLACE)
    deepseek = "sglang.srt.models.deepseek_common."
    handlers = deepseek + "attention_backend_handler.AttentionBackendRegistry."
    register(handlers + "get_handler", _absorb, HookType.AROUND)
    # Copies on other threads cannot be traced (load_staged.py).
    register(deepseek + "deepseek_weight_loader.should_async_load", _no, HookType.REPLACE)
    register(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        _sleep_until_message,
        HookType.AFTER,
    )


# -- torchvision and images -------------------------------------------------------------------------------------------
# Some of SGLang's configs import torchvision at the top. It is not installed, because its CUDA build breaks
# transformers in combination with a CPU build of torch.


class _Unavailable:
    """Stand-in for every name in torchvision."""

    BICUBIC = BILINEAR = NEAREST = LANCZOS = None

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(IMAGES_UNSUPPORTED)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> type[_Unavailable]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable


def _stand_in_for_torchvision() -> None:
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision"):
        return
    from transformers.utils import import_utils

    # Have transformers cache the true answer first, so that it never mistakes the stand-in for torchvision.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    tops = ("torchvision", "torchvision.transforms", "torchvision.io", "torchvision.ops")
    for name in (*tops, "torchvision.transforms.functional", "torchvision.transforms.v2"):
        module = _StandIn(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def _refuse_images(request: Any, *_: Any, **__: Any) -> None:
    # No processor can run without torchvision, and a text model would silently ignore images.
    if any(getattr(request, kind, None) for kind in ("image_data", "video_data", "audio_data")):
        raise ValueError(IMAGES_UNSUPPORTED)


# -- memory -----------------------------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _without_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return create(*args, **kwargs)

    return unpinned


def own_free_memory() -> int:
    """Memory limit of the machine or container, minus the memory of this process, in bytes.

    SGLang compares the machine's free memory before and after loading, and between ranks, so it would refuse to start
    because of memory that other processes allocate meanwhile. Two readings of this function differ only by what this
    process allocated in between. Whether enough memory is really free is checked before the engine starts
    (``pipeline/memory.py``).
    """
    return memory_limit() - own_memory()


# -- attention --------------------------------------------------------------------------------------------------------


def _absorb(original: Callable[..., Any], registry: Any, backend: str) -> Callable[..., Any]:
    """Have ``torch_native`` compute DeepSeek's latent attention over the compressed cache, for every batch.

    For prompts SGLang would choose a form with uncompressed keys and values, but ``torch_native`` reads the cache,
    which holds them compressed.
    """
    if backend != "torch_native":
        handler: Callable[..., Any] = original(registry, backend)
        return handler
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return lambda _attention, _batch: AttnForwardMethod.MLA


def _no(*_: Any) -> bool:
    return False


# -- seeds ------------------------------------------------------------------------------------------------------------


def seeds_of_batch(info: Any, _: Any, batch: Any, *__: Any, **___: Any) -> Any:
    """Set the seeds of a new ``SamplingBatchInfo``: int64[requests], ``UNSEEDED`` for requests without one.

    SGLang itself honours seeds only in its deterministic mode, which uses Triton kernels. Here every request with a
    seed uses it, next to unseeded requests in the same batch.
    """
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor([UNSEEDED if seed is None else seed for seed in seeds], dtype=torch.int64)
    return info


def _no_seed(seed: torch.Tensor | None) -> bool:
    return seed is None or bool((seed == UNSEEDED).all())


def _sample(original: Callable[..., Any], probs: Any, sampling_seed: Any = None, positions: Any = None) -> Any:
    """Sample without seeds unless a request has one: hashing every vocabulary entry is slow."""
    return original(probs, None if _no_seed(sampling_seed) else sampling_seed, positions)


def _sample_truncated(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) != 7:
        raise TypeError(
            f"SGLang called top_k_top_p_min_p_sampling_from_probs_torch with {len(args)} arguments instead of 7, as in "
            "SGLang 0.5.23, which monarch_rl requires: install the SGLang version of locks/cpu.txt"
        )
    *before, seed, positions = args
    return original(*before, None if _no_seed(seed) else seed, positions, **kwargs)


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample one column per row, reproducibly for rows with a seed.

    SGLang's own function is compiled, and hashes with a Triton or AVX512 kernel. This one uses the same hash, so a seed
    samples the same tokens as on a GPU.

    Args:
        logprobs: float[rows, columns], up to a constant per row.
        seed: int64[rows]; rows with ``UNSEEDED`` are sampled without a seed.
        positions: int[rows], each token's position in its sequence.

    Returns:
        int64[rows, 1]: the argmax of log-probs plus Gumbel noise, -log(-log(u)).
    """
    hashed = murmur3(seed, positions, torch.arange(logprobs.shape[1]))
    uniform = hashed.to(torch.float64) / 0xFFFFFFFF
    free = seed == UNSEEDED
    if free.any():
        uniform[free] = torch.rand(int(free.sum()), logprobs.shape[1], dtype=torch.float64)
    # Bounds as in SGLang: 0 has no logarithm, and 1 would win against any log-prob.
    noise = -uniform.log().clamp(torch.finfo(torch.float64).min, -(2.0**-32))
    return (logprobs.to(torch.float64) - noise.log()).argmax(1, keepdim=True)


def murmur3(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 x86_32 (Appleby, 2011) of the 16 bytes (seed, position, column): int64[rows, columns] < 2**32."""
    blocks = (
        (seed & 0xFFFFFFFF)[:, None],
        ((seed >> 32) & 0xFFFFFFFF)[:, None],
        positions.to(torch.int64)[:, None] & 0xFFFFFFFF,
        columns.to(torch.int64)[None, :],
    )
    state = torch.zeros(len(seed), 1, dtype=torch.int64)
    for block in blocks:
        key = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
        state = (_rotate(state ^ key, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state = state ^ 16
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Product modulo 2**32. The int64 product wraps modulo 2**64, so its low bits are correct."""
    return (x * factor) & 0xFFFFFFFF


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF


# -- waiting ----------------------------------------------------------------------------------------------------------


def _sleep_until_message(result: Any, scheduler: Any) -> None:
    # SGLang's scheduler spins while it is paused, but on a CPU other processes need that core.
    scheduler.maybe_sleep_on_idle()

"""SGLang on a machine without an accelerator, through SGLang's own plug-in entry points.

SGLang's in-tree CPU platform needs a build of ``sgl-kernel`` with AVX512 or AMX, and much of its code assumes
CUDA. This module is an out-of-tree platform (entry point ``sglang.srt.platforms``) and a set of hooks (entry
point ``sglang.srt.plugins``) that run the released wheel on any CPU with PyTorch operations alone. Both do
nothing where torch sees an accelerator. SGLang loads them in each of its processes.

What it stands in for, and why:

====================================== ===========================================================================
the platform                           operators dispatch to their PyTorch form, attention to ``torch_native``;
                                       no pinned memory, no graphs, gloo between ranks
``torchvision``                        imported at the top of some of SGLang's configs; a module of inert names
                                       takes its place if it is not installed (its CUDA build breaks
                                       ``transformers`` beside a CPU torch)
images, video, audio                   refused with the reason: no processor can run without torchvision, and a
                                       text model would silently ignore them
pinned memory                          hard-coded for LoRA batches, routed experts and log-probs; a CPU build of
                                       torch raises on it, and there is no device to copy to: ignored
``_cuda_host_register``                registers host pools with the CUDA driver: nothing to register
``multinomial_with_seed``              compiled, and its hash is a Triton or an AVX512 kernel: the same hash and
                                       the same draw in PyTorch, so that a seed draws what it draws on a GPU
``SamplingBatchInfo`` seeds            SGLang honours ``sampling_seed`` only in its deterministic mode, whose
                                       kernels are Triton's; here a request with a seed always gets it, and
                                       requests without one draw freely beside it
attention of DeepSeek-V3               to read a prompt SGLang takes keys and values uncompressed, and ``torch_native``
                                       reads the cache, which holds them compressed: here it always takes those
loading DeepSeek-V3                    on threads, where copies cannot be traced: here on the caller's thread
free memory                            SGLang compares that of the whole machine before and after loading, and between
                                       ranks, so it refuses to start because of what other processes take meanwhile:
                                       here it is the machine's memory less what this process has taken
waiting while paused                   SGLang's scheduler spins while it is paused; on a CPU other processes need
                                       that core meanwhile: it sleeps until the next message
====================================== ===========================================================================

Seen to work (``tests/generator``): dense and mixture-of-experts models, log-probs, routed experts, sampling
masks, LoRA adapters from tensors, weight updates in flight. What makes it fast as well is in ``install.py``.
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

from monarch_rl.generator.memory import memory_limit, own_memory

IMAGES_UNSUPPORTED = (
    "images, video and audio are not supported on a machine without an accelerator: torchvision, which SGLang's "
    "processors need, is not part of monarch_rl's CPU environment, and a text model would ignore them. Send token "
    "ids only, or run on a GPU machine with SGLang's full set of packages."
)
UNSEEDED = -(1 << 63)
"""Stands in a batch's seeds for a request that has none; requests cannot ask for it, see ``seeds_of_batch``."""


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
    """Entry point ``sglang.srt.platforms``: the platform's class, or ``None`` where there is an accelerator."""
    if torch.accelerator.is_available():
        return None
    _stand_in_for_torchvision()
    return f"{__name__}.CpuPlatform"


def hooks() -> None:
    """Entry point ``sglang.srt.plugins``: registers what the module docstring lists."""
    if torch.accelerator.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    register = HookRegistry.register
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
    register(deepseek + "deepseek_weight_loader.should_async_load", _no, HookType.REPLACE)
    register(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        _sleep_until_message,
        HookType.AFTER,
    )


# ---- torchvision and images ----------------------------------------------------------------------------------


class _Unavailable:
    """Stands for any name in torchvision."""

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

    # transformers caches the true answer now, and so never takes the stand-in for torchvision.
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
    if any(getattr(request, kind, None) for kind in ("image_data", "video_data", "audio_data")):
        raise ValueError(IMAGES_UNSUPPORTED)


# ---- memory --------------------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _without_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return create(*args, **kwargs)

    return unpinned


def own_free_memory() -> int:
    """Bytes that this process could have if it were alone on the machine, or in its container, less what it has.

    Two readings differ by what this process took in between, and by nothing else. Whether there is that much is asked
    before the engine starts (``memory.py``).
    """
    return memory_limit() - own_memory()


# ---- attention -----------------------------------------------------------------------------------------------


def _absorb(original: Callable[..., Any], registry: Any, backend: str) -> Callable[..., Any]:
    """Have ``torch_native`` compute DeepSeek's latent attention over the compressed cache, for every batch."""
    if backend != "torch_native":
        handler: Callable[..., Any] = original(registry, backend)
        return handler
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return lambda _attention, _batch: AttnForwardMethod.MLA


def _no(*_: Any) -> bool:
    return False


# ---- seeds ---------------------------------------------------------------------------------------------------


def seeds_of_batch(info: Any, _: Any, batch: Any, *__: Any, **___: Any) -> Any:
    """Give a new ``SamplingBatchInfo`` the seeds of its requests: int64[requests], ``UNSEEDED`` for none."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor([UNSEEDED if seed is None else seed for seed in seeds], dtype=torch.int64)
    return info


def _no_seed(seed: torch.Tensor | None) -> bool:
    return seed is None or bool((seed == UNSEEDED).all())


def _sample(original: Callable[..., Any], probs: Any, sampling_seed: Any = None, positions: Any = None) -> Any:
    """Draw without seeds unless some request has one: hashing every entry of the vocabulary is slow."""
    return original(probs, None if _no_seed(sampling_seed) else sampling_seed, positions)


def _sample_truncated(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) != 7:
        raise TypeError("SGLang calls top_k_top_p_min_p_sampling_from_probs_torch in another way than 0.5.23 does")
    *before, seed, positions = args
    return original(*before, None if _no_seed(seed) else seed, positions, **kwargs)


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one column a row, repeatably for rows with a seed.

    Args:
        logprobs: float[rows, columns], up to a constant per row.
        seed: int64[rows]; ``UNSEEDED`` rows draw freely.
        positions: int[rows], each token's place in its sequence.

    Returns:
        int64[rows, 1]: the argmax of log-probs plus Gumbel noise, -log(-log(u)).
    """
    hashed = murmur3(seed, positions, torch.arange(logprobs.shape[1]))
    uniform = hashed.to(torch.float64) / 0xFFFFFFFF
    free = seed == UNSEEDED
    if free.any():
        uniform[free] = torch.rand(int(free.sum()), logprobs.shape[1], dtype=torch.float64)
    # The bounds are SGLang's: 0 has no logarithm, and 1 would win against any log-prob.
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
    """Modulo 2**32; the int64 product wraps modulo 2**64, which keeps the low bits right."""
    return (x * factor) & 0xFFFFFFFF


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF


# ---- waiting -------------------------------------------------------------------------------------------------


def _sleep_until_message(result: Any, scheduler: Any) -> None:
    scheduler.maybe_sleep_on_idle()

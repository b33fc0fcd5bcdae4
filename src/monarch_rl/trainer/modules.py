"""Modules that replace torchtitan's own in its tree of model configs.

Shapes: B batch (always 1: episodes are packed in one row), L tokens, H head size, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Linear, RoPE
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module

from monarch_rl.trainer.token_logprobs import SampledTokens, TokenLogprobs, VocabularyPart, joined, logprobs_of

LOADED = {"weight": skip_param_init}
"""No initialisation: weights are loaded from the model's folder."""
ZEROS = {"weight": nn.init.zeros_}
"""For weights that no folder has: independent of the number of ranks."""


_rotary_caches: WeakValueDictionary[tuple[object, ...], torch.Tensor] = WeakValueDictionary()
"""Rotary caches of this process's models, by class, device and config."""


def _shared_cache(rope: RoPE, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The rotary cache of a layer, one tensor for all layers. torchtitan computes one per layer, which takes 4 GiB for
    the 32 layers of a Llama-3.1-8B at full length."""
    device = torch.get_default_device()
    if device.type == "meta":  # takes no memory
        return compute()
    values = [getattr(rope.config, field.name) for field in fields(rope.config) if field.name not in _OF_MODULES]
    key = (type(rope), device, *values)
    cache = _rotary_caches.get(key)
    if cache is None:
        cache = _rotary_caches[key] = compute()
    return cache


_OF_MODULES = {field.name for field in fields(Module.Config)}
"""Config fields that all modules have: a rotary cache does not depend on them."""


class PairRotaryEmbedding(ComplexRoPE):
    """Rotary embedding in DeepSeek's layout (neighbouring elements), YaRN included."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        return _shared_cache(self, super()._precompute_cache)


class HalfRotaryEmbedding(CosSinRoPE):
    """Rotary embedding in Hugging Face's layout (first half with second half), Llama 3's scaling included.

    torchtitan's Llama pairs neighbouring elements instead, and permutes the rows of wq and wk on load. With this layout
    a parameter equals the Hugging Face tensor, and its shards are contiguous rows.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        return _shared_cache(self, super()._precompute_cache if self.config.scaling != "llama" else self._scaled_cache)

    def _scaled_cache(self) -> torch.Tensor:
        phases = ComplexRoPE._precompute_cache(self)  # complex [L, H/2], scaled
        return torch.cat([phases.real, phases.real, phases.imag, phases.imag], dim=-1)


class LogprobHead(Linear):
    """The LM head. Given the sampled tokens, it returns their :class:`TokenLogprobs` instead of logits.

    Only the M requested positions are projected, each once per target. Log-probs are computed in fp32, chunk by chunk.
    The logits of every chunk but the last are recomputed in the backward pass, which starts with the last, so never
    more than ``chunk`` x V logits are in memory, in at most six tensors of this size. Each tensor-parallel rank has a
    part of the vocabulary (``trainer/token_logprobs.py``).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk: int = 1024

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk = config.chunk
        self.sampled_tokens: SampledTokens | None = None
        """Input of the next forward pass, which resets it. None: the forward pass returns logits."""
        self._part: VocabularyPart | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if parallel_dims.tp_enabled:
            mesh = parallel_dims.get_mesh("tp")
            first = mesh.get_local_rank() * (self.out_features // mesh.size())
            self._part = VocabularyPart(first, mesh.get_group())
        super().parallelize(parallel_dims)

    def forward(self, hidden_BLD: torch.Tensor) -> Any:
        if self.sampled_tokens is None:
            return super().forward(hidden_BLD)
        sampled, self.sampled_tokens = self.sampled_tokens, None
        weight = _local(self.weight).float()
        hidden_MD = F.embedding(sampled.positions, _local(hidden_BLD)[0])
        if self._part is not None:
            hidden_MD = self._part.share(hidden_MD)
        hidden = hidden_MD.split(self.chunk)
        inputs = list(zip(hidden, sampled.split(self.chunk), strict=True))
        compute = partial(
            _chunk_logprobs,
            temperature=sampled.temperature,
            part=self._part,
            entropy_gradient=sampled.entropy_gradient,
        )
        chunks = [checkpoint(compute, hidden, weight, *ids, use_reentrant=False) for hidden, ids in inputs[:-1]]
        hidden_TD, ids = inputs[-1]
        computed = joined([*chunks, compute(hidden_TD, weight, *ids)])
        rows = sampled.rows
        return computed if rows is None else computed.each(lambda values: values[rows])


class ValueHead(Linear):
    """The head of a critic, in place of the LM head: one value per requested position, in fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.positions: torch.Tensor | None = None
        """int64[M]: places in the row, input of the next forward pass, which resets it. None: all places."""

    def forward(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        positions, self.positions = self.positions, None
        hidden_MD = hidden_BLD[0] if positions is None else F.embedding(positions, hidden_BLD[0])
        return torch.mv(hidden_MD.float(), self.weight.float()[0])


def _local(value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor-parallel tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _chunk_logprobs(
    hidden_TD: torch.Tensor,
    weight_WD: torch.Tensor,
    ids_T: torch.Tensor,
    sampling_masks: tuple[torch.Tensor, torch.Tensor] | None,
    others_TK: torch.Tensor | None,
    *,
    temperature: float,
    part: VocabularyPart | None,
    entropy_gradient: bool,
) -> TokenLogprobs:
    logits = F.linear(hidden_TD.float(), weight_WD)
    if temperature != 1.0:
        logits = logits / temperature
    return logprobs_of(logits, ids_T, sampling_masks, part, entropy_gradient, others_TK)

"""Log-probs of tokens: what goes to the LM head and what comes back, also where ranks divide the vocabulary.

No torchtitan in it: see :mod:`monarch_rl.trainer.platform`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class TokenLogprobs(NamedTuple):
    """What the LM head computes for N drawn tokens. A named tuple, because FSDP looks for tensors in it."""

    logprobs: torch.Tensor
    """float32[N], with gradient."""
    entropies: torch.Tensor
    """float32[N]: of the distribution that each token was drawn from; with gradient if the objective asks for it."""
    mask_mass: torch.Tensor
    """float32[N]: the probability of the kept set among all tokens; 1 if the sampler cut nothing off."""
    others: torch.Tensor | None = None
    """float32[N, k], with gradient: of k further tokens in the place of each, where they were asked for."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenLogprobs:
        """With all of them changed."""
        return TokenLogprobs(*(None if values is None else change(values) for values in self))  # type: ignore[arg-type]


def joined(chunks: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Those of all chunks, one after the other."""
    columns = [[values for values in of_kind if values is not None] for of_kind in zip(*chunks, strict=True)]
    return TokenLogprobs(*(torch.cat(values) if values else None for values in columns))  # type: ignore[arg-type]


@dataclass(slots=True)
class SampledTokens:
    """Which tokens were drawn, and how: what the LM head needs to compute :class:`TokenLogprobs`."""

    positions: torch.Tensor
    """int64[M]: places in the row after which tokens were drawn; some more than once, with other tokens."""
    ids: torch.Tensor
    """int64[M]."""
    temperature: float
    sampling_masks: tuple[torch.Tensor, torch.Tensor] | None
    """``(counts int64[M], ids int32[sum of counts])``: the sets they were drawn from; None is the whole vocabulary."""
    rows: torch.Tensor | None = None
    """int64[N]: which of the M are returned for each drawn token; None returns each once."""
    entropy_gradient: bool = False
    """Whether entropies have a gradient, for a loss that they are a part of."""
    others: torch.Tensor | None = None
    """int64[M, k]: further ids whose log-probs are asked for; None is none."""

    def with_others(self, columns: Sequence[torch.Tensor]) -> SampledTokens:
        """With further ids, float32[N] of each of k, for each drawn token: also one that several episodes share has its
        own, because a teacher may name those that are about as likely in any order.

        Raises:
            ValueError: tokens were drawn from sets, in which further ones need not be.
        """
        if self.sampling_masks is not None:
            raise ValueError("log-probs of further tokens are asked for, and tokens were drawn from kept sets")
        # What is not finite is no id, and its episode is left out of the loss. In its place stands an id that there is.
        others = torch.stack([torch.where(column.isfinite(), column, 0.0).long() for column in columns], -1)
        if self.rows is None:
            return replace(self, others=others)
        return replace(self, positions=self.positions[self.rows], ids=self.ids[self.rows], rows=None, others=others)

    def split(self, size: int) -> list[ChunkIds]:
        """What is to be computed of up to ``size`` tokens each."""
        ids = self.ids.split(size)
        others = [None] * len(ids) if self.others is None else self.others.split(size)
        if self.sampling_masks is None:
            return [(chunk, None, further) for chunk, further in zip(ids, others, strict=True)]
        counts = self.sampling_masks[0].split(size)
        sets = self.sampling_masks[1].split([int(chunk.sum()) for chunk in counts])
        return list(zip(ids, zip(counts, sets, strict=True), others, strict=True))


ChunkIds = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]
"""Ids, kept sets, and further ids."""


# -- where ranks divide the vocabulary: each has the logits of a part of it -------------------------------------------
# No logits travel: of each token the ranks exchange a maximum and a few sums.
#
# Shapes: T tokens, V vocabulary, of which a rank has W.


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The part of the vocabulary of which this rank has the logits: W ids from ``first`` on."""

    first: int
    group: dist.ProcessGroup
    """The ranks that have all parts together, and all compute the same tokens."""

    def share(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same values, of which each rank computes its own logits: their gradients are added up."""
        result: torch.Tensor = _AddGradients.apply(hidden, self.group)
        return result

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks. All ranks derive the same loss from it, so each has the whole gradient already."""
        result: torch.Tensor = _AddValues.apply(values, self.group)
        return result

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the ranks, without gradient."""
        values = values.detach().clone()
        dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values


class _AddValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ARG004
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]  # noqa: ARG004
        return grad, None


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Entropy(torch.autograd.Function):
    """Entropies of logits whose normaliser is known. Beside the logits it keeps nothing of their size, and makes two
    tensors of it at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits_TW: torch.Tensor, normaliser_T: torch.Tensor, part: VocabularyPart | None
    ) -> torch.Tensor:
        entropies_T = torch.special.entr((logits_TW - normaliser_T.unsqueeze(-1)).exp_()).sum(-1)
        if part is not None:
            dist.all_reduce(entropies_T, group=part.group)
        ctx.save_for_backward(logits_TW, normaliser_T, entropies_T)
        return entropies_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        """``dH / dz_j = -p_j (log p_j + H)``; all ranks have the same gradient of H, and each its own logits."""
        logits_TW, normaliser_T, entropies_T = ctx.saved_tensors
        probabilities_TW = (logits_TW - normaliser_T.unsqueeze(-1)).exp_()
        result_TW = torch.special.entr(probabilities_TW)
        result_TW.sub_(probabilities_TW.mul_(entropies_T.unsqueeze(-1))).mul_(grad_T.unsqueeze(-1))
        return result_TW, None, None


def logprobs_of(
    logits_TW: torch.Tensor,
    ids_T: torch.Tensor,
    sampling_masks: tuple[torch.Tensor, torch.Tensor] | None,
    part: VocabularyPart | None = None,
    entropy_gradient: bool = False,
    others_TK: torch.Tensor | None = None,
) -> TokenLogprobs:
    """The :class:`TokenLogprobs` of T tokens.

    Args:
        logits_TW: fp32, over the temperature.
        ids_T: the tokens, int64, by their ids in the whole vocabulary.
        kept_sets: ``(counts int64[T], ids int32[sum of counts])`` that the tokens were drawn from; None is the whole
            vocabulary.
        part: of the vocabulary, of which these are the logits; None is all of it.
        entropy_gradient: the entropies have a gradient, too.
        others_TK: further ids, int64, whose log-probs in the same places are asked for, too.
    """
    mask_mass = torch.ones(len(ids_T), device=logits_TW.device)
    if sampling_masks is not None:
        left_out = _left_out(logits_TW, sampling_masks, part)
        with torch.no_grad():
            log_mass = _logsumexp(logits_TW, part)
        logits_TW = logits_TW.masked_fill(left_out, float("-inf"))
        with torch.no_grad():
            mask_mass = (_logsumexp(logits_TW, part) - log_mass).exp()
    normaliser = _logsumexp(logits_TW, part)
    logprobs = _at(logits_TW, ids_T.unsqueeze(-1), part).squeeze(-1) - normaliser
    others = None if others_TK is None else _at(logits_TW, others_TK, part) - normaliser.unsqueeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies: torch.Tensor = _Entropy.apply(logits_TW, normaliser.detach(), part)
    return TokenLogprobs(logprobs, entropies, mask_mass, others)


def _left_out(
    logits_TW: torch.Tensor, sampling_masks: tuple[torch.Tensor, torch.Tensor], part: VocabularyPart | None
) -> torch.Tensor:
    """bool[T, W]: the ids that no set holds."""
    counts_T, ids = sampling_masks
    left_out = torch.ones_like(logits_TW, dtype=torch.bool)
    tokens = torch.arange(len(counts_T), device=logits_TW.device).repeat_interleave(counts_T)
    ids = ids.long()
    if part is not None:
        ids = ids - part.first
        here = (ids >= 0) & (ids < logits_TW.shape[1])
        tokens, ids = tokens[here], ids[here]
    left_out[tokens, ids] = False
    return left_out


def _logsumexp(logits_TW: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    if part is None:
        return logits_TW.logsumexp(-1)
    highest_T = part.maximum(logits_TW.amax(-1))
    return part.add((logits_TW - highest_T.unsqueeze(-1)).exp().sum(-1)).log() + highest_T


def _at(logits_TW: torch.Tensor, ids_TK: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """The logits of K ids for each token."""
    if part is None:
        return logits_TW.gather(-1, ids_TK)
    width = logits_TW.shape[1]
    places_TK = ids_TK - part.first
    here_TK = (places_TK >= 0) & (places_TK < width)
    found_TK = logits_TW.gather(-1, places_TK.clamp(0, width - 1))
    return part.add(torch.where(here_TK, found_TK, 0.0))

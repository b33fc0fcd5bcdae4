"""Log-probs of tokens: inputs and outputs of the LM head, also for tensor-parallel ranks that divide the vocabulary.

Does not import torchtitan: see :mod:`monarch_rl.trainer.platform`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class TokenLogprobs(NamedTuple):
    """The LM head's output for N sampled tokens. A named tuple, because FSDP looks for tensors in it."""

    logprobs: torch.Tensor
    """float32[N], with gradient."""
    entropies: torch.Tensor
    """float32[N]: entropy of the distribution that each token was sampled from; with gradient if the objective needs
    it."""
    mask_mass: torch.Tensor
    """float32[N]: probability of the tokens in the sampling mask, among all tokens; 1 without a mask."""
    others: torch.Tensor | None = None
    """float32[N, k], with gradient: log-probs of k further tokens at the place of each token, if requested."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenLogprobs:
        """Apply ``change`` to each tensor."""
        return TokenLogprobs(*(None if values is None else change(values) for values in self))  # type: ignore[arg-type]


def joined(chunks: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Concatenate the outputs of chunks."""
    columns = [[values for values in of_kind if values is not None] for of_kind in zip(*chunks, strict=True)]
    return TokenLogprobs(*(torch.cat(values) if values else None for values in columns))  # type: ignore[arg-type]


@dataclass(slots=True)
class SampledTokens:
    """The sampled tokens and how they were sampled: the LM head's input for computing :class:`TokenLogprobs`."""

    positions: torch.Tensor
    """int64[M]: places in the row after which tokens were sampled. A place may occur more than once, with other
    tokens."""
    ids: torch.Tensor
    """int64[M]: the sampled tokens."""
    temperature: float
    sampling_masks: tuple[torch.Tensor, torch.Tensor] | None
    """``(counts int64[M], ids int32[sum of counts])``: the ids that they were sampled from. None: the whole
    vocabulary."""
    rows: torch.Tensor | None = None
    """int64[N]: which of the M each sampled token is. None: N = M, in the same order."""
    entropy_gradient: bool = False
    """Whether entropies have a gradient, for a loss that contains them."""
    others: torch.Tensor | None = None
    """int64[M, k]: further ids whose log-probs are requested. None: no ids."""

    def with_others(self, columns: Sequence[torch.Tensor]) -> SampledTokens:
        """Add k further ids per sampled token, from k columns of float32[N].

        Tokens that several episodes share get separate ids, because a teacher may list tokens of about the same
        probability in any order.

        Raises:
            ValueError: there are sampling masks, which need not contain the further ids.
        """
        if self.sampling_masks is not None:
            raise ValueError(
                "log-probs of a teacher's tokens cannot be computed with sampling masks, which may exclude these "
                "tokens: leave out objective.top, or sample from all tokens"
            )
        # An episode with a non-finite id is left out of the loss: any valid id will do in its place.
        others = torch.stack([torch.where(column.isfinite(), column, 0.0).long() for column in columns], -1)
        if self.rows is None:
            return replace(self, others=others)
        return replace(self, positions=self.positions[self.rows], ids=self.ids[self.rows], rows=None, others=others)

    def split(self, size: int) -> list[ChunkIds]:
        """The ids of chunks of up to ``size`` tokens each."""
        ids = self.ids.split(size)
        others = [None] * len(ids) if self.others is None else self.others.split(size)
        if self.sampling_masks is None:
            return [(chunk, None, further) for chunk, further in zip(ids, others, strict=True)]
        counts = self.sampling_masks[0].split(size)
        sets = self.sampling_masks[1].split([int(chunk.sum()) for chunk in counts])
        return list(zip(ids, zip(counts, sets, strict=True), others, strict=True))


ChunkIds = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]
"""Ids, sampling masks, and further ids of a chunk."""


# -- tensor-parallel ranks that divide the vocabulary: each has the logits of a part of it ----------------------------
# Ranks do not exchange logits, only a maximum and a few sums for each token.
#
# Shapes: T tokens, W ids of the vocabulary that a rank has.


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The part of the vocabulary for which this rank has the logits: W ids from ``first`` on."""

    first: int
    group: dist.ProcessGroup
    """The ranks that together have all parts. They compute the same tokens."""

    def share(self, hidden: torch.Tensor) -> torch.Tensor:
        """Identity, whose backward pass adds up the gradients of the ranks, because each computes its own logits."""
        result: torch.Tensor = _AddGradients.apply(hidden, self.group)
        return result

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks. All ranks compute the same loss from it, so each already has the whole gradient."""
        result: torch.Tensor = _AddValues.apply(values, self.group)
        return result

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, without gradient."""
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
    """Entropies of logits with a given normaliser. Saves nothing of the logits' size besides the logits, and allocates
    at most two such tensors at a time."""

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
        """``dH / dz_j = -p_j (log p_j + H)``. All ranks have the same gradient of H, and each has its own logits."""
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
        logits_TW: fp32 logits, divided by the temperature.
        ids_T: int64, the sampled tokens, by their ids in the whole vocabulary.
        sampling_masks: ``(counts int64[T], ids int32[sum of counts])``, the ids that the tokens were sampled from.
            None: the whole vocabulary.
        part: the part of the vocabulary that the logits are for. None: all of it.
        entropy_gradient: whether the entropies have a gradient.
        others_TK: int64, further ids whose log-probs at the same places are requested.
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
    """bool[T, W]: ids that are not in the token's sampling mask."""
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

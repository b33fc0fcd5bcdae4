"""Log-probs of tokens from logits that may be divided among ranks, each of which has those of a part of the vocabulary.

No logits travel: of each token the ranks exchange a maximum and a few sums.

Shapes: T tokens, V vocabulary, of which a rank has W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from monarch_rl.trainer.token_logprobs import TokenLogprobs


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
    kept_sets: tuple[torch.Tensor, torch.Tensor] | None,
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
    kept_mass = torch.ones(len(ids_T), device=logits_TW.device)
    if kept_sets is not None:
        left_out = _left_out(logits_TW, kept_sets, part)
        with torch.no_grad():
            log_mass = _logsumexp(logits_TW, part)
        logits_TW = logits_TW.masked_fill(left_out, float("-inf"))
        with torch.no_grad():
            kept_mass = (_logsumexp(logits_TW, part) - log_mass).exp()
    normaliser = _logsumexp(logits_TW, part)
    logprobs = _at(logits_TW, ids_T.unsqueeze(-1), part).squeeze(-1) - normaliser
    others = None if others_TK is None else _at(logits_TW, others_TK, part) - normaliser.unsqueeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies: torch.Tensor = _Entropy.apply(logits_TW, normaliser.detach(), part)
    return TokenLogprobs(logprobs, entropies, kept_mass, others)


def _left_out(
    logits_TW: torch.Tensor, kept_sets: tuple[torch.Tensor, torch.Tensor], part: VocabularyPart | None
) -> torch.Tensor:
    """bool[T, W]: the ids that no set holds."""
    counts_T, ids = kept_sets
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

"""What goes to the LM head and what comes back. No torchtitan in it: see :mod:`monarch_rl.trainer.platform`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class TokenLogprobs(NamedTuple):
    """What the LM head computes for N drawn tokens. A named tuple, because FSDP looks for tensors in it."""

    logprobs: torch.Tensor
    """float32[N], with gradient."""
    entropies: torch.Tensor
    """float32[N]: of the distribution that each token was drawn from; with gradient if the objective asks for it."""
    kept_mass: torch.Tensor
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
class DrawnTokens:
    """Which tokens were drawn, and how: what the LM head needs to compute :class:`TokenLogprobs`."""

    positions: torch.Tensor
    """int64[M]: places in the row after which tokens were drawn; some more than once, with other tokens."""
    ids: torch.Tensor
    """int64[M]."""
    temperature: float
    kept_sets: tuple[torch.Tensor, torch.Tensor] | None
    """``(counts int64[M], ids int32[sum of counts])``: the sets they were drawn from; None is the whole vocabulary."""
    rows: torch.Tensor | None = None
    """int64[N]: which of the M are returned for each drawn token; None returns each once."""
    entropy_gradient: bool = False
    """Whether entropies have a gradient, for a loss that they are a part of."""
    others: torch.Tensor | None = None
    """int64[M, k]: further ids whose log-probs are asked for; None is none."""

    def with_others(self, columns: Sequence[torch.Tensor]) -> DrawnTokens:
        """With further ids, float32[N] of each of k, for each drawn token: also one that several episodes share has its
        own, because a teacher may name those that are about as likely in any order.

        Raises:
            ValueError: tokens were drawn from sets, in which further ones need not be.
        """
        if self.kept_sets is not None:
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
        if self.kept_sets is None:
            return [(chunk, None, further) for chunk, further in zip(ids, others, strict=True)]
        counts = self.kept_sets[0].split(size)
        sets = self.kept_sets[1].split([int(chunk.sum()) for chunk in counts])
        return list(zip(ids, zip(counts, sets, strict=True), others, strict=True))


ChunkIds = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]
"""Ids, kept sets, and further ids."""

"""What goes to the LM head and what comes back. No torchtitan in it: see :mod:`monarch_rl.trainer.platform`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class TokenLogprobs(NamedTuple):
    """What the LM head computes for N drawn tokens. A named tuple, because FSDP looks for tensors in it."""

    logprobs: torch.Tensor
    """float32[N], with gradient."""
    entropies: torch.Tensor
    """float32[N]: of the distribution that each token was drawn from."""
    kept_mass: torch.Tensor
    """float32[N]: the probability of the kept set among all tokens; 1 if the sampler cut nothing off."""


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

    def split(self, size: int) -> list[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]]:
        """``(ids, kept sets)`` of up to ``size`` tokens each."""
        ids = self.ids.split(size)
        if self.kept_sets is None:
            return [(chunk, None) for chunk in ids]
        counts = self.kept_sets[0].split(size)
        sets = self.kept_sets[1].split([int(chunk.sum()) for chunk in counts])
        return list(zip(ids, zip(counts, sets, strict=True), strict=True))

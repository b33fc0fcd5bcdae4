"""Changes of rewards and advantages that stand beside any objective. Pure functions."""

from __future__ import annotations

import torch


def overlong_penalty(lengths: torch.Tensor, max_tokens: int, buffer: int) -> torch.Tensor:
    """What to add to the reward of long answers: 0 up to ``max_tokens - buffer``, then falling linearly to -1 at
    ``max_tokens`` (DAPO's soft overlong punishment, arXiv:2503.14476: 16,384 + 4,096 tokens, the last 4,096 of them the
    buffer).

    Args:
        lengths: int[G], tokens that each episode drew.
        max_tokens: that an episode may draw.
        buffer: tokens over which the penalty grows.

    Returns:
        float32[G], in [-1, 0].
    """
    beyond = lengths.to(torch.float32) - (max_tokens - buffer)
    return -(beyond / buffer).clamp(0.0, 1.0)


def positives_only(advantages: torch.Tensor) -> torch.Tensor:
    """``max(A, 0)``: only what was better than its baseline teaches, float[...].

    Nothing pushes probabilities down, so entropy falls faster, and stale tokens do less harm (filtering of rejected
    samples: RAFT, arXiv:2304.06767; asymmetric REINFORCE, arXiv:2506.20520, says why off-policy learners want it).
    """
    return advantages.clamp(min=0)

"""On-policy distillation: the policy learns to match a teacher on tokens that the policy itself has sampled.

Pure functions over the sampled tokens. The teacher's log-probs are in the column ``teacher``. By default the reverse KL
divergence, KL(policy || teacher), is minimised: the policy should generate only what the teacher would, too (GKD,
arXiv:2306.13649; MiniLLM, arXiv:2306.08543; "On-Policy Distillation", Thinking Machines Lab, 2025).
"""

from __future__ import annotations

from functools import partial

import torch

from monarch_rl.algorithms.functions import needs
from monarch_rl.algorithms.group_view import GroupView, PerToken
from monarch_rl.algorithms.losses import k2
from monarch_rl.algorithms.returns import generalised_advantages, path_means, paths

LEAST = 1e-6
"""Least total probability of all other tokens: less is not representable, as float32 rounds a sum near 1 by 1e-7."""


def top_columns(k: int) -> tuple[list[str], list[str]]:
    """Columns for a teacher's ``k`` most likely tokens: ids, which float32 holds up to 2**24, and log-probs."""
    return [f"teacher_id_{i}" for i in range(k)], [f"teacher_logprob_{i}" for i in range(k)]


@needs("teacher", "behaviour")
def distillation(group: GroupView, discount: float = 0.0) -> PerToken:
    """``log teacher - log policy`` of each sampled token, under the policy that sampled it: minus an estimate of the
    reverse KL ("On-Policy Distillation", 2025, whose discount is 0). Rewards are ignored.

    Args:
        discount: discount of the following tokens, in [0, 1]. With 0 a token is credited for itself only. With 1 it is
            also credited for all following tokens, and the policy gradient is that of the divergence of whole sequences
            (MiniLLM, arXiv:2306.08543), with the variance of a sum. A token that several branches share gets the mean
            of theirs.

    Returns:
        float32[length] for each of S sequences.
    """
    gains = torch.cat(list(group.columns["teacher"])) - torch.cat(list(group.columns["behaviour"]))
    along = [gains[path.tokens] for path in paths(group)]
    return PerToken(
        path_means(group, [generalised_advantages(gain, torch.zeros_like(gain), discount) for gain in along])
    )


sequence_distillation = partial(distillation, discount=1.0)
"""MiniLLM's advantage."""


def reverse_kl(logprobs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``(log pi - log teacher)^2 / 2``, float[N]: the estimate of KL(pi || teacher) that, in the loss, has the gradient
    of the divergence at each token (:func:`monarch_rl.algorithms.losses.k2`). This is GKD's loss (arXiv:2306.13649) at
    beta 1, estimated from the sampled token alone.

    Args:
        logprobs: float[N], with gradient, log-probs under pi of tokens sampled from pi.
        teacher: float[N], the teacher's log-probs of the same tokens.
    """
    return k2(logprobs, teacher)


def top_k_divergence(logprobs: torch.Tensor, teacher: torch.Tensor, forward: bool = False) -> torch.Tensor:
    """KL(pi || teacher), float[N], over the teacher's k most likely tokens and one more outcome, any other token; or,
    if ``forward``, KL(teacher || pi), which is mode-covering (GKD, arXiv:2306.13649).

    It is exact over these k + 1 outcomes, and at most the divergence over the whole vocabulary, because merging
    outcomes cannot increase a divergence. Unlike :func:`reverse_kl` it does not depend on which token was sampled.

    Args:
        logprobs: float[N, k], with gradient, pi's log-probs of the teacher's most likely tokens.
        teacher: float[N, k], the teacher's log-probs of these tokens.
    """
    policy, teacher = _with_others(logprobs), _with_others(teacher)
    first, second = (teacher, policy) if forward else (policy, teacher)
    return (first.exp() * (first - second)).sum(-1)


def _with_others(logprobs: torch.Tensor) -> torch.Tensor:
    """float[N, k + 1]: adds the log-probability of all other tokens, at least log ``LEAST``."""
    others = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()
    return torch.cat([logprobs, others], -1)

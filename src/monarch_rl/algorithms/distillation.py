"""On-policy distillation: the policy learns, from what it has drawn itself, to be like a teacher.

Pure functions over the drawn tokens; log-probs of the teacher stand in the column ``teacher``. What is minimised is the
reverse KL divergence, KL(policy || teacher): where the policy goes, the teacher would go, too (GKD, arXiv:2306.13649;
MiniLLM, arXiv:2306.08543; "On-Policy Distillation", Thinking Machines Lab, 2025).
"""

from __future__ import annotations

from functools import partial

import torch

from monarch_rl.algorithms.functions import needs
from monarch_rl.algorithms.group_view import GroupView, PerToken
from monarch_rl.algorithms.losses import k2
from monarch_rl.algorithms.returns import generalised_advantages, path_means, paths

LEAST = 1e-6
"""Probability of all other tokens together, of which float32 knows no less: a sum near 1 is rounded by 1e-7."""


def top_columns(k: int) -> tuple[list[str], list[str]]:
    """The columns of a teacher's ``k`` most likely tokens: of ids, which float32 holds up to 2**24, and log-probs."""
    return [f"teacher_id_{i}" for i in range(k)], [f"teacher_logprob_{i}" for i in range(k)]


@needs("teacher", "behaviour")
def distillation(group: GroupView, discount: float = 0.0) -> PerToken:
    """``log teacher - log policy`` of each drawn token, of the policy that drew it: minus an estimate of the reverse KL
    ("On-Policy Distillation", 2025, whose discount is 0). Rewards count nothing.

    Args:
        discount: of what follows a token, in [0, 1]. With 0 a token answers for itself. With 1 it answers for all that
            comes after it, too, and the policy gradient is that of the divergence of whole sequences (MiniLLM,
            arXiv:2306.08543), with the variance of a sum. A token that several branches begin with answers for the
            mean of theirs.

    Returns:
        Of S sequences: float32[length].
    """
    gains = torch.cat(list(group.columns["teacher"])) - torch.cat(list(group.columns["behaviour"]))
    along = [gains[path.tokens] for path in paths(group)]
    return PerToken(
        path_means(group, [generalised_advantages(gain, torch.zeros_like(gain), discount) for gain in along])
    )


sequence_distillation = partial(distillation, discount=1.0)
"""MiniLLM's."""


def reverse_kl(logprobs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``(log pi - log teacher)^2 / 2``, float[N]: the estimate of KL(pi || teacher) whose gradient, as a part of the
    loss, is that of the divergence at each token (:func:`monarch_rl.algorithms.losses.k2`): the loss of GKD
    (arXiv:2306.13649) at beta 1, from the drawn token alone.

    Args:
        logprobs: float[N], with gradient, of tokens that pi has drawn.
        teacher: float[N].
    """
    return k2(logprobs, teacher)


def top_k_divergence(logprobs: torch.Tensor, teacher: torch.Tensor, forward: bool = False) -> torch.Tensor:
    """KL(pi || teacher), float[N], over the teacher's k most likely tokens and one more outcome, any other token; or,
    ``forward``, KL(teacher || pi), which wants all that the teacher may say (GKD, arXiv:2306.13649).

    It is exact for k outcomes of all, and never more than the divergence over the whole vocabulary, because to see less
    sets distributions less apart. Beside :func:`reverse_kl` it has no noise of which token was drawn.

    Args:
        logprobs: float[N, k], with gradient, of pi, of the tokens that the teacher has most likely.
        teacher: float[N, k], its own.
    """
    policy, teacher = _with_others(logprobs), _with_others(teacher)
    first, second = (teacher, policy) if forward else (policy, teacher)
    return (first.exp() * (first - second)).sum(-1)


def _with_others(logprobs: torch.Tensor) -> torch.Tensor:
    """float[N, k + 1]: the last is the log-probability of none of the k, at least ``LEAST``."""
    others = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()
    return torch.cat([logprobs, others], -1)

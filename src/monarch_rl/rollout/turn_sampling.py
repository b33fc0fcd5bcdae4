"""How one turn is drawn, where it asks for something else than all others."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from monarch_rl.episode.sampling import Sampling


def after(sampling: Sampling, begun: int) -> Sampling:
    """``sampling`` for the rest of a turn that has so many tokens. Raises ValueError if it may have no more."""
    if begun >= sampling.max_new_tokens:
        raise ValueError(f"max_new_tokens must be above {begun}, the tokens that the turn has already")
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - begun)


def applied(
    sampling: Sampling, max_new_tokens: int | None, temperature: float | None, stop_token_ids: Sequence[int]
) -> Sampling:
    """``sampling`` with what one turn asks for; None is as it is. Raises ValueError or TypeError if that cannot be."""
    most = sampling.max_new_tokens
    if max_new_tokens is not None and not 1 <= operator.index(max_new_tokens) <= most:
        raise ValueError(f"max_new_tokens must be 1 to {most}, which is --rollout.max-new-tokens, got {max_new_tokens}")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must not be negative, got {temperature}")
    return replace(
        sampling,
        max_new_tokens=most if max_new_tokens is None else max_new_tokens,
        temperature=sampling.temperature if temperature is None else temperature,
        stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *stop_token_ids})),
    )

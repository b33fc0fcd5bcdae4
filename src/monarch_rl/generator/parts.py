"""Parts of a request's answer, and going on from them: after a commit in the same engine, or in another replica.

A request that goes on is asked again, with what it drew as a part of the prompt and the rest of its tokens. Sampling
noise goes by the token's place in the sequence, so one with a seed draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from monarch_rl.episode.sampling import Completion, KeptSets, Sampling

UNFINISHED = "unfinished"
"""Finish reason of a part: more is drawn after it."""

Tell = Callable[[Completion], None]
"""Takes the parts of one request in order, before its answer; each token is in one of them at most."""


def nobody(part: Completion) -> None:
    """Who asked wants the whole answer only."""


def join(parts: Sequence[Completion], reason: str) -> Completion:
    """One completion of parts that follow each other, each with the routes that those before it have not, or none."""
    kept = [part.kept for part in parts if part.kept is not None]
    expert_routes = [part.expert_routes for part in parts if part.expert_routes is not None]
    return Completion(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.policy_versions for part in parts]),
        reason,
        KeptSets.join(kept) if kept else None,  # a part of no tokens has none
        np.concatenate(expert_routes) if expert_routes else None,
    )


def end_of(drawn: Sequence[int], sampling: Sampling, stops: Collection[int]) -> str | None:
    """The finish reason of a request that has drawn this much, None if it goes on; ``stops`` are all that end it."""
    if len(drawn) and drawn[-1] in stops:
        return "stop"
    return "length" if len(drawn) >= sampling.max_new_tokens else None


class Teller:
    """Tells what a request draws: each token once, whether it comes in parts or with what a commit ended."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told = 0

    def part(self, part: Completion) -> None:
        """The next tokens."""
        self._told += len(part.token_ids)
        self._tell(part)

    def rest(self, parts: Sequence[Completion]) -> None:
        """Everything so far: what of it has not been told is."""
        drawn, told = join(parts, UNFINISHED), self._told
        if len(drawn.token_ids) > told:
            ids, logprobs, versions = drawn.token_ids[told:], drawn.logprobs[told:], drawn.policy_versions[told:]
            kept = None if drawn.kept is None else drawn.kept[told:]
            self.part(Completion(ids, logprobs, versions, UNFINISHED, kept))

"""Parts of a request's answer, and going on from them: after a commit in the same engine, or in another replica.

A request that goes on is asked again, with the tokens it drew as a part of the prompt, for the rest of its tokens.
Sampling noise depends on a token's place in the sequence, so one with a seed draws the tokens it would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling, SamplingMasks

UNFINISHED = "unfinished"
"""Finish reason of a part: more is drawn after it."""

OnPart = Callable[[Completion], None]
"""Takes the parts of one request in order, before its answer; each token is in one part at most."""


def ignore_part(part: Completion) -> None:
    """For callers that want only the whole answer."""


def join_parts(parts: Sequence[Completion], reason: str) -> Completion:
    """One completion of consecutive parts, each with the expert routes that the parts before it lack, or none."""
    if len(parts) == 1:
        (part,) = parts
        return part if part.finish_reason == reason else replace(part, finish_reason=reason)
    sampling_masks = [part.sampling_masks for part in parts if part.sampling_masks is not None]
    expert_routes = [part.expert_routes for part in parts if part.expert_routes is not None]
    return Completion(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.policy_versions for part in parts]),
        reason,
        SamplingMasks.join(sampling_masks) if sampling_masks else None,  # a part of no tokens has none
        np.concatenate(expert_routes) if expert_routes else None,
    )


def finish_reason_of(token_ids: Sequence[int], sampling: Sampling, stop_ids: Collection[int]) -> str | None:
    """The finish reason of a request that drew ``token_ids``, None if it goes on; ``stop_ids`` are all that end it."""
    if len(token_ids) and token_ids[-1] in stop_ids:
        return "stop"
    return "length" if len(token_ids) >= sampling.max_new_tokens else None


class PartStream:
    """Passes on what a request draws: each token once, whether SGLang reports it in parts or a commit ends it."""

    def __init__(self, on_part: OnPart) -> None:
        self._on_part = on_part
        self._sent = 0
        """Tokens."""

    def send(self, part: Completion) -> None:
        """Pass on the next tokens."""
        self._sent += len(part.token_ids)
        self._on_part(part)

    def send_rest(self, parts: Sequence[Completion]) -> None:
        """Pass on what has not been sent yet of everything drawn so far."""
        whole, sent = join_parts(parts, UNFINISHED), self._sent
        if len(whole.token_ids) > sent:
            ids, logprobs, versions = whole.token_ids[sent:], whole.logprobs[sent:], whole.policy_versions[sent:]
            sampling_masks = None if whole.sampling_masks is None else whole.sampling_masks[sent:]
            self.send(Completion(ids, logprobs, versions, UNFINISHED, sampling_masks))

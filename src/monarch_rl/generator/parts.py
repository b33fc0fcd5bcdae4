"""Partial answers to a request, from which it resumes: after a commit in the same engine, or in another replica.

A request is resumed by sending it again for its remaining tokens, with the tokens sampled so far appended to the
prompt. Sampling noise depends on a token's position in the sequence, so a seeded request samples the same tokens as
without the interruption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling, SamplingMasks

UNFINISHED = "unfinished"
"""Finish reason of a part: more tokens are sampled after it."""

OnPart = Callable[[Completion], None]
"""Receives the parts of one request in order, before its answer; each token is in at most one part."""


def settle(answer: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    """Answer a request with its completion or an error, unless its caller was cancelled."""
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def ignore_part(part: Completion) -> None:
    """An :data:`OnPart` for callers that need only the whole answer."""


def join_parts(parts: Sequence[Completion], reason: str) -> Completion:
    """Merge consecutive parts into one completion.

    The expert routes of a part are those that the parts before it lack, or None.
    """
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
        SamplingMasks.join(sampling_masks) if sampling_masks else None,  # an empty part has none
        np.concatenate(expert_routes) if expert_routes else None,
    )


def finish_reason_of(token_ids: Sequence[int], sampling: Sampling, stop_ids: Collection[int]) -> str | None:
    """The finish reason of a request that sampled ``token_ids``; None if it is not finished.

    Args:
        token_ids: all tokens sampled so far.
        sampling: sets the length limit.
        stop_ids: all ids that end the request.
    """
    if len(token_ids) and token_ids[-1] in stop_ids:
        return "stop"
    return "length" if len(token_ids) >= sampling.max_new_tokens else None


class PartStream:
    """Streams a request's tokens, each exactly once, whether SGLang reports them in parts or a commit ends the
    request."""

    def __init__(self, on_part: OnPart) -> None:
        self._on_part = on_part
        self._sent = 0
        """Number of tokens sent."""

    def send(self, part: Completion) -> None:
        """Send the next tokens."""
        self._sent += len(part.token_ids)
        self._on_part(part)

    def send_rest(self, parts: Sequence[Completion]) -> None:
        """Send the tokens of ``parts``, which hold all tokens sampled so far, that have not been sent yet."""
        whole, sent = join_parts(parts, UNFINISHED), self._sent
        if len(whole.token_ids) > sent:
            ids, logprobs, versions = whole.token_ids[sent:], whole.logprobs[sent:], whole.policy_versions[sent:]
            sampling_masks = None if whole.sampling_masks is None else whole.sampling_masks[sent:]
            self.send(Completion(ids, logprobs, versions, UNFINISHED, sampling_masks))

"""Formats messages, items and episodes as JSON objects, for the record of a run (docs/run_folder.md)."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from monarch_rl.episode.episode import Episode, EpisodeTimes, Fork, Turn
from monarch_rl.episode.failure import shortened
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import Message, as_row
from monarch_rl.observe.redact import redact
from monarch_rl.rollout.episode_failed import EpisodeFailed

SHOWN_CHARACTERS = 1000
"""Maximum characters of an item that is not a JSON value."""

Messages = list[dict[str, Any]]
"""Messages of an episode, as JSON objects."""


def episode_rows(episodes: Sequence[Episode], template: ChatTemplate, with_tokens: bool) -> list[dict[str, Any]]:
    """The fields of a row that follow from an episode alone, for each of the sequences of a group or a rollout.

    Decoding long answers takes tens of milliseconds.

    Args:
        episodes: all sequences of some rollouts, in their order.
        with_tokens: include ids, log-probs and versions of the sampled tokens.
    """
    read = [[_tokens_read(turn.trainable) for turn in episode.turns] for episode in episodes]
    _find_shared(episodes, read)
    return [_row(episode, of_turns, template, with_tokens) for episode, of_turns in zip(episodes, read, strict=True)]


def failed_row(failed: EpisodeFailed, template: ChatTemplate) -> dict[str, Any]:
    """The fields of a row that follow from a failure alone: what was played until then, and why it failed."""
    turns = [_turn(turn, _tokens_read(turn.trainable), template, False) for turn in failed.turns]
    times, failure = failed.times, failed.failure
    return {
        "seat": "",
        "fork": None,
        "messages": failed.messages,
        "prompt": turns[0]["read"] if turns else failed.prompt or "",
        "turns": turns,
        "reward": None,
        "parts": {},
        "info": {},
        "finish_reason": "failed",
        "tokens": failed.tokens,
        "versions": [],
        **_times(times, sum(turn.seconds for turn in failed.turns)),
        "failure": {
            "reason": failure.reason,
            "place": failure.place,
            "report": redact(failure.report),
            "infrastructure": failed.infrastructure,
        },
    }


def as_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON, with null for NaN and infinity. Keys and values that JSON does not support, which a
    stage may put into ``info``, are replaced by their representation. Raises RecursionError for a value that contains
    itself."""
    try:
        return json.dumps(row, allow_nan=False, default=_represented)
    except (TypeError, ValueError):
        return json.dumps(_finite(_with_text_keys(row)), default=_represented)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _tokens_read(trainable: np.ndarray) -> int:
    """Number of tokens before the first trainable one; sampled tokens come last. In a turn that is not trained, because
    it was sampled at another temperature, all tokens count as read."""
    return int(np.argmax(trainable)) if trainable.any() else len(trainable)


def _find_shared(episodes: Sequence[Episode], read: list[list[int]]) -> None:
    """Copy the split of shared turns from the sequence that trains them, the only one in which their sampled tokens are
    marked."""
    rollouts: dict[int, list[list[int]]] = {}
    for episode, of_turns in zip(episodes, read, strict=True):
        rollout, fork = rollouts.setdefault(episode.rollout, []), episode.fork
        if fork is not None:
            of_turns[: fork.turns] = rollout[fork.sequence][: fork.turns]
        rollout.append(of_turns)


def _row(episode: Episode, read: Sequence[int], template: ChatTemplate, with_tokens: bool) -> dict[str, Any]:
    turns = [_turn(turn, n, template, with_tokens) for turn, n in zip(episode.turns, read, strict=True)]
    own = episode.turns[_shared(episode.fork) :]
    return {
        "seat": episode.seat,
        "fork": None if episode.fork is None else episode.fork._asdict(),
        "messages": episode.messages,
        "prompt": turns[0]["read"] if turns else "",
        "turns": turns,
        "reward": episode.reward,
        "parts": episode.parts,
        "info": episode.info,
        "finish_reason": episode.finish_reason,
        "tokens": episode.num_trainable,
        "versions": version_spans(episode) if turns else [],
        **_times(episode.times, sum(turn.seconds for turn in own)),
    }


def _shared(fork: Fork | None) -> int:
    return 0 if fork is None else fork.turns


def _turn(turn: Turn, read: int, template: ChatTemplate, with_tokens: bool) -> dict[str, Any]:
    """What the policy read before a turn, and what it sampled, as text with special tokens."""
    ids, arrays = turn.token_ids[read:].tolist(), dict[str, str]()
    if with_tokens:
        sampled, ends = template.decode_with_ends(ids)
        arrays = {
            "ids": packed(turn.token_ids[read:], "<i4"),
            "text_ends": packed(ends, "<u4"),
            "logprobs": packed(turn.logprobs[read:], "<f4"),
            "token_versions": packed(turn.policy_versions[read:], "<i4"),
        }
    else:
        sampled = template.decode(ids)
    return {
        "read": template.decode(turn.token_ids[:read].tolist()),
        "sampled": sampled,
        "reward": turn.reward,
        "tokens": len(ids),
        "seconds": round(turn.seconds, 4),
        "replica": turn.replica,
        **arrays,
    }


def packed(values: np.ndarray, dtype: str) -> str:
    """An array as base64 of its little-endian bytes; ``dtype``: such as ``"<f4"``."""
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def _times(times: EpisodeTimes | None, generate_s: float) -> dict[str, float | None]:
    return {
        "began": None if times is None else round(times.began, 3),
        "ended": None if times is None else round(times.ended, 3),
        "generate_s": round(generate_s, 4),
        "tool_s": 0.0 if times is None else round(times.tool_s, 4),
        "score_s": 0.0 if times is None else round(times.score_s, 4),
    }


def version_spans(episode: Episode) -> list[list[int]]:
    """``[version, tokens]`` of each span of trainable tokens with the same policy version, in order."""
    versions = episode.policy_versions[episode.trainable]
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)] if len(versions) else []
    return [[int(versions[start]), end - start] for start, end in pairwise(starts)]


def shown(item: Any) -> Any:
    """An item as a JSON value. Parts that JSON does not support are replaced by their representation. The whole item
    is, if it cannot be copied or written, or contains NaN or infinity: a logged item must not end a run."""
    try:
        value = asdict(item) if is_dataclass(item) and not isinstance(item, type) else item
        return json.loads(json.dumps(_with_text_keys(value), default=_represented, allow_nan=False))
    except Exception:  # copying or writing an object of the task may raise anything
        return _represented(item)


def _with_text_keys(value: Any) -> Any:
    """``value`` with keys that JSON does not support, such as tuples, as their representation."""
    if isinstance(value, dict):
        keys = {key: key if isinstance(key, str | int | float | None) else _represented(key) for key in value}
        return {keys[key]: _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _represented(value: Any) -> str:
    try:
        return shortened(repr(value), SHOWN_CHARACTERS)
    except Exception as error:  # as above
        return f"<{type(value).__name__}: its representation raised {type(error).__name__}>"


def as_rows(messages: Sequence[Message]) -> Messages:
    """Messages (``model/messages.py``) as JSON objects, without empty fields. Unlike in OpenAI's form, calls have why
    they could not be executed, and answers why the tool failed."""
    return [_with_errors(as_row(message), message) for message in messages]


def _with_errors(row: dict[str, Any], message: Message) -> dict[str, Any]:
    if message.tool_calls:
        row["tool_calls"] = [asdict(call) for call in message.tool_calls]
    if message.failed:
        row["failed"] = message.failed
    return row

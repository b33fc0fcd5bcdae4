"""Keeps the messages of the groups that a worker submitted until they are trained, and formats trained episodes as
rows."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from monarch_rl.episode.episode import Episode, Group
from monarch_rl.episode.failure import shortened
from monarch_rl.episode.serialization import deserialize_episode
from monarch_rl.episode.shard import TrainedEpisode
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import Message, as_row
from monarch_rl.tasks.task import Task

KEPT_CHARACTERS = 64 * 2**20
"""Maximum characters of all messages that a worker keeps; the oldest groups are removed first."""
MESSAGE_CHARACTERS = 256
"""Characters counted per message in addition to its content: about the bytes of its dictionary."""
SHOWN_CHARACTERS = 1000
"""Maximum characters of an item that is not a JSON value."""

Messages = list[dict[str, Any]]
"""Messages of an episode, as JSON objects."""


class Transcripts:
    """The messages of the groups that one worker has submitted. Token ids alone do not show the roles of messages.

    Args:
        characters: maximum number of characters.
    """

    def __init__(self, characters: int = KEPT_CHARACTERS) -> None:
        self._most, self._kept = characters, 0
        self._groups: OrderedDict[tuple[int, int], tuple[list[Messages], int]] = OrderedDict()
        """By group and attempt: the messages of each episode, and their number of characters."""

    def add(self, group: Group) -> None:
        """Keep the messages of a group."""
        messages = [episode.messages for episode in group.episodes]
        size = sum(MESSAGE_CHARACTERS + len(message["content"]) for of_episode in messages for message in of_episode)
        if (group.group_id, group.attempt) in self._groups:
            self._forget((group.group_id, group.attempt))
        self._groups[group.group_id, group.attempt] = messages, size
        self._kept += size
        while self._kept > self._most:
            self._forget(next(iter(self._groups)))

    def take(self, trained: Sequence[TrainedEpisode], again: bool = False) -> list[Messages | None]:
        """The messages of the episodes of one step; None for those that are not here. Groups admitted before all of
        these episodes are removed, unless groups are trained ``again``."""
        messages = [self.of(one.group_id, one.attempt, one.place) for one in trained]
        if not again:
            self.forget_before(min((one.group_id for one in trained), default=0))
        return messages

    def of(self, group_id: int, attempt: int, place: int) -> Messages | None:
        """The messages of an episode; None if its group is not here."""
        messages, _ = self._groups.get((group_id, attempt), ([], 0))
        return messages[place] if place < len(messages) else None

    def forget_before(self, group_id: int) -> None:
        """Remove the groups that were admitted before this one."""
        for key in [key for key in self._groups if key[0] < group_id]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        self._kept -= self._groups.pop(key)[1]


def rows(
    asked: Sequence[tuple[TrainedEpisode, Messages | None]], task: Task, template: ChatTemplate
) -> list[dict[str, Any]]:
    """Trained episodes as JSON objects, the lines of ``rollouts.jsonl`` (docs/run_folder.md).

    Decoding long answers takes tens of milliseconds.

    Args:
        asked: all episodes of some groups, each with its messages, or None if they are not available.
        task: task of the run; in a mixture, items are shown as the task that they belong to defines them.
    """
    items = {index: _item(task, index) for index in dict.fromkeys(trained.task_index for trained, _ in asked)}
    opened = [_Opened(trained, deserialize_episode(trained.data)) for trained, _ in asked]
    _find_shared(opened)
    return [
        _row(one, messages, items[one.trained.task_index], template)
        for one, (_, messages) in zip(opened, asked, strict=True)
    ]


class _Opened:
    """A trained episode, deserialized."""

    def __init__(self, trained: TrainedEpisode, episode: Episode) -> None:
        self.trained, self.episode = trained, episode
        self.read = [_tokens_read(turn.trainable) for turn in episode.turns]
        """For each turn: number of tokens that the policy was given before it generated."""


def _tokens_read(trainable: np.ndarray) -> int:
    """Number of tokens before the first trainable one; sampled tokens come last. In a turn that is not trained, because
    it was sampled at another temperature, all tokens count as read."""
    return int(np.argmax(trainable)) if trainable.any() else len(trainable)


def _find_shared(opened: Sequence[_Opened]) -> None:
    """Copy the split of shared turns from the sequence that trains them, the only one in which their sampled tokens are
    marked."""
    rollouts: dict[tuple[int, int], list[_Opened]] = {}
    for one in sorted(opened, key=lambda one: (one.trained.group_id, one.trained.place)):
        rollout, fork = rollouts.setdefault((one.trained.group_id, one.trained.rollout), []), one.trained.fork
        if fork is not None:
            one.read[: fork.turns] = rollout[fork.sequence].read[: fork.turns]
        rollout.append(one)


def _item(task: Task, index: int) -> Any:
    """The item as its task defines it; a description of the error if it cannot be made again."""
    try:
        return task.owner_of(task.items(index))[1]
    except Exception as error:  # whatever the task raises
        return f"<item {index} raised {_represented(error)} when it was made>"


def _row(opened: _Opened, messages: Messages | None, item: Any, template: ChatTemplate) -> dict[str, Any]:
    trained, episode = opened.trained, opened.episode
    of_turns = zip(episode.turns, opened.read, trained.turn_rewards, strict=True)
    turns = [_decoded(turn.token_ids, read, template) | {"reward": reward} for turn, read, reward in of_turns]
    return {
        "step": trained.step,
        "group": trained.group_id,
        "episode": trained.place,
        "play": trained.rollout,
        "seat": trained.seat,
        "fork": None if trained.fork is None else trained.fork._asdict(),
        "task": trained.task,
        "task_index": trained.task_index,
        "item": shown(item),
        "messages": messages,
        "prompt": turns[0]["read"],
        "turns": turns,
        "reward": trained.reward,
        "parts": trained.parts,
        "advantage": trained.advantage,
        "info": episode.info,
        "finish_reason": episode.finish_reason,
        "tokens": episode.num_trainable,
        "versions": version_runs(episode),
    }


def _decoded(token_ids: np.ndarray, read: int, template: ChatTemplate) -> dict[str, Any]:
    """Text that the policy read before a turn, and text that it generated, with special tokens."""
    return {"read": template.decode(token_ids[:read].tolist()), "drawn": template.decode(token_ids[read:].tolist())}


def version_runs(episode: Episode) -> list[list[int]]:
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

"""Runs items of a task before the run, with a stand-in for the model, to find mistakes before the engines start.

The task's code runs as in a run (``rollout/play.py``), but all of it in a scoring process. Every turn of the policy is
:data:`ANSWER`. Judges and other frozen models are not asked: an episode that asks one ends there.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from monarch_rl.episode.failure import UNUSABLE, Failure
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import (
    ContextFull,
    DeadlineExceeded,
    NotUnpickled,
    ProbeFailed,
    ScorerBroken,
    ScoreTookTooLong,
    ScoringFailed,
)
from monarch_rl.model.messages import Message, ParsedReply
from monarch_rl.rollout.episode_clock import NOT_ASKED, PROBED
from monarch_rl.rollout.episode_failed import EpisodeFailed, item_failed
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.scoring import Convert, Raised, ScoreFunction, Scorer, compute
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import EpisodeResult, GroupRewarder
from monarch_rl.runtime.by_value import ByValue, from_bytes, to_bytes
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.forking.fork_client import NoForkServer
from monarch_rl.settings.ranges import FOREVER_S
from monarch_rl.tasks.task import Outcome, Task, as_outcome, as_outcomes

PROBE_S = 10.0
"""Seconds for all items together, including the tasks' ``warm_up``."""
START_S = 60.0
"""Seconds for the scoring process to start."""
PIECES = ("The", " answer", " is", " 42", ".")
ANSWER = "".join(PIECES)
"""Every answer of the stand-in, one token per piece, if ``rollout.max_new_tokens`` has room for it."""
TURNS = 50
"""Turns of the stand-in after which an episode ends."""
MOST_COPIES = 64
"""Maximum size of the group that ``group_rewards`` compares."""
WARM_UP = "warm_up"
NOT_UNPICKLED = f"score raised {NotUnpickled.__name__}"
HINT = (
    f"(Before the engines start, one item of each task is run with the answer {ANSWER!r} in place of the model's. "
    "--no-probe skips this.)"
)


def sent(task: Task) -> ByValue[Task]:
    """A task for other processes. Raises TypeError, which names the task and the variable, if it cannot be pickled, or
    no copy of its code can be made."""
    for one in _leaves(task):
        ByValue.checked(_code_of(one), f"task {one.name}")
    return ByValue(task, f"task {task.name}")


async def probe(task: Task, settings: RolloutSettings, fork_server: str = "") -> list[str]:
    """Run the first training item and the first held-out item of a task, or of each task of a mixture.

    Args:
        fork_server: name of the fork server that forks the scoring process; "" is the one in this process's
            environment.

    Returns:
        Warnings: exceptions, which a real answer might not raise, and code that took too long.

    Raises:
        ProbeFailed: the task cannot work: a value that is not a reward was returned, ``warm_up`` raised, or there is no
            first item.
    """
    items = [(one, _first_items(one, settings.group_size)) for one in _leaves(task) if one.probe]
    if not items:
        return []
    warnings: dict[tuple[str, ...], str] = {}
    scorer = Scorer(1, PROBE_S, fork_server=fork_server)
    try:
        await within(START_S, scorer.call(_nothing, (), _as_is), "a scoring process to start", on="the fork server")
        ends = time.monotonic() + PROBE_S
        for one, first in items:
            for failure in await _failures(one, first, settings, scorer, ends):
                # The deadlines are those of the probe, not of settings.
                lines = [line for line in str(failure).splitlines() if "-deadline-s" not in line]
                message = "\n".join([f"task {one.name}, {failure.what}: {lines[0]}", *lines[1:], HINT])
                if UNUSABLE in failure.reason or failure.what == WARM_UP:
                    raise ProbeFailed(message)
                warnings.setdefault((one.name, *failure.kind), message)
    except (
        DeadlineExceeded,
        ScorerBroken,
        NoForkServer,
    ) as error:  # the machine's fault, which the run reports if it lasts
        warnings["",] = f"the task was not run before the engines start: {error}"
    finally:
        await asyncio.to_thread(scorer.close)
    return list(warnings.values())


def _leaves(task: Task) -> Iterator[Task]:
    for one in task.tasks:
        yield from _leaves(one)
    if not task.tasks:
        yield task


def _code_of(task: Task) -> Task:
    """The task without its items, of which there may be many."""
    return Task(
        _nothing, task.episode, {}, task.name, task.full_context_reward, task.warm_up, group_rewards=task.group_rewards
    )


def _first_items(task: Task, group_size: int) -> list[tuple[Any, int]]:
    """The first training item and the first held-out item, each with the size of its group: a held-out item has no
    group rewards. Raises ProbeFailed."""
    name = f"task {task.name}"
    found = [(_first(task.items, name), group_size)]
    if task.held_out and len(held_out := task.held_out_items()):
        found.append((_first(held_out.__getitem__, f"held-out items of {name}"), 0))
    return found


def _first(items: Callable[[int], Any], of: str) -> Any:
    try:
        return items(0)
    except Exception as error:  # of the task's code
        raise ProbeFailed(f"{of}: {item_failed(error, 0).failure}") from error


async def _failures(
    task: Task, items: Sequence[tuple[Any, int]], settings: RolloutSettings, scorer: Scorer, ends: float
) -> list[Failure]:
    """Failures of items of one task, within the time that is left."""
    code = _code_of(task)
    found: list[Failure] = []
    if task.warm_up is not None:
        try:
            await _call(scorer, ends, task.name, _warm_up, task.warm_up)
        except ScoreTookTooLong:  # which is allowed
            return []
        except ScoringFailed as failed:
            return [Failure(failed.reason.replace("score", "it", 1), failed.place, failed.report, WARM_UP)]
    for item, group_size in items:
        if (left := ends - time.monotonic()) <= 0:
            break
        little = left < PROBE_S / 2
        # With little time left, only the scorer's deadline counts, after which nothing is reported. On a machine
        # without time for it, the scorer lengthens that one.
        limited = replace(settings, episode_deadline_s=FOREVER_S if little else 0.8 * PROBE_S)
        what = "a training item" if group_size else "a held-out item"
        try:
            failures = await _call(scorer, ends, task.name, run_item, code, item, group_size, limited)
        except ScoringFailed as failed:
            if isinstance(failed, ScoreTookTooLong) and little:
                break  # earlier items had used the time
            reason = failed.reason.replace("score", "the episode and its reward", 1)
            failures = [Failure(reason, failed.place, failed.report)]
        found += [replace(failure, what=what) for failure in failures]
    return found


async def _call(scorer: Scorer, ends: float, task: str, function: ScoreFunction, code: Any, *args: Any) -> Any:
    """``function(code, *args)`` in the scoring process. Raises ProbeFailed if no copy of the arguments can be made
    there."""
    scorer.deadline_s = round(max(ends - time.monotonic(), 1.0), 1)
    # In one object, because only functions are pickled by value: the task's are members of the recipe's `__main__`.
    call = functools.partial(function, code, *args)
    try:
        return await scorer.call(call, (), _as_is)  # waits: the scorer has a deadline
    except ScoringFailed as failed:
        if failed.reason != NOT_UNPICKLED:
            raise
        raise ProbeFailed(
            f"task {task}, or its first item, cannot be sent to the processes that run episodes: {failed.detail}"
        ) from failed


def _as_is(value: Any) -> Any:
    return value


def _nothing(*_: Any) -> None:
    return None


def _warm_up(warm_up: Any) -> None:
    warm_up()


# -- in the scoring process -------------------------------------------------------------------------------------------


def run_item(task: Task, item: Any, group_size: int, settings: RolloutSettings) -> list[Failure]:
    """Run an item, and compute the rewards of a group of ``group_size`` such episodes, if the task has group rewards;
    returns the first failure, if there is one."""
    return asyncio.run(_run_item(task, item, group_size, settings))  # waits: the scorer has a deadline


async def _run_item(task: Task, item: Any, group_size: int, settings: RolloutSettings) -> list[Failure]:
    PROBED.set(True)
    sequences = settings.bound().share(settings.group_size).max_sequences
    scorer: Any = _ScorerHere()
    template: Any = _Template()
    runner = EpisodeRunner(_Generator(), template, settings, scorer)
    sampling = Sampling(settings.max_new_tokens, settings.temperature, template.stop_token_ids)
    results: Sequence[EpisodeResult]
    try:
        episode = await runner.play(task, 0, item, sampling, 0, GroupBound(sequences))
        copies: list[EpisodeResult] = [copy.deepcopy(episode) for _ in range(min(group_size, MOST_COPIES))]
        results = await GroupRewarder(scorer, settings.episode_deadline_s).added(task, item, 0, copies)
    except EpisodeFailed as failed:
        results = [failed]
    except ContextFull:  # the stand-in's
        return []
    failures = [result.failure for result in results[:1] if isinstance(result, EpisodeFailed)]
    return [failure for failure in failures if NOT_ASKED not in failure.reason]


class _ScorerHere:
    """Takes the place of the scoring processes (:class:`Scorer`) in a scoring process."""

    queue = ""

    async def score(self, function: ScoreFunction, *args: Any) -> Outcome:
        return self._call(function, args, as_outcome)  # type: ignore[no-any-return]

    async def score_group(self, function: ScoreFunction, *args: Any) -> list[Outcome]:
        return self._call(function, args, as_outcomes)  # type: ignore[no-any-return]

    def _call(self, function: ScoreFunction, args: tuple[Any, ...], convert: Convert) -> Any:
        pickled = to_bytes(args, f"the arguments of {getattr(function, '__name__', function)}")
        result = compute(function, from_bytes(pickled), convert)
        if isinstance(result, Raised):
            raise result.failure
        return result


class _Generator:
    """The stand-in for the model."""

    def __init__(self) -> None:
        self._turns = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        self._turns += 1
        if self._turns > TURNS:
            raise ContextFull(f"the stand-in for the model has had {TURNS} turns")
        ids = range(min(len(PIECES) + 1, sampling.max_new_tokens))
        n, reason = len(ids), "stop" if len(ids) > len(PIECES) else "length"
        return Completion(np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), reason)


class _Template:
    """Takes the place of a chat template. Token ids are the indices of :data:`PIECES`, followed by the end token."""

    system = ""
    stop_token_ids = (len(PIECES),)

    def opening(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        return [0] * len(messages)

    def between(self, messages: Sequence[Message], tools: Any, end: int | None, thinking: bool) -> list[int]:
        return [0] * len(messages)

    def read(self, token_ids: Sequence[int], tools: Any = None, stop: Sequence[str] = ()) -> ParsedReply:
        raw = self.decode(token_ids)
        return ParsedReply(raw, raw[: min([raw.find(text) for text in stop if text in raw], default=len(raw))])

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(PIECES[index] for index in token_ids if index < len(PIECES))

    def token_texts(self) -> list[str]:
        return [*PIECES, ""]

    def cut_while_thinking(self, token_ids: Sequence[int], tools: Any = None) -> bool:
        return False

"""The rollout worker: an actor that generates groups of episodes with the generators and submits them to the buffer."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch.actor import current_rank

from monarch_rl.episode.episode import Group, Ticket
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.sampling import Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.blocked_loop import GRACE_S, LoopGuard
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.evaluation import EpisodeResult, Evaluation, EvaluationPlan, run_held_out
from monarch_rl.rollout.frozen import AsksFrozenModels, FrozenModel, FrozenReplicas, connect_frozen_models
from monarch_rl.rollout.handles import BUFFER_DEADLINE_S, BufferHandle, DispatchedGenerators
from monarch_rl.rollout.one_turn import OneTurnGroups
from monarch_rl.rollout.play import EpisodeRunner, all_or_none, make_item
from monarch_rl.rollout.policy import episode_seed
from monarch_rl.rollout.process_limits import (
    bound_printing,
    check_open_files,
    end_copies,
    refuse_alarms,
    survive_exits,
)
from monarch_rl.rollout.record import EpisodeRecord, WorkerRows
from monarch_rl.rollout.run_tools import check_hung_tools
from monarch_rl.rollout.scoring import Scorer, read_nothing
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import GroupRewarder, Stage
from monarch_rl.rollout.statistics import Statistics, WorkerProgress, WorkerStats
from monarch_rl.rollout.submit import GroupSubmitter, TicketQueue
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue, run_recipe_code
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.runtime.process import freeze_heap
from monarch_rl.tasks.task import Task

GREEDY = EvaluationPlan()
NO_TURN = Failure(
    "episodes ended before the policy's turn",
    report="Nothing was sampled, so there is nothing to train. Unless the task may end before the policy's first turn, "
    "as a game against an opponent may, its episode has to await policy.reply(...) at least once.",
    what="a group",
)
"""Why a group is dropped in which too few episodes had a turn."""
COLLECT_AFTER = 50_000
"""New objects after which a worker looks for garbage. In the main job, episodes in progress hold 5,000 to 20,000
objects: with Python's default of 700, collections visited them thousands of times and hardly found any garbage."""


@dataclass(frozen=True)
class Resources:
    """Objects that a worker loads before it runs episodes."""

    template: ChatTemplate
    task: Task
    scorer: Scorer

    @classmethod
    async def load(cls, settings: RolloutSettings, pickled: ByValue[Task], model: str) -> Resources:
        """Load chat template and task, and start the scoring processes. Raises what loading raises."""
        template = await asyncio.to_thread(
            ChatTemplate,
            model,
            settings.template_options,
            tool_parser=settings.tool_parser,
            allow_control_tokens=settings.allow_control_tokens,
        )
        task = await asyncio.to_thread(pickled.load)
        if task.warm_up is not None:
            await asyncio.to_thread(task.warm_up)
        await asyncio.to_thread(task.items, 0)  # loads the data of the items
        return cls(template, task, Scorer(settings.scorer_processes, settings.score_deadline_s, task.warm_up))


class RolloutWorker(AsksFrozenModels):
    """One process that runs groups of episodes.

    Args:
        settings: how to run episodes.
        task: the :class:`Task` to run, pickled by value.
        model: Hugging Face folder or Hub name, for the tokenizer.
        name: name of this worker; empty uses its rank in the mesh.
        keep_expert_routes: keep the expert routes with which the generators processed each token; not for held-out
            items.
        stages: stages that a group passes before it is submitted.
        logged: the groups whose trained episodes are recorded; None records no episodes at all.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        task: ByValue[Task],
        model: str,
        name: str = "",
        keep_expert_routes: bool = False,
        stages: ByValue[Sequence[Stage]] | None = None,
        logged: LoggedGroups | None = None,
    ) -> None:
        self._settings, self._logged = settings, logged
        self._pickled_task, self._pickled_stages = task, stages
        self._model = model
        self._keep_expert_routes = keep_expert_routes
        self._name = name or f"rollout worker {current_rank().rank}"
        wait_registry.register(self._name, block_limit_s=settings.episode_deadline_s + GRACE_S)
        self._guard: LoopGuard | None = None
        self._scorer: Scorer | None = None
        self._resources: Resources | None = None
        self._loading = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self._evaluating: set[asyncio.Task[Evaluation]] = set()
        self._held_out_ended = 0
        """Held-out episodes that have ended since the evaluation began."""
        self._statistics = Statistics(self._name)
        self._permits = asyncio.Semaphore(settings.concurrent_groups)
        self._record: EpisodeRecord | None = None

    @concurrent_endpoint
    async def load(self) -> None:
        """Load what episodes need. May be called before :meth:`setup`, while the generators start. Raises what loading
        raises (OSError, ValueError)."""
        await self._loaded()

    @concurrent_endpoint
    async def setup(
        self,
        buffer: BufferHandle,
        generator: DispatchedGenerators,
        episode_limit: int | None = None,
        frozen: Sequence[tuple[FrozenModel, FrozenReplicas]] = (),
    ) -> tuple[int, ...]:
        """Load what episodes need, unless that is done; returns the ids at which turns end. Raises what loading raises
        (OSError, ValueError).

        When called again, the worker cancels its episodes, continues with the given buffer and restarts its counters.

        Args:
            episode_limit: maximum tokens of a sequence, prompts included; None means no limit.
            frozen: models that episodes may ask, and their engines.
        """
        await connect_frozen_models(frozen)
        resources = await self._loaded()
        await self._cancel_all()
        self._statistics = Statistics(self._name)  # earlier counts are in the checkpoint
        self.connect(buffer, generator, resources, episode_limit)
        return self._template.stop_token_ids

    async def _loaded(self) -> Resources:
        async with self._loading:  # waits: for another call that loads; the caller keeps the deadline
            if self._resources is None:
                self.guard_process()
                self._resources = await Resources.load(self._settings, self._pickled_task, self._model)
                freeze_heap(COLLECT_AFTER)
        return self._resources

    async def _cancel_all(self) -> None:
        """Cancel training and held-out episodes, whose caller no longer exists."""
        running = [*self._evaluating, *([] if self._running is None else [self._running])]
        for task in running:
            task.cancel()
        ended = asyncio.gather(*running, return_exceptions=True)
        await within(BUFFER_DEADLINE_S, ended, "cancelled episodes to end", on="an episode's code")

    def guard_process(self) -> None:
        """Prepare this process, which belongs to the worker alone, for episodes' code, and limit what it can do."""
        run_recipe_code()
        read_nothing()
        self._guard = LoopGuard(self._name, self._settings.episode_deadline_s)
        bound_printing(f"the code of {self._name}")
        end_copies()
        refuse_alarms()
        survive_exits(asyncio.get_running_loop())

    def connect(
        self,
        buffer: BufferHandle,
        generator: DispatchedGenerators,
        resources: Resources,
        episode_limit: int | None = None,
    ) -> None:
        """Use these from now on; the second part of :meth:`setup`."""
        self._buffer = buffer
        self._generator = generator
        self._template, self._task, self._scorer = resources.template, resources.task, resources.scorer
        stages = () if self._pickled_stages is None else self._pickled_stages.load()
        # A new one: rows of episodes after the checkpoint, from which a warm restart resumes, must not be written.
        self._record = None if self._logged is None else EpisodeRecord(self._name, resources.template, self._logged)
        self._submitter = GroupSubmitter(
            buffer, self._name, self._settings.slot_deadline_s, stages, self._statistics, self._record
        )
        self._tickets = TicketQueue(buffer, self._name, self._settings.slot_deadline_s)
        self._group_rewards = GroupRewarder(resources.scorer, self._settings.episode_deadline_s)
        s = self._settings
        self._held_out_share = s.bound(episode_limit).share(s.group_size)
        """Bound of a held-out episode: as for an episode of a group, so that it is the same kind of episode."""
        self._runner = EpisodeRunner(generator, resources.template, s, resources.scorer, episode_limit)
        self._one_turn_groups = OneTurnGroups(
            generator, resources.template, s, resources.scorer, episode_limit, self._runner
        )

    @concurrent_endpoint
    async def run(self) -> None:
        """Generate groups until the buffer or this worker is closed. Raises any error that is not one episode's own
        failure."""
        if self._running is not None:
            raise RuntimeError(f"{self._name} is already running")
        self._running = running = asyncio.ensure_future(self._run_until_closed())
        try:
            await asyncio.wait({running})  # waits: as long as the run; close() ends it
        finally:
            running.cancel()
            self._running = None
        if not running.cancelled():
            running.result()

    @persistent_endpoint
    async def evaluate(
        self, indices: list[int], plan: EvaluationPlan = GREEDY, max_concurrent: int | None = None
    ) -> Evaluation:
        """Run items of a held-out set next to the training rollouts. Nothing of it is sent to the buffer.

        Args:
            max_concurrent: number of episodes that run at once; None means as many as for training.
        """
        settings = self._settings
        if not self._evaluating:
            self._held_out_ended = 0

        async def run_item(task: Task, item: Any, index: int, sampling: Sampling, group: int) -> EpisodeResult:
            return await self._run_episode(task, item, index, sampling, group, self._held_out_share)

        async def ended(result: EpisodeResult, task: Task, item: Any, index: int, sample: int) -> None:
            if self._record is not None:
                await self._record.add_held_out(result, plan.held_out, sample, task.name, index, item)
            self._held_out_ended += 1
            if not isinstance(result, EpisodeFailed):
                wait_registry.progress("held-out item run")

        evaluation = run_held_out(
            plan,
            self._task,
            indices,
            run_item,
            max_new_tokens=settings.max_new_tokens,
            stops=self._template.stop_token_ids,
            item_deadline_s=settings.episode_deadline_s,
            max_concurrent=max_concurrent or settings.concurrent_groups * settings.group_size,
            ended=ended,
        )
        self._evaluating.add(task := asyncio.ensure_future(evaluation))
        task.add_done_callback(self._evaluating.discard)
        result = await task  # waits: every wait of an episode has a deadline of its own
        for failure in result.first.values():
            await self._submitter.note(failure)
        return result

    @persistent_endpoint
    async def stats(self) -> WorkerStats:
        """Counters of this worker."""
        return self._statistics.stats()

    @persistent_endpoint
    async def progress(self, groups: list[int] | None) -> WorkerProgress:
        """How far the longest running episode of these groups is; of a held-out item if ``groups`` is None."""
        return WorkerProgress(self._held_out_ended, self._runner.longest(groups))

    @persistent_endpoint
    async def take_rows(self) -> WorkerRows:
        """The lines of episodes that have ended since the last call, for the run's record."""
        return WorkerRows([]) if self._record is None else self._record.take()

    @persistent_endpoint
    async def update_replicas(self, paused: list[int], lost: list[int]) -> None:
        """Send no new requests to the ``paused`` replicas, and resend the unanswered requests of the ``lost`` ones to
        others."""
        self._generator.update_replicas(paused, lost)

    @concurrent_endpoint
    async def replace(self, replica: int, handle: object) -> None:
        """Use the generator behind ``handle`` for ``replica`` from now on."""
        self._generator.replace(replica, handle)

    @concurrent_endpoint
    async def block_until_lost(self) -> None:
        """Never returns. Callers await it so that their call fails when this process dies."""
        await asyncio.Event().wait()  # waits: as long as the process lives

    @concurrent_endpoint
    async def close(self) -> None:
        """End ``run`` and the scoring processes."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running}, timeout=BUFFER_DEADLINE_S)
        await self._end_helpers()

    async def __cleanup__(self, exc: Exception | None) -> None:
        await self._end_helpers()

    async def _end_helpers(self) -> None:
        if self._guard is not None:
            self._guard.close()
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            await asyncio.to_thread(scorer.close)

    async def _run_until_closed(self) -> None:
        """Generate ``concurrent_groups`` groups at once, while others are in stages. The first loop to end, by an error
        or at the end of the run, ends all."""
        count = self._settings.concurrent_groups + self._submitter.max_groups_in_stages
        loops = [asyncio.ensure_future(self._run_groups()) for _ in range(count)]
        try:
            # waits: as long as the run; close() ends it
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)  # waits: they are done or cancelled
            await self._runner.leave()

    async def _run_groups(self) -> None:
        """Generate one group after another until the run ends."""
        while True:
            check_open_files()
            check_hung_tools()
            async with self._permits:
                with self._statistics.group_waiting():
                    ticket = await self._tickets.ticket()
                if ticket is None:
                    return
                with self._statistics.group_running():
                    item, group = await self._run_group(ticket)
            if group is not None:
                await self._submitter.submit(ticket, item, group)

    async def _run_group(self, ticket: Ticket) -> tuple[Any, Group | None]:
        """Run the episodes of a group; returns the item and the group, or None if the group was dropped because too few
        episodes are left to compare."""
        size, cursor, task = self._settings.group_size, ticket.task_cursor, self._task
        item: Any = None
        results: list[EpisodeResult]
        try:
            made = functools.partial(task.item, steps=ticket.steps)
            item = await make_item(made, cursor, self._settings.episode_deadline_s)
        except EpisodeFailed as failed:
            results = [await self._submitter.reported(failed)] * size
        else:
            seeds = [episode_seed(self._settings.seed, ticket.group_id, i) for i in range(size)]
            task, item = self._task.owner_of(item)
            share, group_id, samplings = ticket.bound.share(size), ticket.group_id, list(map(self._sampling, seeds))
            rollouts = await self._one_turn_groups.play(task, cursor, item, samplings, group_id, share)
            if rollouts is None:
                rollouts = await all_or_none(
                    [self._run_episode(task, item, cursor, sampling, group_id, share) for sampling in samplings]
                )
            # An episode without a turn of the policy says nothing about its choices. So it is not compared either: the
            # mean over the episodes in which the policy did choose is the better baseline.
            results = [of for of in rollouts if isinstance(of, EpisodeFailed) or of[0].turns]
            compared = await self._group_rewards.added(task, item, cursor, results)
            results = [await self._submitter.reported(e) if isinstance(e, EpisodeFailed) else e for e in compared]
            results += [[]] * (size - len(results))
        self._statistics.add_episodes(results)
        failures = [result for result in results if isinstance(result, EpisodeFailed)]
        if self._record is not None:
            for number, result in enumerate(results):
                if isinstance(result, EpisodeFailed):
                    of_group = ticket.group_id, ticket.attempt, task.name, cursor
                    await self._record.add_failed(result, number, *of_group, item)
        succeeded = [result for result in results if not isinstance(result, EpisodeFailed) and result]
        for number, sequences in enumerate(succeeded):
            for sequence in sequences:
                sequence.rollout = number
        episodes = [sequence for sequences in succeeded for sequence in sequences]
        group = Group(ticket.group_id, cursor, episodes, len(failures), ticket.attempt)
        group.task, group.success_reward = task.name, task.success_reward
        if len(succeeded) >= min(2, size):
            return item, group
        reasons = Counter(failure.reason for failure in failures)
        reasons[NO_TURN.reason] = size - len(failures) - len(succeeded)
        reason = reasons.most_common(1)[0][0]
        if reason == NO_TURN.reason:
            await self._submitter.note(NO_TURN)
        if self._record is not None:
            await self._record.add_group(group, item, reason)
        await self._submitter.drop(ticket, reason, sum(episode.num_trainable for episode in episodes))
        return item, None

    async def _run_episode(
        self, task: Task, item: Any, index: int, sampling: Sampling, group: int, share: GroupBound
    ) -> EpisodeResult:
        """Result of an episode. Failures are returned, so that they do not cancel other episodes."""
        if self._scorer is None:
            raise RuntimeError(f"{self._name} has not been set up, or is closed")
        try:
            return await self._runner.play(task, index, item, sampling, group, share)
        except EpisodeFailed as failed:
            return await self._submitter.reported(failed)

    def _sampling(self, seed: int | None) -> Sampling:
        s, expert_routes_from = self._settings, 0 if self._keep_expert_routes else None
        stops = self._template.stop_token_ids
        return Sampling(s.max_new_tokens, s.temperature, stops, seed, s.top_k, s.top_p, s.min_p, expert_routes_from)

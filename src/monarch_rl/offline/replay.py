"""Replays the updates of a run from its journal, on trainer ranks only, without engines or rollouts.

On the same machine, with the same packages and number of ranks, the weights after each step equal those of the run, bit
for bit (docs/journal.md lists the conditions). With another objective, the same batches give other updates.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monarch_rl.checkpoint.folders import complete, verify
from monarch_rl.checkpoint.journal import JournalReader, journal_of
from monarch_rl.errors import BrokenCheckpoint, SettingsError
from monarch_rl.offline.parity import run_ranks
from monarch_rl.pipeline.checkpoints import FOLDER as CHECKPOINTS
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.network import held_port
from monarch_rl.runtime.scratch import temporary_directory
from monarch_rl.settings.ranges import to_plain
from monarch_rl.trainer.plan import read_plan
from monarch_rl.trainer.settings import SCHEDULE

if TYPE_CHECKING:
    import torch

    from monarch_rl.episode.shard import PackedShard
    from monarch_rl.trainer.advantages import BatchAdvantages
    from monarch_rl.trainer.batch import MicroBatch
    from monarch_rl.trainer.functions import LoadedFunctions
    from monarch_rl.trainer.objective import LossFunction
    from monarch_rl.trainer.plan import TrainerPlan
    from monarch_rl.trainer.policy import Policy

logger = logging.getLogger("monarch_rl")

START_S = 900.0
"""Seconds for the ranks to start and load the model."""
STEP_S = 600.0
"""Maximum seconds per step."""


@dataclass(frozen=True)
class ReplayJob:
    """The steps to replay, and the state to start from."""

    journal: Path
    """``journal/`` in the run's folder."""
    start: int
    """The version whose weights the replay starts from."""
    last: int
    """The last step to replay."""
    checkpoint: Path | None = None
    """Checkpoint of version ``start``; None for version 0, the model that the run began with."""
    optimizer_steps: int = 0
    """Optimiser steps made up to ``start``."""
    objective: ByValue[LossFunction] | None = None
    """Replaces the run's objective."""
    generation: int = 0
    """Generation of the run whose trainer plan is used."""
    opened: int | None = None
    """A step whose episodes are inspected, with the weights before its update."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """The result of a replayed step."""

    step: int
    equal: bool | None
    """Whether the weights of all ranks equal those of the run, bit for bit; None if the journal has no checksums."""
    recorded: dict[str, float]
    """Metrics of the run's own update; empty if the journal has none."""
    figures: dict[str, float]
    """Metrics of the replayed update."""


@dataclass(frozen=True, slots=True)
class OpenedEpisode:
    """An inspected episode, as its update saw it. Lists but ``prompt`` have an entry for each trainable token."""

    group: int
    """Id of its group."""
    place: int
    """Position in the group."""
    reward: float
    finish_reason: str
    prompt: list[int]
    """Token ids before the first trainable token."""
    token_ids: list[int]
    advantages: list[float]
    ratios: list[float]
    """exp(trainer's log-prob - engine's log-prob)."""
    lags: list[int]


def starting_point(run: Path, first: int) -> tuple[int, Path | None, int]:
    """The newest complete checkpoint before step ``first``: its version, folder and number of optimiser steps. Without
    one, version 0 and None: the model that the run began with."""
    for version, folder in reversed(complete(run / CHECKPOINTS).items()):
        if version < first:
            try:
                return version, folder.resolve(), verify(folder).optimizer_steps
            except BrokenCheckpoint as error:
                logger.warning("%s: using an earlier checkpoint", error)
    return 0, None, 0


def check_range(reader: JournalReader, start: int, last: int) -> None:
    """Raise SettingsError if the journal lacks a batch of the steps ``start`` + 1 to ``last``; says which steps it has,
    and what is damaged."""
    missing = sorted(set(range(start, last)) - set(reader.versions))
    if missing or start >= last:
        lacks = f"step {missing[0] + 1}" if missing else f"steps after {start} up to {last}"
        damage = "".join(f". {damage}" for damage in reader.damage)
        advice = "replay a range without the missing steps (--from, --to), for which" if damage else "for longer ranges"
        raise SettingsError(
            f"{reader.folder} lacks {lacks}; it has {steps_of(reader.versions)}{damage}. The replay starts from the "
            "newest checkpoint before the first step, or from the model that the run began with (here version "
            f"{start}): {advice}, keep more checkpoints, or a longer journal (--journal.mib)"
        )


def steps_of(versions: Sequence[int]) -> str:
    """The steps that update these versions, in ascending order, as ranges: "steps 1 to 8 and 10 to 20"."""
    ranges: list[list[int]] = []
    for version in versions:
        if ranges and version == ranges[-1][1]:
            ranges[-1][1] += 1
        else:
            ranges.append([version + 1, version + 1])
    named = [f"{first} to {last}" if first < last else str(first) for first, last in ranges]
    return f"steps {' and '.join(named)}" if named else "no steps"


def generation_of(journal: Path, reader: JournalReader, start: int, last: int) -> int:
    """The generation of the run that trained step ``last``, after checking the steps from ``start`` + 1 on.

    Raises:
        ValueError: the journal lacks a batch, or a step was trained with other ranks, trainer settings (except those
            of the learning rate) or functions than the last one, because the run was resumed in between; says where.
    """
    check_range(reader, start, last)
    generations = {version: reader.about_batch(version)["generation"] for version in range(start, last)}
    newest = generations[last - 1]
    settings = {generation: read_plan(journal, generation).settings for generation in set(generations.values())}
    for version, generation in reversed(generations.items()):
        other, own = (to_plain(settings[each]) for each in (generation, newest))
        changed = [name for name in own if other[name] != own[name] and name not in ("lr", *SCHEDULE)]
        if changed:
            name = changed[0]
            raise SettingsError(
                f"step {version + 1} was trained with other trainer settings than step {last} (trainer.{name} "
                f"{other[name]} and {own[name]}): the run was resumed in between. Start after step {version + 1} "
                "(--from), which needs a later checkpoint, or end before the resume (--to)"
            )
        if reader.about_batch(version).get("functions_as") != reader.about_batch(last - 1).get("functions_as"):
            raise SettingsError(
                f"step {version + 1} was trained with another advantage or objective than step {last}, or with another "
                "length limit or temperature of answers: the run was resumed in between, with a changed recipe. Start "
                f"after step {version + 1} (--from), which needs a later checkpoint, or end before the resume (--to)"
            )
    return newest


def replay(job: ReplayJob) -> tuple[list[ReplayedStep], list[OpenedEpisode]]:
    """Replay the updates; returns their results, and the episodes of the step to inspect.

    Raises:
        ValueError: the journal lacks a batch.
        SideFailed: a rank failed; its error is on stderr.
    """
    plan = read_plan(job.journal, job.generation)
    ranks = plan.settings.ranks
    for reader in (JournalReader(job.journal, rank) for rank in range(0, ranks, plan.settings.tp)):
        check_range(reader, job.start, job.last)
        for damage in reader.damage:
            logger.warning("the journal is damaged: %s. It has %s", damage, steps_of(reader.versions))
    limit_s = START_S + plan.settings.compile_limit_s + STEP_S * (job.last - job.start)
    with temporary_directory() as folder, held_port() as port:
        what = f"{ranks} trainer ranks to replay {job.last - job.start} steps"
        run_ranks(replay_rank, (folder, job, port), ranks, limit_s, what)
        by_rank = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]
    steps = []
    for of_ranks in zip(*(results["steps"] for results in by_rank), strict=True):
        equal = [of_rank["equal"] for of_rank in of_ranks]
        first = of_ranks[0]
        verdict = None if None in equal else all(equal)
        steps.append(ReplayedStep(first["step"], verdict, first["recorded"], first["figures"]))
    opened = [OpenedEpisode(**episode) for results in by_rank for episode in results["opened"]]
    return steps, sorted(opened, key=lambda episode: (episode.group, episode.place))


def replay_rank(rank: int, folder: Path, job: ReplayJob, port: int) -> None:
    """Replay the steps on one trainer rank; writes the results to ``folder``."""
    plan = read_plan(job.journal, job.generation)
    own, batches = journal_of(job.journal, rank, plan.settings.tp)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(plan.settings.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["OMP_NUM_THREADS"] = str(own.about.get("threads", 1))
    import torch

    from monarch_rl.trainer.policy import Policy

    torch.set_num_threads(own.about.get("threads", 1))
    if rank == 0 and own.about.get("torch") != str(torch.__version__):
        logger.warning(
            "the run used torch %s, this is torch %s: weights may differ", own.about.get("torch"), torch.__version__
        )
    policy = Policy(plan.model, plan.settings, total_steps=plan.total_steps, temperature=plan.temperature)
    states = {}
    if job.checkpoint is not None:
        states = policy.checkpoint.restore(job.checkpoint, job.optimizer_steps)
    functions = functions_of(plan, job.objective, states)
    results = _Rank(policy, plan, functions, job, own, batches).run()
    (folder / str(rank)).write_text(json.dumps(results))
    policy.close()


def functions_of(plan: TrainerPlan, objective: ByValue[LossFunction] | None, states: dict[str, Any]) -> LoadedFunctions:
    """The functions of the updates, with their state restored.

    Args:
        objective: replaces the plan's own.
        states: saved state of the plan's functions at the checkpoint; empty at the beginning of the run.

    Raises:
        ValueError: the plan's functions do not have the state that was saved.
    """
    from monarch_rl.trainer.checkpoint import ROWS_TAKEN
    from monarch_rl.trainer.functions import TrainingFunctions

    functions = (plan.functions or TrainingFunctions.of_settings(plan.settings.loss, plan.settings.critic)).load()
    states = {kind: state for kind, state in states.items() if kind != ROWS_TAKEN}  # the journal has the rows
    if states:
        functions.load_state_dict(states)
    return functions if objective is None else replace(functions, objective=objective.load())


class _Rank:
    """Replays the steps of one rank."""

    def __init__(
        self,
        policy: Policy,
        plan: TrainerPlan,
        functions: LoadedFunctions,
        job: ReplayJob,
        own: JournalReader,
        batches: JournalReader,
    ) -> None:
        self._policy, self._plan, self._functions = policy, plan, functions
        self._job, self._own, self._batches = job, own, batches

    def run(self) -> dict[str, Any]:
        steps, opened = [], list[OpenedEpisode]()
        generation = self._job.generation
        for version in range(self._job.start, self._job.last):
            if (taken_by := self._batches.about_batch(version)["generation"]) != generation:
                generation = taken_by  # the learning rate may have changed when the run was resumed
                plan = read_plan(self._job.journal, generation)
                self._policy.reschedule(plan.settings, plan.total_steps)
            shard = self._batches.batch(version)
            inspect = version + 1 == self._job.opened
            logprobs = self._logprobs(shard) if inspect else []
            step, advantages = self._train(shard)
            steps.append(step)
            if inspect:
                opened = self._opened(shard, logprobs, advantages)
        # A tensor-parallel rank that reads another rank's batches leaves their episodes to that rank.
        shares_batches = self._batches is not self._own
        return {"steps": [asdict(step) for step in steps], "opened": [asdict(x) for x in opened if not shares_batches]}

    def _train(self, shard: PackedShard) -> tuple[ReplayedStep, BatchAdvantages]:
        from monarch_rl.trainer.step import train
        from monarch_rl.trainer.step_journal import weights_checksums

        trained = train(self._policy, shard, self._functions, self._plan.normaliser_tokens)
        figures, advantages = trained.metrics, trained.advantages
        made, version = self._own.made(shard.version), shard.version
        about, taken = self._own.about_made(version), self._batches.about_batch(version)
        # A result from before the run was resumed is that of another batch.
        if made is None or about is None or about["generation"] < taken["generation"]:
            return ReplayedStep(shard.version + 1, None, {}, figures), advantages
        equal = bool(np.array_equal(made.checksums, weights_checksums(self._policy)))
        return ReplayedStep(shard.version + 1, equal, made.figures, figures), advantages

    def _packed(self, shard: PackedShard, advantages: BatchAdvantages) -> list[MicroBatch]:
        from monarch_rl.trainer.batch import pack_shard

        plan, aggregation = self._plan, self._plan.settings.loss.aggregation
        parts = pack_shard(shard, advantages, aggregation, plan.normaliser_tokens, self._policy.device)
        return [microbatch for part in parts for microbatch in part]

    def _logprobs(self, shard: PackedShard) -> list[torch.Tensor]:
        """Log-probs of the tokens of each micro-batch, under the current weights."""
        import torch

        no_advantages = [[torch.zeros(()) for _ in rewards] for rewards in shard.rewards]
        with torch.no_grad():
            return [self._policy.token_logprobs(batch).logprobs for batch in self._packed(shard, no_advantages)]

    def _opened(
        self, shard: PackedShard, logprobs: Sequence[torch.Tensor], advantages: BatchAdvantages
    ) -> list[OpenedEpisode]:
        """The step's episodes of this rank."""
        opened, packed = [], self._packed(shard, advantages)
        for places, episodes, batch, computed in zip(shard.places, shard.deserialize(), packed, logprobs, strict=True):
            ratios = (computed - batch.behaviour_logprobs).exp().tolist()
            for index, ((group, place, _), episode) in enumerate(zip(places, episodes, strict=True)):
                mine = (batch.sequences == index).nonzero().flatten().tolist()
                opened.append(
                    OpenedEpisode(
                        shard.group_ids[group][0],
                        place,
                        episode.reward,
                        episode.finish_reason,
                        _prompt(episode.token_ids, episode.trainable),
                        episode.token_ids[episode.trainable].tolist(),
                        [float(batch.advantages[i]) for i in mine],
                        [ratios[i] for i in mine],
                        [int(batch.lags[i]) for i in mine],
                    )
                )
        return opened


def _prompt(token_ids: np.ndarray, trainable: np.ndarray) -> list[int]:
    first = int(np.argmax(trainable)) if trainable.any() else len(token_ids)
    return [int(token) for token in token_ids[:first]]


def compared(steps: Sequence[ReplayedStep]) -> str:
    """A table with a line per step: whether its weights equal the run's, and metrics of both updates."""
    names = {"loss": "loss", "grad norm": "grad_norm", "KL (k3)": "mismatch_k3_all", "clipped": "clipped"}
    lines = [f"{'step':>6}  {'weights':9}" + "".join(f"{name:>12}{'run':>12}" for name in names)]
    for step in steps:
        weights = {True: "equal", False: "differ", None: "not known"}[step.equal]
        cells = [f"{_shown(step.figures.get(key)):>12}{_shown(step.recorded.get(key)):>12}" for key in names.values()]
        lines.append(f"{step.step:>6}  {weights:9}" + "".join(cells))
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"

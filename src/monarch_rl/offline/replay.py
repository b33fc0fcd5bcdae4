"""The updates of a run, made again from its journal by trainer ranks alone: no engines, no rollouts.

On the same machine, with the same packages and as many ranks, the weights after each step are those of the run, bit for
bit (docs/journal.md says what that needs). Under another objective the same batches make other updates.
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

from monarch_rl.checkpoint.folders import BrokenCheckpoint, complete, verify
from monarch_rl.checkpoint.journal import JournalReader, journal_of
from monarch_rl.offline.parity import run_ranks
from monarch_rl.pipeline.checkpoints import FOLDER as CHECKPOINTS
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.network import held_port
from monarch_rl.runtime.scratch import temporary_directory
from monarch_rl.trainer.plan_file import read_plan

if TYPE_CHECKING:
    import torch

    from monarch_rl.episode.shard import PackedShard
    from monarch_rl.trainer.advantages import BatchAdvantages
    from monarch_rl.trainer.batch import MicroBatch
    from monarch_rl.trainer.functions import LoadedFunctions
    from monarch_rl.trainer.objective import Objective
    from monarch_rl.trainer.plan import TrainerPlan
    from monarch_rl.trainer.policy import Policy

logger = logging.getLogger("monarch_rl")

START_S = 900.0
"""Seconds for the ranks to come up and load the model."""
STEP_S = 600.0
"""Seconds of a step, at most."""


@dataclass(frozen=True)
class ReplayJob:
    """What is made again."""

    journal: Path
    """``journal/`` of the run."""
    start: int
    """The version whose weights are there at first."""
    last: int
    """The last step that is made again."""
    checkpoint: Path | None = None
    """Of ``start``; None is the model that the run began with, version 0."""
    optimizer_steps: int = 0
    """Of ``start``."""
    objective: ByValue[Objective] | None = None
    """In place of the run's own."""
    generation: int = 0
    """Of the run, whose plan is taken."""
    opened: int | None = None
    """A step whose episodes are looked at, with the weights from which it was made."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step that was made again."""

    step: int
    equal: bool | None
    """Whether all weights of all ranks are those of the run, bit for bit; None if the run did not get to say."""
    recorded: dict[str, float]
    """The metrics of the run's own update; empty if it did not get to say."""
    figures: dict[str, float]
    """Those of the update that was made now."""


@dataclass(frozen=True, slots=True)
class OpenedEpisode:
    """An episode of a step, as the update saw it. Arrays of its trainable tokens, N."""

    group: int
    """Id of its group."""
    place: int
    """Position in the group."""
    reward: float
    finish_reason: str
    prompt: list[int]
    """The ids before the first trainable token."""
    token_ids: list[int]
    advantages: list[float]
    ratios: list[float]
    """exp(trainer's log-prob - engine's)."""
    lags: list[int]


def starting_point(run: Path, first: int) -> tuple[int, Path | None, int]:
    """Where to begin to make step ``first`` again: version, checkpoint (None is the model that the run began with) and
    optimizer steps. The newest checkpoint before that step which is whole."""
    for version, folder in reversed(complete(run / CHECKPOINTS).items()):
        if version < first:
            try:
                return version, folder.resolve(), verify(folder).optimizer_steps
            except BrokenCheckpoint as error:
                logger.warning("%s: an earlier checkpoint is taken", error)
    return 0, None, 0


def check_range(reader: JournalReader, start: int, last: int) -> None:
    """Raise ValueError, saying what is there, if the journal lacks a batch of the steps ``start`` + 1 to ``last``."""
    missing = sorted(set(range(start, last)) - set(reader.versions))
    if missing or start >= last:
        known = reader.versions
        there = f"steps {known[0] + 1} to {known[-1] + 1}" if known else "no step"
        lacks = f"step {missing[0] + 1}" if missing else f"steps after {start} up to {last}"
        raise ValueError(
            f"the journal lacks {lacks}; it has {there}. Updates are made again from the newest checkpoint before "
            f"the first step, or from the model that the run began with (here version {start}): keep more checkpoints, "
            "or a longer journal (--journal.mib)"
        )


def generation_of(journal: Path, reader: JournalReader, start: int, last: int) -> int:
    """The generation of the run that made the last of the steps ``start`` + 1 to ``last``.

    Raises:
        ValueError: the journal lacks a batch, or a step was made on other ranks, with other settings of the trainer or
            with other functions than the last one: the run was resumed between them. Says where.
    """
    check_range(reader, start, last)
    generations = {version: reader.about_batch(version)["generation"] for version in range(start, last)}
    newest = generations[last - 1]
    settings = {generation: read_plan(journal, generation).settings for generation in set(generations.values())}
    for version, generation in reversed(generations.items()):
        if settings[generation] != settings[newest]:
            ranks = [settings[each].ranks for each in (generation, newest)]
            raise ValueError(
                f"step {version + 1} was made with other settings of the trainer than step {last} (trainer.ranks "
                f"{ranks[0]} and {ranks[1]}): the run was resumed between them. Begin after it (--from), with a "
                "checkpoint from there on, or end before (--to)"
            )
        if reader.about_batch(version).get("trained_as") != reader.about_batch(last - 1).get("trained_as"):
            raise ValueError(
                f"step {version + 1} was made with another advantage or objective than step {last}, or with answers of "
                "another length or temperature: the run was resumed between them, with another recipe. Begin after it "
                "(--from), with a checkpoint from there on, or end before (--to)"
            )
    return newest


def replay(job: ReplayJob) -> tuple[list[ReplayedStep], list[OpenedEpisode]]:
    """Make the updates again; what they gave, and the episodes of the step that is opened.

    Raises:
        ValueError: the journal lacks a batch.
        SideFailed: a rank failed; its error is on stderr.
    """
    plan = read_plan(job.journal, job.generation)
    check_range(JournalReader(job.journal, 0), job.start, job.last)
    ranks = plan.settings.ranks
    limit_s = START_S + plan.settings.compile_limit_s + STEP_S * (job.last - job.start)
    with temporary_directory() as folder, held_port() as port:
        what = f"{ranks} trainer ranks to make {job.last - job.start} steps again"
        run_ranks(replay_rank, (folder, job, port), ranks, limit_s, what)
        told = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]
    steps = []
    for of_ranks in zip(*(one["steps"] for one in told), strict=True):
        equal = [of_rank["equal"] for of_rank in of_ranks]
        first = of_ranks[0]
        verdict = None if None in equal else all(equal)
        steps.append(ReplayedStep(first["step"], verdict, first["recorded"], first["figures"]))
    opened = [OpenedEpisode(**episode) for one in told for episode in one["opened"]]
    return steps, sorted(opened, key=lambda episode: (episode.group, episode.place))


def replay_rank(rank: int, folder: Path, job: ReplayJob, port: int) -> None:
    """What one trainer rank does; writes what it found to ``folder``."""
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
            "the run had torch %s, here is %s: weights may differ", own.about.get("torch"), torch.__version__
        )
    policy = Policy(plan.model, plan.settings, total_steps=plan.total_steps, temperature=plan.temperature)
    remembered = {}
    if job.checkpoint is not None:
        remembered = policy.checkpoint.restore(job.checkpoint, job.optimizer_steps)
    functions = functions_of(plan, job.objective, remembered)
    told = _Rank(policy, plan, functions, job, own, batches).run()
    (folder / str(rank)).write_text(json.dumps(told))
    policy.close()


def functions_of(
    plan: TrainerPlan, objective: ByValue[Objective] | None, remembered: dict[str, Any]
) -> LoadedFunctions:
    """What the updates are made with.

    Args:
        objective: in place of the plan's own.
        remembered: by the plan's functions, at the checkpoint; empty at the beginning of the run.

    Raises:
        ValueError: the plan's functions do not remember what was saved.
    """
    from monarch_rl.trainer.checkpoint import ROWS_TAKEN
    from monarch_rl.trainer.functions import TrainingFunctions

    functions = (plan.functions or TrainingFunctions.of_settings(plan.settings.loss, plan.settings.critic)).load()
    remembered = {kind: state for kind, state in remembered.items() if kind != ROWS_TAKEN}  # the journal has the rows
    if remembered:
        functions.load_state_dict(remembered)
    return functions if objective is None else replace(functions, objective=objective.load())


class _Rank:
    """Makes the steps of one rank again."""

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
        for version in range(self._job.start, self._job.last):
            shard = self._batches.batch(version)
            looks = version + 1 == self._job.opened
            logprobs = self._logprobs(shard) if looks else []
            step, advantages = self._make(shard)
            steps.append(step)
            if looks:
                opened = self._opened(shard, logprobs, advantages)
        of_neighbour = self._batches is not self._own
        return {"steps": [asdict(step) for step in steps], "opened": [asdict(x) for x in opened if not of_neighbour]}

    def _make(self, shard: PackedShard) -> tuple[ReplayedStep, BatchAdvantages]:
        from monarch_rl.trainer.step import train
        from monarch_rl.trainer.step_journal import weights_checksums

        figures, advantages = train(self._policy, shard, self._functions, self._plan.max_new_tokens)
        made = self._own.made(shard.version)
        if made is None:
            return ReplayedStep(shard.version + 1, None, {}, figures), advantages
        equal = bool(np.array_equal(made.checksums, weights_checksums(self._policy)))
        return ReplayedStep(shard.version + 1, equal, made.figures, figures), advantages

    def _packed(self, shard: PackedShard, advantages: BatchAdvantages) -> list[MicroBatch]:
        from monarch_rl.trainer.batch import pack_shard

        plan, aggregation = self._plan, self._plan.settings.loss.aggregation
        parts = pack_shard(shard.unpack(), advantages, aggregation, plan.max_new_tokens, self._policy.device)
        return [microbatch for part in parts for microbatch in part]

    def _logprobs(self, shard: PackedShard) -> list[torch.Tensor]:
        """Of the tokens of each micro-batch, under the weights as they are."""
        import torch

        none = [[torch.zeros(()) for _ in rewards] for rewards in shard.rewards]
        with torch.no_grad():
            return [self._policy.token_logprobs(batch).logprobs for batch in self._packed(shard, none)]

    def _opened(
        self, shard: PackedShard, logprobs: Sequence[torch.Tensor], advantages: BatchAdvantages
    ) -> list[OpenedEpisode]:
        """This rank's episodes."""
        opened, microbatches = [], shard.unpack().microbatches
        for places, batch, computed in zip(microbatches, self._packed(shard, advantages), logprobs, strict=True):
            ratios = (computed - batch.behaviour_logprobs).exp().tolist()
            for index, (group, place, episode) in enumerate(places):
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
    """A line for each step: whether its weights are the run's, and the figures of both updates."""
    names = {"loss": "loss", "grad norm": "grad_norm", "KL (k3)": "mismatch_k3_all", "clipped": "clipped"}
    lines = [f"{'step':>6}  {'weights':9}" + "".join(f"{name:>12}{'run':>12}" for name in names)]
    for step in steps:
        weights = {True: "equal", False: "differ", None: "not known"}[step.equal]
        cells = [f"{_shown(step.figures.get(key)):>12}{_shown(step.recorded.get(key)):>12}" for key in names.values()]
        lines.append(f"{step.step:>6}  {weights:9}" + "".join(cells))
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"

"""A trainer step against plain torchtitan on the same batch, in the same processes, alternately."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.serialization import deserialize_group, serialize_group
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S, update
from monarch_rl.runtime.cluster import Cluster, init_torch_distributed_env
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, Patience, within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.settings import TrainerSettings

LOSS_BOUND = 1e-4
"""Nats by which both sides' mean log-prob of the first batch may differ (fp32)."""
OURS, PLAIN, FUSED = "trainer", "plain", "fused"
"""The reference sides: torchtitan with the trainer's model config, and with q, k and v fused as in its own recipes."""
COEFFICIENT = 1e-3
"""Coefficient of KL and entropy when they are measured; any value except 0 costs the same."""


class TrainerBeside(Trainer):
    """A trainer rank that can also make the step of plain torchtitan, on the same thread."""

    _plain: dict[str, Any]
    _labelled: list[Any]

    @concurrent_endpoint
    async def plain_setup(self, groups: list[bytes], names: list[str]) -> None:
        """Load the plain models, and prepare this rank's part of the batch like torchtitan's data loader."""
        await self._on(self._compute, self._set_up_plain, [deserialize_group(data) for data in groups], names)

    def _set_up_plain(self, groups: list[Group], names: list[str]) -> None:
        import torch
        from plain_torchtitan import PlainTorchtitan, labelled

        from monarch_rl.algorithms.packing import plan_microbatches, separate
        from monarch_rl.trainer.batch import pack

        plan, policy = self._plan, self.policy
        self._plain = {
            name: PlainTorchtitan(plan.model, plan.settings, plan.total_steps, policy.device, fuse_qkv=name == FUSED)
            for name in names
        }
        episodes = [episode for group in groups for episode in group.episodes]
        # Divides groups as the buffer does, except for shared prefixes.
        lengths = [episode.num_tokens for episode in episodes]
        budget = plan.settings.tokens_per_microbatch
        self._labelled = []
        for places in plan_microbatches(separate(lengths), budget, policy.world_size)[policy.rank]:
            zeros = torch.zeros(len(places))
            self._labelled.append(labelled(pack([episodes[i] for i, _ in places], zeros, zeros, 0, policy.device)))

    @concurrent_endpoint
    async def cpu_seconds(self) -> float:
        """Return the CPU time of this process so far."""
        return time.process_time()

    @concurrent_endpoint
    async def plain_step(self, name: str) -> tuple[float, float]:
        """Make one step of a reference side; returns its seconds on this rank and the mean loss."""
        return await self._on(self._compute, self._plain_step, name)

    def _plain_step(self, name: str) -> tuple[float, float]:
        started = time.perf_counter()
        loss = self._plain[name].step(self._labelled)
        return time.perf_counter() - started, loss


@dataclass
class Training:
    """A trainer mesh with a buffer to which the same groups are submitted again and again."""

    trainer: TrainerBeside
    buffer: Buffer
    groups: list[Group]
    version: int = 0

    @classmethod
    async def start(
        cls, cluster: Cluster, plan: TrainerPlan, groups: list[Group], steps: int, first_device: int = 0, name: str = ""
    ) -> Training:
        """Start the mesh.

        Args:
            steps: maximum number of steps.
            name: prefix of mesh names, for several meshes on the same devices.
        """
        name = name or str(first_device)
        buffer = cluster.spawn(f"buffer{name}", 1).spawn("buffer", Buffer, len(groups), BufferSettings(steps))
        mesh = cluster.spawn(f"trainer{name}", plan.settings.ranks, first_device=first_device)
        await init_torch_distributed_env(mesh)
        trainer = mesh.spawn("trainer", TrainerBeside, plan, buffer)
        deadline = SET_UP_DEADLINE_S
        await within(deadline, trainer.setup.call(), f"{plan.settings.ranks} trainer ranks to load {plan.model}")
        return cls(trainer, buffer, groups)

    async def step(self, deadline_s: float) -> tuple[float, list[dict[str, float]]]:
        """Make an update with the groups in the buffer; returns the seconds of the call and the metrics by rank."""
        for group in self.groups:
            ticket = await within(CALL_DEADLINE_S, self.buffer.admit.call_one("benchmark", 1.0), "a slot")
            assert ticket is not None, "the buffer is closed"
            data = serialize_group(Group(ticket.group_id, ticket.task_cursor, group.episodes))
            await within(CALL_DEADLINE_S, self.buffer.submit.call_one(data), "the buffer to accept a group")
        started = time.perf_counter()
        metrics = await update(self.trainer, self.buffer, self.version, Patience(deadline_s))
        seconds = time.perf_counter() - started
        self.version += 1
        return seconds, metrics

    async def served(self) -> None:
        """Free the slots, although nothing was published."""
        await within(CALL_DEADLINE_S, self.buffer.published.call_one(self.version), "the buffer to release slots")


def make_groups(vocabulary: int, groups: int, group_size: int, prompt: int, answer: int) -> list[Group]:
    """Return random episodes with prompts of ``prompt`` / 2 to 3 / 2 tokens and answers of 1 to ``answer``, uniform."""
    rng = np.random.default_rng(0)

    def episode(prompt_ids: list[int]) -> Episode:
        n = int(rng.integers(1, answer + 1))
        context, total = len(prompt_ids), len(prompt_ids) + n
        trainable = np.arange(total) >= context
        tokens = np.concatenate([prompt_ids, rng.integers(0, vocabulary, n)]).astype(np.int32)
        # The engine's log-probs of an untrained model, so that importance weights are near 1.
        logprobs = np.where(trainable, -np.log(vocabulary), 0).astype(np.float32)
        turn = Turn(tokens, logprobs, np.where(trainable, 0, -1).astype(np.int32), trainable)
        return Episode([turn], float(rng.integers(0, 2)), "stop")

    found = []
    for index in range(groups):
        prompt_ids = rng.integers(0, vocabulary, int(rng.integers(prompt // 2, prompt * 3 // 2 + 1))).tolist()
        found.append(Group(index, index, [episode(prompt_ids) for _ in range(group_size)]))
    return found


@dataclass
class Timed:
    """Measurements of each side, for each round except the first."""

    seconds: dict[str, list[float]]
    """Seconds of a step on the slowest rank."""
    cpu_seconds: dict[str, list[float]]
    """CPU seconds of all ranks."""
    calls: list[float]
    """Seconds of the trainer's calls."""

    def ratio(self, yardstick: str) -> float:
        return _ratio(self.seconds[yardstick], self.seconds[OURS])

    @property
    def cpu_ratio(self) -> float:
        return _ratio(self.cpu_seconds[PLAIN], self.cpu_seconds[OURS])

    def step_ms(self, name: str) -> float:
        return statistics.median(self.seconds[name]) * 1e3


async def take_turns(training: Training, yardsticks: list[str], rounds: int, deadline_s: float) -> Timed:
    """Run rounds of one step each of the trainer and of the references; the first round warms up."""
    trainer, deadline = training.trainer, SET_UP_DEADLINE_S
    data = [serialize_group(group) for group in training.groups]
    await within(deadline, trainer.plain_setup.call(data, yardsticks), "trainer ranks to load plain torchtitan")

    async def ours() -> tuple[float, float, float]:
        call, metrics = await training.step(deadline_s)
        await training.served()
        return max(rank["step_s"] for rank in metrics), metrics[0]["logprob"], call

    async def plain(name: str) -> tuple[float, float, float]:
        answers = await within(deadline, trainer.plain_step.call(name), f"a step of {name} torchtitan")
        seconds, losses = zip(*answers.values(), strict=True)
        return max(seconds), -losses[0], 0.0

    async def cpu() -> float:
        answers = await within(deadline, trainer.cpu_seconds.call(), "the CPU time of trainer ranks")
        return float(sum(answers.values()))

    names = [OURS, *yardsticks]
    timed = Timed({name: [] for name in names}, {name: [] for name in names}, [])
    for turn in range(rounds + 1):
        logprobs = []
        for name in names if turn % 2 else reversed(names):  # no side always goes first
            before = await cpu()
            step, logprob, call = await (ours() if name == OURS else plain(name))
            logprobs.append(logprob)
            if turn:
                timed.cpu_seconds[name].append(await cpu() - before)
                timed.seconds[name].append(step)
                timed.calls += [call] if name == OURS else []
        if turn == 0:
            _check_same_batch(logprobs)
    return timed


async def measure(training: Training, rounds: int, deadline_s: float) -> dict[str, Any]:
    """Compare the trainer with both references.

    A ratio is the median over rounds of reference / trainer: 1 is as fast as torchtitan, less is slower.
    """
    timed = await take_turns(training, [PLAIN, FUSED], rounds, deadline_s)
    tokens = sum(episode.num_tokens - 1 for group in training.groups for episode in group.episodes)
    return {
        "trainer_step_ratio": timed.ratio(PLAIN),
        "trainer_step_ratio_fused_qkv": timed.ratio(FUSED),
        "trainer_call_ratio": _ratio(timed.seconds[PLAIN], timed.calls),
        "trainer_cpu_ratio": timed.cpu_ratio,
        "trainer_step_ms": timed.step_ms(OURS),
        "trainer_call_ms": statistics.median(timed.calls) * 1e3,
        "torchtitan_step_ms": timed.step_ms(PLAIN),
        "torchtitan_fused_qkv_step_ms": timed.step_ms(FUSED),
        "trainer_step_tokens": tokens,
        "trainer_rounds": rounds,
    }


async def measure_with_reference(
    cluster: Cluster, plan: TrainerPlan, groups: list[Group], rounds: int, deadline_s: float
) -> dict[str, Any]:
    """Compare a trainer whose loss has the KL to a reference model and the entropy with plain torchtitan, which runs a
    frozen model on the same tokens before its step."""
    loss = replace(plan.settings.loss, kl_coefficient=COEFFICIENT, entropy_coefficient=COEFFICIENT)
    settings = replace(plan.settings, reference=True, loss=loss)
    training = await Training.start(cluster, replace(plan, settings=settings), groups, 1 + rounds, name="_reference")
    timed = await take_turns(training, [PLAIN], rounds, deadline_s)
    await within(SET_UP_DEADLINE_S, training.trainer.close.call(), "trainer ranks to leave their process group")
    return {
        "reference_step_ratio": timed.ratio(PLAIN),
        "reference_cpu_ratio": timed.cpu_ratio,
        "reference_step_ms": timed.step_ms(OURS),
        "torchtitan_reference_step_ms": timed.step_ms(PLAIN),
        "reference_rounds": rounds,
    }


def _ratio(yardstick: list[float], ours: list[float]) -> float:
    return statistics.median(there / here for there, here in zip(yardstick, ours, strict=True))


def _check_same_batch(logprobs: list[float]) -> None:
    if max(logprobs) - min(logprobs) > LOSS_BOUND:
        raise RuntimeError(
            "the trainer and plain torchtitan did not compute the same thing: their mean log-probs of the first "
            f"batch, {logprobs}, differ by more than {LOSS_BOUND}"
        )


def plan_of(model: Path, settings: TrainerSettings, steps: int, answer: int) -> TrainerPlan:
    """Return the plan of a run that would train these groups."""
    return TrainerPlan(model, settings, steps, 1.0, answer)

"""A trainer mesh, generator replicas and a buffer, started as by a recipe and driven step by step by a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.pipeline.preloads import PRELOADS as RUN_PRELOADS
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.start import start_buffer, start_trainer, update
from monarch_rl.rollout.scoring import PRELOAD as SCORING_PRELOAD
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import Patience
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.settings import RouterReplay, TrainerSettings
from monarch_rl.weights.area import attach
from monarch_rl.weights.transport import TransferSettings

PRELOADS = [preload for preload in RUN_PRELOADS if preload.name != SCORING_PRELOAD]
"""Imports that the host does once, as in a run: most of the start-up time is imports."""
ENGINES = GeneratorSettings(replicas=2, max_running_requests=32, max_total_tokens=16384)
GROUPS, SIZE, NEW_TOKENS, VOCABULARY = 4, 4, 24, 500
TRANSFER = TransferSettings(bucket_mib=1, deadline_s=60)
ALL_TOKENS = Sampling(max_new_tokens=NEW_TOKENS)
LENGTHS = (300, 220)
"""Tokens of the sequences that are generated while versions are published."""

G = TypeVar("G", bound=Generator)
"""Class of the generators."""


class InspectedGenerator(Generator):
    """A generator whose engine weights and received bytes tests can inspect."""

    _received: tuple[int, ...] = ()

    async def _receive(self, version: int, snapshot: int) -> int:
        nbytes = await super()._receive(version, snapshot)
        self._received += (nbytes,)
        return nbytes

    @concurrent_endpoint
    async def take_received(self) -> list[int]:
        """Bytes received for each version (or delta) since the last call."""
        received, self._received = self._received, ()
        return list(received)

    @concurrent_endpoint
    async def engine_waits(self) -> list[str]:
        """What the requests of the engine wait for."""
        return [wait.what for wait in self._running.requests.waits()]

    @concurrent_endpoint
    async def save_ranks(self, folder: str) -> None:
        """Let SGLang write the parameters of each engine rank to a file: see :mod:`tests.pipeline.held`."""
        save = self._running._sglang.engine.save_sharded_model
        await asyncio.to_thread(save, path=folder, pattern=None, max_size=None)

    @concurrent_endpoint
    async def flip_bit(self, snapshot: int, name: str) -> None:
        """Flip one bit of tensor ``name`` in the version received from ``snapshot``; a second call undoes it."""
        weights = self._weights_ready()
        spec = weights.manifest.tensors[weights.manifest.names.index(name)]
        spec.view(attach(weights.receiver.area(snapshot))).view(torch.uint8).view(-1)[spec.nbytes // 2].bitwise_xor_(1)

    @concurrent_endpoint
    async def engine_checksums(self) -> dict[str, str]:
        """SGLang's own checksums of the parameters; the engine must have one rank."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        manager = self._running._sglang.manager
        answer: Any = await manager.check_weights(CheckWeightsReqInput(action="checksum"), None)
        assert answer[0], answer
        (rank,) = answer[2] if isinstance(answer[2], list) else [answer[2]]
        return dict(rank["checksums"])


async def start_inspected(
    cluster: Cluster, model: Path, replicas: int, first_device: int, name: str, tp: int = 1, **engine: Any
) -> list[InspectedGenerator]:
    """Like ``start_generators``, with inspected generators of ``tp`` ranks; ``engine`` holds arguments of setup()."""
    generators: list[InspectedGenerator] = []
    for index in range(replicas):
        device = first_device + index * tp
        mesh = cluster.spawn(f"{name}{index}", 1, first_device=device, devices_per_process=tp, preload=ENGINE_PRELOAD)
        generators.append(mesh.spawn(f"{name}{index}", InspectedGenerator))
    settings = replace(ENGINES, tp=tp)
    await asyncio.gather(*(g.setup.call_one(str(model), settings, i, **engine) for i, g in enumerate(generators)))
    return generators


@dataclass
class System(Generic[G]):
    """Trainer, generators, buffer and publisher, all at ``version``."""

    trainer: Trainer
    generators: Sequence[G]
    buffer: Buffer
    publisher: Publisher
    version: int

    @classmethod
    async def start(
        cls,
        cluster: Cluster,
        model: Path,
        generators: Sequence[G],
        lr: float,
        version: int = 0,
        transfer: TransferSettings = TRANSFER,
        lora: LoraSettings = FULL_TRAINING,
        ranks: int = 2,
        expert_parallel: int = 1,
        router_replay: RouterReplay = "off",
        temperature: float = 1.0,
    ) -> System[G]:
        """Start a trainer on the first devices and publish its weights as ``version`` to running generators."""
        buffer = await start_buffer(cluster, GROUPS, BufferSettings(1), version)
        settings = TrainerSettings(ranks, expert_parallel, router_replay, lr=lr, lora=lora)
        plan = TrainerPlan(model, settings, 100, temperature, NEW_TOKENS)
        trainer = await start_trainer(cluster, plan, buffer, first_device=0)
        publisher = await Publisher.connect(trainer, dict(enumerate(generators)), buffer, transfer, "float32")
        system = cls(trainer, generators, buffer, publisher, version)
        await publisher.publish(version)
        await publisher.wait_until_served()
        return system

    async def use_transfer(self, transfer: TransferSettings) -> None:
        """Connect again with other transfer settings and publish the newest version once more."""
        self.publisher = await Publisher.connect(
            self.trainer, dict(enumerate(self.generators)), self.buffer, transfer, "float32"
        )
        await self.publisher.publish(self.version)
        await self.publisher.wait_until_served()

    async def generate(self, prompts: list[list[int]], sampling: Sampling = ALL_TOKENS) -> list[Completion]:
        """Return completions of all prompts, generated concurrently and spread over the replicas."""
        # No controller replaces a lost replica: when the last one is lost, the request fails.
        dispatcher = Dispatcher(self.generators, 120.0, max_losses=len(self.generators) - 1)
        requests = (dispatcher.generate(prompt, sampling, group) for group, prompt in enumerate(prompts))
        return list(await asyncio.gather(*requests))

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[list[Completion]]:
        """Generate sequences while the block runs; afterwards the list holds all completions.

        There are two lengths, so that sequences of one length are in flight between two sets of the other.
        """
        completions: list[Completion] = []
        block_runs = True

        async def keep_generating(first: int, tokens: int) -> None:
            while block_runs:
                completions.extend(await self.generate([[first, i] for i in range(4)], Sampling(max_new_tokens=tokens)))

        requests = asyncio.gather(*[keep_generating(5 + i, tokens) for i, tokens in enumerate(LENGTHS)])
        yield completions
        block_runs = False
        await requests

    async def submit_batch(self, seed: int, sampling: Sampling = ALL_TOKENS) -> list[Group]:
        """Admit one batch of groups, generate answers to random prompts, and submit them with random rewards."""
        rng = np.random.default_rng(seed)
        groups = []
        for _ in range(GROUPS):
            ticket = await self.buffer.admit.call_one("test", 30.0)
            assert ticket is not None
            prompt = rng.integers(3, VOCABULARY, 6).tolist()
            completions = await self.generate([prompt] * SIZE, sampling)
            episodes = [episode(prompt, completion, float(rng.integers(0, 2))) for completion in completions]
            groups.append(Group(ticket.group_id, 0, episodes))
            await self.buffer.submit.call_one(serialize_group(groups[-1]))
        return groups

    async def step(self, seed: int, sampling: Sampling = ALL_TOKENS) -> dict[str, float]:
        """Submit a batch, update, publish, and wait until the new version is served; returns the update's metrics."""
        await self.submit_batch(seed, sampling)
        metrics = await update(self.trainer, self.buffer, self.version, Patience(60.0))
        self.version += 1
        await self.publisher.publish(self.version)
        await self.publisher.wait_until_served()
        return metrics[0]

    async def mismatch(self, seed: int, sampling: Sampling = ALL_TOKENS) -> float:
        """The largest difference between the log-probs of engine and trainer, over newly sampled tokens."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(3, VOCABULARY, rng.integers(1, 40)).tolist() for _ in range(12)]
        completions = await self.generate(prompts, sampling)
        assert {int(v) for c in completions for v in c.policy_versions} == {self.version}
        episodes = [episode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        answers = await self.trainer.logprobs.call([serialize_group(Group(0, 0, episodes))], self.version)
        return max(
            float(np.abs(computed - completion.logprobs).max())
            for by_rank in answers.values()
            for computed, completion in zip(by_rank, completions, strict=True)
        )


def episode(prompt: list[int], completion: Completion, reward: float = 0.0) -> Episode:
    """An episode of one turn."""
    return Episode([Turn.from_completion(prompt, completion)], reward, "length", expert_routes=completion.expert_routes)

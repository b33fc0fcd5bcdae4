"""recipes/grpo.py with the latencies of simulated devices: ``async_gain_recipe.py LATENCIES.json ARGUMENTS...``

For async_gain.py. Everything is real: actors, buffer, workers, scores, SGLang's engines, torchtitan's updates, versions
that are sent, verified and committed. But an answer is returned only when a device that generates `places` sequences at
a time, at `token_s` seconds per token, would have it; and an update ends only after `update_s` seconds. The machine's
own computations must fit into these times.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.episode.sampling import Completion, Sampling  # noqa: E402
from monarch_rl.generator.actor import Generator  # noqa: E402
from monarch_rl.generator.engine import Engine  # noqa: E402
from monarch_rl.generator.parts import OnPart, ignore_part  # noqa: E402
from monarch_rl.pipeline import run, start  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402
from monarch_rl.simulate.costs import Distribution  # noqa: E402
from monarch_rl.trainer.actor import Trainer  # noqa: E402
from monarch_rl.trainer.batch import MicroBatch  # noqa: E402
from monarch_rl.trainer.objective import LossFunction  # noqa: E402
from monarch_rl.trainer.policy import Policy  # noqa: E402


@dataclass(frozen=True)
class Latencies:
    """Latencies of the simulated devices."""

    length: Distribution
    """Tokens of an answer; the engine really generates fewer."""
    token_s: float
    places: int
    update_s: float

    @staticmethod
    def read(path: Path) -> Latencies:
        fields = json.loads(path.read_text())
        return Latencies(Distribution(**fields.pop("length")), **fields)


class SlowGenerator(Generator):
    """A generator whose engine answers when the simulated device would."""

    latencies: Latencies
    _places: asyncio.Semaphore | None = None

    @property
    def _running(self) -> Engine:
        engine = super()._running
        if "generate" not in vars(engine):
            self._slow_down(engine)
        return engine

    def _slow_down(self, engine: Engine) -> None:
        real_generate, latencies, places = engine.generate, self.latencies, asyncio.Semaphore(self.latencies.places)

        async def generate(prompt_ids: list[int], sampling: Sampling, on_part: OnPart = ignore_part) -> Completion:
            if sampling.seed is None:  # a held-out item
                return await real_generate(prompt_ids, sampling, on_part)
            async with places:
                now = asyncio.get_running_loop().time
                due = now() + latencies.token_s * tokens_of(latencies.length, sampling.seed)
                engine.requests.clock.enter()
                try:
                    completion = await real_generate(prompt_ids, sampling, on_part)
                    await asyncio.sleep(due - now())
                finally:
                    engine.requests.clock.leave()
                return completion

        engine.generate = generate  # type: ignore[method-assign]


class SlowTrainer(Trainer):
    """A trainer rank whose updates take as long as on the simulated device."""

    latencies: Latencies

    @property
    def policy(self) -> Policy:
        policy = super().policy
        if "update" not in vars(policy):
            update, seconds = policy.update, self.latencies.update_s

            def slow_update(microbatches: Sequence[MicroBatch], objective: LossFunction) -> dict[str, float]:
                due = time.monotonic() + seconds
                metrics = update(microbatches, objective)
                time.sleep(max(0.0, due - time.monotonic()))
                return metrics

            policy.update = slow_update  # type: ignore[method-assign]
        return policy


def tokens_of(length: Distribution, seed: int) -> int:
    """Return the tokens of the answer with this seed, as in :class:`monarch_rl.simulate.replica.SimulatedReplica`."""
    return max(1, round(length.draw(0, seed)))


def main(latencies: Latencies, arguments: Sequence[str]) -> None:
    SlowGenerator.latencies = SlowTrainer.latencies = latencies
    start.Generator = SlowGenerator  # type: ignore[misc]
    start.Trainer = SlowTrainer  # type: ignore[misc]
    run.launch(grpo.train, cli(grpo.Settings, args=arguments), grpo.task)


if __name__ == "__main__":
    main(Latencies.read(Path(sys.argv[1])), sys.argv[2:])

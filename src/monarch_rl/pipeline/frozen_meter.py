"""What the engines of frozen models did, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_rl.generator.frozen import FrozenStats
from monarch_rl.pipeline.frozen import FrozenPool
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S


class FrozenMeter:
    """What the engines of frozen models did so far.

    Args:
        pools: of all models.
    """

    def __init__(self, pools: Sequence[FrozenPool]) -> None:
        self._pools = pools
        self._newest: dict[str, dict[tuple[int, int], FrozenStats]] = {pool.model.name: {} for pool in pools}
        """By model, replica and pid, of each process that was an engine of it: machines have the same pids."""

    async def metrics(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
        for pool in self._pools:
            answers = await pool.ask(CALL_DEADLINE_S, "to return its stats", lambda _, engine: engine.stats.call_one())
            self._newest[pool.model.name] |= {(index, stats["pid"]): stats for index, stats in answers.items()}
        values: dict[str, float] = {}
        for name, stats in self._newest.items():
            each = stats.values()
            values |= {
                f"frozen/{name}/requests": sum(engine["requests"] for engine in each),
                f"frozen/{name}/read_tokens": sum(engine["read_tokens"] for engine in each),
                f"frozen/{name}/drawn_tokens": sum(engine["drawn_tokens"] for engine in each),
                f"frozen/{name}/device_s": sum(engine["busy_seconds"] * engine["devices"] for engine in each),
            }
        versions = {f"frozen/{pool.model.name}/version": pool.version for pool in self._pools}
        refused = {
            f"frozen/{pool.model.name}/refused_snapshots": float(pool.refused_snapshots)
            for pool in self._pools
            if pool.plan.snapshot_every
        }
        return values | refused | {name: version for name, version in versions.items() if version is not None}

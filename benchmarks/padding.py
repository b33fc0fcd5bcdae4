"""Source of the constants of padded attention on CPUs: its CPU time by the allowed share of padding.

    python benchmarks/padding.py [--rounds 10]

For the trainer (``trainer/attention_layout.py``, a forward and a backward pass of one layer) and for the engine
(``generator/cpu/attention.py``, the plan of a forward and 3 layers of it), each in batches of the main job's shape and
of longer sequences whose lengths differ. Prints CPU time relative to that of the constants in use, as medians
over rounds in which all alternate. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import tyro

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.algorithms.packing import Padding  # noqa: E402
from monarch_rl.generator.cpu import attention  # noqa: E402
from monarch_rl.trainer import attention_layout  # noqa: E402
from monarch_rl.trainer.attention import PackedAttention  # noqa: E402
from monarch_rl.trainer.attention_layout import AttentionLayout, Segment  # noqa: E402

WASTES, FREE_PAIRS = (0.0, 0.25, 1.0, 4.0), (0, 4096, 16_384, 65_536)
HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 32, 3
"""Sizes of the main job's model."""
Work = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """CPU time of padded attention (see the top of this file)."""

    rounds: int = 10
    """Measured rounds, after one that warms up."""


def trainer_work(groups: int, size: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Work:
    """Return a micro-batch of groups whose prompts are computed once; prompts and answers have random lengths."""
    rng, segments, end = np.random.default_rng(0), [], 0
    for _ in range(groups):
        start, prompt = end, rng.integers(*prompts)
        for index, answer in enumerate(rng.integers(*answers, size)):
            own = answer + (prompt if index == 0 else 0)
            shared = np.arange(start, start + (0 if index == 0 else prompt))
            segments.append(Segment(end, np.concatenate([shared, np.arange(end, end + own)]), int(own)))
            end += int(own)
    attention = PackedAttention(PackedAttention.Config())
    q, k, v = (torch.randn(1, end, heads, WIDTH, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def work() -> None:
        layout = AttentionLayout(segments, torch.device("cpu"))
        attention(q, k, v, attention_masks=layout, enable_gqa=True).sum().backward()

    return work


def engine_work(count: int, lengths: tuple[int, int], new: tuple[int, int] | None) -> Work:
    """Return a forward of ``count`` sequences; ``new`` tokens of each are queries, or one if None."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(*lengths, count)
    queries = np.ones_like(sizes) if new is None else np.minimum(rng.integers(*new, count), sizes)
    table = torch.arange(count * int(sizes.max())).view(count, -1).int()
    query, output = torch.randn(int(queries.sum()), HEADS, WIDTH), torch.empty(int(queries.sum()), HEADS, WIDTH)
    keys, values = (torch.randn(table.numel(), KV_HEADS, WIDTH) for _ in range(2))

    def work() -> None:
        calls = attention.plan(table, torch.arange(count), sizes.tolist(), queries.tolist())
        for _ in range(LAYERS):
            attention.attend(calls, query, output, keys, values, WIDTH**-0.5)

    return work


def cpu_ms(side: str, padding: Padding, work: Work) -> float:
    """Return the milliseconds of one call."""
    module = attention_layout if side == "trainer" else attention
    before, module.PADDING = module.PADDING, padding  # type: ignore[attr-defined]
    started = time.process_time()
    work()
    module.PADDING = before  # type: ignore[attr-defined]
    return (time.process_time() - started) * 1e3


def main(s: Settings) -> None:
    torch.set_num_threads(1)
    loads = {
        "trainer, main job": trainer_work(32, 8, (7, 10), (3, 9)),
        "trainer, long": trainer_work(4, 8, (60, 200), (20, 200)),
        "engine, main job: decoding": engine_work(128, (8, 18), None),
        "engine, main job: prompts": engine_work(32, (7, 10), (7, 10)),
        "engine, long: decoding": engine_work(16, (100, 600), None),
        "engine, long: answers to cached prompts": engine_work(8, (100, 400), (1, 60)),
    }
    best_constants = {}
    for name, work in loads.items():
        side = name.split(",")[0]
        used = attention_layout.PADDING if side == "trainer" else attention.PADDING
        paddings = [Padding(waste, free) for waste in WASTES for free in FREE_PAIRS]
        rounds = [{padding: cpu_ms(side, padding, work) for padding in paddings} for _ in range(s.rounds + 1)][1:]
        median = {padding: statistics.median(each[padding] for each in rounds) for padding in paddings}
        print(
            f"{name}: {median[used]:.2f} ms with waste {used.waste:g} and {used.free_pairs} free pairs; relative to it"
        )
        print("  waste \\ free" + "".join(f"{free:9d}" for free in FREE_PAIRS))
        for waste in WASTES:
            relative = [median[Padding(waste, free)] / median[used] for free in FREE_PAIRS]
            print(f"{waste:14g}" + "".join(f"{value:9.2f}" for value in relative))
        best = min(median, key=lambda padding: median[padding])
        best_constants[name] = {"best": [best.waste, best.free_pairs], "of_used": round(median[best] / median[used], 3)}
    print(json.dumps({"benchmark": "padding", "best": best_constants}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))

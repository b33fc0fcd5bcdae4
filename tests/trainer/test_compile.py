"""Compiled blocks compute the same as others, and rows of other lengths and forks are not recompiled."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from monarch_rl.trainer import platform

platform.prepare()

from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402

from monarch_rl.trainer.attention import PrefixVarlenAttention  # noqa: E402
from monarch_rl.trainer.attention_layout import AttentionLayout  # noqa: E402
from monarch_rl.trainer.batch import (  # noqa: E402
    MicroBatch,
    layout_rows,  # noqa: E402
    pack,
)
from monarch_rl.trainer.compiling import prepare_to_compile  # noqa: E402
from tests.episode.trees import tree_of  # noqa: E402
from tests.trainer.folders import MOE, QWEN3, make_folder  # noqa: E402
from tests.trainer.programs import run_program, saved  # noqa: E402
from tests.trainer.test_shared_prefix import (  # noqa: E402
    CPU,
    GRADIENT_BOUND,
    LOGPROB_BOUND,
    computed,
    model,
)

TREES: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([20, 18, 18, 9], [(0, 0), (0, 12), (1, 15), (0, 5)]),
    ([30], [(0, 0)]),
    ([170, 180, 165, 172, 290], [(0, 0), (0, 150), (0, 160), (2, 164), (0, 40)]),
    ([2], [(0, 0)]),
    ([33, 34, 35], [(0, 0)] * 3),
    ([500, 450, 490], [(0, 0)] * 3),
    ([7, 5], [(0, 0), (0, 3)]),
    ([501] * 11, [(0, 0)] * 11),
]
"""Lengths and forks of micro-batches."""
GRAPHS = 5
"""A row of one input is compiled separately, and so are, on a CPU, rows of more than 1024, 2048 and 4096 inputs: sums
over these, over their 2 key heads or over their 4 heads then have more than 4096 terms, and other kernels."""


@pytest.fixture
def compiler() -> Iterator[None]:
    """As in a rank that compiles."""
    compiler_config: Any = torch.compiler.config
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64), compiler_config.patch(dynamic_sources=""):
        prepare_to_compile()
        yield
    torch._dynamo.reset()


def microbatches(routes: bool) -> list[MicroBatch]:
    made = []
    for seed, (lengths, forks) in enumerate(TREES):
        episodes, number = tree_of(lengths, forks, seed, routes=routes), len(lengths)
        values = torch.linspace(-1.5, 2.0, number), torch.linspace(0.3, 0.7, number)
        made.append(pack(episodes, *values, 0, CPU, [0] * number))
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_compiled_blocks_compute_the_same_log_probs_and_gradients_for_rows_of_all_lengths(kind: str) -> None:
    module = model.__wrapped__(kind)
    rows = microbatches(kind == "moe")
    if kind == "moe":  # minutes of compiling for nothing new
        rows = [row for row in rows if row.num_tokens <= 1024]
    expected = [computed(module, row, replay=True) for row in rows]
    apply_compile(module, compile_config=CompileConfig(enable=True), parallel_dims=SimpleNamespace(tp_enabled=False))  # type: ignore[arg-type]
    for row, (their_output, their_grads) in zip(rows, expected, strict=True):
        output, grads = computed(module, row, replay=True)
        for ours, theirs in zip(output, their_output, strict=True):
            assert ours is not None and theirs is not None
            assert ours.numel() == 0 or (ours - theirs).abs().max() < LOGPROB_BOUND
        total = torch.stack([value.norm() for value in their_grads.values()]).norm()
        for name, theirs in their_grads.items():
            assert (grads[name] - theirs).norm() <= GRADIENT_BOUND * max(theirs.norm(), 1e-2 * total), name
    assert 1 < counters["stats"]["unique_graphs"] <= GRAPHS
    seen = counters["stats"]["unique_graphs"]
    for row in rows:
        computed(module, row, replay=True)
    assert counters["stats"]["unique_graphs"] == seen


@pytest.mark.usefixtures("compiler")
def test_flash_attention_is_traced_once_for_all_rows() -> None:
    """For rows that share prefixes, and once more for rows that share none; on the meta device no kernel runs."""
    meta, module = torch.device("meta"), PrefixVarlenAttention(PrefixVarlenAttention.Config())

    class Block(torch.nn.Module):
        """Has the parameters of torchtitan's blocks, by the same names."""

        def forward(self, x: torch.Tensor, attention_masks: AttentionLayout) -> Any:
            return module(x, x[:, :, :2], x[:, :, :2], attention_masks=attention_masks, scale=0.3, enable_gqa=True)

    block = Block()
    block.compile(backend="eager", fullgraph=True)
    for seed, (lengths, forks) in enumerate(TREES):
        row = layout_rows(tree_of(lengths, forks, seed), [0] * len(lengths))
        if row.width < 2:
            continue
        layout = AttentionLayout(row.segments(), meta)
        layout.prepare_for_flash()
        assert block(torch.empty(1, row.width, 4, 16, device=meta), layout).shape == (1, row.width, 4, 16)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@pytest.mark.usefixtures("compiler")
def test_ranks_may_compile_in_folders_with_spaces() -> None:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    builder = CppBuilder("kernel", ["/a folder/kernel.cpp"], CppTorchOptions(warning_all=False), "/a folder")
    arguments = shlex.split(builder.get_command_line())
    assert {"/a folder/kernel.cpp", "/a folder/kernel.so"} <= set(arguments)


# ---- on trainer ranks ----------------------------------------------------------------------------------------

RUNS = ("checkpointed", "experts", "passes")
COMPILING_S = 1500.0
"""Time limit of a program of which each rank compiles several times, on shared cores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the output of compile_ranks.py."""
    folder = tmp_path_factory.mktemp("compile")
    make_folder(folder / "dense", QWEN3, seed=0)
    make_folder(folder / "moe", MOE, seed=1)
    run_program("compile_ranks.py", folder, *RUNS, ranks=2, limit_s=COMPILING_S)
    return folder


@pytest.mark.timeout(COMPILING_S + 60)
@pytest.mark.parametrize("name", RUNS)
def test_updates_of_two_ranks_equal_those_without_compiling(folder: Path, name: str) -> None:
    """Losses within 1e-5, gradient norms within 1e-4, and the same weights, in the norm."""
    start = load_file(folder / ("moe" if name == "experts" else "dense") / "model.safetensors")
    compiled, plain = (json.loads((folder / f"{name}.{mode}.json").read_text()) for mode in ("compiled", "plain"))
    for our_step, their_step in zip(compiled, plain, strict=True):
        assert abs(our_step["loss"] - their_step["loss"]) < 1e-5
        assert abs(our_step["grad_norm"] - their_step["grad_norm"]) < 1e-4 * their_step["grad_norm"]
    ours, theirs = saved(folder / f"{name}.compiled"), saved(folder / f"{name}.plain")
    for tensor in theirs:
        moved, trained = (theirs[tensor] - start[tensor]).norm(), name != "passes" or "_proj" in tensor  # LoRA's
        assert (moved > 0) == trained and (ours[tensor] - theirs[tensor]).norm() <= 0.01 * moved, tensor


@pytest.mark.timeout(COMPILING_S + 60)
@pytest.mark.parametrize("name", RUNS)
def test_ranks_compile_at_the_start_and_not_in_a_step(folder: Path, name: str) -> None:
    """Except for the row of one input of a rank without episodes. Passes without gradients have none in this test."""
    at_start, after_steps = json.loads((folder / f"{name}.graphs.json").read_text())
    assert 1 <= at_start <= after_steps <= at_start + (name != "passes")

"""Part ``weights``: checksums, updates, shared memory, a transfer during training, the cost of a commit. No SGLang."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monarch_rl.generator import load_report, load_staged
from monarch_rl.generator.load_report import Box, LoadSheet, matrix_shape
from monarch_rl.generator.load_staged import CopyPlan, Placement, plan_copies
from monarch_rl.weights import delta
from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import TensorSpec, make_manifest
from monarch_rl.weights.transport import Sender, TransferSettings, make_sender
from tools.gpu_parts.common import GIB, Bench, Findings

SPAWN_S = 600.0
"""Seconds for another process to import torch, open a GPU and sum an area."""
BUSY_S = 3.0
"""Seconds for which the training stream is kept busy while a version is sent."""
SLEEP_CYCLES_PER_S = 1_500_000_000
"""GPU clock cycles per second, for ``torch.cuda._sleep``; the busy time is measured, so an estimate is enough."""


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    checksums(bench, found)
    updates(bench, found)
    areas(bench, found)
    expandable_segments(bench, found)
    asyncio.run(transfer(bench, found))
    many_tensors(bench, found)


# -- checksums and updates --------------------------------------------------------------------------------------------


def checksums(bench: Bench, found: Findings) -> None:
    """Require that checksums of odd shapes are equal to the CPU's."""
    torch.manual_seed(0)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        for shape in ((4097, 1027), (1, 3), (33,), (5, 7, 9)):
            whole = torch.randint(0, 200, shape, dtype=dtype)
            part = whole[:, 1:] if whole.dim() > 1 else whole  # rows that begin inside a word
            for x, column in ((whole, 0), (part, 1 if whole.dim() > 1 else 0)):
                there, here = (int(tensor_checksum(y, 0, column)) for y in (x.to(bench.device), x))
                found.require(there == here, f"the checksum of {dtype} {list(x.shape)} is {there}, the CPU's is {here}")
    large = torch.randint(0, 200, ((4 * GIB if bench.on_gpu else 16 << 20) // 8192, 4096), dtype=torch.int16)
    large = large.to(bench.device)
    found.note(checksum_gb_per_s=large.nbytes / bench.seconds(lambda: tensor_checksum(large)) / 1e9)


def updates(bench: Bench, found: Findings) -> None:
    """Require that an encoded update has the same bytes as the CPU's, and gives the new version when applied."""
    torch.manual_seed(0)
    size, bucket = (256 << 20 if bench.on_gpu else 4 << 20) + 6, 4 << 20
    old = torch.randint(0, 200, (size,), dtype=torch.uint8)
    new = old.clone()
    new.view(torch.int16)[torch.randint(0, size // 2, (size // 100,))] += 1  # sparse
    new[: bucket // 4] += 1  # dense
    wires = {}
    for device in {torch.device("cpu"), bench.device}:
        a, b = old.to(device), new.to(device)
        out = torch.zeros(delta.wire_bound(size, bucket), dtype=torch.uint8, device=device)
        wires[device] = out[: delta.encode(a, b, 2, bucket, out)].cpu()
        if device == bench.device:
            found.note(delta_encode_ms=1e3 * bench.seconds(partial(delta.encode, a, b, 2, bucket, out)))
            wire = wires[device].to(device)
            found.note(delta_apply_ms=1e3 * bench.seconds(partial(delta.apply, wire, a)))
            found.require(torch.equal(a, b), "an applied update does not give the new version")
    found.require(
        torch.equal(wires[torch.device("cpu")], wires[bench.device]), "an encoded update differs from the CPU's"
    )
    found.note(delta_mib=size / 2**20)


# -- shared memory ----------------------------------------------------------------------------------------------------


def areas(bench: Bench, found: Findings) -> None:
    """Require that another process sees what is written to an area, even after it has attached, and can write to it."""
    size = GIB if bench.on_gpu else 1 << 20
    if bench.on_gpu:
        torch.cuda.empty_cache()  # so that memory of earlier checks is not freed during this measurement
    before = torch.cuda.memory_reserved() if bench.on_gpu else 0
    area = Area(size, bench.device)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_sum_area, args=(there, area.handle), daemon=True)
    process.start()
    try:
        for value in (3, 5):
            area.buffer.fill_(value)
            bench.synchronize()
            here.send(value)
            if not here.poll(SPAWN_S):
                found.problems.append(f"another process did not attach to an area within {SPAWN_S:g} s")
                return
            answer = here.recv()
            found.require(answer == value * size, f"another process summed {answer} where {value * size} was written")
            found.require(int(area.buffer[0]) == value + 1, "a write of another process is not visible")
        here.send(None)
    finally:
        process.join(SPAWN_S)
    del area
    if bench.on_gpu:
        torch.cuda.empty_cache()
        found.note(area_kept_mib=(torch.cuda.memory_reserved() - before) / 2**20)
        unattached = Area(size, bench.device)
        del unattached
        torch.cuda.empty_cache()
        found.note(unattached_area_kept_mib=(torch.cuda.memory_reserved() - before) / 2**20)


def expandable_segments(bench: Bench, found: Findings) -> None:
    """Record whether a process whose allocator uses expandable segments can share an area, with torch's defaults and
    with ``TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC``. Neither is required."""
    if not bench.on_gpu:
        return
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name, environment in (
        ("expandable_segments", setting),
        ("expandable_segments_ipc", setting | {"TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "1"}),
    ):
        work = [sys.executable, "-c", "from tools.gpu_parts.weights import share_an_area; share_an_area()"]
        try:
            ended = subprocess.run(
                work, env=os.environ | environment, capture_output=True, text=True, timeout=2 * SPAWN_S
            )
        except subprocess.TimeoutExpired:
            found.note(**{name: f"no answer within {2 * SPAWN_S:g} s"})
            continue
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        found.note(**{name: "shared" if ended.returncode == 0 else last})


def share_an_area() -> None:
    """Share an area with another process, as :func:`areas` does. Raises RuntimeError if that fails."""
    found = Findings()
    areas(Bench.on("cuda", Path()), found)
    if found.problems:
        raise RuntimeError("; ".join(found.problems))


def _sum_area(pipe: Any, handle: bytes) -> None:
    """Program of the other process: for each message, sum the area and write to its first byte."""
    buffer = attach(handle)
    while pipe.recv() is not None:
        total = int(buffer.sum(dtype=torch.int64))
        buffer[0] += 1
        if buffer.is_cuda:
            torch.cuda.synchronize()
        pipe.send(total)


# -- a transfer during training ---------------------------------------------------------------------------------------


async def transfer(bench: Bench, found: Findings) -> None:
    """Send a version while the training stream is busy, and require that sending does not wait for the stream.

    The sender's group has no receiver, because one GPU cannot have two NCCL ranks.
    """
    shapes = [("small", (1000,), torch.int16), ("large", (4096, 4096), torch.int16)]
    manifest = make_manifest(shapes, [[("small", 0, 1000), ("large", 0, 4096 * 4096)]])
    sender = make_sender(manifest, 0, TransferSettings(deadline_s=60.0), "127.0.0.1", bench.device)
    address = await asyncio.wait_for(sender.open(), 60.0)
    await asyncio.wait_for(sender.connect([address], 0), 60.0)
    for view in sender.views(0):
        view.fill_(7)
    bench.synchronize()
    await asyncio.wait_for(sender.send(1, 0), 90.0)  # initializes NCCL
    await send_beside_training(bench, found, sender, 90.0)
    await asyncio.wait_for(sender.close(), 60.0)


async def send_beside_training(bench: Bench, found: Findings, sender: Sender, limit_s: float, prefix: str = "") -> None:
    """Send version 2 from snapshot 0, within ``limit_s`` seconds, while the training stream is busy. The names of the
    measurements begin with ``prefix``."""
    started = time.perf_counter()
    if bench.on_gpu:
        torch.cuda._sleep(int(BUSY_S * SLEEP_CYCLES_PER_S))
    await asyncio.wait_for(sender.send(2, 0), limit_s)
    sent_s = time.perf_counter() - started
    if bench.on_gpu:
        still_busy = not torch.cuda.current_stream().query()
        bench.synchronize()
        busy_s = time.perf_counter() - started
        found.note(**{f"{prefix}busy_ms": 1e3 * busy_s})
        found.require(
            still_busy and sent_s < busy_s / 2, f"sending took {sent_s:.2f} s during {busy_s:.2f} s of training"
        )
    found.note(**{f"{prefix}send_beside_training_ms": 1e3 * sent_s})


# -- the cost of a commit ---------------------------------------------------------------------------------------------

LAYERS, EXPERTS, QUERY_HEADS, KV_HEADS, HEAD = 48, 128, 32, 4, 128
"""Shape of Qwen3-30B-A3B."""


def many_tensors(bench: Bench, found: Findings) -> None:
    """Measure how long a commit of a version with 18,867 tensors would pause decoding, with the code that runs in the
    engine.

    The model has the tensors of Qwen3-30B-A3B, with a fraction of its width.
    """
    width, expert, vocabulary = (512, 192, 151_936) if bench.on_gpu else (8, 4, 100)
    shapes = moe_shapes(width, expert, vocabulary, HEAD if bench.on_gpu else 4)
    manifest = make_manifest(
        [(name, shape, torch.bfloat16) for name, shape in shapes.items()],
        [[(name, 0, torch.Size(shape).numel()) for name, shape in shapes.items()]],
    )
    area, model = Area(manifest.nbytes, bench.device), Fused(shapes, bench.device)
    area.buffer.view(torch.int16).random_(-(2**14), 2**14)
    expected = np.array([int(tensor_checksum(spec.view(area.buffer).cpu())) for spec in manifest.tensors])
    sheet, pauses = LoadSheet(manifest, 1), []
    order = load_staged.write_order(0, area.handle, sheet.handle, 0)
    for _ in range(4):
        sheet.ask(expected)
        started = time.perf_counter()
        load_staged.run_order(model, [(order, torch.empty(0))], _place)
        pauses.append(time.perf_counter() - started)
        refusal = sheet.judge()
        found.require(refusal is None, f"a commit of {len(shapes)} tensors is refused: {refusal}")
    copy, checksum = (
        sheet.state[0, column] / 1e6 for column in (load_report.COPY_NANOSECONDS, load_report.CHECKSUM_NANOSECONDS)
    )
    source, target = area.buffer, torch.empty_like(area.buffer)
    found.note(many_tensors=len(shapes), many_gib=manifest.nbytes / GIB, many_first_ms=1e3 * pauses[0])
    found.note(many_pause_ms=1e3 * min(pauses[1:]), many_copy_ms=float(copy), many_checksum_ms=float(checksum))
    found.note(many_local_copy_ms=1e3 * bench.seconds(lambda: target.copy_(source)))


def moe_shapes(width: int, expert: int, vocabulary: int, head: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a Qwen3-MoE, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        shapes |= {
            f"{block}self_attn.q_proj.weight": (QUERY_HEADS * head, width),
            f"{block}self_attn.k_proj.weight": (KV_HEADS * head, width),
            f"{block}self_attn.v_proj.weight": (KV_HEADS * head, width),
            f"{block}self_attn.o_proj.weight": (width, QUERY_HEADS * head),
            f"{block}self_attn.q_norm.weight": (head,),
            f"{block}self_attn.k_norm.weight": (head,),
            f"{block}input_layernorm.weight": (width,),
            f"{block}post_attention_layernorm.weight": (width,),
            f"{block}mlp.gate.weight": (EXPERTS, width),
        }
        # In the order in which a trainer sends them: one projection after the other, each for all experts.
        for x, shape in (("gate", (expert, width)), ("up", (expert, width)), ("down", (width, expert))):
            shapes |= {f"{block}mlp.experts.{e}.{x}_proj.weight": shape for e in range(EXPERTS)}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


class Fused(torch.nn.Module):
    """Parameters as in an engine: q, k and v fused into one, the experts of a layer into two."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self.places: dict[str, torch.Tensor] = {}
        """By tensor name: the view of the parameter that contains it."""
        for parts in _fused(shapes):
            rows = sum(matrix_shape(shapes[name])[0] for name in parts)
            columns = matrix_shape(shapes[parts[0]])[1]
            value = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16, device=device), False)
            self.register_parameter(parts[0].replace(".", "_"), value)
            sizes = [matrix_shape(shapes[name])[0] for name in parts]
            self.places |= dict(zip(parts, value.split(sizes), strict=True))


def _fused(shapes: dict[str, tuple[int, ...]]) -> Iterable[list[str]]:
    """For each parameter, the names of its tensors."""
    together: dict[str, list[str]] = {}
    for name in shapes:
        block, _, rest = name.rpartition(".self_attn." if ".self_attn." in name else ".mlp.")
        kind = name
        if rest.split("_")[0] in ("q", "k", "v") and "proj" in rest:
            kind = f"{block}.qkv"
        elif "experts" in rest:
            kind = f"{block}.{'w2' if 'down' in rest else 'w13'}"
        together.setdefault(kind, []).append(name)
    return together.values()


def _place(model: torch.nn.Module, area: torch.Tensor, specs: tuple[TensorSpec, ...]) -> CopyPlan:
    """Plan the copies, as an engine does at its first load."""
    assert isinstance(model, Fused)
    placements = []
    for index, spec in enumerate(specs):
        rows, columns = matrix_shape(spec.shape)
        place = model.places[spec.name]
        place.copy_(spec.view(area).view(rows, columns))
        placements.append(Placement(index, Box(0, rows, 0, columns), place))
    return plan_copies(model, specs, placements, None)

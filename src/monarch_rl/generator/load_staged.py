"""Runs inside SGLang's scheduler: puts a version that lies in a shared area into the engine's parameters.

The first commit goes through SGLang's own loader and finds for every tensor which box of it lies where in this rank
(``trace_copies.py``). That is the plan (``copy_plan.py``), for any area that is laid out alike. Later commits replay
it: each piece is copied and, while it is still in the core's cache, read back from the parameter into its checksum.

Nothing may be raised here: an exception in the scheduler ends the engine. Answers go through :class:`LoadSheet`.
"""

from __future__ import annotations

import base64
import json
import time
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monarch_rl.generator import load_report
from monarch_rl.generator.copy_plan import CopyPlan, UnsupportedModel
from monarch_rl.generator.load_report import LoadSheet
from monarch_rl.generator.trace_copies import RestOfModel, load_and_plan
from monarch_rl.runtime.streams import finish_device
from monarch_rl.weights.area import attach
from monarch_rl.weights.manifest import TensorSpec

MakePlan = Callable[[torch.nn.Module, torch.Tensor, tuple[TensorSpec, ...]], CopyPlan]
"""Loads a version from an area (uint8) for the first time, and says where everything went."""
_plans: WeakKeyDictionary[torch.nn.Module, tuple[bytes, CopyPlan]] = WeakKeyDictionary()
"""By model: the layout that the plan is for, and the plan."""
_open_sheet = lru_cache(maxsize=2)(LoadSheet.open)
_last_load: list[tuple[LoadSheet, int, int]] = []
"""The sheet of the last load, which says whether decoding may go on, this rank's row in it, and how many tokens the
prefix cache is to keep."""


def write_order(rank: int, area: bytes, sheet: bytes, kept_tokens: int) -> str:
    """Write what :func:`load` is to do as a name, because SGLang hands over nothing else beside tensors.

    Args:
        rank: of the engine rank that is asked.
        area: handle of the area that holds the version.
        sheet: handle of the :class:`LoadSheet`.
        kept_tokens: how many tokens of the prefix cache, those used last, are kept for conversations that go on.
    """
    return json.dumps([rank, kept_tokens, *(base64.b64encode(handle).decode() for handle in (area, sheet))])


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader``; the name of the only tensor is the order, see :func:`write_order`."""
    run_order(model, named_tensors, load_and_plan)


def verify(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A ``custom_weight_loader`` that loads nothing: it takes checksums of what the engine holds already.

    Takes orders like :func:`load`. Of the area only the size counts: its bytes are neither read nor copied.
    """
    run_order(model, named_tensors, partial(load_and_plan, write=False), copy=False)


def load_part(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`load`, for versions that fill some parameters: :func:`verify_rest` must have seen the rest."""
    run_order(model, named_tensors, partial(load_and_plan, rest=RestOfModel.VERIFIED))


def verify_rest(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`verify`, for some of the parameters: those that no version fills."""
    run_order(model, named_tensors, partial(load_and_plan, write=False, rest=RestOfModel.TO_COME), copy=False)


def run_order(
    model: torch.nn.Module,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    make_plan: MakePlan,
    copy: bool = True,
) -> None:
    """Do what an order says and answer on its sheet; the first load of a layout is done by ``make_plan``."""
    ((order, _),) = named_tensors
    rank, kept_tokens, *handles = json.loads(order)
    area, sheet = base64.b64decode(handles[0]), _open_sheet(base64.b64decode(handles[1]))
    _last_load[:] = [(sheet, rank, kept_tokens)]
    try:
        with torch.no_grad():
            _load(model, area, sheet, rank, make_plan, copy)
        sheet.state[rank, load_report.STATUS] = load_report.LOADED
    except Exception as error:  # whatever it is, the engine must live to say it
        known = isinstance(error, UnsupportedModel)
        sheet.fail(rank, str(error) if known else "".join(traceback.format_exception(error, limit=-6)))


def continue_if_verified(scheduler: Any, original: Callable[..., None], *args: Any) -> None:
    """Replaces SGLang's ``Scheduler.continue_generation``: decode on only if the last load is the trainer's.

    SGLang lets its ranks meet after a load, so all of them see the answers of all, and come to one verdict: a rank that
    went on alone would wait for the others in the middle of a layer.
    """
    if not _last_load:
        original(scheduler, *args)
        return
    sheet, rank, kept_tokens = _last_load[0]
    if sheet.judge() is not None:
        return
    stood = time.monotonic() - scheduler._pause_started_at if scheduler._pause_started_at is not None else 0.0
    original(scheduler, *args)
    sheet.state[rank, load_report.STOOD_NANOSECONDS] = int(stood * 1e9)
    forget_prefixes(scheduler.tree_cache, kept_tokens)


def forget_prefixes(cache: Any, kept_tokens: int = 0) -> None:
    """Empty SGLang's prefix cache of what no running request holds, but for the ``kept_tokens`` that were used last.

    Entries belong to the version under which their conversations began, and those that begin later ask for a newer
    one. SGLang itself would keep them until its KV cache is full: hundreds of versions of a small model, a kilobyte of
    Python objects an entry.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tokens = cache.evictable_size() - kept_tokens
    if tokens > 0:
        cache.evict(EvictParams(num_tokens=tokens))  # SGLang begins with what was used longest ago


def _load(model: torch.nn.Module, area: bytes, sheet: LoadSheet, rank: int, make_plan: MakePlan, copy: bool) -> None:
    started = time.perf_counter_ns()
    # Enqueued steps read the parameters that are overwritten next.
    finish_device(next(model.parameters()).device)
    layout, plan = _plans.get(model, (b"", None))
    planned = plan is not None and layout == sheet.layout and plan.fits(model)
    if plan is None or not planned:
        plan = make_plan(model, attach(area), sheet.specs)
        _plans[model] = sheet.layout, plan
    sheet.boxes[rank] = plan.boxes
    blocks, sources, device = plan.checksums.blocks, plan.sources_in(area), plan.device
    # A core finds in its cache what it has just copied; a device is kept busy by long runs of calls.
    fused = device.type == "cpu" and plan.derive is None
    groups = [slice(i, i + 1) for i in range(len(blocks))] if fused else [slice(None)]
    copied, summed, before = time.perf_counter_ns() - started, 0, time.perf_counter_ns()
    for group in groups:
        if planned and copy:
            for block, source in zip(blocks[group], sources[group], strict=True):
                torch._foreach_copy_(block.data, source)
            if plan.derive is not None:
                plan.derive()
            finish_device(device)  # the copy is timed, and its end is reported to another process
        between = time.perf_counter_ns()
        for block in blocks[group]:
            block.add()
        after = time.perf_counter_ns()
        copied, summed, before = copied + between - before, summed + after - between, after
    sheet.checksums[rank] = plan.take_checksums()
    sheet.state[rank, load_report.COPY_NANOSECONDS] = copied
    sheet.state[rank, load_report.CHECKSUM_NANOSECONDS] = summed + time.perf_counter_ns() - before
    sheet.state[rank, load_report.BYTES] = plan.nbytes

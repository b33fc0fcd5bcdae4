"""What SGLang's own ServerArgs make of an engine's arguments on a faked GPU:  resolve_on_gpu.py < JOBS

A program of its own, because it fakes SGLang's platform for the whole process. Reads a JSON list of jobs: capability,
GiB of memory, arguments. Writes a JSON list: the resolved values.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from sglang.srt import platforms
from sglang.srt.platforms.cuda import CudaSRTPlatform

platforms._current_platform = CudaSRTPlatform()  # before anything binds it

from sglang.srt.arg_groups import kv_shard_hook, memory_hook  # noqa: E402
from sglang.srt.arg_groups.model_override_base import resolved_view  # noqa: E402
from sglang.srt.runtime_context import override_platform  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

FIELDS = (
    "attention_backend",
    "moe_runner_backend",
    "enable_fp32_lm_head",
    "disable_overlap_schedule",
    "max_running_requests",
    "dtype",
    "chunked_prefill_size",
    "watchdog_timeout",
)


def facts(capability: tuple[int, int]) -> dict[str, Any]:
    """What SGLang would detect on the machine."""
    sm = capability[0] * 10 + capability[1]
    return {
        "is_cuda": True,
        "is_sm90": sm == 90,
        "is_hopper_with_cuda_12_3": sm == 90,
        "is_sm100": sm == 100,
        "is_sm100_or_sm110": sm in (100, 110),
        "is_sm110": sm == 110,
        "is_sm120": sm == 120,
        "is_blackwell": sm >= 100,
        "has_flashinfer": True,
        "device_sm": sm,
        "device_capability": capability,
    }


def resolve(capability: tuple[int, int], gib: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """The values that SGLang would start with."""
    with (
        override_platform(**facts(capability)),
        patch.object(memory_hook, "get_device_memory_capacity", lambda _: gib * 1024),
        patch.object(kv_shard_hook, "get_device_memory_capacity", lambda _: gib * 1024),
    ):
        args = ServerArgs(**arguments, device="cuda")
        args.resolve_once()
        view = resolved_view(args)
        found = {name: getattr(view, name) for name in FIELDS}
        graphs = view.cuda_graph_config
        for phase in ("decode", "prefill"):
            found[f"{phase}_graphs"] = str(getattr(graphs, phase).backend)
        return found | {"decode_graph_batch": graphs.decode.max_bs}


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    found = [resolve(tuple(job["capability"]), job["gib"], job["arguments"]) for job in jobs]
    sys.stdout.write("\n" + json.dumps(found))

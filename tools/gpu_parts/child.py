"""Runs one part of tools/gpu_check.py in its own process:  child.py PART DEVICE SCRATCH RESULT

Writes the results of the part to RESULT, as JSON. An exception is a failed verdict with its traceback.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from monarch_rl.runtime.process import end_quickly
from tools.gpu_parts import old_torch
from tools.gpu_parts.common import Bench, Findings, Skipped, machine, versions

WITHOUT_SGLANG = ("trainer", "weights", "members")
"""Parts that must run without SGLang."""


def look(part: str, device: str, scratch: Path) -> dict[str, Any]:
    """Run a part; returns its results."""
    findings = Findings()
    found: dict[str, Any] = {}
    try:
        old_torch.prepare()
        bench = Bench.on(device, scratch)
        found = {"device": bench.device_name, "versions": versions(), "machine": machine()}
        importlib.import_module(f"tools.gpu_parts.{part}").run(bench, findings)
    except Skipped as reason:
        return found | {"verdict": "skipped", "problems": [str(reason)], "figures": findings.figures}
    except Exception:  # any error is a failed verdict, after which the next part runs
        traceback.print_exc()
        findings.problems.append("".join(traceback.format_exc(limit=-8)))
    if part in WITHOUT_SGLANG:
        findings.require("sglang" not in sys.modules, "SGLang was imported, which this part must not need")
    verdict = "failed" if findings.problems else "passed"
    return found | {"verdict": verdict, "problems": findings.problems, "figures": findings.figures}


if __name__ == "__main__":
    _, part, device, scratch, result = sys.argv
    Path(result).write_text(json.dumps(look(part, device, Path(scratch))))
    end_quickly(0)

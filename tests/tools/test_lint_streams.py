"""The stream lint: code that it must report, and code that it must accept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import patience
from tools.lint_streams import lint

BAD = {
    "the current stream": "def f():\n    torch.cuda.current_stream()",
    "a device": "def f():\n    torch.accelerator.synchronize()",
    "a stream": "def f(s):\n    s.synchronize()",
    "a bare name": "def f():\n    synchronize()",
    "a function in a block": "with torch.cuda.stream(s):\n    def f():\n        s.synchronize()",
    "what opens a block": "with a(torch.cuda.current_stream()):\n    pass",
    "another block": "def f(s):\n    with lock:\n        s.synchronize()",
    "a stream that waits, in a block": "with torch.cuda.stream(s):\n    s.wait_stream(t)",
    "an event": "def f(s, e):\n    s.wait_event(e)",
    "work of NCCL": "def f(work):\n    work.block_current_stream()",
    "no reason": "def f(s):\n    s.synchronize()  # streams:",
    "a reason of another line": "def f(s):\n    # streams: because\n    a = 1\n    s.synchronize()",
}
GOOD = {
    "a block of torch": "def f(s):\n    with torch.cuda.stream(s):\n        g()\n        s.synchronize()",
    "a block of ours": "def f(self):\n    with self._stream.use():\n        torch.cuda.current_stream()",
    "an inner block": "def f(s):\n    with a.stream(s):\n        with lock:\n            s.synchronize()",
    "no call": "def f(s):\n    return s.synchronize",
    "a reason": "def f(s):\n    s.synchronize()  # streams: its own",
    "a reason above": "def f(s):\n    # streams: its own\n    s.synchronize()",
}


@pytest.mark.parametrize("snippet", BAD.values(), ids=BAD.keys())
def test_work_on_a_foreign_stream_is_found_once(snippet: str) -> None:
    (finding,) = lint("a.py", snippet)
    assert finding.path == "a.py" and 1 <= finding.line <= len(snippet.splitlines())


@pytest.mark.parametrize("snippet", GOOD.values(), ids=GOOD.keys())
def test_work_on_an_own_stream_is_left_alone(snippet: str) -> None:
    assert lint("a.py", snippet) == []


def test_the_exit_code_reports_findings(tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).parents[2] / "tools" / "lint_streams.py", file := tmp_path / "bare.py"]
    file.write_text(GOOD["a reason"])
    assert patience.run(command).returncode == 0
    file.write_text(BAD["a device"])
    done = patience.run(command)
    assert done.returncode == 1 and f"{file}:2: `synchronize` outside a `with` block" in done.stdout

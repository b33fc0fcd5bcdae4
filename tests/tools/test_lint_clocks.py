"""The clock lint: code that it must report in tests, and code that it must accept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import patience
from tools.lint_clocks import lint

BAD = {
    "a deadline": "def f():\n    deadline = time.monotonic() + 5\n    while time.monotonic() < deadline: g()",
    "an assertion in a loop": "def f():\n    end = time.time() + 5\n    while g():\n        assert time.time() < end",
    "a duration": "def f():\n    began = perf_counter()\n    assert perf_counter() - began <= 2",
    "a variable": "def f():\n    s = time.monotonic()\n    s = time.monotonic() - s\n    assert s < 5",
    "an attribute": "def f(run):\n    run.seconds = time.monotonic() - 1\n    assert 5 > run.seconds",
    "an attribute of another method": (
        "class A:\n    def f(self):\n        self.end = time.time() + 5\n"
        "    def g(self):\n        return time.time() < self.end"
    ),
    "a chain": "def f():\n    s = time.monotonic()\n    assert 1 <= time.monotonic() - s <= 2",
    "two at once": "def f():\n    cpu, s = 0, time.monotonic()\n    assert time.monotonic() - s > 1",
    "a list": "def f(a):\n    at = []\n    at.append(time.monotonic())\n    assert max(at) < 5",
    "pairs of a list": ("def f():\n    at = [time.monotonic()]\n    assert all(b - a < 1 for a, b in zip(at, at[1:]))"),
    "a function": "def f():\n    return time.monotonic() - 1\ndef g():\n    assert f() < 2",
    "a coroutine": (
        "async def f():\n    s = time.monotonic()\n    return time.monotonic() - s\n"
        "def g():\n    assert asyncio.run(f()) < 2"
    ),
    "a loop's clock": "async def f():\n    assert asyncio.get_running_loop().time() < 5",
    "a loop by name": "async def f(loop):\n    assert loop.time() < 5",
    "a process": "def f(p):\n    p.wait(10)",
    "a process by keyword": "def f(p):\n    p.communicate(timeout=59.9)",
    "what a deadline leaves": "def f(p):\n    end = time.monotonic() + 600\n    p.wait(end - time.monotonic())",
    "a thread": "def f(t):\n    t.join(10)",
    "a future": "def f(x):\n    return x.result(10)",
    "a queue": "def f(q):\n    return q.get(timeout=5)",
    "a command": "def f():\n    subprocess.run(['true'], timeout=30)",
    "wait_for": "async def f(x):\n    await asyncio.wait_for(x, 10)",
    "asyncio.wait": "async def f(tasks):\n    await asyncio.wait(tasks, timeout=0.3)",
    "asyncio.timeout": "async def f():\n    async with asyncio.timeout(5):\n        await g()",
    "a constant": "GONE_S = 12.0\ndef f(p):\n    p.wait(3 * GONE_S)",
    "a default": "def f(p, seconds=12.0):\n    p.wait(seconds)",
    "the limit of a test": "@pytest.mark.timeout(300)\ndef test_it(): ...",
    "no reason": "def f(p):\n    p.wait(10)  # clock:",
    "a reason of another line": "def f(p):\n    # clock: because\n    a = 1\n    p.wait(10)",
    "a reason in the body": "@pytest.mark.timeout(300)\ndef test_it():\n    a = 1  # clock: because",
}
GOOD = {
    "no clock": "def f(a, time):\n    began = a.time()\n    assert began < 5",
    "equality": "def f():\n    assert time.monotonic() != 5",
    "another function's name": "def f():\n    s = time.monotonic()\ndef g(s):\n    assert s < 5",
    "an argument": "def f():\n    assert g(time.monotonic()) < 5",
    "a lambda": "def f():\n    c = g(lambda: time.monotonic())\n    assert c < 5",
    "CPU time": "def f():\n    while time.process_time() < 1: pass",
    "virtual time": (
        "def test_it():\n    async def f():\n        assert asyncio.get_running_loop().time() < 5\n    run_virtual(f())"
    ),
    "a generous limit": "PATIENCE_S = 120.0\ndef f(p):\n    p.wait(PATIENCE_S)\n    p.wait(timeout=60)",
    "no limit": "def f(p, s):\n    p.wait()\n    p.wait(s)",
    "a parameter named like a constant": "S = 5.0\ndef f(p, S):\n    p.wait(S)",
    "at once": "def f(p):\n    p.wait(0)\n    p.poll(0.0)",
    "a tick": "async def f(p):\n    p.wait(0.01)",
    "a loop without a limit": "def f(stop):\n    while not stop.wait(0.1): g()",
    "strings and dictionaries": "def f(d):\n    return ', '.join(d.get('x', 5))",
    "a lock": "def f(lock):\n    lock.acquire(True)",
    "paths": "def f(path):\n    return os.path.join(path, 'a')",
    "our own": "async def f(x):\n    await within(5.0, x, 'x', on='x')",
    "the limit of a test": "@pytest.mark.timeout(900)\ndef test_it(): ...",
    "a reason": "def f(p):\n    p.wait(10)  # clock: it is to pass",
    "a reason above": "def f(p):\n    # clock: it is to pass\n    p.wait(10)",
    "a reason within a statement": "def f(p):\n    p.wait(\n        10,  # clock: it is to pass\n    )",
    "a reason above a decorator": "# clock: it hangs on purpose\n@pytest.mark.timeout(5)\ndef test_it(): ...",
    "a reason beside a decorator": "@pytest.mark.timeout(5)  # clock: it hangs on purpose\ndef test_it(): ...",
}


@pytest.mark.parametrize("snippet", BAD.values(), ids=BAD.keys())
def test_a_wall_clock_is_found_once(snippet: str) -> None:
    (finding,) = lint({"tests/a.py": snippet})
    assert finding.path == "tests/a.py" and 1 <= finding.line <= len(snippet.splitlines())


@pytest.mark.parametrize("snippet", GOOD.values(), ids=GOOD.keys())
def test_code_that_does_not_depend_on_the_machine_is_left_alone(snippet: str) -> None:
    assert lint({"tests/a.py": snippet}) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "from tests.b import GONE_S\ndef f(p):\n    p.wait(GONE_S)",
        "from tests import b\ndef f(p):\n    p.wait(b.GONE_S)",
    ],
)
def test_constants_are_resolved_across_files(snippet: str) -> None:
    for seconds, found in ((12, 1), (120, 0)):
        assert len(lint({"tests/a.py": snippet, "tests/b.py": f"GONE_S = {seconds}"})) == found


def test_only_the_patience_module_may_read_the_clock() -> None:
    assert lint({"tests/patience.py": BAD["a deadline"]}) == []


def test_the_exit_code_reports_findings(tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).parents[2] / "tools" / "lint_clocks.py", tmp_path]
    (tmp_path / "test_it.py").write_text(GOOD["a tick"])
    assert patience.run(command).returncode == 0
    (tmp_path / "test_it.py").write_text(BAD["a process"])
    done = patience.run(command)
    assert done.returncode == 1 and f"{tmp_path / 'test_it.py'}:2: `p.wait(10)`" in done.stdout

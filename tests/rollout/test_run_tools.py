"""A tool that raises, hangs or ends itself fails only that call; its author sees where, and the policy reads it."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from monarch_rl.episode.failure import Failure
from monarch_rl.errors import InfrastructureFailed, SandboxFailed
from monarch_rl.model.messages import ToolCall, as_messages
from monarch_rl.model.tools import as_tools
from monarch_rl.rollout import run_tools as module
from monarch_rl.rollout.run_tools import run_tools
from monarch_rl.values import plain
from tests import patience

SEED: contextvars.ContextVar[int] = contextvars.ContextVar("seed", default=0)
RELEASE = threading.Event()


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: One.
        b: Another.
    """
    return a * b


async def look_up(word: str) -> dict[str, str]:
    """Look up.

    Args:
        word: What.
    """
    await asyncio.sleep(0)
    return {"word": word}


def divide(a: int, b: int) -> float:
    """Divide.

    Args:
        a: One.
        b: Another.
    """
    return a / b


def leave() -> None:
    """End the process, or try to."""
    sys.exit(3)


async def leave_too() -> None:
    """End the process, or try to."""
    sys.exit(3)


async def await_a_cancelled_task() -> None:
    """Await a cancelled task."""
    other = asyncio.ensure_future(asyncio.Event().wait())
    other.cancel()
    await other


async def cancel_itself() -> None:
    """Cancel the call."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def hang() -> None:
    """Wait until the test is over."""
    RELEASE.wait(600)


async def hang_too() -> None:
    """Wait forever."""
    await asyncio.Event().wait()


def long_page() -> str:
    """Read a page."""
    return "a" * 50 + "b" * 50


def seed() -> int:
    """Read the seed."""
    return SEED.get()


VALUES: dict[str, Any] = {
    "numpy": np.int64(3),
    "series": {"counts": pd.Series([1, 2]), "share": np.float32(0.25)},
    "day": date(2026, 3, 4),
    "text": "é\n",
    "nan": {"rows": [1.0, float("nan")]},
    "keys": {np.int64(1): 2},
    "set": {"a"},
    "file name": "caf\udce9.txt",
}


def give(kind: str) -> Any:
    """Give a value.

    Args:
        kind: Which.
    """
    return VALUES[kind]


def open_file() -> str:
    """Open a file whose name is not UTF-8."""
    raise FileNotFoundError(2, "No such file", "caf\udce9.txt")


TOOLS = as_tools(
    [
        multiply,
        look_up,
        divide,
        leave,
        leave_too,
        await_a_cancelled_task,
        cancel_itself,
        hang,
        hang_too,
        long_page,
        seed,
        give,
        open_file,
    ]
)


def run(*calls: ToolCall, **more: Any) -> tuple[list[str], list[Failure]]:
    failures: list[Failure] = []
    messages = asyncio.run(run_tools(calls, TOOLS, failed=failures.append, **more))
    assert [(m.role, m.name, m.tool_call_id) for m in messages] == [("tool", c.name or None, c.id) for c in calls]
    return [message.content for message in messages], failures


def call(name: str, error: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, f"call-{name}", error)


@pytest.mark.parametrize("error", [SandboxFailed("no namespaces"), InfrastructureFailed("no answer")])
def test_a_service_that_is_away_is_not_read_by_the_policy(error: Exception) -> None:
    def search() -> str:
        """Search."""
        raise error

    with pytest.raises(type(error)) as raised:
        asyncio.run(run_tools([call("search")], [search]))
    assert raised.value is error


def test_calls_are_answered_in_order() -> None:
    SEED.set(7)
    answers, failures = run(
        call("multiply", a=17, b=23), call("look_up", word="é"), call("", "not readable"), call("seed")
    )
    assert answers == ["391", '{"word": "é"}', "not readable", "7"]
    assert failures == []


@pytest.mark.parametrize(
    ("bad", "reason", "answer", "line"),
    [
        (
            call("divide", a=1, b=0),
            "tool divide raised ZeroDivisionError",
            "ZeroDivisionError: division by zero",
            "a / b",
        ),
        (call("leave"), "tool leave raised ToolExit", "ToolExit: SystemExit: 3", "sys.exit(3)"),
        (call("leave_too"), "tool leave_too raised ToolExit", "ToolExit: SystemExit: 3", "sys.exit(3)"),
        (
            call("await_a_cancelled_task"),
            "tool await_a_cancelled_task raised CancelledError",
            "CancelledError",
            "await other",
        ),
        (call("cancel_itself"), "tool cancel_itself raised CancelledError", "CancelledError", "asyncio.sleep(0)"),
    ],
)
def test_a_tool_that_raises_fails_only_its_call(bad: ToolCall, reason: str, answer: str, line: str) -> None:
    answers, (failure,) = run(bad, call("multiply", a=2, b=3))
    assert answers == [f"The tool {bad.name} failed: {answer}", "6"]
    assert failure.reason == reason
    assert failure.place.startswith(__file__)
    assert line in failure.report


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("numpy", "3"), ("series", '{"counts": [1, 2], "share": 0.25}'), ("day", "2026-03-04"), ("text", "é\n")],
)
def test_a_value_is_answered_as_json(kind: str, answer: str) -> None:
    (message,) = asyncio.run(run_tools([call("give", kind=kind)], TOOLS))
    assert (message.content, message.failed) == (answer, "")


Colour = Enum("Colour", {"RED": "red"}, type=str)
RECORD = np.array((3, 0.1, np.datetime64("2026-05-01", "ns")), [("n", "i4"), ("x", "f4"), ("day", "M8[ns]")])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Decimal("100").normalize(), "100"),
        (Decimal("1E-7"), "0.0000001"),
        (pd.Series([0.1], dtype="float32"), [0.1]),
        (pd.Index([0.1], dtype="float32"), [0.1]),
        (torch.tensor([0.1], dtype=torch.float16), [0.1]),
        (RECORD, {"n": 3, "x": 0.1, "day": "2026-05-01T00:00:00.000000000"}),
        (pd.DataFrame({"a": [1], "b": ["x"]}).to_records(index=False), [{"a": 1, "b": "x"}]),
        ({Colour.RED: 1}, {"red": 1}),
    ],
    ids=repr,
)
def test_a_typed_value_has_the_json_value_that_a_person_would_write(value: Any, expected: Any) -> None:
    assert repr(plain(value)) == repr(expected)


@pytest.mark.parametrize(
    ("kind", "culprits"),
    [("nan", ["rows[1]", "nan"]), ("keys", ["int64"]), ("set", ["set"]), ("file name", [r"caf\udce9"])],
)
def test_a_value_without_a_json_form_fails_its_call(kind: str, culprits: list[str]) -> None:
    failures: list[Failure] = []
    (message,) = asyncio.run(run_tools([call("give", kind=kind)], TOOLS, failed=failures.append))
    (failure,) = failures
    assert failure.place.startswith(__file__) and "give" in failure.reason
    for culprit in ("give", *culprits):
        assert culprit in message.content
    assert all(culprit in message.failed and culprit in failure.report for culprit in culprits)
    as_messages(message)


def test_an_answer_tells_whether_its_tool_failed() -> None:
    """A call that the policy wrote wrongly was not run: its ``error`` tells."""
    calls = [call("divide", a=1, b=0), call("multiply", a=2, b=3), call("", "not readable"), call("open_file")]
    messages = asyncio.run(run_tools(calls, TOOLS))
    divided, multiplied, unreadable, opened = messages
    (hung,) = asyncio.run(run_tools([call("hang_too")], TOOLS, deadline_s=0.1))
    assert divided.failed == "ZeroDivisionError: division by zero"
    assert (multiplied.failed, unreadable.failed) == ("", "")
    assert "0.1 s" in hung.failed
    assert r"caf\udce9" in opened.failed and as_messages(messages) == messages


def test_calls_end_with_their_episode() -> None:
    """Cancellation of the episode is not a failure of the tool."""
    failures: list[Failure] = []

    async def cancelled() -> None:
        started = asyncio.Event()

        async def wait() -> None:
            """Wait forever."""
            started.set()
            await asyncio.Event().wait()

        calling = asyncio.ensure_future(run_tools([call("wait")], as_tools([wait]), failed=failures.append))
        await started.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(cancelled())
    assert failures == []


@pytest.mark.parametrize(
    ("name", "line"), [("hang", "RELEASE.wait(600)"), ("hang_too", "await asyncio.Event().wait()")]
)
def test_a_tool_that_hangs_is_named_with_its_line(name: str, line: str) -> None:
    try:
        answers, (failure,) = run(call(name), deadline_s=1.0)
    finally:
        RELEASE.set()
    RELEASE.clear()
    assert answers == [f"The tool {name} gave no answer within 1 seconds."]
    assert failure.reason == f"tool {name} took over 1 s"
    assert failure.place.startswith(__file__)
    assert line in failure.report


def test_threads_of_tools_that_never_return_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the call was late or its episode ended. A thread that returns late no longer counts."""
    monkeypatch.setattr(module, "HUNG_THREADS", 3)
    monkeypatch.setattr(module, "_left", [])

    async def cancelled() -> None:
        calling = asyncio.ensure_future(run_tools([call("hang")], TOOLS))
        await patience.until(lambda: "tool" in {thread.name for thread in threading.enumerate()}, "the tool's thread")
        calling.cancel()
        await asyncio.wait({calling})

    try:
        asyncio.run(cancelled())
        run(call("hang"), call("hang_too"), call("seed"), deadline_s=0.1)
        module.check_hung_tools()
        run(call("hang"), deadline_s=0.1)
        with pytest.raises(module.ToolsHang, match=r"hang \(3 times\)"):
            module.check_hung_tools()
    finally:
        RELEASE.set()
    for thread in threading.enumerate():
        if thread.name == "tool":
            patience.join(thread)
    module.check_hung_tools()
    RELEASE.clear()


def test_a_long_answer_loses_its_middle() -> None:
    (answer,), _ = run(call("long_page"), characters=20)
    assert answer == "aaaaaaaaaa [... 80 characters ...] bbbbbbbbbb"


def test_the_first_failure_of_a_kind_is_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_shown", set())
    for _ in range(3):
        asyncio.run(run_tools([call("divide", a=1, b=0)], TOOLS))
    (record,) = [record for record in caplog.records if "tool divide" in record.getMessage()]
    assert "return a / b" in record.getMessage()


def test_a_tool_given_as_a_schema_cannot_be_run() -> None:
    schema = {"type": "function", "function": {"name": "search", "parameters": {}}}
    with pytest.raises(LookupError, match="schema"):
        asyncio.run(run_tools([call("search")], [schema]))

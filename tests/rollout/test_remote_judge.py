"""A judge behind an OpenAI-compatible endpoint: a test server, which also misbehaves."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from monarch_rl.errors import ChatError, JudgeFailed
from monarch_rl.model.messages import Message, ToolCall, user
from monarch_rl.rollout import remote_judge
from monarch_rl.rollout.remote_judge import RemoteJudge, RemoteReply
from tests.patience import patiently, until

KEY = "sk-very-secret"
Answer = tuple[int, str, str]
"""Status, headers, body."""
HANG: Answer = (0, "", "")
TRUNCATED: Answer = (-1, "", "")
"""The connection ends in the middle of the answer."""


def ends(answer: Answer) -> dict[str, float]:
    """Settings under which an attempt with this answer ends. One that hangs has a short deadline, which may pass on any
    attempt if the machine stalls."""
    return {"attempt_deadline_s": 0.3} if answer is HANG else {}


def answer(text: str, **more: Any) -> Answer:
    message = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}], **more}
    return 200, "", json.dumps(message)


@dataclass
class Server:
    """Answers requests with ``answers``, repeating the last one; records the requests."""

    answers: list[Answer]
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Head and body of each request."""
    open: int = 0
    most_open: int = 0
    """Maximum number of simultaneous requests."""
    gate: asyncio.Event | None = None
    """If set, answers wait for it."""
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                (length,) = [int(line.split(":")[1]) for line in head.lower().splitlines() if "content-length" in line]
                self.asked.append((head, json.loads(await reader.readexactly(length))))
                self.open += 1
                self.most_open = max(self.open, self.most_open)
                status, headers, body = self.answers[min(len(self.asked), len(self.answers)) - 1]
                if self.gate is not None:
                    await self.gate.wait()
                if status == 0:
                    await asyncio.Event().wait()
                length = len(body.encode()) + 100 * (status < 0)
                writer.write(f"HTTP/1.1 {abs(status) * 200 if status < 0 else status} X\r\n{headers}".encode())
                writer.write(f"Content-Length: {length}\r\n\r\n{body}".encode())
                await writer.drain()
                self.open -= 1
                if status < 0:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def serving(*answers: Answer, **settings: Any) -> AsyncIterator[tuple[Server, RemoteJudge]]:
    server = Server(list(answers))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    given: dict[str, Any] = {"key_variable": "JUDGE_KEY", "deadline_s": 600.0, "attempt_deadline_s": 600.0} | settings
    judge = RemoteJudge(server.url, "some-model", **given)
    try:
        yield server, judge
    finally:
        await judge.close()
        listening.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_judge, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(patiently(test(), "the test"))


def test_a_judge_answers_an_openai_request() -> None:
    async def test() -> None:
        good = answer("yes", usage={"prompt_tokens": 7, "completion_tokens": 1})
        async with serving(good) as (server, judge):
            judge = pickle.loads(pickle.dumps(judge))
            messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "right?"}]
            reply = await judge.reply(messages, max_new_tokens=4, temperature=0.5, stop="\n")
            assert reply == RemoteReply("yes", "stop", prompt_tokens=7, completion_tokens=1)
            ((head, body),) = server.asked
            assert head.startswith("POST /v1/chat/completions ") and f"Bearer {KEY}" in head
            assert body == {
                "model": "some-model",
                "messages": messages,
                "max_tokens": 4,
                "temperature": 0.5,
                "stop": ["\n"],
            }

    run(test)


def test_settings_of_a_request_may_be_numbers_of_numpy() -> None:
    async def test() -> None:
        async with serving(answer("yes")) as (server, judge):
            await judge.reply("right?", max_new_tokens=np.int64(4), temperature=np.float32(0.5))  # type: ignore[arg-type]
            ((_, body),) = server.asked
            assert (body["max_tokens"], body["temperature"]) == (4, 0.5)

    run(test)


def test_tool_calls_and_answers_are_sent_in_openais_format() -> None:
    async def test() -> None:
        async with serving(answer("yes")) as (server, judge):
            call = ToolCall("add", {"a": 1, "how": "é"}, "call00000")
            await judge.reply([user("1+2?"), Message("assistant", "", (call,)), call.answer("3")])
            as_rows: list[dict[str, Any]] = [
                {"role": "user", "content": "1+2?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "call00000",
                            "type": "function",
                            "function": {"name": "add", "arguments": '{"a": 1, "how": "é"}'},
                        }
                    ],
                },
                {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00000"},
            ]
            assert server.asked[0][1]["messages"] == as_rows
            await judge.reply(as_rows)  # as in a data set
            assert server.asked[1][1]["messages"] == as_rows

    run(test)


@pytest.mark.parametrize(
    "bad",
    [
        (429, "Retry-After: 0\r\n", "slow down"),
        (500, "", "oops"),
        (200, "", "<html>no JSON"),
        (200, "", "[]"),
        (200, "", '{"choices": []}'),
        (200, "", '{"choices": [{"message": {"content": null}}]}'),
        HANG,
        TRUNCATED,
    ],
)
def test_transient_errors_are_retried(bad: Answer) -> None:
    async def test() -> None:
        async with serving(bad, bad, answer("yes"), **ends(bad)) as (server, judge):
            assert (await judge.reply("right?")).text == "yes"
            assert len(server.asked) == 3 or bad is HANG

    run(test)


@pytest.mark.parametrize(
    ("bad", "reason", "report"),
    [
        (
            (500, "", "out of memory"),
            "remote judge answered with status 500",
            "status 500: out of memory\n3 attempts at",
        ),
        ((200, "", "{}"), "remote judge answered what cannot be used", "KeyError: 'choices' in '{}'\n3 attempts"),
        (HANG, "remote judge did not answer", "nothing in 0.3 s\n3 attempts"),
    ],
)
def test_attempts_are_bounded_and_the_last_error_is_shown(bad: Answer, reason: str, report: str) -> None:
    async def test() -> None:
        async with serving(bad, **ends(bad), retries=2) as (server, judge):
            with pytest.raises(JudgeFailed) as failed:
                await judge.reply("right?")
            assert failed.value.reason == reason and failed.value.report.startswith(report)
            assert len(server.asked) == 3 or bad is HANG

    run(test)


@pytest.mark.parametrize(
    ("status", "infrastructure"), [(400, False), (422, False), (401, True), (404, True), (503, True)]
)
def test_a_request_that_is_refused_is_no_failure_of_infrastructure(status: int, infrastructure: bool) -> None:
    async def test() -> None:
        async with serving((status, "", "too long"), retries=0) as (_, judge):
            with pytest.raises(JudgeFailed) as failed:
                await judge.reply("right?")
            assert failed.value.infrastructure == infrastructure

    run(test)


def test_a_refusal_is_final_and_the_key_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        refusal = (401, "", f"no such key: {KEY}")
        async with serving(refusal) as (server, judge):
            with pytest.raises(JudgeFailed, match="(?s)401.*JUDGE_KEY.* set") as failed:
                await judge.reply("right?")
            assert len(server.asked) == 1
            assert KEY not in f"{failed.value} {failed.value.report} {judge}"

    caplog.set_level(logging.DEBUG)
    run(test)
    assert KEY not in caplog.text


@pytest.mark.parametrize("key", ["sk-secret\r\nX-Other: 1", "sk-secret\N{EURO SIGN}"])
def test_a_key_that_cannot_be_sent_is_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    async def test() -> None:
        async with serving(answer("yes")) as (server, judge):
            monkeypatch.setenv("JUDGE_KEY", key)
            with pytest.raises(JudgeFailed, match="JUDGE_KEY") as failed:
                await judge.reply("right?")
            assert "secret" not in f"{failed.value} {failed.value.report}" and not server.asked

    run(test)


def test_text_that_is_not_unicode_is_refused_by_its_message() -> None:
    """A lone surrogate, as rows of JSON may have."""

    async def test() -> None:
        async with serving(answer("yes")) as (server, judge):
            with pytest.raises(ChatError, match=r"message 1 \(user\): .*ud83d"):
                await judge.reply([{"role": "system", "content": "Judge."}, {"role": "user", "content": "\ud83d no"}])
            assert not server.asked

    run(test)


def test_the_newline_of_a_key_file_is_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(answer("yes")) as (server, judge):
            monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
            await judge.reply("right?")
            assert f"Bearer {KEY}" in str(server.asked)

    run(test)


def test_a_refused_connection_is_reported() -> None:
    async def test() -> None:
        async with serving(answer("")) as (server, judge):
            gone = RemoteJudge(server.url, "m", retries=1)
        with pytest.raises(JudgeFailed, match="ConnectError"):
            await gone.reply("right?")
        await gone.close()

    run(test)


def test_one_deadline_bounds_all_attempts_and_pauses() -> None:
    async def test() -> None:
        slow = (429, "Retry-After: 1000\r\n", "later")
        async with serving(slow, deadline_s=3.0, retries=100) as (server, judge):
            with pytest.raises(JudgeFailed, match="(?s)in time.*429"):
                await judge.reply("right?")
            assert len(server.asked) == 1, "the server asked for a pause"

    run(test)


def test_concurrent_requests_are_bounded() -> None:
    async def test() -> None:
        async with serving(answer("yes"), concurrency=3) as (server, judge):
            server.gate = asyncio.Event()
            asking = [asyncio.ensure_future(judge.reply(str(i))) for i in range(10)]
            await until(lambda: len(server.asked) == 3, "requests")
            server.gate.set()
            assert [reply.text for reply in await asyncio.gather(*asking)] == ["yes"] * 10
            assert server.most_open == 3 and len(server.asked) == 10

    run(test)


def test_an_endless_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_judge, "MOST_BYTES", 1000)

    async def test() -> None:
        async with serving(answer("x" * 5000), retries=0) as (_, judge):
            with pytest.raises(JudgeFailed, match="1,000 bytes"):
                await judge.reply("right?")

    run(test)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"judge\.url 'judges'"):
        RemoteJudge("judges", "m")
    with pytest.raises(ValueError, match=r"judge\.concurrency"):
        RemoteJudge("http://x", "m", concurrency=0)

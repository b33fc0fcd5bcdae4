"""A judge that somebody else serves, behind an OpenAI-compatible endpoint.

    judge = RemoteJudge("https://judges.example.com/v1", "some-model")

    async def episode(item, policy):
        reply = await policy.reply(item["question"])
        verdict = await judge.reply(f"Is this right? {reply.text}", max_new_tokens=8)
        return float("yes" in verdict.text.lower())

It holds settings only, so it travels with the functions that use it; connections are made where it is asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from monarch_rl.model.messages import Message, ToolCall, as_messages
from monarch_rl.rollout.episode_clock import JudgeFailed, outside
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range
from monarch_rl.tasks.task import PromptLike

if TYPE_CHECKING:
    import httpx

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses of answers that may be others a moment later."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before the second attempt, and between any two; each is twice the one before, less up to half of it at random."""
MOST_BYTES = 8 << 20
"""Of an answer; a longer one is none of a judge."""
SHOWN_CHARACTERS = 500
"""Of what a server said, in an error."""
AROUND = 40
"""Characters before and after one that cannot be sent, in an error."""


@dataclass(frozen=True, slots=True)
class RemoteReply:
    """What a remote judge answered."""

    text: str
    finish_reason: str
    """The server's word: mostly ``stop`` or ``length``."""
    prompt_tokens: int = 0
    """By the server's count, as is the next; 0 if it says nothing."""
    completion_tokens: int = 0


class _Refused(Exception):
    """An attempt that failed."""

    def __init__(self, reason: str, said: str, again: bool, pause_s: float = 0.0) -> None:
        super().__init__(f"{reason}: {said}")
        self.reason, self.said, self.again, self.pause_s = reason, said, again, pause_s


@dataclass(frozen=True)
class RemoteJudge(CheckedSettings, flags="judge"):
    """A model behind ``POST <url>/chat/completions``."""

    url: str
    """With the version: ``https://judges.example.com/v1``."""
    model: str
    """The server's name of it."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key, read where the judge is asked; without one no key is sent."""
    deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 300.0
    """Seconds for an answer, with all attempts and the wait for a place; a longer one costs the episode."""
    attempt_deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 60.0
    """Seconds of one attempt."""
    retries: Annotated[int, Range(0, 1000)] = 4
    """Attempts after the first one: after no answer, one that is no JSON, or a status that may pass (408, 409, 425,
    429, 5xx). The pause before each is at least what the server asks for by ``Retry-After``."""
    concurrency: Annotated[int, Range(1, 65_536)] = 32
    """Requests at once from one worker."""
    max_new_tokens: Annotated[int, Range(1, 2**31 - 1)] = 256
    """Tokens of an answer that says nothing else."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"judge.url {self.url!r} must begin with http:// or https://")

    async def reply(
        self,
        messages: PromptLike,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        stop: str | Sequence[str] = (),
    ) -> RemoteReply:
        """Have the judge answer.

        Args:
            messages: the whole conversation; text is a user's message.
            max_new_tokens: None is the setting's.
            temperature: 0 takes the most likely token.
            stop: texts that end the answer.

        Raises:
            JudgeFailed: no usable answer came: the server's last error, with its status.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_row(message) for message in as_messages(messages)],
            "max_tokens": self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            "temperature": temperature,
        }
        if stop:
            body["stop"] = [stop] if isinstance(stop, str) else list(stop)
        content = _encoded(body)
        attempts: list[str] = []
        what = f"remote judge {self.model} at {self.url} to answer"
        with outside():
            try:
                answering = self._answer(content, attempts)
                return await within(self.deadline_s, answering, what, on="a remote judge", flag="judge.deadline-s")
            except DeadlineExceeded as error:
                before = f"; before: {attempts[-1]}" if attempts else ""
                raise JudgeFailed("remote judge did not answer in time", f"{error}{before}") from error

    async def close(self) -> None:
        """Close this process's connections; they are made anew when the judge is asked again."""
        connection = _connections_here().pop(self, None)
        if connection is not None:
            await connection.client.aclose()  # waits: closes sockets, nobody answers

    async def _answer(self, body: bytes, attempts: list[str]) -> RemoteReply:
        """``attempts``: gets what became of each that failed."""
        connection = _connection(self)
        async with connection.places:
            pause_s = FIRST_PAUSE_S
            while True:
                try:
                    return _read(await self._post(connection.client, body))
                except _Refused as refused:
                    attempts.append(str(refused))
                    if not refused.again or len(attempts) > self.retries:
                        report = f"{refused.said}\n{len(attempts)} attempts at {self.url}, model {self.model}"
                        raise JudgeFailed(f"remote judge {refused.reason}", report) from None
                    wait_s = max(refused.pause_s, pause_s * random.uniform(0.5, 1.0))
                await asyncio.sleep(wait_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        """The body of a good answer. Raises _Refused."""
        import httpx

        key = os.environ.get(self.key_variable, "").strip()  # a file's last line break is none of the key's
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        url = f"{self.url.rstrip('/')}/chat/completions"
        try:
            async with (
                asyncio.timeout(self.attempt_deadline_s),
                client.stream("POST", url, content=body, headers=headers) as answer,
            ):
                content = await _content(answer)
        except TimeoutError:
            raise _Refused("did not answer", f"nothing in {self.attempt_deadline_s:g} s", again=True) from None
        except (httpx.LocalProtocolError, UnicodeError) as error:  # its words quote the key, escaped
            said = f"{type(error).__name__}: not sent; look at the key in the variable {self.key_variable}"
            raise _Refused("could not be asked", said, again=False) from None
        except httpx.HTTPError as error:
            said = _without(f"{type(error).__name__}: {error}", key)
            raise _Refused("could not be reached", said, again=True) from None
        if answer.status_code != 200:
            said = f"status {answer.status_code}: {_without(content.decode(errors='replace'), key)[:SHOWN_CHARACTERS]}"
            if answer.status_code in (401, 403):
                said += (
                    f"\nThe key comes from the variable {self.key_variable}, which is {'set' if key else 'not set'}."
                )
            again = answer.status_code in TRANSIENT
            raise _Refused(f"answered with status {answer.status_code}", said, again, _asked_pause(answer))
        return content


def _row(message: Message) -> dict[str, Any]:
    """As OpenAI's servers read it."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [_call_row(call) for call in message.tool_calls]
    if message.name:
        row["name"] = message.name
    if message.tool_call_id:
        row["tool_call_id"] = message.tool_call_id
    return row


def _call_row(call: ToolCall) -> dict[str, Any]:
    # A call of a data set's row may have its arguments as JSON already.
    arguments: Any = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def _encoded(body: dict[str, Any]) -> bytes:
    """Raises JudgeFailed if that cannot be."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - AROUND) : error.end + AROUND]
        said = (
            f"UnicodeEncodeError: not sent; it is asked with {error.object[error.start : error.end]!a}, which is half "
            f"of a character and no text, in {around!a}: leave it out of the messages"
        )
        raise JudgeFailed("remote judge could not be asked", said) from None


async def _content(answer: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in answer.aiter_bytes():
        content += chunk
        if len(content) > MOST_BYTES:
            raise _Refused("answered what cannot be used", f"more than {MOST_BYTES:,} bytes", again=True)
    return bytes(content)


def _asked_pause(answer: httpx.Response) -> float:
    """Seconds that the server asks for; 0 if it names none, or a date."""
    try:
        return min(max(0.0, float(answer.headers.get("retry-after", 0))), LONGEST_PAUSE_S)
    except ValueError:
        return 0.0


def _without(text: str, key: str) -> str:
    """A server's words, without the key that it may have repeated."""
    return text.replace(key, "...") if key else text


def _read(content: bytes) -> RemoteReply:
    """The first choice. Raises _Refused if there is none."""
    try:
        answer = json.loads(content)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"its content is {text!r:.80}, which is no text")
        counts = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        return RemoteReply(text, str(choice.get("finish_reason") or ""), *counts)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        shown = content.decode(errors="replace")[:SHOWN_CHARACTERS]
        said = f"{type(error).__name__}: {error} in {shown!r}"
        raise _Refused("answered what cannot be used", said, again=True) from None


# ---- connections of this process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Connection:
    client: httpx.AsyncClient
    places: asyncio.Semaphore


_connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RemoteJudge, _Connection]]
_connections = weakref.WeakKeyDictionary()
"""By event loop."""


def _connections_here() -> dict[RemoteJudge, _Connection]:
    return _connections.setdefault(asyncio.get_running_loop(), {})


def _connection(judge: RemoteJudge) -> _Connection:
    import httpx

    connections = _connections_here()
    if judge not in connections:
        if (logger := logging.getLogger("httpx")).level == logging.NOTSET:
            logger.setLevel(logging.WARNING)  # else it writes a line for each request
        limits = httpx.Limits(max_connections=judge.concurrency)
        # The deadlines of an attempt and of the answer bound every wait.
        connections[judge] = _Connection(
            httpx.AsyncClient(timeout=None, limits=limits), asyncio.Semaphore(judge.concurrency)
        )
    return connections[judge]

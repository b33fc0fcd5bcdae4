"""A judge that a third party serves behind an OpenAI-compatible endpoint.

    judge = RemoteJudge("https://judges.example.com/v1", "some-model")

    async def episode(item, policy):
        reply = await policy.reply(item["question"])
        verdict = await judge.reply(f"Is this right? {reply.text}", max_new_tokens=8)
        return float("yes" in verdict.text.lower())

It holds only settings, so it can be pickled with the functions that use it; connections are opened on first use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from monarch_rl.errors import DeadlineExceeded, JudgeFailed
from monarch_rl.model.messages import Message, as_messages, as_row
from monarch_rl.rollout.episode_clock import episode_clock_stopped
from monarch_rl.runtime.deadlines import within
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range
from monarch_rl.tasks.task import PromptLike

if TYPE_CHECKING:
    import httpx

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses after which a retry may succeed."""
OF_REQUEST = (400, 413, 422)
"""Statuses by which a server refuses what it was asked, such as a prompt that is too long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pause before the second attempt, and the longest pause between two attempts. Each pause is twice the one before, less
up to half of it at random."""
MOST_BYTES = 8 << 20
"""Maximum size of a response; no answer of a judge is longer."""
SHOWN_CHARACTERS = 500
"""Characters of a server's response that an error quotes."""


@dataclass(frozen=True, slots=True)
class RemoteReply:
    """Answer of a remote judge."""

    text: str
    finish_reason: str
    """As the server reports it: usually ``stop`` or ``length``."""
    prompt_tokens: int = 0
    """As counted by the server, like ``completion_tokens``; 0 if it does not report them."""
    completion_tokens: int = 0


class _Refused(Exception):
    """A failed attempt."""

    def __init__(
        self, reason: str, detail: str, retry: bool, pause_s: float = 0.0, infrastructure: bool = True
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.retry, self.pause_s = reason, detail, retry, pause_s
        self.infrastructure = infrastructure


@dataclass(frozen=True)
class RemoteJudge(CheckedSettings, flags="judge"):
    """A model behind ``POST <url>/chat/completions``."""

    url: str
    """URL including the version: ``https://judges.example.com/v1``."""
    model: str
    """Name of the model on the server."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the API key, read when the judge is asked; if it is not set, no key is sent."""
    deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 300.0
    """Deadline in seconds for an answer, including all attempts and the wait for a free connection; exceeding it costs
    the episode."""
    attempt_deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 60.0
    """Deadline in seconds of one attempt."""
    retries: Annotated[int, Range(0, 1000)] = 4
    """Attempts after the first one. An attempt is repeated if there was no answer, if it was not JSON, or after a
    transient status (408, 409, 425, 429, 5xx). The pause before each is at least what the server asks for by
    ``Retry-After``."""
    concurrency: Annotated[int, Range(1, 65_536)] = 32
    """Maximum number of concurrent requests of one worker."""
    max_new_tokens: Annotated[int, Range(1, 2**31 - 1)] = 256
    """Maximum tokens of an answer, unless the call sets its own limit."""

    def contradictions(self) -> Iterator[str]:
        if not self.url.startswith(("http://", "https://")):
            yield f"judge.url {self.url!r} must begin with http:// or https://"

    async def reply(
        self,
        messages: PromptLike,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        stop: str | Sequence[str] = (),
    ) -> RemoteReply:
        """Ask the judge for an answer.

        Args:
            messages: the whole conversation; a string is a user message.
            max_new_tokens: None means the setting.
            temperature: 0 is greedy.
            stop: stop strings.

        Raises:
            ChatError: an item of ``messages`` is not a message, or not text.
            JudgeFailed: there was no usable answer; contains the server's last error and its status.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_row(message) for message in as_messages(messages)],
            "max_tokens": self.max_new_tokens if max_new_tokens is None else int(max_new_tokens),
            "temperature": float(temperature),  # also NumPy's, which JSON does not support
        }
        if stop:
            body["stop"] = [stop] if isinstance(stop, str) else list(stop)
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        attempts: list[str] = []
        what = f"remote judge {self.model} at {self.url} to answer"
        with episode_clock_stopped():
            try:
                answering = self._answer(content, attempts)
                return await within(self.deadline_s, answering, what, on="a remote judge", flag="judge.deadline-s")
            except DeadlineExceeded as error:
                last = f"; last failed attempt: {attempts[-1]}" if attempts else ""
                raise JudgeFailed("remote judge did not answer in time", f"{error}{last}") from error

    async def close(self) -> None:
        """Close this process's connections; they are reopened when the judge is asked again."""
        connection = _connections_here().pop(self, None)
        if connection is not None:
            await connection.client.aclose()  # waits: closes sockets, nobody answers

    async def _answer(self, body: bytes, attempts: list[str]) -> RemoteReply:
        """Ask until an attempt succeeds; ``attempts`` receives a description of each failed one."""
        connection = _connection(self)
        async with connection.places:
            pause_s = FIRST_PAUSE_S
            while True:
                try:
                    return _read(await self._post(connection.client, body))
                except _Refused as refused:
                    attempts.append(str(refused))
                    if not refused.retry or len(attempts) > self.retries:
                        report = f"{refused.detail}\n{len(attempts)} attempts at {self.url}, model {self.model}"
                        raise JudgeFailed(f"remote judge {refused.reason}", report, refused.infrastructure) from None
                    wait_s = max(refused.pause_s, pause_s * random.uniform(0.5, 1.0))
                await asyncio.sleep(wait_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        """Body of a successful response. Raises _Refused."""
        import httpx

        key = os.environ.get(self.key_variable, "").strip()  # a key read from a file may end in a line break
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        url = f"{self.url.rstrip('/')}/chat/completions"
        try:
            async with (
                asyncio.timeout(self.attempt_deadline_s),
                client.stream("POST", url, content=body, headers=headers) as answer,
            ):
                content = await _content(answer)
        except TimeoutError:
            raise _Refused("did not answer", f"nothing in {self.attempt_deadline_s:g} s", retry=True) from None
        except (httpx.LocalProtocolError, UnicodeError) as error:  # the message is left out: it quotes the key, escaped
            detail = f"{type(error).__name__}: not sent; check the key in the environment variable {self.key_variable}"
            raise _Refused("could not be asked", detail, retry=False) from None
        except httpx.HTTPError as error:
            detail = _without(f"{type(error).__name__}: {error}", key)
            raise _Refused("could not be reached", detail, retry=True) from None
        if answer.status_code != 200:
            text = _without(content.decode(errors="replace"), key)
            detail = f"status {answer.status_code}: {text[:SHOWN_CHARACTERS]}"
            if answer.status_code in (401, 403):
                detail += (
                    f"\nThe key is read from the environment variable {self.key_variable}, which is "
                    f"{'set' if key else 'not set'}."
                )
            retry = answer.status_code in TRANSIENT
            reason, infrastructure = f"answered with status {answer.status_code}", answer.status_code not in OF_REQUEST
            raise _Refused(reason, detail, retry, _requested_pause(answer), infrastructure)
        return content


def _row(message: Message) -> dict[str, Any]:
    """The message in the form of OpenAI's API, which has arguments as JSON text."""
    row = as_row(message)
    for call in row.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return row


async def _content(answer: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in answer.aiter_bytes():
        content += chunk
        if len(content) > MOST_BYTES:
            raise _Refused("answered what cannot be used", f"more than {MOST_BYTES:,} bytes", retry=True)
    return bytes(content)


def _requested_pause(answer: httpx.Response) -> float:
    """Pause in seconds that the server asks for; 0 if it asks for none, or gives a date."""
    try:
        return min(max(0.0, float(answer.headers.get("retry-after", 0))), LONGEST_PAUSE_S)
    except ValueError:
        return 0.0


def _without(text: str, key: str) -> str:
    """``text`` without the key, which a server may have repeated."""
    return text.replace(key, "...") if key else text


def _read(content: bytes) -> RemoteReply:
    """The first choice of a response. Raises _Refused if there is none."""
    try:
        answer = json.loads(content)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"its content is {text!r:.80}, which is not text")
        counts = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        return RemoteReply(text, str(choice.get("finish_reason") or ""), *counts)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        shown = content.decode(errors="replace")[:SHOWN_CHARACTERS]
        detail = f"{type(error).__name__}: {error} in {shown!r}"
        raise _Refused("answered what cannot be used", detail, retry=True) from None


# -- connections of this process --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Connection:
    client: httpx.AsyncClient
    places: asyncio.Semaphore


_connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RemoteJudge, _Connection]]
_connections = weakref.WeakKeyDictionary()
"""Connections by event loop."""


def _connections_here() -> dict[RemoteJudge, _Connection]:
    return _connections.setdefault(asyncio.get_running_loop(), {})


def _connection(judge: RemoteJudge) -> _Connection:
    import httpx

    connections = _connections_here()
    if judge not in connections:
        if (logger := logging.getLogger("httpx")).level == logging.NOTSET:
            logger.setLevel(logging.WARNING)  # otherwise it logs a line per request
        limits = httpx.Limits(max_connections=judge.concurrency)
        # No timeout of httpx's own: the deadlines of the attempt and of the answer bound every wait.
        connections[judge] = _Connection(
            httpx.AsyncClient(timeout=None, limits=limits), asyncio.Semaphore(judge.concurrency)
        )
    return connections[judge]

"""The tree of errors has every exception class of the package, and is documented completely."""

from __future__ import annotations

import ast
import asyncio
import builtins
import errno
import pickle
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import grpc
import httpx
import pytest
import requests
import urllib3
import websockets
from websockets.exceptions import ConnectionClosedError

from monarch_rl import errors

SOURCES = Path(__file__).parents[2] / "src/monarch_rl"
NOT_ERRORS = {"DropGroup", "LoopBlocked", "NoForkServer"}
"""A decision of a stage, what ends code that blocks an event loop, and an answer of a program that imports only the
standard library."""


def parents() -> dict[str, set[str]]:
    """The base class names of each class of the package, by class name."""
    classes = [
        node
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    return {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in classes
        if not node.name.startswith("_")
    }


def ancestors(name: str, bases: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = {name}
    while left:
        found |= (above := bases.get(left.pop(), set()) - found)
        left |= above
    return found


def raisable(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def test_all_exceptions_are_in_the_tree() -> None:
    bases = parents()
    exceptions = {name for name in bases if any(map(raisable, ancestors(name, bases)))}
    assert {"Stalled", "ReplicaLost", "MonarchRLError"} <= exceptions
    outside = {name for name in exceptions if "MonarchRLError" not in ancestors(name, bases)}
    assert outside - {"MonarchRLError"} == NOT_ERRORS
    assert errors.__doc__ is not None
    tree = set(re.findall(r"\b[A-Z]\w+", errors.__doc__.split("\n\n")[1]))
    assert exceptions - NOT_ERRORS <= tree


EXCEPTIONS = sorted(
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)
)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_each_exception_is_documented_and_can_be_pickled(name: str) -> None:
    kind = getattr(errors, name)
    assert kind.__doc__
    again = pickle.loads(pickle.dumps(kind("why")))
    assert type(again) is kind and str(again) == str(kind("why"))


@pytest.fixture
def silent() -> Iterator[str]:
    """Address of a server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def by_aiohttp(address: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.05)) as session:
        await session.get(f"http://{address}")


async def by_websockets(address: str) -> None:
    async with websockets.connect(f"ws://{address}", open_timeout=0.05):
        pass


def by_grpc(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        channel.unary_unary("/judge/score")(b"", timeout=0.05)  # clock: this timeout is to pass


# clock: these timeouts are to pass
CLIENTS: dict[str, Callable[[str], object]] = {
    "urllib": lambda address: urllib.request.urlopen(f"http://{address}", timeout=0.05),
    "urllib3": lambda address: urllib3.PoolManager().request("GET", f"http://{address}", retries=False, timeout=0.05),
    "requests": lambda address: requests.get(f"http://{address}", timeout=0.05),
    "httpx": lambda address: httpx.get(f"http://{address}", timeout=0.05),
    "aiohttp": lambda address: asyncio.run(by_aiohttp(address)),
    "websockets": lambda address: asyncio.run(by_websockets(address)),
    "grpc": by_grpc,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_does_not_answer_a_client_in_time_is_infrastructure(client: str, silent: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever the client raises
        CLIENTS[client](silent)
    assert errors.is_infrastructure(raised.value)


def test_an_error_that_its_own_group_caused_is_judged_by_itself() -> None:
    """As in ``except* ... raise group.exceptions[0] from group``."""
    for member, expected in ((KeyError("x"), False), (ConnectionResetError(), True)):
        group = ExceptionGroup("tasks", [member, ConnectionResetError()])
        member.__cause__ = group
        assert errors.is_infrastructure(member) == expected
        assert errors.is_infrastructure(group) == expected
    group = ExceptionGroup("tasks", [KeyError("x")])
    group.__cause__ = ConnectionResetError()
    assert errors.is_infrastructure(group)


@pytest.mark.parametrize(("code", "expected"), [(None, True), (1006, True), (1011, True), (1000, False), (1009, False)])
def test_a_websocket_that_refuses_a_message_is_no_infrastructure(code: int | None, expected: bool) -> None:
    received = None if code is None else websockets.frames.Close(code, "")
    assert errors.is_infrastructure(websockets.ConnectionClosedError(received, None)) == expected


def test_retries_that_a_server_answered_are_no_infrastructure() -> None:
    pool = urllib3.HTTPConnectionPool("127.0.0.1")
    exceptions = urllib3.exceptions
    for reason, expected in (
        (exceptions.ResponseError("too many 500 error responses"), False),
        (exceptions.ResponseError("too many 503 error responses"), True),
        (exceptions.NewConnectionError(pool, "refused"), True),  # type: ignore[arg-type]
    ):
        error = exceptions.MaxRetryError(pool, "/score", reason)
        assert errors.is_infrastructure(error) == expected
        assert errors.is_infrastructure(requests.exceptions.RetryError(error)) == expected


class Guarded(Exception):
    @property
    def response(self) -> None:
        raise ValueError("there is none")


def of_status(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://judge")
    return httpx.HTTPStatusError("an error", request=request, response=httpx.Response(status, request=request))


def own_cause(error: Exception) -> Exception:
    error.__cause__ = error
    return error


REFUSED = ConnectionRefusedError("refused")


@pytest.mark.parametrize(
    ("error", "infrastructure"),
    [
        (ConnectionClosedError(None, None), True),
        (ExceptionGroup("of a TaskGroup", [REFUSED, ExceptionGroup("inner", [httpx.ConnectError("refused")])]), True),
        (ExceptionGroup("of a TaskGroup", [REFUSED, KeyError("answer")]), False),
        (own_cause(KeyError("answer")), False),
        (own_cause(httpx.ConnectError("refused")), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 80), [Errno 111] ..."), True),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (requests.exceptions.RetryError("too many 503 error responses"), True),
        (of_status(408), True),
        (of_status(529), True),
        (of_status(422), False),
        (TimeoutError(), False),
        (Guarded("no"), False),
    ],
    ids=repr,
)
def test_which_errors_are_of_infrastructure(error: Exception, infrastructure: bool) -> None:
    assert errors.is_infrastructure(error) is infrastructure


def test_a_deadline_of_the_episodes_own_is_no_infrastructure() -> None:
    with pytest.raises(TimeoutError) as raised:
        asyncio.run(asyncio.wait_for(asyncio.sleep(60), 0.01))
    assert not errors.is_infrastructure(raised.value)

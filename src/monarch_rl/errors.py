"""All errors that monarch_rl raises, in one tree: `except MonarchRLError` catches each of them.

    MonarchRLError
        SettingsError           settings, models or data are refused, before any device is taken where possible
            TooFewDevices, UnsupportedModel, FrozenRefused, ChatError, BrokenCheckpoint, DoesNotFit, ProbeFailed,
            NotUnpickled
        RunError                the run, or a process of it, cannot continue
            Stalled, AllActorsLost, EpisodesFail, HostLost, EngineStopped, FolderChanged, NotFinite, BufferClosed,
            ScorerBroken, ToolsHang, FilesLeaked, SideFailed, NothingLeft, OutOfMemory
        DeadlineExceeded        a wait for another process exceeded its deadline
            ProcessLost
        EpisodeError            one episode or group is lost, which is counted by the reason; an episode may catch it
            EpisodeFailed, StageFailed, UnusableReward, ContextFull, GroupFull, ToolExit
            InfrastructureFailed, JudgeFailed, SandboxFailed: see is_infrastructure
            ScoringFailed
                ScoreTookTooLong
            GenerationError
                SamplingMaskMissing
            RequestLost
                ReplicaLost
        WeightsError            a version of the weights did not reach a generator
            PublishError, TransferError, DeltaError
            StillServing
                StillRunning
            CommitError
                WeightMismatch
        CannotWrite             a checkpoint could not be written; the run continues

Each also derives from the built-in exception that fits it best, for example ValueError for refused settings.
Exceptions of a recipe's own code reach the recipe unchanged, with their traceback.
:class:`~monarch_rl.rollout.stages.DropGroup` is not an error: a stage raises it to drop a group. Nor is
:class:`LoopBlocked`, which ends code that blocks an event loop. Four errors are
defined where their data is (``EpisodeFailed``, ``StageFailed``, ``ReplicaLost``, ``DoesNotFit``), all others here.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


class MonarchRLError(Exception):
    """Base of all errors of this package."""


class SettingsError(MonarchRLError, ValueError):
    """Settings, a model or data are refused. The message names the flag or file, and says what to change."""

    problems: Sequence[ValueError] = ()
    """If several are refused together: one error for each."""


class Refusals:
    """Collects what independent checks refuse, so that a user reads all of it at once.

    refusals = Refusals()
    with refusals:
        check_devices(...)
    with refusals:
        check_prompts(...)
    refusals.raise_all()
    """

    def __init__(self) -> None:
        self._found: list[ValueError] = []

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        # A ValueError of the recipe's own code needs its traceback.
        refused = isinstance(error, SettingsError) or (isinstance(error, ValueError) and raised_in_package(error))
        if refused:
            self._found.append(error)  # type: ignore[arg-type]
        return refused

    def add(self, problem: str) -> None:
        """Refuse something with this message."""
        self._found.append(SettingsError(problem))

    def raise_all(self) -> None:
        """Raise what was refused, if anything was."""
        raise_together(self._found)


def raise_together(errors: Sequence[ValueError]) -> None:
    """Raise the error, or one with all messages if there are several; none if there are none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        problems = [problem for error in errors for problem in getattr(error, "problems", ()) or (error,)]
        together = SettingsError("\n".join([f"{len(problems)} problems:", *(f"- {problem}" for problem in problems)]))
        together.problems = problems
        raise together


def raised_in_package(error: BaseException) -> bool:
    """Whether this package raised the error, not code that it called; its message is then enough without a
    traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename.startswith(f"{Path(__file__).parent}/")


class RunError(MonarchRLError, RuntimeError):
    """The run, or the process in which this is raised, cannot continue."""


class EpisodeError(MonarchRLError):
    """One episode or one group is lost, and no other."""

    infrastructure = False
    """Whether a service that the episode needs is to blame, not the policy and not the episode's code: see
    :func:`is_infrastructure`."""


class WeightsError(MonarchRLError, RuntimeError):
    """A version of the weights did not reach a generator, or not intact."""


class TooFewDevices(SettingsError):
    """The ranks need more devices than the launch has."""


class UnsupportedModel(SettingsError):
    """The model's loader does more than copy, so its work cannot be replayed or verified."""


class FrozenRefused(SettingsError):
    """A frozen model cannot be loaded, or does not support a request; the message says what to do."""


class ChatError(SettingsError):
    """Messages, options or tools that do not work with this model's chat template. The message says what to change."""


class BrokenCheckpoint(SettingsError):
    """A checkpoint cannot be read; the message names the file and its defect."""


class ProbeFailed(SettingsError):
    """One item, run before the engines start, showed that the task cannot work; the message names the function."""


class NotUnpickled(SettingsError, TypeError):
    """An object of the recipe arrived in another process, but no copy of it could be made there."""


class Stalled(RunError):
    """The run could not continue. The message states which process waited for what, down to the cause."""


class AllActorsLost(RunError):
    """All processes of a kind are lost; the message has the first cause."""


class EpisodesFail(RunError):
    """No episode is usable. The message begins with the reason and ends with the first traceback."""


class HostLost(RunError):
    """The host process of this machine ended unexpectedly, or was killed, and all processes that it owned with it."""


class EngineStopped(RunError):
    """The engine was stopped, or one of its processes ended unexpectedly: no request can be answered."""


class FolderChanged(RunError):
    """The folder of a frozen model was modified while it is served, so that its engines read different weights."""


class NotFinite(RunError):
    """A tensor holds NaN or infinity; the message names the tensor."""


class OutOfMemory(RunError):
    """A trainer rank could not allocate memory; the message names flags that lower its need."""


class BufferClosed(RunError):
    """The run ended before the batch was complete."""


class ScorerBroken(RunError):
    """The scoring processes do not start, so no score can be computed any more. The worker is lost."""


class ToolsHang(RunError):
    """So many tool calls are still running after their deadline that the worker has to be replaced."""


class FilesLeaked(RunError):
    """Episodes have left so many files open that the worker has to be replaced."""


class SideFailed(RunError):
    """A process of the engine's or of the trainer's side failed, or took too long."""


class NothingLeft(RunError):
    """All tasks wait and no timer is set: a real run would hang."""


class DeadlineExceeded(MonarchRLError, TimeoutError):
    """A wait exceeded its deadline. The message states who waited, for what, and since when."""

    def __init__(self, message: str, what: str = "", seconds: float = 0.0) -> None:
        super().__init__(message)
        self.what = what
        """Description of what was awaited."""
        self.seconds = seconds
        """The deadline, in seconds."""

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, str, float]]:
        return type(self), (str(self), self.what, self.seconds)  # so that it can be pickled inside Monarch's errors


class ProcessLost(DeadlineExceeded):
    """The awaited process is lost, so it cannot answer within the deadline."""


class ScoringFailed(EpisodeError):
    """One score could not be computed. ``reason`` is short and without details, because failures are counted by it.

    ``place`` and ``report`` are as in :class:`~monarch_rl.episode.failure.Failure`.
    """

    def __init__(
        self, reason: str, detail: str = "", place: str = "", report: str = "", infrastructure: bool = False
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.place, self.report = reason, detail, place, report
        self.infrastructure = infrastructure


class InfrastructureFailed(EpisodeError, ConnectionError):
    """A service that the episode needs, such as an environment's server, is away or broken. An episode, a tool or a
    reward may raise it for services of its own."""

    infrastructure = True


class ScoreTookTooLong(ScoringFailed):
    """A score exceeded its deadline."""


class JudgeFailed(EpisodeError):
    """A judge or another frozen model refused a request or did not answer. Unless the coroutine catches it, the episode
    fails and is counted by ``reason``.

    Args:
        reason: short, because failures are counted by it.
        report: full description.
        infrastructure: False if the request itself cannot be answered.
    """

    def __init__(self, reason: str, report: str = "", infrastructure: bool = True) -> None:
        super().__init__(f"{reason}: {report}" if report else reason)
        self.reason, self.report, self.infrastructure = reason, report, infrastructure


class UnusableReward(EpisodeError, ValueError):
    """A function of the task returned a value that is not a reward, or a turn's reward was set to one. ``place`` is the
    file and line of the function or of the assignment, ``what`` says whose reward it is."""

    def __init__(self, message: str, place: str = "", what: str = "score") -> None:
        super().__init__(message, place, what)
        self.place, self.what = place, what

    def __str__(self) -> str:
        return str(self.args[0])


class ContextFull(EpisodeError):
    """The episode has no room for another turn, or has had ``rollout.max_turns``.

    If the coroutine does not catch it, the episode ends with ``policy.reward_so_far`` and is trained like any other.
    """


class GroupFull(EpisodeError):
    """The episode may not have another seat or branch, because of ``rollout.max_sequences`` or
    ``rollout.max_tokens``."""


class ToolExit(EpisodeError):
    """A tool raised an exception that would have ended the worker, such as SystemExit."""


class SandboxFailed(EpisodeError, RuntimeError):
    """The sandbox did not start, so there is no result of the program."""

    infrastructure = True


class GenerationError(EpisodeError, RuntimeError):
    """A request was refused or aborted; the message is the engine's own."""


class RequestLost(EpisodeError, RuntimeError):
    """A request was not answered because its replica is lost; another replica can be asked."""

    infrastructure = True


class SamplingMaskMissing(GenerationError):
    """The engine sampled a token but cannot report its sampling mask: this episode fails, and no other."""


class PublishError(WeightsError):
    """A version is abandoned because it cannot be published; the message names who is to blame."""


class TransferError(WeightsError):
    """A transfer failed or delivered another version than expected; the content of the area is undefined."""


class StillServing(WeightsError):
    """A version was not committed; the previous version is still served."""


class StillRunning(StillServing):
    """Running sequences did not end in time; the engine still serves the previous version."""


class CommitError(WeightsError):
    """A version could not be loaded; the engine stays paused and serves nothing."""


class WeightMismatch(CommitError):
    """The loaded weights differ from the trainer's; the engine stays paused and serves nothing."""


class DeltaError(WeightsError, ValueError):
    """The bytes are damaged, or not an encoded update for this target."""


class CannotWrite(MonarchRLError, OSError):
    """A rank could not write its shards; the message names the rank and the reason."""


UNREACHABLE = frozenset(
    {
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("http", "BadStatusLine"),
        ("http", "IncompleteRead"),
        ("httpx", "TransportError"),
        ("openai", "APIConnectionError"),
        ("requests", "ChunkedEncodingError"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
        ("socket", "gaierror"),
        ("ssl", "SSLEOFError"),
        ("urllib", "URLError"),
        ("urllib3", "ProtocolError"),
        ("urllib3", "TimeoutError"),
        ("websockets", "ConnectionClosed"),
    }
)
"""Exceptions of clients whose server did not answer, by package and name: they are compared without an import."""
ANSWERED = ("urllib", "HTTPError")
"""The one exception of a server's answer that derives from one of :data:`UNREACHABLE`."""
UNAVAILABLE = (408, 429, 502, 503, 504, *range(520, 530))
"""HTTP statuses of a server, or a proxy before it, that is overloaded or away; those above 511 are Cloudflare's and
Anthropic's. 500 may be its answer to what the policy sent."""
RETRIED = frozenset({("requests", "RetryError"), ("urllib3", "MaxRetryError")})
"""Exceptions after several tries, the first of which wraps the second; the text has the status of the last answer."""
GRPC_UNAVAILABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Status codes of gRPC of such a server. RESOURCE_EXHAUSTED may also mean that a message was too long."""
WEBSOCKET_ANSWERED = (1000, 1002, 1003, 1007, 1008, 1009, 1010)
"""Close codes of a WebSocket (RFC 6455) with which a server ends a session, or refuses what it got."""
NO_ROUTE = (errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ETIMEDOUT)
"""Errors of connections for which Python has no subclass of ConnectionError."""


def is_infrastructure(error: BaseException | None) -> bool:
    """Whether an error, or its explicit cause (``raise ... from error``), is one of a service that an episode needs: a
    judge, an environment's server, the sandbox, a scoring process. Such an episode says nothing about the policy: it is
    left out of its group and of evaluations. Of an ``ExceptionGroup``, all errors have to be."""
    return _is_infrastructure(error, frozenset())


def _is_infrastructure(error: BaseException | None, seen: frozenset[int]) -> bool:
    # Errors may be causes of themselves: "raise error from error", "raise group.exceptions[0] from group".
    while error is not None and id(error) not in seen:
        seen |= {id(error)}
        if isinstance(error, BaseExceptionGroup):
            if all(_is_infrastructure(member, seen) for member in error.exceptions):
                return True
            error = error.__cause__
            continue
        if _attribute(error, "infrastructure") or isinstance(error, ConnectionError) or _is_unreachable(error):
            return True
        if (status := _http_status(error)) is not None:
            return status in UNAVAILABLE
        error = error.__cause__
    return False


def _is_unreachable(error: BaseException) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if ANSWERED in kinds:
        return False
    if ("grpc", "RpcError") in kinds and callable(code := _attribute(error, "code")):
        return getattr(code(), "name", "") in GRPC_UNAVAILABLE
    if ("websockets", "ConnectionClosed") in kinds:
        return _attribute(_attribute(error, "rcvd"), "code") not in WEBSOCKET_ANSWERED
    if not kinds.isdisjoint(RETRIED):
        if answered := re.search(r"too many (\d+) error responses", str(error)):
            return int(answered[1]) in UNAVAILABLE
        retried = error if isinstance(_attribute(error, "reason"), Exception) else next(iter(error.args), None)
        reason = _attribute(retried, "reason")
        return isinstance(reason, Exception) and _is_unreachable(reason)
    if isinstance(error, TimeoutError) and _raised_by_client(error):
        return True
    # asyncio joins the errors of a name's several addresses, such as ::1 and 127.0.0.1, to one without a number.
    joined = type(error) is OSError and str(error).startswith("Multiple exceptions: [Errno ")
    return joined or (isinstance(error, OSError) and error.errno in NO_ROUTE) or not UNREACHABLE.isdisjoint(kinds)


def _raised_by_client(error: BaseException) -> bool:
    """Whether a client of :data:`UNREACHABLE` raised the error, not ``asyncio.timeout`` or the episode's own code."""
    *_, module = ("", *(frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)))
    return module.partition(".")[0] in {package for package, _ in UNREACHABLE}


def _http_status(error: BaseException) -> int | None:
    """The status that a server answered with, under the names of it in HTTP clients; None if there is none."""
    response = _attribute(error, "response")
    names = [(error, "status_code"), (error, "status"), (error, "code"), (response, "status_code")]
    return next((status for of, name in names if isinstance(status := _attribute(of, name), int)), None)


def _attribute(of: object, name: str) -> Any:
    """An attribute of an error of any package; None if there is none, or its property raises."""
    try:
        return getattr(of, name, None)
    except Exception:  # the package's own code
        return None


def written_by_another_version(what: str, writer: str, reason: object) -> str:
    """A message saying that this version of the package cannot read a file, and which one can.

    Args:
        what: the file; the message begins with it.
        writer: version of this package that wrote it; "" if it is unknown.
        reason: why it cannot be read.
    """
    by, use = "another version of monarch_rl", "that version"
    if writer and writer != version("monarch_rl"):  # an unreleased version may have had other files, too
        by = use = f"monarch_rl {writer}"
    return (
        f"{what} was written by {by}, and this version, {version('monarch_rl')}, cannot read it ({reason}): use {use}"
    )


class LoopBlocked(BaseException):
    """Raised in an episode's code that has blocked the event loop of its worker for ``rollout.episode_deadline_s``.

    No Exception, because a loop that catches these would go on.
    """

    def __str__(self) -> str:  # raised by its class alone, without arguments
        return (
            "this code blocked the event loop of its worker, and with it all other episodes there, for longer than "
            "--rollout.episode-deadline-s: await asyncio.to_thread(...) for computation and blocking calls"
        )

"""Starts this machine's host (``host.py``): when a run is launched, or early, while its recipe still imports.

Early, the host's fork server imports beside the recipe, on another core, instead of after it. The launch takes the
early host only if one started then would be the same (:class:`_Inherited`); otherwise, and if the program ends without
a launch, it is killed. Imports nothing heavy.
"""

from __future__ import annotations

import atexit
import logging
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from monarch_rl.runtime.by_value import INSTALLED
from monarch_rl.runtime.devices import has_accelerator_driver, launched_by_torchrun, visible_devices
from monarch_rl.runtime.forking.fork_server import Preload
from monarch_rl.runtime.host import HostProcess
from monarch_rl.runtime.torchrun import without_torchrun

logger = logging.getLogger("monarch_rl")

EXECUTION_ID = "HYPERACTOR_EXECUTION_ID"
"""Environment variable with the name of a run in Monarch's own log."""
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that set the number of compute threads of a process."""


@dataclass(frozen=True)
class _Inherited:
    """What a host has from its starter, and its processes from it."""

    ip: str | None
    preloads: tuple[Preload, ...]
    environment: dict[str, str]
    folder: str
    cores: frozenset[int]
    limits: tuple[tuple[int, int], ...]
    niceness: int
    umask: str
    outputs: tuple[tuple[int, int] | None, ...]
    """Device and inode of standard output and error."""


@dataclass(frozen=True)
class _EarlyHost:
    process: HostProcess
    inherited: _Inherited


_early: _EarlyHost | None = None


def start_host(ip: str | None, preloads: Sequence[Preload]) -> HostProcess:
    """Start this machine's host, with this process's environment except torchrun's variables; takes over the early one
    if there is one for this launch."""
    inherited = _inherited(ip, preloads, on_gpu=bool(visible_devices()))
    return _take_early(inherited) or HostProcess(ip, inherited.environment, preloads)


def may_start_early() -> bool:
    """Whether the launch would start such a host: not under torchrun, where the ranks agree on addresses first, and not
    if there may be GPUs, on which torch has to say what the host may import."""
    return not (launched_by_torchrun() or has_accelerator_driver())


def start_early(preloads: Sequence[Preload], outputs: Mapping[int, int]) -> None:
    """Start this machine's host for a launch of this process. Does nothing if there is one.

    Args:
        preloads: the launch's.
        outputs: descriptors of the host's standard output (1) and error (2): what this process has there when it
            launches.
    """
    global _early
    if _early is not None:
        return
    # Monarch makes one when it is imported, which happens later in this process, and must be the same in the host.
    os.environ.setdefault(EXECUTION_ID, f"monarch_rl_{os.getpid()}_{time.time_ns()}")
    inherited = _inherited(None, preloads, on_gpu=False, outputs=outputs)
    _early = _EarlyHost(HostProcess(None, inherited.environment, preloads, outputs, early=True), inherited)
    atexit.register(kill_early)


def _take_early(inherited: _Inherited) -> HostProcess | None:
    """The early host, if one is running that has inherited the same; another is killed."""
    global _early
    early = _early
    if early is None:
        return None
    if early.inherited != inherited:
        before, after = vars(early.inherited), vars(inherited)
        differing = [name for name in after if before[name] != after[name]]
        logger.debug("the host is started anew: another %s than when the program began", ", ".join(differing))
        kill_early()
        return None
    try:
        early.process.serve()
    except BrokenPipeError:  # it was killed
        kill_early()
        return None
    _early = None
    return early.process


def kill_early() -> None:
    """Kill the early host, if no launch took it."""
    global _early
    if _early is not None:
        _early.process.kill()
        _early = None


def _leave_to_parent() -> None:
    """In a fork of this process: the early host ends when the parent does, and this process has none."""
    global _early
    if _early is not None:
        _early.process.leave()
        _early = None


os.register_at_fork(after_in_child=_leave_to_parent)


def _inherited(
    ip: str | None, preloads: Sequence[Preload], on_gpu: bool, outputs: Mapping[int, int] = MappingProxyType({})
) -> _Inherited:
    environment = without_torchrun(os.environ)
    # For the tools (ninja) of a virtual environment that is not activated.
    environment["PATH"] = _joined([Path(sys.executable).parent], environment.get("PATH"))
    environment["PYTHONPATH"] = _joined(_own_folders(), environment.get("PYTHONPATH"))
    if not on_gpu:  # as in Cluster.spawn: the fork server loads the libraries that its processes use
        environment = dict.fromkeys(THREAD_COUNTS, "1") | environment
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    status = Path("/proc/self/status").read_text().splitlines()
    return _Inherited(
        ip=ip,
        preloads=tuple(preloads),
        environment=environment,
        folder=os.getcwd(),
        cores=frozenset(os.sched_getaffinity(0)),
        limits=tuple(resource.getrlimit(limit) for limit in limits),
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        umask=next((line for line in status if line.startswith("Umask:")), ""),
        outputs=tuple(_file(outputs.get(number, number)) for number in (1, 2)),
    )


def _file(descriptor: int) -> tuple[int, int] | None:
    """Identity of an open file; None if the descriptor is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _own_folders() -> list[Path]:
    """Folders from which this program imports and other programs do not: the script's, and those that it has added to
    ``sys.path``."""
    folders = [Path(entry).resolve() for entry in sys.path if entry and Path(entry).is_dir()]
    return [folder for folder in folders if not any(folder.is_relative_to(installed) for installed in INSTALLED)]


def _joined(folders: Sequence[Path], search_path: str | None) -> str:
    """``folders``, and those of a search path behind them, each once."""
    others = search_path.split(os.pathsep) if search_path else []
    return os.pathsep.join(dict.fromkeys([*map(str, folders), *others]))

"""How a rank reports the end of its host process. The host is killed before it serves."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_rl.runtime.host import HostProcess
from monarch_rl.runtime.process import signal_name
from monarch_rl.runtime.torchrun import Follower, Peer, Rank
from tests.patience import exit_code, run


@pytest.fixture
def host() -> Iterator[HostProcess]:
    process = HostProcess(None, os.environ)
    yield process
    process.end(60.0)


def kill(host: HostProcess, number: int) -> None:
    os.kill(host._process.pid, number)
    exit_code(host._process)


def test_every_signal_has_a_name() -> None:
    names = [signal_name(number) for number in range(1, signal.SIGRTMAX + 1)]
    assert names[signal.SIGKILL - 1] == "SIGKILL"
    assert len(set(names)) == len(names) and all(names)


def test_a_process_whose_parent_ends_during_a_scan_is_found() -> None:
    """Otherwise a host ends without it, and it runs forever."""
    done = run([sys.executable, Path(__file__).with_name("orphans.py")], seconds=400)
    assert done.returncode == 0, done.stderr


@pytest.mark.core
def test_a_host_ended_by_a_real_time_signal_is_named(host: HostProcess) -> None:
    assert host.lost() is None
    kill(host, signal.SIGRTMIN + 6)
    assert f"signal {signal.SIGRTMIN + 6}." in str(host.lost())


@pytest.mark.core
def test_a_rank_on_another_machine_reports_how_its_host_was_lost(
    host: HostProcess, caplog: pytest.LogCaptureFixture
) -> None:
    controller, connection = socket.socketpair()
    follower = object.__new__(Follower)  # without a rendezvous
    follower._rank, follower._peer, follower._host = Rank(1, 0, 2, 1, 1), _Connected(connection), host
    kill(host, signal.SIGKILL)
    with controller, connection, caplog.at_level(logging.ERROR, "monarch_rl"):
        assert not follower.wait()
    (message,) = (message for message in caplog.messages if "rank 1 " in message)  # Monarch may put an actor before it
    pid = host._process.pid
    assert f"{pid} " in message and "SIGKILL" in message


class _Connected(Peer):
    def __post_init__(self) -> None:
        """Without the options of TCP, which this connection lacks."""

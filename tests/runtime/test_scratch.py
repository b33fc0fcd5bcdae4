"""Temporary folders exist while their process lives, and are removed by others once it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from monarch_rl.runtime import scratch
from monarch_rl.runtime.host import HostProcess
from monarch_rl.runtime.scratch import ScratchFolder, temporary_directory
from tests.patience import exit_code, run

HOLDS = """
import sys
from monarch_rl.runtime.scratch import ScratchFolder
print(ScratchFolder().path, flush=True)
sys.stdin.read()
"""
LISTENS = """
from monarch_rl.runtime.scratch import folder_of_process
with folder_of_process().as_temporary_directory():
    from multiprocessing.connection import Listener
    listener = Listener(family="AF_UNIX")
print(folder_of_process().path.parent)
"""


def test_a_folder_of_a_killed_process_is_removed_by_the_next_process(temporary: Path) -> None:
    (temporary / "monarch_rl-file").touch()
    (temporary / "another").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().decode().strip())
        (held / "below").mkdir()
        (held / "below" / "socket").touch()
        with ScratchFolder() as folder:
            assert held.is_dir() and folder.path.is_dir() and folder.path != held
        assert not folder.path.exists()
        holder.kill()
        exit_code(holder)
    assert held.is_dir(), "the process could not remove it"
    with ScratchFolder():
        assert not held.exists()
    assert {path.name for path in temporary.iterdir()} == {"another", "monarch_rl-file"}


def test_folders_of_users_with_similar_names_stay(temporary: Path) -> None:
    for name, mode in (
        ("monarch_rl-runs2026", 0o700),
        ("monarch_rl-checkout", 0o755),
        ("monarch_rl-dev", scratch.MARK),
    ):
        (temporary / name).mkdir()
        (temporary / name / "content").touch()
        (temporary / name).chmod(mode)
    (temporary / ".monarch_rl-justmade").mkdir()
    (temporary / ".monarch_rl-forgot_1").mkdir()
    hours_ago = time.time() - 2 * scratch.LOCKED_S
    os.utime(temporary / ".monarch_rl-forgot_1", (hours_ago, hours_ago))
    with ScratchFolder() as folder:
        assert scratch.MADE_HERE.fullmatch(folder.path.name)
    left = {".monarch_rl-justmade", "monarch_rl-runs2026", "monarch_rl-checkout", "monarch_rl-dev"}
    assert {path.name for path in temporary.iterdir()} == left
    assert len(list(temporary.glob("*/content"))) == 3


def test_a_user_without_a_system_entry_can_run(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with ScratchFolder() as folder:
        assert folder.variables()[scratch.COMPILED] == str(temporary / f"torchinductor_uid_{2**31 - 5}")


def test_the_temporary_directory_of_a_block_exists_during_the_block(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with temporary_directory() as folder:
        assert Path(tempfile.mkdtemp()).parent == folder == Path(os.environ["TMPDIR"]) and folder.parent == temporary
        compiled = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert compiled.parent == temporary, "the compile cache stays"
        Path(tempfile.gettempdir(), compiled.name, "header").touch()  # as torch does
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(temporary)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert list(temporary.iterdir()) == [compiled] and (compiled / "header").is_file(), "and so do its headers"


def test_the_folder_of_a_process_is_removed_after_multiprocessings_files(temporary: Path) -> None:
    ended = run([sys.executable, "-c", LISTENS])
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert ended.stdout.strip() == str(temporary) and not list(temporary.iterdir())


def test_a_path_too_long_for_sockets_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MOST_BYTES", len(str(temporary)) + 10)
    with ScratchFolder() as folder:
        assert folder.path.parent == Path("/tmp")


@pytest.mark.heavy
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.core
def test_the_folder_of_a_host_is_removed_however_the_host_ends(temporary: Path, killed: bool) -> None:
    host = HostProcess(None, os.environ)
    (folder,) = temporary.iterdir()
    (folder / "socket").touch()
    if killed:
        os.kill(host._process.pid, signal.SIGKILL)
    host.end(60.0)
    assert not list(temporary.iterdir())

"""The lock of a folder, as other processes see it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monarch_rl.runtime import folder_lock
from tests.patience import exit_code

HOLD = """
import sys
from pathlib import Path
from monarch_rl.runtime import folder_lock
print(folder_lock.take(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock of a folder."""
    program = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "True\n"
            yield process
        finally:
            process.kill()


def test_others_see_a_lock_until_its_process_is_killed(tmp_path: Path) -> None:
    assert folder_lock.is_held(tmp_path) is None and not list(tmp_path.iterdir()), "a look leaves no file"
    with holder(tmp_path) as process:
        assert folder_lock.is_held(tmp_path) is True and not folder_lock.take(tmp_path)
        process.send_signal(signal.SIGKILL)
        exit_code(process)
        assert folder_lock.is_held(tmp_path) is False


def test_a_look_neither_takes_a_lock_nor_ends_that_of_its_own_process(tmp_path: Path) -> None:
    (tmp_path / folder_lock.LOCK).touch()
    assert folder_lock.is_held(tmp_path) is False
    with holder(tmp_path):  # it could take the lock
        pass
    assert folder_lock.take(tmp_path)
    try:
        assert folder_lock.is_held(tmp_path) is True
        look = "import sys; from pathlib import Path; from monarch_rl.runtime import folder_lock as f; "
        look += "print(f.is_held(Path(sys.argv[1])))"
        seen = subprocess.run([sys.executable, "-c", look, str(tmp_path)], capture_output=True, text=True, timeout=120)
        assert seen.stdout == "True\n", seen.stderr
    finally:
        folder_lock.release(tmp_path)
    assert folder_lock.is_held(tmp_path) is False

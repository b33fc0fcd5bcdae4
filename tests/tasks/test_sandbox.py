"""The sandbox against programs that try to escape, or to exceed their limits."""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_rl.errors import ScoringFailed
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.tasks import sandbox as module
from monarch_rl.tasks.sandbox import Ran, Sandbox
from tests import patience

MARK = "left-by-a-program-in-a-sandbox"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Without effective time limits, however long the machine stalls."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: apt install bubblewrap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "START_S", 600.0)
        yield Sandbox(seconds=600, memory_mib=256, files_mib=2, output_bytes=4096)


def test_a_program_reads_prints_and_ends(sandbox: Sandbox) -> None:
    ran = sandbox.run("import sys\na, b = map(int, input().split())\nprint(a * b)\nsys.exit(3)", "6 7\n")
    assert ran == Ran("42\n", "", 3) and not ran.ok
    ran = sandbox.run("open('/tmp/a', 'w').write('x' * 1000)\nprint(len(open('/tmp/a').read()))")
    assert ran.ok and ran.stdout == "1000\n"
    ran = sandbox.run("print('before', flush=True)\nraise KeyError('no')")
    assert (ran.stdout, ran.exit_code) == ("before\n", 1)
    assert sandbox.run("raise SystemExit(200)") == Ran("", "", 200), "no signal has the number 72"
    assert sandbox.run("import os\nos.kill(os.getpid(), 11)").ended == "ended by SIGSEGV"
    assert 'File "/program.py", line 2' in ran.stderr and "KeyError: 'no'" in ran.stderr
    assert "SyntaxError" in sandbox.run("def").stderr
    with pytest.raises(TypeError, match="stdin .* None"):
        sandbox.run("print(1)", None)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(sandbox))
    assert again == sandbox and again.run("print(1)").stdout == "1\n"


def test_it_has_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 60)"
        assert "ConnectionRefusedError" in sandbox.run(code).stderr
        with pytest.raises(BlockingIOError):
            server.accept()
    ran = sandbox.run("import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.connect(('9.9.9.9', 53))")
    assert "Network is unreachable" in ran.stderr


def test_it_reads_only_its_own_files(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(MARK)
    tmp_path.chmod(0o755)
    for path in (secret, "/etc/passwd", "/etc/shadow", Path.home(), "/home", "/proc/1/environ", "/sys", Path.cwd()):
        ran = sandbox.run(f"import os\nprint(os.listdir({str(path)!r}) if os.path.isdir({str(path)!r}) else '')")
        assert ran.stdout.strip() in ("", "[]"), path
        assert "No such file" in sandbox.run(f"open({str(path)!r})").stderr or path in ("/home",), path
    inside = sandbox.run("import os\nprint(sorted(os.listdir('/')), sorted(os.listdir('/tmp')), dict(os.environ))")
    assert "program.py" in inside.stdout and "[]" in inside.stdout
    os.environ[MARK] = MARK
    try:
        assert MARK not in sandbox.run("import os\nprint(os.environ)").stdout
    finally:
        del os.environ[MARK]


@pytest.mark.parametrize("folder", ["/", "/usr", "/usr/lib", "/dev", "/dev/shm", "/etc"])
def test_it_writes_only_in_tmp(sandbox: Sandbox, folder: str) -> None:
    ran = sandbox.run(
        f"import os\nos.makedirs({folder!r}, exist_ok=True)\nopen({folder + '/' + MARK!r}, 'w').write('x')"
    )
    assert not ran.ok and ("Read-only file system" in ran.stderr or "Permission denied" in ran.stderr)
    assert not (Path(folder) / MARK).exists()


def test_its_files_are_bounded_and_removed(sandbox: Sandbox) -> None:
    many = "for i in range(100): open(f'/tmp/{i}', 'wb').write(bytes(2**17))"
    assert "No space left" in sandbox.run(many).stderr
    assert sandbox.run("import os\nprint(os.listdir('/tmp'))").stdout == "[]\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork()",
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import threading\nthreading.Thread(target=print).start()",
    ],
)
def test_it_starts_no_other_process(sandbox: Sandbox, code: str) -> None:
    ran = sandbox.run(code)
    assert not ran.ok and ("Resource temporarily unavailable" in ran.stderr or "can't start new thread" in ran.stderr)


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(4 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**20))",
        "import mmap\nx = mmap.mmap(-1, 4 * 2**30)",
    ],
)
def test_its_memory_is_bounded(sandbox: Sandbox, code: str) -> None:
    ran = sandbox.run(code)
    assert not ran.ok and ("MemoryError" in ran.stderr or "Cannot allocate memory" in ran.stderr), ran


@pytest.mark.parametrize(
    "call",
    [
        "shmget(0, 2**28, 0o1600)",  # memory that no limit of a process counts
        "memfd_create(b'a', 0)",
        "unshare(0x10000000)",  # a user namespace, in which it would be root
        "mount(b'a', b'/tmp', b'tmpfs', 0, 0)",
        "ptrace(0, 0, 0, 0)",
    ],
)
def test_system_calls_beyond_all_limits_are_refused(sandbox: Sandbox, call: str) -> None:
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, ctypes.get_errno())"
    assert sandbox.run(code).stdout == f"-1 {errno.EPERM}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "import os\nos.setuid(0)",
        "import os\nos.chroot('/tmp')",
        "import os\nos.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))",
        "import os\nos.nice(-5)",
    ],
)
def test_it_regains_no_privileges(sandbox: Sandbox, code: str) -> None:
    stderr = sandbox.run(code).stderr
    words = ("not allowed to raise", "Operation not permitted", "Invalid argument", "Permission denied")
    assert any(word in stderr for word in words), stderr


def test_its_time_is_bounded(sandbox: Sandbox) -> None:
    quick = copy.copy(sandbox)  # a new sandbox would first try a program within this time
    object.__setattr__(quick, "seconds", 1.5)
    for code in (
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)",
    ):
        ran = quick.run("print('begun', flush=True)\n" + code)
        assert ran == Ran("begun\n", "", None, "took over 1.5 s")
    ignoring = (
        "import signal\nfor n in range(1, 30):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
    )
    assert quick.run(ignoring + "import time\ntime.sleep(600)").ended == "took over 1.5 s"


def test_its_output_is_bounded(sandbox: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        ran = sandbox.run(f"import sys\nsys.{stream}.write('x' * 10_000_000)")
        assert ran.ended == "printed over 4096 bytes" and getattr(ran, stream) == "x" * 4096


def test_it_reaches_no_process_outside(sandbox: Sandbox) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        code = (
            "import os, signal\nprint(os.getppid())\nfor pid in (os.getppid(), %d, %d, -1):\n  try: os.kill(pid, 9)\n"
        )
        code += "  except OSError as e: print(e.strerror, flush=True)\n"
        ran = sandbox.run(code % (os.getpid(), bystander.pid))
        assert ran.stdout.startswith("1\n")  # the parent that it sees is bubblewrap
        assert bystander.poll() is None
    finally:
        bystander.kill()
        patience.exit_code(bystander)
    crash = sandbox.run("import ctypes\nctypes.string_at(0)")
    assert crash.ended == "ended by SIGSEGV" and crash.exit_code is None


def test_it_ends_when_its_owner_is_killed(sandbox: Sandbox, tmp_path: Path) -> None:
    code = (
        "from monarch_rl.tasks.sandbox import Sandbox\n"
        "sandbox = Sandbox(seconds=600)\n"
        f"sandbox.run('import time\\nprint(1)\\ntime.sleep(600)  # {MARK}')\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        started = patience.wait_until(lambda: _sandboxes(owner), "a sandbox")
    finally:
        owner.kill()
        patience.exit_code(owner)
    gone = lambda: not any(Path(f"/proc/{pid}").exists() for pid in started)  # noqa: E731
    patience.wait_until(gone, lambda: f"the end of the processes {started}")


def _sandboxes(owner: subprocess.Popen[bytes]) -> list[int]:
    """The processes of bubblewrap below ``owner``."""
    assert owner.poll() is None
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    return [int(pid) for pid in children if "bwrap" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_many_run_at_once(sandbox: Sandbox) -> None:
    answers: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n: answers.update({n: sandbox.run(f"print({n} ** 2)").stdout}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        patience.join(thread)
    assert answers == {n: f"{n * n}\n" for n in range(8)}


def test_a_reward_runs_it_in_a_scoring_process(sandbox: Sandbox) -> None:
    def passes(row: dict[str, str], answer: str) -> float:
        return float(sandbox.run(answer, row["given"]).stdout == row["printed"])

    async def scores() -> list[float]:
        scorer = Scorer(1, deadline_s=600.0)
        row = {"given": "3", "printed": "9\n"}
        try:
            answers = ("print(int(input()) ** 2)", "print(6)", "while True: print('x')")
            return [(await scorer.score(passes, row, answer)).reward for answer in answers]
        finally:
            await asyncio.to_thread(scorer.close)

    try:
        assert asyncio.run(patience.patiently(scores(), "the scores", 400)) == [1.0, 0.0, 0.0]
    except ScoringFailed as error:
        raise AssertionError(error.report) from error


def test_a_machine_that_cannot_isolate_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="apt install bubblewrap"):
        Sandbox()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the folder of these tests is closed to other users
        Path(folder).chmod(0o755)
        (stand_in := Path(folder) / "bwrap").write_text("#!/bin/sh\necho 'no namespaces: not permitted' >&2\nexit 1\n")
        stand_in.chmod(0o755)
        monkeypatch.setenv("PATH", folder)
        with pytest.raises(ValueError, match="no namespaces.* bubblewrap 0.7"):
            Sandbox()


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="sandbox.seconds"):
        Sandbox(seconds=0)

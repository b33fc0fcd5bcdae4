"""The host that a script starts early: it is the launch's only if a host started then would be the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_rl.pipeline.capture import capturing
from monarch_rl.pipeline.preloads import start_host_early
from monarch_rl.runtime import host_start
from monarch_rl.runtime.devices import has_accelerator_driver
from monarch_rl.runtime.forking.fork_server import Preload
from monarch_rl.runtime.host import HostProcess
from tests.patience import LIMIT_S, run, wait_until
from tests.recipe.running import random_model

PRELOADS = (Preload("json", ("json",)),)

HERE = pytest.mark.skipif(has_accelerator_driver(), reason="no host starts early where there may be GPUs")

SCRIPT = """
import os, sys
{before}
from monarch_rl import {name}
from monarch_rl.runtime import host_start
early = host_start._early
print(early.process._process.pid if early else 0, early.process.scratch.path if early else "", flush=True)
{after}
"""


@pytest.fixture(autouse=True)
def no_early_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    host_start.kill_early()
    monkeypatch.setattr(host_start, "visible_devices", list)
    monkeypatch.setenv(host_start.EXECUTION_ID, "a_test")
    yield
    host_start.kill_early()


def start() -> HostProcess:
    host_start.start_early(PRELOADS, {})
    assert host_start._early is not None
    return host_start._early.process


@pytest.mark.heavy
def test_a_launch_takes_the_early_host() -> None:
    early = start()
    host = host_start.start_host(None, PRELOADS)
    assert host is early and host._process.poll() is None
    other = host_start.start_host(None, PRELOADS)  # of a second launch
    assert other is not early
    for each in (host, other):
        each.end(LIMIT_S)


def changed_variable(monkeypatch: pytest.MonkeyPatch, _: Path) -> dict[str, Any]:
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    return {}


def changed_search_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(folder))
    return {}


def changed_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    return {}


def other_preloads(_: pytest.MonkeyPatch, __: Path) -> dict[str, Any]:
    return {"preloads": (Preload("csv", ("csv",)),)}


def other_machines(_: pytest.MonkeyPatch, __: Path) -> dict[str, Any]:
    return {"ip": "127.0.0.1"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "change", [changed_variable, changed_search_path, changed_folder, other_preloads, other_machines]
)
def test_a_launch_that_needs_another_host_starts_it(
    change: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    early = start()
    host = host_start.start_host(**({"ip": None, "preloads": PRELOADS} | change(monkeypatch, tmp_path)))
    try:
        assert host is not early
        assert early._process.poll() is not None and not early.scratch.path.exists()
    finally:
        host.end(LIMIT_S)


@pytest.mark.heavy
def test_a_launch_with_another_umask_or_output_starts_its_own_host(tmp_path: Path) -> None:
    early, umask = start(), os.umask(0o077)
    try:
        host = host_start.start_host(None, PRELOADS)
    finally:
        os.umask(umask)
    assert host is not early and early._process.poll() is not None
    host.end(LIMIT_S)

    with (tmp_path / "output").open("w") as output:  # this process prints elsewhere
        host_start.start_early(PRELOADS, {1: output.fileno()})
    assert host_start._early is not None
    early = host_start._early.process
    host = host_start.start_host(None, PRELOADS)
    assert host is not early and early._process.poll() is not None
    host.end(LIMIT_S)


def test_a_recipe_that_is_only_read_starts_no_host() -> None:
    with capturing(lambda *_: None):
        start_host_early()
    assert host_start._early is None


@pytest.mark.heavy
def test_an_early_host_that_was_killed_is_replaced() -> None:
    early = start()
    psutil.Process(early._process.pid).kill()
    early._process.wait(LIMIT_S)
    host = host_start.start_host(None, PRELOADS)
    assert host is not early
    host.end(LIMIT_S)


def run_script(folder: Path, name: str, before: str, after: str, *arguments: str) -> list[str]:
    """The pid and the folder that a script printed, once the script has ended."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(name=name, before=before, after=after))
    command = [sys.executable, str(script), *arguments]
    return run(command).stdout.split()


def processes_in(folder: str) -> list[psutil.Process]:
    """Processes that have ``folder`` as their temporary directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


FORKS = """
import time
if os.fork() == 0:
    os.closerange(1, 3)  # else the test would wait for its output
    with open(os.path.join(sys.argv[1], "child"), "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(os.path.join(sys.argv[1], "end")):
        time.sleep(0.05)
    os._exit(0)
os.kill(os.getpid(), 9)
"""


@HERE
@pytest.mark.heavy
def test_a_fork_of_the_script_does_not_keep_the_host(tmp_path: Path) -> None:
    try:
        _, folder = run_script(tmp_path, "launch", "", FORKS, str(tmp_path))
        wait_until((tmp_path / "child").exists, "the fork")
        wait_until(lambda: not processes_in(folder), lambda: f"the end of {processes_in(folder)}")
        assert psutil.pid_exists(int((tmp_path / "child").read_text()))
    finally:
        (tmp_path / "end").touch()


LAUNCHES = """
import sys
from pathlib import Path
import psutil
from monarch_rl import Run, RunSettings, launch
from monarch_rl.runtime import host_start
early = host_start._early.process._process.pid

async def train(run, s):
    hosts = [child.pid for child in psutil.Process().children() if "monarch_rl.runtime.host" in child.cmdline()]
    print("hosts", hosts == [early])

launch(train, RunSettings(model=sys.argv[1], output=Path(sys.argv[2])))
"""


@HERE
@pytest.mark.heavy
def test_a_run_has_the_host_that_its_script_started(tmp_path: Path) -> None:
    script, model = tmp_path / "script.py", random_model(tmp_path / "model")
    script.write_text(LAUNCHES)
    done = run([sys.executable, str(script), str(model), str(tmp_path / "runs")])
    assert "hosts True" in done.stdout, done.stdout + done.stderr


@HERE
@pytest.mark.heavy
@pytest.mark.parametrize("after", ["sys.exit('error')", "os.kill(os.getpid(), 9)"])
def test_a_script_that_ends_without_a_launch_leaves_nothing(after: str, tmp_path: Path) -> None:
    pid, folder = run_script(tmp_path, "launch", "", after)
    wait_until(lambda: not psutil.pid_exists(int(pid)), f"the end of host {pid}")
    wait_until(lambda: not Path(folder).exists(), f"the removal of {folder}")
    wait_until(lambda: not processes_in(folder), lambda: f"the end of {processes_in(folder)}")


@pytest.mark.parametrize(
    ("name", "before", "arguments"),
    [
        ("launch", "", ["--help"]),
        ("launch", "os.environ.update(TORCHELASTIC_RUN_ID='a', RANK='0', WORLD_SIZE='1', LOCAL_WORLD_SIZE='1')", []),
        ("RolloutSettings as launches", "", []),
    ],
)
def test_a_script_that_needs_no_host_of_its_own_starts_none(
    name: str, before: str, arguments: list[str], tmp_path: Path
) -> None:
    assert run_script(tmp_path, name, before, "", *arguments) == ["0"]


def test_a_module_that_imports_launch_starts_no_host(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("from monarch_rl import launch\n")
    assert run_script(tmp_path, "RolloutSettings", "import part", "") == ["0"]


def test_there_is_no_early_host_where_torch_must_be_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for driver in ((), ("/dev/nvidiactl",), ("/dev/dxg",), ("/dev/kfd",)):
        monkeypatch.setattr(os.path, "exists", driver.__contains__)
        assert host_start.may_start_early() == (not driver)

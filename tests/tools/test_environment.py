"""Set-up installs what differs, nothing when nothing differs, and starts over after an interruption."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tools import lock_cpu
from tools.environment import Environment, SetupError, Stamp, plan, progress
from tools.make_tiny_model import Settings, main

ROOT = Path(__file__).resolve().parents[2]
STAMP = Stamp(root="/here", lock="a", project="b", packages=["alpha"])


@pytest.mark.parametrize(
    ("found", "steps"),
    [
        (STAMP, []),
        (None, ["create", "lock", "project"]),
        (replace(STAMP, root="/elsewhere"), ["create", "lock", "project"]),
        (replace(STAMP, lock="other"), ["lock", "project"]),
        (replace(STAMP, project="other"), ["project"]),
    ],
)
def test_plan(found: Stamp | None, steps: list[str]) -> None:
    assert plan(found, STAMP) == steps


@pytest.mark.parametrize("text", ["", "{", "[]", '{"root": "/here"}'])
def test_a_stamp_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stamp"
    assert Stamp.read(path) is None
    path.write_text(text, encoding="utf-8")
    assert Stamp.read(path) is None
    STAMP.write(path)
    assert Stamp.read(path) == STAMP


def test_progress_counts_packages() -> None:
    log = "Collecting alpha==1 (from x)\nProcessing /wheels/beta-2-py3-none-any.whl\n"
    assert progress([""], 3) == "starting"
    assert progress([log], 3) == "2/3 fetching beta-2-py3-none-any.whl"
    assert progress([log + "Installing collected packages: alpha, beta\n"], 3) == "2 fetched, writing them to disk"


def small_project(root: Path, *packages: str) -> None:
    locked = lock_cpu.read_lock()
    (root / "tools").mkdir(exist_ok=True)
    (root / "tools" / "cpu.lock").write_text("".join(f"{name}=={locked[name]}\n" for name in packages), "utf-8")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "small"\nversion = "1"\n[tool.setuptools]\npy-modules = []\n',
        encoding="utf-8",
    )


def installed(environment: Environment) -> set[str]:
    command = [str(environment.python), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {line.partition("==")[0] for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_a_real_environment_through_its_life(tmp_path: Path) -> None:
    small_project(tmp_path, "setuptools", "iniconfig")
    environment = Environment(tmp_path)
    assert environment.bring_up() == ["create", "lock", "project"]
    assert {"setuptools", "iniconfig", "small"} <= installed(environment)

    assert environment.bring_up() == []

    mine = environment.folder / "mine"
    mine.touch()
    small_project(tmp_path, "setuptools", "six")
    assert environment.bring_up() == ["lock", "project"]
    assert "six" in installed(environment)
    assert "iniconfig" not in installed(environment)
    assert mine.exists()

    environment.stamp.unlink()  # as an interruption leaves it
    assert environment.bring_up() == ["create", "lock", "project"]
    assert not mine.exists()

    (tmp_path / "tools" / "cpu.lock").write_text("setuptools==0.0.0.1\n", encoding="utf-8")
    with pytest.raises(SetupError, match=r"(?s)No matching distribution found for setuptools==0.0.0.1.*setup.log"):
        environment.bring_up()
    assert not environment.stamp.exists()


def test_a_second_call_of_the_real_set_up_is_fast_and_installs_nothing() -> None:
    environment = Environment(ROOT)
    if Stamp.read(environment.stamp) != Stamp.wanted(ROOT):
        pytest.skip("tools/setup.sh did not make this environment")
    before = environment.stamp.stat().st_mtime_ns
    begin = time.monotonic()
    done = subprocess.run([ROOT / "tools" / "setup.sh"], capture_output=True, text=True, timeout=60, check=True)
    elapsed = time.monotonic() - begin
    assert (done.stdout, done.stderr) == ("", "")
    assert environment.stamp.stat().st_mtime_ns == before
    assert elapsed < 5  # 0.2 s on an idle machine; the bound leaves room for a busy one


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A file system that cannot be written to, also by root, whom permissions do not stop."""
    for options in (["--bind", str(folder)], ["-o", "remount,ro,bind"]):
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mount {' '.join(options)}: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def checkout(folder: Path) -> Path:
    """What `./tools/train` runs before it starts Python code of the project."""
    (folder / "tools").mkdir(parents=True)
    for name in ("train", "run.sh", "setup.sh", "environment.py", "cpu.lock"):
        shutil.copy(ROOT / "tools" / name, folder / "tools" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def train(folder: Path) -> str:
    """What `./tools/train` says where it fails."""
    done = subprocess.run([folder / "tools" / "train"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


def test_a_folder_that_cannot_be_written_to_gets_one_sentence(tmp_path: Path) -> None:
    root = checkout(tmp_path / "checkout")
    (root / ".cache").touch()  # a file where the folder should be
    said = train(root)
    assert re.fullmatch(rf"setup: {root}/\.cache cannot be used \(.*\), and .* copy it to one that is\n", said), said
    (root / ".cache").unlink()
    with read_only(root):
        said = train(root)
    assert re.fullmatch(rf"setup: {root}/\.cache cannot be used \(Read-only file system\), and .*\n", said), said


@pytest.mark.parametrize("kind", ["read-only", "a file"])
def test_the_tiny_model_says_where_it_cannot_be_made(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cache").mkdir() if kind == "read-only" else (tmp_path / "cache").touch()
    refused = pytest.raises(SystemExit, match=rf"cannot be made in {tmp_path}/cache \(.*--model FOLDER")
    with read_only(tmp_path) if kind == "read-only" else nullcontext(), refused:
        main(Settings(output=tmp_path / "cache" / "tiny"))


def test_without_a_python_that_fits_set_up_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "tools" / "setup.sh"],
        env={"PATH": "/usr/bin:/bin", "MONARCH_RL_PYTHON": str(tmp_path / "no-python")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13 found" in done.stderr
    assert "MONARCH_RL_PYTHON=" in done.stderr

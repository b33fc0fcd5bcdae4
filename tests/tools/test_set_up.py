"""`tools/set_up` installs only differences, starts over after an interruption, and reports missing things in one
sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests import patience
from tools.make_tiny_model import Settings, main

ROOT = Path(__file__).resolve().parents[2]


def checkout(folder: Path, *packages: str) -> Path:
    """Make a small project with this set-up script, and a lock of these packages in their locked versions."""
    for name in ("tools", "locks"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "set_up", folder / "tools")
    write_lock(folder, *packages)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "small"\nversion = "1"\n[tool.setuptools]\npy-modules = []\n'
    )
    return folder


def write_lock(folder: Path, *packages: str) -> None:
    real = (ROOT / "locks" / "cpu.txt").read_text().splitlines()
    lines = [line for line in real if line.partition("==")[0] in packages]
    (folder / "locks" / "cpu.txt").write_text("\n".join(lines) + "\n")


def set_up(folder: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    """Run the script with the Python of the tests; returns its messages."""
    done = patience.run(
        [folder / "tools" / "set_up", *arguments],
        env={**os.environ, "MONARCH_RL_PYTHON": sys.executable, **variables},
    )
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    return done.stderr


def installed(folder: Path) -> set[str]:
    """Return the names of the installed packages."""
    found = (folder / ".venv").glob("lib/python*/site-packages/*.dist-info")
    return {path.name.removesuffix(".dist-info").partition("-")[0] for path in found}


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.skipif(shutil.which("uv") is None, reason="no uv")
def test_an_environment_through_its_life_in_a_folder_with_a_space(tmp_path: Path) -> None:
    root = checkout(tmp_path / "a folder", "setuptools", "iniconfig")
    set_up(root)
    assert {"setuptools", "iniconfig", "small"} <= installed(root)
    mine = root / ".venv" / "mine"
    mine.touch()
    assert set_up(root) == "", "it is up to date"

    with (root / "pyproject.toml").open("a") as file:
        file.write("[project.scripts]\nsmall-script = 'os:getcwd'\n")
    set_up(root)
    assert (root / ".venv" / "bin" / "small-script").exists()

    write_lock(root, "setuptools", "six")
    set_up(root)
    assert {"six", "small"} <= installed(root) and "iniconfig" not in installed(root) and mine.exists()

    root = root.rename(tmp_path / "moved")
    (root / "locks" / "cpu.txt").write_text("setuptools==0.0.0.1\n")
    assert "0.0.0.1" in set_up(root, code=1)
    mine = root / ".venv" / "mine"
    assert not mine.exists(), "an environment of another folder must be replaced"
    mine.touch()
    write_lock(root, "setuptools", "six")
    set_up(root)
    assert {"six", "small"} <= installed(root) and not mine.exists(), "an unfinished environment must be replaced"


@pytest.mark.slow
def test_without_uv_pip_makes_the_same(tmp_path: Path) -> None:
    root = checkout(tmp_path / "a folder", "setuptools", "iniconfig")
    set_up(root, MONARCH_RL_UV="")
    assert {"setuptools", "iniconfig", "small"} <= installed(root)
    write_lock(root, "setuptools", "six")
    set_up(root, MONARCH_RL_UV="")
    assert {"six", "small"} <= installed(root) and "iniconfig" not in installed(root)


def stub(folder: Path, name: str, script: str) -> str:
    """Write a program and return a PATH on which it comes first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_two_set_ups_wait_for_each_other(tmp_path: Path) -> None:
    root = checkout(tmp_path / "checkout")
    (root / ".cache").mkdir()
    with subprocess.Popen(
        ["flock", root / ".cache" / "set_up.lock", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdin.write(b"held\n")
        other.stdin.flush()
        assert other.stdout.readline() == b"held\n"
        with subprocess.Popen(
            [root / "tools" / "set_up"],
            env={**os.environ, "MONARCH_RL_PYTHON": "no-python"},
            stderr=subprocess.PIPE,
            text=True,
        ) as waiting:
            assert waiting.stderr is not None and "another set-up" in waiting.stderr.readline()
            assert waiting.poll() is None
            other.stdin.close()
            assert "no-python" in waiting.stderr.read(), "it did not continue after the other had ended"


def test_each_missing_thing_gets_one_sentence(tmp_path: Path) -> None:
    root = checkout(tmp_path / "checkout")
    without_venv = stub(tmp_path / "python", "python", f'[ "$1" = -m ] && exit 1; exec "{sys.executable}" "$@"')
    cases: dict[str, dict[str, str]] = {
        "MONARCH_RL_PYTHON=": {"MONARCH_RL_PYTHON": "no-python"},
        "python3-venv": {"MONARCH_RL_PYTHON": without_venv.partition(":")[0] + "/python"},
        "Darwin arm64": {"PATH": stub(tmp_path / "mac", "uname", "echo Darwin arm64")},
        "glibc 2.31": {"PATH": stub(tmp_path / "old", "getconf", "echo glibc 2.31")},
    }
    for expected, variables in cases.items():
        messages = set_up(root, code=1, **variables).splitlines()
        assert expected in messages[-1] and len(messages) == 1 + (expected == "python3-venv"), messages


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only, even for root, who ignores permissions."""
    for options in (["--bind", str(folder)], ["-o", "remount,ro,bind"]):
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mount {' '.join(options)}: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_cannot_be_written_to_gets_one_sentence(tmp_path: Path) -> None:
    root = checkout(tmp_path / "checkout")
    (root / ".cache").touch()  # a file where the folder should be
    (message,) = set_up(root, code=1).splitlines()
    assert f"{root}/.cache" in message
    (root / ".cache").unlink()
    with read_only(root):
        (message,) = set_up(root, code=1).splitlines()
    assert f"{root}/.cache" in message and "Read-only" in message


@pytest.mark.parametrize("kind", ["read-only", "a file"])
def test_the_tiny_model_names_the_folder_that_cannot_be_written_to(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cache").mkdir() if kind == "read-only" else (tmp_path / "cache").touch()
    refused = pytest.raises(SystemExit, match=rf"{tmp_path}/cache.*--model FOLDER")
    with read_only(tmp_path) if kind == "read-only" else nullcontext(), refused:
        main(Settings(output=tmp_path / "cache" / "tiny"))

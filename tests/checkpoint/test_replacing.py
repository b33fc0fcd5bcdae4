"""A model's folder that is replaced: the old one or the new one has the name, however the process ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from monarch_rl.checkpoint.folders import finish_all, finish_replacing, partial_folder, replace_folder
from tests import patience


def written(folder: Path, text: str) -> None:
    partial = partial_folder(folder)
    partial.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (partial / name).write_text(text)


KILLED = """
import os, sys
from pathlib import Path
from monarch_rl.checkpoint.folders import replace_folder
from tests.checkpoint.test_replacing import written
top, left = Path(sys.argv[1]), 0
def killed(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.endswith(("checkpoint/folders.py", "shutil.py")):
        def line(frame, event, argument):
            global left
            left -= event == "line"
            if left <= 0:
                os.kill(os.getpid(), 9)
            return line
        return line
lines = code = 1
while code:
    folder = top / str(lines) / "model"
    written(folder, "old")
    replace_folder(folder)
    written(folder, "new")
    child = os.fork()
    if child == 0:
        left = lines
        sys.settrace(killed)
        replace_folder(folder)
        sys.settrace(None)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -9), code
    lines += 1
"""


def test_after_a_kill_at_any_line_the_name_has_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    done = patience.run([sys.executable, "-c", KILLED, str(tmp_path)], seconds=300)
    assert done.returncode == 0, done.stderr
    found, without = set[str](), 0
    for run in tmp_path.iterdir():
        without += not (run / "model").exists()
        finish_all(run)
        texts = {(run / "model" / name).read_text() for name in ("config.json", "model.safetensors")}
        assert len(texts) == 1
        found |= texts
        assert {path.name for path in run.iterdir()} <= {"model", ".model.partial"}
    assert found == {"old", "new"} and without, "no kill happened between the two renames"


def test_an_old_folder_without_a_new_one_gets_its_name_back(tmp_path: Path) -> None:
    written(tmp_path / "model", "old")
    replace_folder(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.old")
    finish_replacing(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_is_flushed_completely_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[str]()
    rename = Path.rename

    def note_rename(path: Path, target: Path) -> Path:
        flushed.append(f"{path.name} renamed")
        return rename(path, target)

    fsync = os.fsync

    def note_flush(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(Path, "rename", note_rename)
    written(tmp_path / "run" / "model", "new")
    replace_folder(tmp_path / "run" / "model")
    files, rest = flushed[:2], flushed[2:]
    assert set(files) == {"config.json", "model.safetensors"}
    assert rest == [".model.partial", ".model.partial renamed", "run"]

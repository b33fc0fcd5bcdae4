"""Checkpoints as folders: whole or absent, verified, and as many as the settings retain."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import TRAINER, Manifest, Measurement, complete, newest_whole
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.errors import BrokenCheckpoint
from tests import patience

MANIFEST = Manifest(0, 0, 0, 1.5, {"metrics.jsonl": 7})
ACCURACY = "held_out/accuracy"


def made(root: Path, version: int, accuracy: float | None = None, metric: str = ACCURACY, generation: int = 0) -> Path:
    partial = folders.begin(root, version)
    (partial / TRAINER / "shard").write_bytes(os.urandom(1000))
    files = [folders.file_sum(partial, partial / TRAINER / "shard")]
    measured = None if accuracy is None else Measurement(metric, accuracy, version)
    about = replace(MANIFEST, version=version, generation=generation, measured=measured, files=files)
    return folders.commit(root, about)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = made(tmp_path, 3, 0.5)
    folders.keep(tmp_path, 3, newest=1)
    manifest = folders.verify(folder)
    assert (manifest.version, manifest.positions) == (3, {"metrics.jsonl": 7})
    assert manifest.measured == Measurement(ACCURACY, 0.5, 3)
    assert manifest.nbytes == 1000 and newest_whole(tmp_path) == (folder, manifest)
    assert os.readlink(tmp_path / "latest") == "step-000003"


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_is_named_and_an_earlier_one_is_taken(tmp_path: Path, damage: str) -> None:
    earlier, folder = made(tmp_path, 3), made(tmp_path, 6)
    shard = folder / TRAINER / "shard"
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    if damage == "flip":
        shard.write_bytes(data)
    elif damage == "truncate":
        shard.write_bytes(data[:999])
    elif damage == "remove":
        shard.unlink()
    else:
        (folder / "manifest.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match=str(folder / "manifest.json" if damage == "manifest" else shard)):
        folders.verify(folder)
    assert newest_whole(tmp_path)[0] == earlier
    (earlier / TRAINER / "shard").unlink()
    with pytest.raises(BrokenCheckpoint, match="step-000006.*; .*step-000003"):
        newest_whole(tmp_path)


KILLED = """
import os, sys
from pathlib import Path
from tests.checkpoint import test_folders as t
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
    root = top / str(lines)
    for version in (6, 9):
        t.made(root, version)
    child = os.fork()
    if child == 0:
        left = lines
        sys.settrace(killed)
        t.made(root, 9)
        t.folders.keep(root, 9, 1)
        sys.settrace(None)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -9), code
    lines += 1
"""


def test_a_kill_at_any_line_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    """While one is written, replaces an older one of the same step, and older ones are removed."""
    done = patience.run([sys.executable, "-c", KILLED, str(tmp_path)], seconds=300)
    assert done.returncode == 0, done.stderr
    roots = list(tmp_path.iterdir())
    assert len(roots) > 50, "no kill happened while a folder was removed"
    for root in roots:
        for folder in complete(root).values():
            folders.verify(folder)
        assert complete(root), f"no checkpoint is left at line {root.name}"
        made(root, 12)
        assert not list(root.glob(".step-*")), "leftovers of a kill are still there"


@given(st.lists(st.sampled_from([None, 0.1, 0.5, 0.9]), min_size=1, max_size=8), st.integers(1, 3), st.booleans())
def test_the_newest_and_the_best_checkpoints_remain(
    tmp_path_factory: pytest.TempPathFactory, metrics: list[float | None], newest: int, best: bool
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    everything: dict[int, float | None] = {}
    for version, metric in enumerate(metrics, 1):
        made(root, version, metric)
        folders.keep(root, version, newest, ACCURACY if best else "")
        everything[version] = metric
        expected = sorted(everything)[-newest:]
        measured = {v: m for v, m in everything.items() if m is not None}
        if best and measured:
            # A checkpoint that was removed before stays removed: the best of those still there remains.
            expected = sorted({*expected, max(measured, key=lambda v: (measured[v], -v))})
            assert os.readlink(root / "best") == f"step-{max(measured, key=lambda v: (measured[v], -v)):06d}"
        assert list(complete(root)) == expected
        everything = {v: everything[v] for v in expected}


@pytest.mark.parametrize("resumed", [False, True])
def test_links_that_were_copied_as_folders_are_set_aside(
    tmp_path: Path, resumed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As by ``scp -r``."""
    made(tmp_path, 1, 0.5)
    folders.keep(tmp_path, 1, 1, ACCURACY)
    root = tmp_path / "copied"
    shutil.copytree(tmp_path, root, symlinks=False, ignore=shutil.ignore_patterns("copied"))
    assert not any((root / name).is_symlink() for name in ("latest", "best"))
    if resumed:
        folders.go_back(root, 1)
    else:
        made(root, 2)
        folders.keep(root, 2, 1)
        assert not os.path.lexists(root / "best")
    assert os.readlink(root / "latest") == f"step-{1 if resumed else 2:06d}"
    assert str(root / "latest") in caplog.text
    (aside,) = root.glob("latest-copy-*")
    assert folders.verify(aside).version == 1


def test_values_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    """As after a resume with another --evaluation.best."""
    made(tmp_path, 1, 4.0, "held_out/reward")
    folders.keep(tmp_path, 1, 1, "held_out/reward")
    made(tmp_path, 2)
    folders.keep(tmp_path, 2, 1, ACCURACY)
    assert list(complete(tmp_path)) == [2] and not os.path.lexists(tmp_path / "best")
    for version, accuracy in ((3, 0.9), (4, 0.7)):
        made(tmp_path, version, accuracy)
        folders.keep(tmp_path, version, 1, ACCURACY)
    assert list(complete(tmp_path)) == [3, 4] and os.readlink(tmp_path / "best") == "step-000003"


def test_a_later_evaluation_counts_for_the_checkpoint_of_its_version_or_the_next_one(tmp_path: Path) -> None:
    made(tmp_path, 3, 0.5), made(tmp_path, 6)

    def noted(version: int, accuracy: float, best: bool = False, metric: str = ACCURACY) -> bool:
        return folders.measure(tmp_path, Measurement(metric, accuracy, version), best)

    def measured() -> list[Measurement | None]:
        return [folders.verify(folder).measured for folder in complete(tmp_path).values()]

    assert not noted(7, 0.9) and not noted(3, 0.25), "a version is as good as the best evaluation of it"
    assert measured() == [Measurement(ACCURACY, 0.5, 3), None]
    assert noted(5, 0.75, best=True) and noted(3, 0.625)
    assert measured() == [Measurement(ACCURACY, 0.625, 3), Measurement(ACCURACY, 0.75, 5)]
    assert [folders.verify(folder).best for folder in complete(tmp_path).values()] == [None, measured()[1]]
    assert noted(6, 0.25) and not noted(5, 1.0), "an evaluation of the same version is closer"
    assert noted(6, 0.125, metric="held_out/reward")
    assert measured()[1] == Measurement("held_out/reward", 0.125, 6)


def test_a_run_rolled_back_behind_a_broken_checkpoint_retains_its_new_ones(tmp_path: Path) -> None:
    """Also if the broken one remains, and has the better metric: it is no longer part of the run's history."""
    for rolled_back in (False, True):
        root = tmp_path / str(rolled_back)
        made(root, 100), made(root, 120, 0.9)
        folders.keep(root, 120, 2, ACCURACY)
        (root / "step-000120" / TRAINER / "shard").write_bytes(b"")
        assert newest_whole(root)[1].version == 100
        if rolled_back:
            folders.go_back(root, 100)
            assert list(complete(root)) == [100] and os.readlink(root / "latest") == "step-000100"
            assert not os.path.lexists(root / "best")
        made(root, 110, 0.5, generation=1)
        folders.keep(root, 110, 1, ACCURACY)
        assert list(complete(root)) == [110] and newest_whole(root)[1].version == 110
        assert {os.readlink(root / link) for link in ("latest", "best")} == {"step-000110"}


def test_a_checkpoint_renamed_while_others_are_removed_remains(tmp_path: Path) -> None:
    """Unless the run was rolled back to before it."""
    for version in (1, 2, 4):
        made(tmp_path, version)
    folders.keep(tmp_path, 2, 1)
    assert list(complete(tmp_path)) == [2, 4]
    made(tmp_path, 3, generation=1)
    folders.keep(tmp_path, 3, 1)
    assert list(complete(tmp_path)) == [3]


def test_an_abandoned_checkpoint_is_not_renamed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example by a thread that a stalled disk has delayed, and that continues before all files are removed."""

    def stalled(folder: Path) -> None:
        if folder.name == ".step-000003.partial":
            monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
            folders.discard(tmp_path, 3)

    monkeypatch.setattr(folders, "flush", stalled)
    with pytest.raises(FileNotFoundError):
        made(tmp_path, 3)
    assert not complete(tmp_path)


def test_files_that_cannot_be_removed_do_not_prevent_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a file that an NFS client still has open. The folder to be written must be empty."""
    stuck = folders.begin(tmp_path, 3) / TRAINER / "shard"
    stuck.write_bytes(b"old")
    unlink = os.unlink

    def refuses(path: str, **at: int) -> None:
        if Path(path).name == "shard":
            raise OSError(16, "Device or resource busy", path)
        unlink(path, **at)

    monkeypatch.setattr(os, "unlink", refuses)
    assert made(tmp_path, 6).exists() and stuck.exists()
    with pytest.raises(OSError, match="busy"):
        folders.begin(tmp_path, 3)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    values = folders.read_checked(folder / "manifest.json")
    folders.write_checked(folder / "manifest.json", values | {"format": 9})
    with pytest.raises(BrokenCheckpoint, match="format 9.* 3"):
        folders.verify(folder)


def test_a_field_of_a_later_version_is_refused_with_that_version(tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    values = folders.read_checked(folder / "manifest.json")
    folders.write_checked(folder / "manifest.json", values | {"new": 1, "packages": {"monarch_rl": "7.5"}})
    with pytest.raises(BrokenCheckpoint, match=r"monarch_rl 7\.5.* new\): use monarch_rl 7\.5"):
        folders.read_manifest(folder)


def test_a_measurement_and_the_supervised_steps_may_be_missing(tmp_path: Path) -> None:
    folder = made(tmp_path, 1, 0.5)
    values = folders.read_checked(folder / "manifest.json")
    optional = {field.name for field in fields(Manifest) if field.default is None}
    assert optional == {"measured", "best", "warm_up_steps"}
    required = {name: value for name, value in values.items() if name not in optional}
    (folder / "manifest.json").write_text(json.dumps(required))  # as an earlier version did, without a checksum
    manifest = folders.read_manifest(folder)
    assert manifest.version == 1 and manifest.measured is manifest.best is None and manifest.warm_up_steps is None


def test_when_a_checkpoint_is_due() -> None:
    assert not CheckpointSettings().due(steps=0, seconds=1e6)
    assert CheckpointSettings(every_minutes=15).due(1, 900) and not CheckpointSettings(every_minutes=15).due(1, 899)
    assert CheckpointSettings(every_steps=5, every_minutes=0).due(5, 0)
    assert not CheckpointSettings(every_minutes=0).due(10**6, 1e9)


@given(st.data())
def test_a_flipped_bit_or_a_cut_in_a_manifest_is_noticed(root: Path, data: st.DataObject) -> None:
    folder = folders.folder_of(root, 3)
    path, whole = folder / "manifest.json", (root / "whole").read_bytes()
    spoilt, place = bytearray(whole), data.draw(st.integers(0, len(whole) - 2))
    if data.draw(st.booleans()):
        spoilt[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del spoilt[place:]
    path.write_bytes(spoilt)
    with pytest.raises(BrokenCheckpoint, match=str(path)):
        folders.verify(folder)
    path.write_bytes(whole)
    assert folders.verify(folder).counters == {"7": 1.5, "12": [2]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 3, and a copy of its manifest."""
    root = tmp_path_factory.mktemp("manifest")
    folder = made(root, 3, 0.5)
    manifest = replace(folders.read_manifest(folder), counters={7: 1.5, 12: (2,)})  # type: ignore[dict-item]
    folders.write_checked(folder / "manifest.json", asdict(manifest))
    shutil.copy(folder / "manifest.json", root / "whole")
    return root


def test_checkpoints_whose_names_were_exchanged_are_not_used(tmp_path: Path) -> None:
    earlier, third, later = (made(tmp_path, version) for version in (3, 6, 9))
    third.rename(tmp_path / "other")
    later.rename(third)
    (tmp_path / "other").rename(later)
    assert newest_whole(tmp_path) == (earlier, folders.read_manifest(earlier))
    with pytest.raises(BrokenCheckpoint, match=f"{later} was renamed: .* step 6"):
        folders.verify(later)

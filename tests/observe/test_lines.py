"""Files of lines: only whole lines are written, and a full or read-only disk ends nothing."""

from __future__ import annotations

import json
import logging
import os
import resource
import select
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.errors import SettingsError
from monarch_rl.observe import disk_thread
from monarch_rl.observe.lines import LineFile, read_object, read_rows, truncate
from monarch_rl.observe.metrics import Metrics
from tests import patience


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A working disk is waited for, however long the machine stalls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_thread, "ANSWER_S", 600.0)
        yield


@contextmanager
def disk_of(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond ``nbytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_whole_lines_and_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(tmp_path / "lines")
    assert file.append("a" * 50)
    with disk_of(100), caplog.at_level(logging.WARNING):
        assert not any(file.append("b" * 70) for _ in range(3))
        assert file.append("c" * 20), "a shorter line fits"
    assert file.append("d", "e") and file.lost == 3 and file.position() == 51 + 21 + 4
    assert [line[0] for line in file.path.read_text().splitlines()] == ["a", "c", "d", "e"]
    assert len(caplog.records) == 2 and "3 lines are lost" in caplog.text


def test_an_unwritable_folder_loses_lines(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = LineFile(tmp_path / "file" / "lines")
    assert not file.append("a") and file.lost == 1
    full = LineFile(Path("/dev/full"))
    assert not full.append("a") and not full.append("b", "c") and full.lost == 3


def test_a_partial_line_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("whole\n" + "half" * 50_000)
    file = LineFile(path)
    assert file.append("next") and path.read_text() == "whole\nnext\n"
    truncate(path, 6)
    assert path.read_text() == "whole\n"
    truncate(path, 100)
    truncate(tmp_path / "none", 3)
    assert path.read_text() == "whole\n"


def test_short_writes_make_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:4]))
    file = LineFile(tmp_path / "lines")
    assert file.append("a" * 20) and file.append("b" * 9, "c") and file.lost == 0
    assert file.path.read_text().splitlines() == ["a" * 20, "b" * 9, "c"] and file.position() == 33


def test_a_partial_line_that_could_not_be_truncated_is_removed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, sound = os.write, True

    def written(descriptor: int, data: bytes) -> int:
        if not sound and len(data) < 20:
            raise OSError(5, "Input/output error")
        return write(descriptor, data if sound else data[:4])

    def refused(*_: int) -> None:
        raise OSError(5, "Input/output error")

    file = LineFile(tmp_path / "lines")
    assert file.append("a" * 20)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", written)
        disk.setattr(os, "ftruncate", refused)
        sound = False
        assert not file.append("b" * 20)
        sound = True
    assert file.path.read_text().endswith("bbbb") and file.append("c" * 20)
    assert file.path.read_text().splitlines() == ["a" * 20, "c" * 20] and file.position() == 42


def test_earlier_lines_count_in_the_position(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert LineFile(path).position() == 0 and not path.exists()
    path.write_text("whole\nhalf")
    assert LineFile(path).position() == 6


def test_a_stalled_disk_does_not_block_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full pipe without a reader blocks its writer. Writes that have not begun at the end are given up."""
    monkeypatch.setattr(disk_thread, "WAITING", 20)
    monkeypatch.setattr(disk_thread, "ANSWER_S", 0.2)
    os.mkfifo(tmp_path / "metrics.jsonl")
    pipe = os.open(tmp_path / "metrics.jsonl", os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"\n")
    metrics = Metrics(tmp_path)
    for step in range(1000):
        metrics.log(step, {"reward/mean": 0.5})
    assert metrics.lines.lost in (979, 980), "20 wait, and one may be in progress"
    with pytest.raises(OSError, match="the disk"):
        disk_thread.answers([metrics.position()])
    metrics.close()
    written = bytearray()

    def all_read() -> bool:
        with suppress(BlockingIOError):
            written.extend(os.read(pipe, 65536))
        return not metrics._disk._thread.is_alive() and not select.select([pipe], [], [], 0)[0]

    patience.wait_until(all_read, "the end of the thread")
    os.close(pipe)
    steps = [json.loads(line)["step"] for line in bytes(written).split(b"\n") if line]
    assert steps in ([], [0]) and len(steps) + metrics.lines.lost == 1000
    assert "given up" in caplog.text and caplog.text.count("left out") == 1


def test_a_slow_disk_is_reported_once_even_if_it_recovers_between(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LineFile(tmp_path / "lines")
    for _ in range(3):
        file.lose(2, "the disk is slower than the run")
        assert file.append("a")
    assert file.lost == 6 and len(caplog.records) == 1 and "slower than the run" in caplog.text


def test_threads_that_are_asked_together_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock."""
    waited = list[float]()

    class Asked(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            waited.append(timeout or 0.0)
            return 7

    clock = iter((100.0, 100.0, 103.0))
    monkeypatch.setattr(disk_thread, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert disk_thread.answers([Asked(), Asked()], 5.0) == [7, 7] and waited == [5.0, 2.0]


def test_an_error_does_not_end_the_writing_thread(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    disk = disk_thread.DiskThread("lines", lambda: done.append("last"))
    disk.begin(lambda: [][0], lambda: done.append("refused"))
    assert disk_thread.answers([disk.ask(lambda: "here")]) == ["here"] and "IndexError" in caplog.text
    with pytest.raises(ValueError, match="answered so"):
        disk_thread.answers([disk.ask(lambda: int("answered so"))])
    disk.close()
    assert done == ["last"] and not disk._thread.is_alive()


def test_metrics_continue_without_a_disk_and_resume_with_it(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log(1, {"reward/mean": 0.5})
    with disk_of(*disk_thread.answers([metrics.position()])):
        metrics.log(2, {"reward/mean": 0.5})
        disk_thread.answers([metrics.position()])
    metrics.log(3, {"reward/mean": 0.5})
    metrics.close()
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [1, 3]
    assert metrics.lines.lost == 1


@given(
    st.lists(st.dictionaries(st.text(), st.integers() | st.text()), min_size=1, max_size=6),
    st.binary(max_size=9).filter(lambda noise: b"\n" not in noise),
    st.data(),
)
def test_a_damaged_line_is_named_and_all_others_are_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], noise: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    lines = [json.dumps(row).encode() for row in rows]
    place = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[place])))
    lines[place] = lines[place][:at] + b"\x00" + noise
    path.write_bytes(b"\n".join([*lines, b'{"cut": of']))  # a line that is just being written
    found, damage = read_rows(path)
    assert found == rows[:place] + rows[place + 1 :]
    offset = sum(len(line) + 1 for line in lines[:place])
    assert len(damage) == 1 and damage[0].startswith(f"{path}: line {place + 1}, at byte {offset}, is damaged (")
    assert "utf-16" not in damage[0] and "utf-32" not in damage[0]


@pytest.mark.parametrize("content", [b'{"a": 1', b"[1]", b"\xff\xfe{", b"[" * 10**5, b""])
def test_a_damaged_object_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"^{path} is damaged"):
        read_object(path)
    with pytest.raises(SettingsError, match=r"none\.json cannot be read \(No such file"):
        read_object(tmp_path / "none.json")

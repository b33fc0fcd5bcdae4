"""The journal's files: whatever is truncated or corrupted, records that are read are the ones that were written."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.checkpoint import journal
from monarch_rl.checkpoint.journal import (
    FILES,
    MAGIC,
    OVERHEAD,
    JournalReader,
    JournalWriter,
    Made,
    Record,
    decode,
    encode,
    files_of,
    read_records,
    serialize_record,
)
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import MiniBatch, PackedShard, SupervisedShard
from tests.buffer.helpers import group
from tests.patience import wait_until

ARRAYS = arrays.arrays(
    st.sampled_from([np.dtype(name) for name in ("i4", "i8", "f4", "f8", "bool", "u1", "u2")]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | ARRAYS
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
RECORDS = st.lists(st.builds(Record, st.sampled_from(["BTCH", "STEP"]), st.integers(-1, 2**40), st.binary(max_size=60)))


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Wait for a slow disk, however long the machine stands still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "END_S", 600.0)
        yield


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and (found == expected or found != found)


@given(VALUES)
def test_values_survive_a_round_trip(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_dataclasses_survive_a_round_trip() -> None:
    record = Record("BTCH", 3, b"x")
    assert decode(encode([record, None]), Record) == [record, None]
    with pytest.raises(ValueError, match="another version"):
        decode(encode(record))


@given(VALUES, st.data())
def test_a_truncated_value_is_refused(value: Any, data: st.DataObject) -> None:
    packed = encode(value)
    length = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError):
        decode(packed[:length])


@given(RECORDS, st.data())
def test_all_whole_records_of_a_truncated_file_are_read(records: list[Record], data: st.DataObject) -> None:
    packed = [serialize_record(record) for record in records]
    whole = MAGIC + b"".join(packed)
    length = data.draw(st.integers(0, len(whole)))
    ends = np.cumsum([len(MAGIC), *map(len, packed)])
    expected = records[: max(0, int((ends <= length).sum()) - 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.journal"
        path.write_bytes(whole[:length])
        assert list(read_records(path)) == expected
        path.write_bytes(whole[:length] + bytes(data.draw(st.integers(0, 40))))  # a hole that was never filled
        found = list(read_records(path))  # zeros may complete a record that ends in zeros
        assert found[: len(expected)] == expected and found == records[: len(found)]


@given(RECORDS.filter(bool), st.data())
def test_a_corrupted_byte_costs_its_record_and_the_following_ones(records: list[Record], data: st.DataObject) -> None:
    packed = [serialize_record(record) for record in records]
    ends = np.cumsum([len(MAGIC), *map(len, packed)])
    place = data.draw(st.integers(len(MAGIC), int(ends[-1]) - 1))
    spoilt = bytearray(MAGIC + b"".join(packed))
    spoilt[place] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.journal"
        path.write_bytes(spoilt)
        assert list(read_records(path)) == records[: int((ends <= place).sum()) - 1]


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.journal").write_bytes(b"MRLJNL99")
    with pytest.raises(ValueError, match="MRLJNL99"):
        list(read_records(tmp_path / "0.journal"))
    assert OVERHEAD == 24


def shards(version: int, ranks: int) -> list[PackedShard]:
    groups = [group(2 * version + g, [version] * 3, [version] * (2 + g)) for g in range(2)]
    packed = [SerializedGroup.read(serialize_group(one)) for one in groups]
    return cut(Batch(version, packed, None, np.asarray([10], np.int64)), ShardPlan(ranks, 1000, minibatches=2))


SUPERVISED = SupervisedShard(
    share=0.25,
    lr_factor=2.0,
    minibatches=[MiniBatch(1, 3, 2), MiniBatch(1, 0, 0)],
    lengths=[[(3, 1), (2, 1)], []],
    rows=[[7, 3], []],
    token_ids=np.asarray([5, 6, 7, 8, 9], np.int32),
)


def check_equal(found: PackedShard, expected: PackedShard) -> None:
    for field in fields(PackedShard):
        np.testing.assert_equal(_lists(getattr(found, field.name)), _lists(getattr(expected, field.name)))


def _lists(value: Any) -> Any:
    if is_dataclass(value):
        return [_lists(getattr(value, field.name)) for field in fields(value)]
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def test_batches_are_read_as_a_rank_took_them(tmp_path: Path) -> None:
    """Also with supervised rows mixed into the groups, or with rows alone."""
    taken = {version: shards(version, 2) for version in range(5)}
    for of_rank in taken[1]:
        of_rank.supervised = SUPERVISED
    taken[2] = [PackedShard.of_rows(2, SUPERVISED) for _ in range(2)]
    for rank in range(2):
        writer = JournalWriter(tmp_path, rank, 10**6, {"threads": 1})
        for version, of_ranks in taken.items():
            append(writer, of_ranks[rank])
            if version < 4:
                writer.made(version, Made(np.asarray([version, -rank], np.int64), {"loss": 0.1 * version}))
        writer.close()
        reader = JournalReader(tmp_path, rank)
        assert reader.versions == [0, 1, 2, 3, 4] and reader.about["threads"] == 1
        for version, of_ranks in taken.items():
            check_equal(reader.batch(version), of_ranks[rank])
            made = reader.made(version)
            if version == 4:
                assert made is None
                continue
            assert made is not None and made.checksums.tolist() == [version, -rank]
            assert made.figures == {"loss": 0.1 * version}


@settings(max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.lists(st.integers(1, 6), min_size=4, max_size=4))
def test_replayed_batches_replace_those_before_the_resume(starts: list[int], steps: list[int]) -> None:
    """Each run begins at the version that the run before has reached, or at an earlier one."""
    expected: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        reached = 0
        for run, (start, count) in enumerate(zip(starts, steps, strict=False)):
            first = min(start, reached)
            reached = first + count
            writer = JournalWriter(Path(folder), 0, 10**6)
            for version in range(first, reached):
                (shard,) = shards(version, 1)
                shard.tasks = [f"run {run}"] * 2
                append(writer, shard)
            writer.close()
            expected = {version: was for version, was in expected.items() if version < first}
            expected |= dict.fromkeys(range(first, reached), run)
        reader = JournalReader(Path(folder), 0)
        assert {version: int(reader.batch(version).tasks[0][4:]) for version in reader.versions} == expected


def append(writer: JournalWriter, shard: PackedShard) -> None:
    """Append a batch once there is room for it and for its record of results."""
    wait_until(writer._waiting.empty, "room for a batch", every_s=0.001)
    writer.batch(shard)


def test_the_newest_batches_stay_within_the_bound(tmp_path: Path) -> None:
    most = 8000
    writer = JournalWriter(tmp_path, 0, most)
    for version in range(200):
        (shard,) = shards(version, 1)
        append(writer, shard)
    writer.close()
    files = files_of(tmp_path / "rank0")
    assert sum(path.stat().st_size for path in files) <= most and len(files) > FILES // 2
    versions = JournalReader(tmp_path, 0).versions
    assert versions[-1] == 199 and versions == list(range(versions[0], 200)) and len(versions) > 4
    assert writer.lost == 0


def test_a_disk_that_refuses_writes_is_reported_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rank0").write_text("a file in the place of the folder")
    writer = JournalWriter(tmp_path, 0, 10**6)
    for version in range(3):
        append(writer, shards(version, 1)[0])
    writer.close()
    assert writer.lost == 3
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "has gaps from here on" in warning


def has_lost(writer: JournalWriter, records: int) -> bool:
    return writer.lost >= records


def test_a_full_disk_leaves_whole_records_and_no_files_without_any(tmp_path: Path) -> None:
    """Each lost record counts once. When there is room again, the next one follows the last whole one."""
    made = Made(np.arange(50), {"loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    begun, empty = JournalWriter(tmp_path, 0, 10**6), JournalWriter(tmp_path, 1, 10**6)
    begun.made(0, made)
    wait_until(lambda: begun._written, "the first record", every_s=0.001)
    (file,) = files_of(tmp_path / "rank0")
    whole = file.read_bytes()
    try:
        for writer, room in ((begun, len(whole) + 10), (empty, 5)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
            for version in range(1, 21):
                writer.made(version, made)
                lost = partial(has_lost, writer, version)
                wait_until(lost, "the loss of the record", every_s=0.001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for writer in (begun, empty):
        writer.made(21, made)
        writer.close()
        assert writer.lost == 20
    for rank, expected in ((0, [0, 21]), (1, [21])):
        (file,) = files_of(tmp_path / f"rank{rank}")
        assert [record.version for record in read_records(file) if record.kind == "STEP"] == expected
        end = serialize_record(list(read_records(file))[-1])
        assert file.read_bytes().endswith(end) and file.stat().st_size == len(whole) + len(end) * (rank == 0)

"""The journal's files: whatever is truncated or corrupted, records that are read are the ones that were written."""

from __future__ import annotations

import resource
import shutil
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
    Damage,
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
RECORDS = st.lists(
    st.builds(
        Record,
        st.sampled_from(["BTCH", "STEP"]),
        st.integers(-1, 2**40),
        st.binary(max_size=60),
        st.integers(0, 9),
        st.integers(0, 99),
    )
)


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
        assert read(path)[0] == expected
        path.write_bytes(whole[:length] + bytes(data.draw(st.integers(0, 40))))  # a hole that was never filled
        found, _ = read(path)  # zeros may complete a record that ends in zeros
        assert found[: len(expected)] == expected and found == records[: len(found)]


def read(path: Path) -> tuple[list[Record], list[Damage]]:
    """The records of a file, and its damage."""
    items = list(read_records(path))
    return [item for item in items if isinstance(item, Record)], [item for item in items if isinstance(item, Damage)]


@given(RECORDS.filter(bool), st.data())
def test_a_corrupted_byte_costs_its_record_alone_which_is_named(records: list[Record], data: st.DataObject) -> None:
    packed = [serialize_record(record) for record in records]
    ends = np.cumsum([len(MAGIC), *map(len, packed)])
    place = data.draw(st.integers(len(MAGIC), int(ends[-1]) - 1))
    hit = int((ends <= place).sum()) - 1
    spoilt = bytearray(MAGIC + b"".join(packed))
    spoilt[place] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.journal"
        path.write_bytes(spoilt)
        found, (damage,) = read(path)
        assert found == records[:hit] + records[hit + 1 :]
        assert (damage.record, damage.offset, damage.nbytes) == (hit, ends[hit], len(packed[hit]))
        assert damage.at_the_end == (hit == len(records) - 1)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.journal").write_bytes(b"MRLJNL99" + bytes(40))
    with pytest.raises(ValueError, match="MRLJNL99"):
        list(read_records(tmp_path / "0.journal"))
    assert OVERHEAD == 32


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
            writer = JournalWriter(Path(folder), 0, 10**6, {"generation": run})
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
        records, _ = read(file)
        assert [record.version for record in records if record.kind == "STEP"] == expected
        end = serialize_record(records[-1])
        assert file.read_bytes().endswith(end) and file.stat().st_size == len(whole) + len(end) * (rank == 0)


# -- damage: whatever happens to the files, a batch or result that is read is the one that the run used last ----------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a run in three generations, which have made versions 0 to 5, 3 to 7, and 6 to 9, in six files."""
    folder = tmp_path_factory.mktemp("resumed")
    for generation, versions in enumerate((range(6), range(3, 8), range(6, 10))):
        writer = JournalWriter(folder, 0, 16_000, {"generation": generation})
        for version in versions:
            (shard,) = shards(version, 1)
            shard.tasks = [f"generation {generation}"] * 2
            append(writer, shard)
            append_made(writer, version, generation)
        writer.close()
    return folder


def append_made(writer: JournalWriter, version: int, generation: int) -> None:
    wait_until(writer._waiting.empty, "room for a result", every_s=0.001)
    writer.made(version, Made(np.asarray([version, generation]), {}))


LAST = {version: 0 if version < 3 else 1 if version < 6 else 2 for version in range(10)}
"""By version: the generation that made it last."""


def check_read(folder: Path) -> JournalReader:
    """Read the journal, and check that all of its contents are those of the last generation that made them."""
    reader = JournalReader(folder, 0)
    for version in reader.versions:
        shard, made = reader.batch(version), reader.made(version)
        assert (shard.version, shard.tasks[0]) == (version, f"generation {LAST[version]}")
        assert reader.about_batch(version)["generation"] == LAST[version]
        assert made is None or made.checksums.tolist() == [version, LAST[version]]
    return reader


def copied(journal_folder: Path, folder: str) -> tuple[Path, list[Path]]:
    copy = Path(shutil.copytree(journal_folder, Path(folder) / "journal"))
    return copy, files_of(copy / "rank0")


def test_an_undamaged_journal_of_several_generations_is_read_in_full(resumed: Path) -> None:
    reader = check_read(resumed)
    assert reader.versions == list(range(10)) and not reader.damage
    assert [reader.made(version) is not None for version in range(10)] == [True] * 10
    assert len(files_of(resumed / "rank0")) >= 5


def test_copies_and_other_programs_files_are_no_part_of_a_journal(tmp_path: Path, resumed: Path) -> None:
    copy, files = copied(resumed, str(tmp_path))
    for name in (f"{files[0].stem} (1).journal", "._000000.journal"):  # of a file manager, and of macOS
        shutil.copy(files[0], copy / "rank0" / name)
    assert check_read(copy).versions == list(range(10))
    writer = JournalWriter(copy, 0, 10**6, {"generation": 3})
    append(writer, shards(10, 1)[0])
    writer.close()
    assert not writer.lost and JournalReader(copy, 0).versions == list(range(11))


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_never_gives_a_wrong_batch_and_its_file_and_record_are_named(
    resumed: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy, files = copied(resumed, folder)
        file = data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        _, records = bounds(file)
        hit = next((record for start, end, record in records if start <= place < end), None)
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        reader = check_read(copy)
        if hit is not None:
            number, start = next((i, start) for i, (start, _, record) in enumerate(records) if record is hit)
            cut_off = hit is records[-1][2] and 12 <= place - start < 20  # a longer record would be cut off here
            assert len(reader.damage) == 1 or (cut_off and not reader.damage)
            assert all(str(file) in text and f"record {number}, at byte {start}" in text for text in reader.damage)
            lost = set(range(10)) - set(reader.versions)
            if hit.kind == "BTCH" and hit.version not in (3, 6):  # a generation's first batch replaces earlier ones
                assert lost <= {hit.version}


def bounds(file: Path) -> tuple[bytes, list[tuple[int, int, Record]]]:
    """The content of a journal file, and the beginning and end of each record."""
    content, place, found = file.read_bytes(), len(MAGIC), []
    for record in read(file)[0]:
        end = place + len(serialize_record(record))
        found.append((place, end, record))
        place = end
    return content, found


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["truncate", "remove", "swap", "repeat", "remove file", "swap files"]))
def test_missing_and_exchanged_records_and_files_never_give_a_wrong_batch(
    resumed: Path, data: st.DataObject, fault: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy, files = copied(resumed, folder)
        place = data.draw(st.integers(0, len(files) - 1))
        file, other = files[place], files[data.draw(st.integers(0, len(files) - 1))]
        content, records = bounds(file)
        bodies = [content[start:end] for start, end, _ in records]
        i, j = (data.draw(st.integers(0, len(bodies) - 1)) for _ in range(2))
        if fault == "truncate":
            file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        elif fault == "remove":
            del bodies[i]
        elif fault == "swap":
            bodies[i], bodies[j] = bodies[j], bodies[i]
        elif fault == "repeat":
            bodies.insert(j, bodies[i])
        elif fault == "remove file" and file != files[-1]:  # nothing shows that there was a newer one
            file.unlink()
        elif fault == "swap files":
            both = file.read_bytes(), other.read_bytes()
            file.write_bytes(both[1])
            other.write_bytes(both[0])
        if fault in ("remove", "swap", "repeat"):
            file.write_bytes(MAGIC + b"".join(bodies))
        reader = check_read(copy)
        oldest_removed = fault == "remove file" and file == files[0]  # as a journal does that has reached its limit
        at_the_end = file == files[-1] and fault in ("truncate", "remove")  # nothing shows that there was more
        if reader.versions != list(range(10)) and not oldest_removed and not at_the_end:
            assert all(".journal" in text for text in reader.damage) and reader.damage

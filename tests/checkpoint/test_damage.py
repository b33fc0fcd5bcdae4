"""A damaged checkpoint is never read as another one: the file, and the tensors or groups that are hit, are named."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.buffer.actor import read_state, write_state
from monarch_rl.checkpoint.folders import (
    GROUPS,
    MANIFEST,
    RECORDS,
    TRAINER,
    Manifest,
    begin,
    commit,
    newest_whole,
    sum_records,
    verify,
)
from monarch_rl.checkpoint.tensors import StagedTensors, checkpoint_group, read
from monarch_rl.errors import BrokenCheckpoint
from tests.buffer import helpers

TENSORS = {
    "model.embeddings": torch.arange(48, dtype=torch.float32).reshape(8, 6),
    "model.norm": torch.ones(6),
    "optimizer.embeddings.exp_avg": torch.randn(8, 6),
    "optimizer.embeddings.step": torch.tensor(3.0),
}


@pytest.fixture(scope="module")
def process_group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield checkpoint_group(60)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, process_group: dist.ProcessGroup) -> Path:
    """A checkpoint of a trainer rank and a buffer."""
    root = tmp_path_factory.mktemp("checkpoints")
    partial = begin(root, 4)
    staged = StagedTensors(torch.device("cpu"))
    staged.stage(TENSORS)
    files = staged.write(partial / TRAINER, partial, process_group, lambda name, value: None)
    files.append(sum_records(partial, partial / GROUPS, write_state(partial / GROUPS, state())))
    return commit(root, Manifest(4, 4, 0, 1.5, {"metrics.jsonl": 7}, files=files))


def state() -> dict[str, object]:
    core = helpers.core(2, 1)
    return core.state() | {"live": [(7, *range(6), b"seven" * 9), (8, *range(6), None), (9, *range(6), b"nine" * 9)]}


def values_of(folder: Path, group: dist.ProcessGroup) -> tuple[object, ...]:
    manifest = asdict(verify(folder))
    loaded = {name: torch.zeros_like(value) for name, value in TENSORS.items()}
    read(loaded, folder / TRAINER, group)
    return manifest, {name: value.tolist() for name, value in loaded.items()}, read_state(folder / GROUPS)


def hit(path: Path, start: int, end: int) -> list[str]:
    """The records of a file with a byte in ``[start, end)``; every file of tensors or groups has its records."""
    if path.suffix != ".distcp" and path.name != GROUPS:
        return []
    records = json.loads(path.with_name(path.name + RECORDS).read_text())["records"]
    first = [0, *(last for _, last, _ in records)]
    assert first[-1] == path.stat().st_size
    return [name for (name, last, _), begins in zip(records, first, strict=False) if begins < end and start < last]


@given(st.data())
def test_whatever_is_damaged_is_named_or_the_values_are_the_saved_ones(
    saved: Path, process_group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("copies") / saved.name
    shutil.copytree(saved, folder)
    path = data.draw(st.sampled_from(sorted(file for file in folder.rglob("*") if file.is_file())))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "swap"]))
    if how == "flip":
        spoilt, end = bytearray(content), place + 1
        spoilt[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        spoilt, end = bytearray(content[:place]), len(content)
    else:
        spoilt, end = bytearray(content[place:] + content[:place]), len(content)
    damaged = hit(path, place, end) if how != "swap" else []
    path.write_bytes(spoilt)
    try:
        assert values_of(folder, process_group) == values_of(saved, process_group)
        # A manifest may differ in its spaces, and what only locates damage costs no checkpoint.
        assert path.name == MANIFEST or path.suffix == RECORDS or spoilt == content
    except BrokenCheckpoint as error:
        assert str(path) in str(error)
        assert all(re.search(rf"{re.escape(name)} at byte \d+", str(error)) for name in damaged[:3])
    finally:
        shutil.rmtree(folder.parent)


def test_each_damaged_group_and_tensor_is_named_with_its_offset_and_the_checkpoint_used_instead(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for version, name in itertools.product((4, 6), (GROUPS, f"{TRAINER}/__0_0.distcp")):
        shutil.rmtree(tmp_path, ignore_errors=True)
        for step in (4, 6):
            shutil.copytree(saved, tmp_path / f"step-{step:06d}")
        manifest = tmp_path / "step-000006" / MANIFEST
        values = json.loads(manifest.read_text()) | {"version": 6}
        del values["crc32"]  # as of an earlier version
        manifest.write_text(json.dumps(values))
        path = tmp_path / f"step-{version:06d}" / name
        content = bytearray(path.read_bytes())
        records = json.loads(path.with_name(path.name + RECORDS).read_text())["records"]
        for _, end, _ in (records[-1], records[-2]):
            content[end - 1] ^= 1
        path.write_bytes(content)
        expected = [f"{records[place][0]} at byte {records[place - 1][1]}" for place in (-2, -1)]
        with pytest.raises(BrokenCheckpoint, match=f"{path} .*2 of its {len(records)} .*{', '.join(expected)}"):
            verify(path.parents[len(Path(name).parts) - 1])
        caplog.clear()
        used, _ = newest_whole(tmp_path)
        assert used.name == f"step-{10 - version:06d}"
        assert (version == 4) or re.search(f"{expected[0]}.*{used.name}", caplog.text)


def test_a_checkpoint_of_an_earlier_version_is_verified_by_its_files(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns(f"*{RECORDS}"))
    manifest = folder / MANIFEST
    values = json.loads(manifest.read_text())
    del values["crc32"]
    manifest.write_text(json.dumps(values))
    assert verify(folder).version == 4
    (folder / GROUPS).write_bytes((folder / GROUPS).read_bytes()[::-1])
    for other in (None, "{}", "[]", '{"records": [["the header"]]}', '{"records": 1}'):
        if other is not None:  # without a checksum
            (folder / f"{GROUPS}{RECORDS}").write_text(other)
        with pytest.raises(BrokenCheckpoint, match=f"{folder / GROUPS} is damaged"):
            verify(folder)

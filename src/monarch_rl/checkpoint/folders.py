"""Checkpoints as folders: each appears complete or not at all, with a manifest that has the checksum of every file.

    checkpoints/step-000120/manifest.json      version, generation, positions in the run's files, files with checksums
                            trainer/           torch.distributed.checkpoint: each trainer rank's shards
                            buffer.groups      complete groups, and which others had begun
    checkpoints/latest -> step-000120, best -> step-000100

All is written to ``.step-000120.partial`` and flushed, then renamed. Whoever is killed meanwhile, and whatever the disk
refuses, a folder without a dot is whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

logger = logging.getLogger("monarch_rl")

FORMAT = 3
MANIFEST = "manifest.json"
TRAINER = "trainer"
"""The folder of the trainer ranks' shards."""
GROUPS = "buffer.groups"
"""The file of the buffer."""
LATEST, BEST = "latest", "best"
"""Links to checkpoints."""
_NAME = re.compile(r"step-(\d+)$")
_CHUNK = 1 << 22


class BrokenCheckpoint(ValueError):
    """A checkpoint cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file of a checkpoint, by its path in the checkpoint's folder."""

    path: str
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What an evaluation found: the value of the metric that decides which version is the best."""

    metric: str
    value: float
    version: int
    """The newest version that drew a token of it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of a checkpoint without reading its tensors."""

    version: int
    """Batches trained."""
    optimizer_steps: int
    generation: int
    """How often the run had been resumed when it was made."""
    seconds: float
    """Of the run so far."""
    positions: dict[str, int]
    """Bytes of the run's own files, by path in its folder: a resumed run goes on from there."""
    counters: dict[str, Any] = field(default_factory=dict)
    """What the metrics count over the run, and no actor keeps."""
    measured: Measurement | None = None
    """What an evaluation found that counts for it: of its own version, or of an earlier one that has no checkpoint."""
    best: Measurement | None = None
    """The best result of an evaluation so far, as ``best.json`` has it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the run that made it."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of all that was installed where the controller ran."""
    ranks: int = 1
    """Trainer ranks that wrote it; any number may read it."""
    files: list[FileSum] = field(default_factory=list)
    format: int = FORMAT

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def folder_of(root: Path, version: int) -> Path:
    """Of the checkpoint of a version; ``root`` is the folder of all."""
    return root / f"step-{version:06d}"


def partial_of(root: Path, version: int) -> Path:
    """Where it is written before it is complete."""
    return root / f".step-{version:06d}.partial"


def file_sum(root: Path, path: Path) -> FileSum:
    """Of a file below ``root``, as the disk gives it back."""
    crc = nbytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc, nbytes = zlib.crc32(chunk, crc), nbytes + len(chunk)
    return FileSum(path.relative_to(root).as_posix(), nbytes, crc)


def begin(root: Path, version: int) -> Path:
    """Make the folder to write to, without what a process that was killed has left of others. Raises OSError."""
    partial = partial_of(root, version)
    for left in root.glob(".step-*.partial"):
        # What cannot be removed of others, such as what an NFS client still has open, costs no checkpoint.
        shutil.rmtree(left, ignore_errors=left != partial)
    (partial / TRAINER).mkdir(parents=True)
    return partial


def discard(root: Path, version: int) -> None:
    """Remove what was written of a checkpoint that will not be complete. Renamed first: a thread that a stalled disk
    holds in :func:`commit` then has nothing to name, until the same version is begun again. Raises OSError."""
    gone = root / f".{folder_of(root, version).name}.gone-{time.time_ns()}.partial"
    with suppress(FileNotFoundError):
        partial_of(root, version).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def commit(root: Path, manifest: Manifest) -> Path:
    """Give a checkpoint its name, once all its files are written and flushed. Raises OSError."""
    partial, folder = partial_of(root, manifest.version), folder_of(root, manifest.version)
    _write_manifest(partial, manifest)
    flush(partial / TRAINER)
    flush(partial)
    replaced = root / f".{folder.name}.replaced.partial"
    if folder.exists():  # of the same version, before the run was resumed
        folder.rename(replaced)
    partial.rename(folder)
    flush(root)
    shutil.rmtree(replaced, ignore_errors=True)
    return folder


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that whoever reads it, or loses power, sees the old one or the new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def flush(folder: Path) -> None:
    """Have the disk hold a folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, folder: Path) -> None:
    """Let ``link`` name a checkpoint beside it, at once."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.rename(link)


def complete(root: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by version, oldest first."""
    found = {int(match[1]): path for path in root.glob("step-*") if (match := _NAME.match(path.name))}
    return dict(sorted(found.items()))


def read_manifest(folder: Path) -> Manifest:
    """Raises BrokenCheckpoint."""
    try:
        values = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{folder / MANIFEST} cannot be read ({error})") from error
    if values.get("format") != FORMAT:
        raise BrokenCheckpoint(f"{folder / MANIFEST} has format {values.get('format')}; this program reads {FORMAT}")
    for name in ("measured", "best"):
        values[name] = Measurement(**values[name]) if values[name] else None
    return Manifest(**values | {"files": [FileSum(**file) for file in values["files"]]})


@contextmanager
def held(folder: Path, links: Path) -> Iterator[None]:
    """For the block, hold the files of a checkpoint open, with links to them in a new folder ``links``: there this
    process and others of its user can read them, also when its run removes the checkpoint meanwhile.

    Raises:
        BrokenCheckpoint: a file is gone, or cannot be read.
    """
    with ExitStack() as files:
        for name in (MANIFEST, *(file.path for file in read_manifest(folder).files)):
            try:
                file = files.enter_context((folder / name).open("rb"))
            except (FileNotFoundError, PermissionError) as error:
                raise BrokenCheckpoint(f"{folder / name} cannot be read ({error})") from error
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            (links / name).symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        yield


def verify(folder: Path, links: Path | None = None) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest. Raises BrokenCheckpoint.

    Args:
        links: where its files are :func:`held`.
    """
    there = links or folder
    manifest = read_manifest(there)
    for expected in manifest.files:
        try:
            found = file_sum(there, there / expected.path)
        except OSError as error:
            raise BrokenCheckpoint(f"{folder / expected.path} cannot be read ({error})") from error
        if found.nbytes != expected.nbytes:
            raise BrokenCheckpoint(f"{folder / expected.path} has {found.nbytes} bytes, not {expected.nbytes}")
        if found.crc32 != expected.crc32:
            raise BrokenCheckpoint(f"{folder / expected.path} is not what was written: its checksum differs")
    return manifest


def newest_whole(root: Path) -> tuple[Path, Manifest]:
    """The newest checkpoint of which every file is as it was written. Says which newer ones are not.

    Raises:
        BrokenCheckpoint: there is none.
    """
    broken: list[str] = []
    for folder in reversed(complete(root).values()):
        try:
            return folder, verify(folder)
        except BrokenCheckpoint as error:
            logger.error("%s: an earlier checkpoint is taken", error)
            broken.append(str(error))
    raise BrokenCheckpoint("; ".join(broken) or f"{root} has no checkpoint")


def measure(root: Path, found: Measurement, best: bool) -> bool:
    """Note what an evaluation found in the checkpoint of its version, or in the first one after it; returns whether it
    counts there. Raises OSError, BrokenCheckpoint.

    Args:
        best: it is the best result so far.
    """
    folder = next((folder for version, folder in complete(root).items() if version >= found.version), None)
    if folder is None:
        return False
    manifest = read_manifest(folder)
    if closer(manifest.measured, found) != found:
        return False
    _write_manifest(folder, replace(manifest, measured=found, best=found if best else manifest.best))
    return True


def closer(known: Measurement | None, found: Measurement) -> Measurement:
    """Which of two counts for a checkpoint that is no older: that of the newer version, and of one version the larger
    value, as for ``best.json``. Those of another metric do not count any more."""
    if known is None or known.metric != found.metric:
        return found
    return max(found, known, key=lambda measured: (measured.version, measured.value))


def keep(root: Path, made: int, newest: int, best_by: str = "") -> None:
    """Let ``latest`` name the checkpoint of version ``made``, which is whole, and remove earlier ones. Raises OSError.

    All go but the ``newest``, and the best one. Later ones stay, since one may just have got its name, but for those of
    an earlier resume: the run went back behind them.

    Args:
        best_by: the metric by which the best one stays, which ``best`` then names; empty keeps none.
    """
    folders = complete(root)
    point(root / LATEST, folders[made])
    known = {version: folder for version, folder in folders.items() if version <= made}
    kept = set(list(known)[-newest:])
    best = _best(known.items(), best_by) if best_by else None
    if best is not None:
        kept.add(best)
        point(root / BEST, known[best])
    else:
        (root / BEST).unlink(missing_ok=True)
    for version in known.keys() - kept:
        with suppress(OSError):
            _remove(root, version)
    generation = read_manifest(folders[made]).generation
    for version in folders.keys() - known.keys():
        with suppress(OSError, BrokenCheckpoint):
            if read_manifest(folders[version]).generation < generation:
                _remove(root, version)


def go_back(root: Path, version: int) -> None:
    """Remove the checkpoints of later versions, from which no run may go on any more: it goes on from ``version``, and
    makes others. What was damaged may be read again when the disk is well. Raises OSError."""
    folders = complete(root)
    point(root / LATEST, folders[version])
    for later in folders:
        if later > version:
            _remove(root, later)
    if not (root / BEST).exists():
        (root / BEST).unlink(missing_ok=True)


def _remove(root: Path, version: int) -> None:
    """Renamed first: half of a checkpoint must not have a name that is taken for a whole one."""
    gone = partial_of(root, version)
    folder_of(root, version).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _best(folders: Iterable[tuple[int, Path]], metric: str) -> int | None:
    """The version of which the metric is largest, and of several the oldest; None if none was measured by it."""
    values = dict(_values(folders, metric))
    return max(values, key=lambda version: (values[version], -version), default=None)


def _values(folders: Iterable[tuple[int, Path]], metric: str) -> Iterator[tuple[int, float]]:
    for version, folder in folders:
        with suppress(BrokenCheckpoint):
            measured = read_manifest(folder).measured
            if measured is not None and measured.metric == metric:
                yield version, measured.value


# -- folders of a model that are replaced as a whole ------------------------------------------------------------------
# Whatever ends the process that does it, the name has the old folder or the new one, at the latest when the next
# process asks (:func:`finish_replacing`).


def partial_folder(folder: Path) -> Path:
    """Where a folder is written before it is complete: on the same disk, under a name that nobody takes for it."""
    return folder.with_name(f".{folder.name}.partial")


def _old_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def replace_folder(folder: Path) -> None:
    """Give what is complete in :func:`partial_folder` its name; one that has it is removed after that. Raises OSError.

    All of it is flushed first: a name must not be on the disk before what it names.
    """
    partial, old = partial_folder(folder), _old_folder(folder)
    for file in partial.iterdir():
        _flush_file(file)
    flush(partial)
    finish_replacing(folder)
    if partial.exists():  # else the line above has named it
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def finish_replacing(folder: Path) -> None:
    """Do what :func:`replace_folder` of a process that was killed has left, before anything is written to
    :func:`partial_folder` again. Raises OSError."""
    partial, old = partial_folder(folder), _old_folder(folder)
    if not old.exists():
        return
    if not folder.exists():  # killed between two renames, of which the first one comes when the new folder is complete
        (partial if partial.exists() else old).rename(folder)
        flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def finish_all(parent: Path) -> None:
    """As :func:`finish_replacing`, for all folders in one. Raises OSError."""
    for old in parent.glob(".*.old"):
        finish_replacing(parent / old.name.removeprefix(".").removesuffix(".old"))


def _flush_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- what trainer ranks report ----------------------------------------------------------------------------------------
# Here, not beside what writes tensors, whose imports would take a third of the controller's start.


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy that is ready to be written."""

    version: int
    optimizer_steps: int
    seconds: float = 0.0
    """That the copy took."""

"""Checkpoint folders. A folder appears complete or not at all, with a manifest that has the checksum of every file.

    checkpoints/step-000120/manifest.json      version, generation, positions in the run's files, files with checksums
                            trainer/           torch.distributed.checkpoint: each trainer rank's shards
                            buffer.groups      complete groups, and which other groups were in progress
                            *.records          where the tensors or groups of a file end, with checksums up to there
    checkpoints/latest -> step-000120, best -> step-000100

Everything is written to ``.step-000120.partial`` and flushed, then renamed. So a folder without a leading dot is
complete, whichever process is killed and whichever write fails.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from monarch_rl.errors import BrokenCheckpoint, SettingsError, written_by_another_version
from monarch_rl.observe.lines import read_object
from monarch_rl.runtime.restart import CHECKPOINT_NAME

logger = logging.getLogger("monarch_rl")

FORMAT = 3
MANIFEST = "manifest.json"
CHECKSUM = "crc32"
"""Key of the checksum of a JSON file's other values."""
TRAINER = "trainer"
"""Folder of the trainer ranks' shards."""
RECORDS = ".records"
"""Ending of the file that locates damage in the file beside it (:func:`sum_records`). It is not in the manifest,
because a checkpoint is as good without it."""
GROUPS = "buffer.groups"
"""File of the buffer's state."""
LATEST, BEST = "latest", "best"
"""Symbolic links to checkpoints."""
NAMED = 3
"""Damaged records of a file, or changed layers, that a message names."""
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and checksum of a file of a checkpoint."""

    path: str
    """Path relative to the checkpoint's folder."""
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of an evaluation: the value of the metric that decides which version is the best."""

    metric: str
    value: float
    version: int
    """Newest version that sampled a token of the evaluation."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a checkpoint, readable without its tensors."""

    version: int
    """Steps trained, including supervised ones."""
    optimizer_steps: int
    generation: int
    """How often the run had been resumed when the checkpoint was made."""
    seconds: float
    """Duration of the run so far, in seconds."""
    positions: dict[str, int]
    """Bytes of the run's own files, by path in the run's folder: a resumed run truncates them to these sizes."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Counters of metrics over the whole run that no actor holds."""
    measured: Measurement | None = None
    """Evaluation result that counts for this checkpoint: of its version, or of an earlier one without a checkpoint."""
    best: Measurement | None = None
    """Best evaluation result so far, as in ``best.json``."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the run that made it."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of all packages installed where the controller ran."""
    warm_up_steps: int | None = None
    """Supervised steps before the first step of reinforcement learning, which is step 1 of the run. None: written by an
    earlier version, in which supervised steps counted as steps of the run and of the learning rate's schedule."""
    base_weights: dict[str, int] = field(default_factory=dict)
    """With LoRA, checksums of the base weights, which the checkpoint needs but does not contain, by layer."""
    ranks: int = 1
    """Number of trainer ranks that wrote it; any number may read it."""
    files: list[FileSum] = field(default_factory=list)
    format: int = FORMAT

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def check_base_weights(self, found: Mapping[str, int], checkpoint: Path) -> None:
        """Raise SettingsError if LoRA's base weights are no longer those of the checkpoint.

        Args:
            found: checksums as in :attr:`base_weights`. Those that only one of both has, as of another dtype, are
                ignored.
            checkpoint: folder of the checkpoint, for the message.
        """
        saved = self.base_weights
        if changed := [name for name, checksum in saved.items() if found.get(name, checksum) != checksum]:
            raise SettingsError(
                f"the weights in {self.settings['model']} have changed or are damaged since {checkpoint} was written, "
                f"whose LoRA weights belong to the old ones: {', '.join(changed[:NAMED])}"
                f"{f' and {len(changed) - NAMED} more layers' if len(changed) > NAMED else ''}. Put the old files back"
            )


def folder_of(root: Path, version: int) -> Path:
    """Folder of the checkpoint of a version; ``root``: the folder of all checkpoints."""
    return root / f"step-{version:06d}"


def partial_of(root: Path, version: int) -> Path:
    """Folder to which the checkpoint of a version is written before it is complete."""
    return partial_folder(folder_of(root, version))


def file_sum(root: Path, path: Path) -> FileSum:
    """Size and checksum of a file below ``root``, read back from disk."""
    with path.open("rb") as file:
        nbytes, crc = _sum_up_to(file, None, 0)
    return FileSum(path.relative_to(root).as_posix(), nbytes, crc)


def sum_records(root: Path, path: Path, ends: Iterable[tuple[str, int]]) -> FileSum:
    """As :func:`file_sum`, for a file of named records. Writes a file beside it, with which :func:`verify` names the
    damaged ones. Reads the file once. Raises OSError.

    Args:
        root: folder to which the returned path is relative.
        path: a file below it.
        ends: name of each record, and the position in bytes behind it, in the order of the file.
    """
    records, nbytes, crc = [], 0, 0
    with path.open("rb") as file:
        for name, end in ends:
            read, crc = _sum_up_to(file, end - nbytes, crc)
            nbytes += read
            records.append((name, nbytes, crc))
        read, crc = _sum_up_to(file, None, crc)
    # The checksums are of all bytes up to the record's end: so the last one is the file's, and nothing is summed twice.
    write_checked(path.with_name(path.name + RECORDS), {"records": records})
    return FileSum(path.relative_to(root).as_posix(), nbytes + read, crc)


def _sum_up_to(file: BinaryIO, nbytes: int | None, crc: int) -> tuple[int, int]:
    """Read at most ``nbytes`` (None: all) from where the file is; returns how many there were, and ``crc`` continued
    with them."""
    read = 0
    while chunk := file.read(_CHUNK if nbytes is None else min(_CHUNK, nbytes - read)):
        read, crc = read + len(chunk), zlib.crc32(chunk, crc)
    return read, crc


def _damaged_records(path: Path, beside: Path) -> str:
    """Names the damaged records of a file; empty if ``beside`` does not tell, as in checkpoints of earlier versions."""
    damaged, start, before, count = list[str](), 0, 0, 0
    try:
        with path.open("rb") as file:
            for name, end, expected in read_checked(beside)["records"]:
                read, crc = _sum_up_to(file, end - start, before)
                if read < end - start:
                    damaged.append(f"{name} at byte {start} (cut off)")
                elif crc != expected:
                    damaged.append(f"{name} at byte {start}")
                start, before, count = end, expected, count + 1
    except (OSError, ValueError, LookupError, TypeError):  # it is damaged, or not such a file
        return ""
    if not damaged:
        return ""
    more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
    return f" ({len(damaged)} of its {count} records: {', '.join(damaged[:NAMED])}{more})"


def begin(root: Path, version: int) -> Path:
    """Create the folder of a new checkpoint, and remove partial checkpoints of killed processes. Raises OSError."""
    partial = partial_of(root, version)
    for leftover in root.glob(".step-*.partial"):
        # Failing to remove others, such as files that an NFS client still has open, must not prevent a checkpoint.
        shutil.rmtree(leftover, ignore_errors=leftover != partial)
    (partial / TRAINER).mkdir(parents=True)
    return partial


def discard(root: Path, version: int) -> None:
    """Remove the partial folder of a checkpoint that will not be completed. Raises OSError."""
    # Renamed first: a thread stuck in :func:`commit` on a stalled disk then finds no folder to rename, until the same
    # version is begun again.
    gone = root / f".{folder_of(root, version).name}.gone-{time.time_ns()}.partial"
    with suppress(FileNotFoundError):
        partial_of(root, version).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def commit(root: Path, manifest: Manifest) -> Path:
    """Give a checkpoint its final name, after all its files are written and flushed. Raises OSError."""
    partial, folder = partial_of(root, manifest.version), folder_of(root, manifest.version)
    write_checked(partial / MANIFEST, asdict(manifest))
    flush(partial / TRAINER)
    flush(partial)
    replaced = root / f".{folder.name}.replaced.partial"
    if folder.exists():  # a checkpoint of the same version from before the run was resumed
        folder.rename(replaced)
    partial.rename(folder)
    flush(root)
    shutil.rmtree(replaced, ignore_errors=True)
    return folder


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers, also after a power failure, see the old or the new content. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def write_checked(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of itself, atomically. Raises OSError."""
    values = json.loads(json.dumps(values))  # as it is read back
    write_whole(path, json.dumps({CHECKSUM: _checksum(values), **values}, indent=1) + "\n")


def read_checked(path: Path) -> dict[str, Any]:
    """The JSON object that :func:`write_checked` wrote, without its checksum. Files of earlier versions have none.

    Raises:
        SettingsError: the file cannot be read or is damaged; names it.
    """
    values = read_object(path)
    expected = values.pop(CHECKSUM, None)
    if expected is not None and expected != _checksum(values):
        raise SettingsError(
            f"{path} is damaged: its values do not have its checksum. If you edited it, remove its key {CHECKSUM}"
        )
    return values


def _checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, folder: Path) -> None:
    """Point ``link`` at a checkpoint in the same folder, atomically."""
    _set_copy_aside(link)
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.rename(link)


def _unlink(link: Path) -> None:
    _set_copy_aside(link)
    link.unlink(missing_ok=True)


def _set_copy_aside(link: Path) -> None:
    """Rename a folder in the place of ``link``, as ``scp -r`` and object stores make one of a symbolic link."""
    if link.is_symlink() or not link.is_dir():
        return
    aside = link.with_name(f"{link.name}-copy-{time.time_ns()}")
    link.rename(aside)
    logger.warning("%s was a folder, not a link: it is a copy of a checkpoint, is now %s, and is not used", link, aside)


def complete(root: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, by version, oldest first."""
    found = {int(match[1]): path for path in root.glob("step-*") if (match := CHECKPOINT_NAME.match(path.name))}
    return dict(sorted(found.items()))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises BrokenCheckpoint."""
    try:
        values = read_checked(folder / MANIFEST)
    except SettingsError as error:
        raise BrokenCheckpoint(str(error)) from error
    if values.get("format") != FORMAT:
        raise BrokenCheckpoint(
            f"{folder / MANIFEST} has format {values.get('format')}, but this program reads format {FORMAT}"
        )
    unknown = values.keys() - Manifest.__dataclass_fields__.keys()
    if unknown:  # fields with a default are added without another format
        writer = values.get("packages", {}).get("monarch_rl", "")
        reason = f"unknown fields: {', '.join(sorted(unknown))}"
        raise BrokenCheckpoint(written_by_another_version(str(folder / MANIFEST), writer, reason))
    try:
        for name in ("measured", "best"):
            values[name] = Measurement(**values[name]) if values.get(name) else None
        return Manifest(**values | {"files": [FileSum(**file) for file in values["files"]]})
    except (TypeError, KeyError) as error:  # of an earlier version, without a checksum
        raise BrokenCheckpoint(f"{folder / MANIFEST} is damaged ({error})") from error


@contextmanager
def held(folder: Path, links: Path) -> Iterator[None]:
    """Context manager that holds the files of a checkpoint open, with links to them in a new folder ``links``. This
    process and others of the same user can read them there, even if the run removes the checkpoint meanwhile.

    Raises:
        BrokenCheckpoint: a file is gone, or cannot be read.
    """
    with ExitStack() as files:
        for name in (MANIFEST, *(file.path for file in read_manifest(folder).files)):
            try:
                file = files.enter_context((folder / name).open("rb"))
            except OSError as error:
                raise BrokenCheckpoint(f"{folder / name} cannot be read ({error})") from error
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            (links / name).symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        yield


def verify(folder: Path, links: Path | None = None) -> Manifest:
    """Compare every file of a checkpoint with the manifest. Raises BrokenCheckpoint.

    Args:
        folder: folder of the checkpoint, named in errors.
        links: folder with links from :func:`held`, from which to read in place of ``folder``.
    """
    source = links or folder
    manifest = read_manifest(source)
    name = CHECKPOINT_NAME.match(folder.name)
    if name and int(name[1]) != manifest.version:
        raise BrokenCheckpoint(f"{folder} was renamed: its manifest is that of step {manifest.version}")
    for expected in manifest.files:
        try:
            found = file_sum(source, source / expected.path)
        except OSError as error:
            raise BrokenCheckpoint(f"{folder / expected.path} cannot be read ({error})") from error
        if found.nbytes != expected.nbytes:
            problem = f"has {found.nbytes} bytes, expected {expected.nbytes}"
        elif found.crc32 != expected.crc32:
            problem = "is damaged: its checksum differs from the manifest's"
        else:
            continue
        records = _damaged_records(source / expected.path, folder / f"{expected.path}{RECORDS}")
        raise BrokenCheckpoint(f"{folder / expected.path} {problem}{records}")
    return manifest


def newest_whole(root: Path) -> tuple[Path, Manifest]:
    """The newest checkpoint that passes :func:`verify`, with its manifest. Logs an error for each newer one, and which
    one is used instead.

    Raises:
        BrokenCheckpoint: there is none.
    """
    broken: list[str] = []
    for folder in reversed(complete(root).values()):
        try:
            manifest = verify(folder)
        except BrokenCheckpoint as error:
            broken.append(str(error))
            continue
        for problem in broken:
            logger.error("%s. Using %s instead, which is intact: the steps after it are repeated", problem, folder.name)
        return folder, manifest
    raise BrokenCheckpoint("; ".join(broken) or f"{root} has no checkpoint")


def measure(root: Path, found: Measurement, best: bool) -> bool:
    """Record an evaluation result in the checkpoint of its version, or in the first one after it. Returns whether the
    result counts for that checkpoint. Raises OSError, BrokenCheckpoint.

    Args:
        root: folder of all checkpoints.
        found: the result.
        best: whether it is the best result so far.
    """
    folder = next((folder for version, folder in complete(root).items() if version >= found.version), None)
    if folder is None:
        return False
    manifest = read_manifest(folder)
    if closer(manifest.measured, found) != found:
        return False
    measured = replace(manifest, measured=found, best=found if best else manifest.best)
    write_checked(folder / MANIFEST, asdict(measured))
    return True


def closer(known: Measurement | None, found: Measurement) -> Measurement:
    """Which of two results counts for a checkpoint that is at least as new as both: the one of the newer version, or,
    if both are of the same version, the larger value, as for ``best.json``. ``found`` replaces a result of another
    metric."""
    if known is None or known.metric != found.metric:
        return found
    return max(found, known, key=lambda measured: (measured.version, measured.value))


def keep(root: Path, made: int, newest: int, best_by: str = "") -> None:
    """Point ``latest`` at the complete checkpoint of version ``made``, and remove old checkpoints. Raises OSError.

    Args:
        root: folder of all checkpoints.
        made: version of the checkpoint that was just made.
        newest: number of newest checkpoints up to ``made`` to keep.
        best_by: metric by which the best checkpoint is kept as well, to which ``best`` then points; empty keeps none.
    """
    folders = complete(root)
    point(root / LATEST, folders[made])
    up_to_made = {version: folder for version, folder in folders.items() if version <= made}
    kept = set(list(up_to_made)[-newest:])
    best = _best(up_to_made.items(), best_by) if best_by else None
    if best is not None:
        kept.add(best)
        point(root / BEST, up_to_made[best])
    else:
        _unlink(root / BEST)
    for version in up_to_made.keys() - kept:
        with suppress(OSError):
            _remove(root, version)
    # A later checkpoint stays, because it may just have been completed, unless it is from an earlier generation: then
    # the run resumed from a version before it.
    generation = read_manifest(folders[made]).generation
    for version in folders.keys() - up_to_made.keys():
        with suppress(OSError, BrokenCheckpoint):
            if read_manifest(folders[version]).generation < generation:
                _remove(root, version)


def go_back(root: Path, version: int) -> None:
    """Point ``latest`` at ``version``, from which the run resumes, and remove checkpoints of later versions. Raises
    OSError."""
    # The resumed run makes different versions with these numbers. A damaged later checkpoint is removed as well: it may
    # become readable again when the disk recovers, and no run may resume from it.
    folders = complete(root)
    point(root / LATEST, folders[version])
    for later in folders:
        if later > version:
            _remove(root, later)
    if not (root / BEST).exists():
        (root / BEST).unlink(missing_ok=True)


def _remove(root: Path, version: int) -> None:
    # Renamed first: a half-removed checkpoint must not have the name of a complete one.
    gone = partial_of(root, version)
    folder_of(root, version).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _best(folders: Iterable[tuple[int, Path]], metric: str) -> int | None:
    """The version with the largest value of the metric, on a tie the oldest; None if none was evaluated by it."""
    values = dict(_values(folders, metric))
    return max(values, key=lambda version: (values[version], -version), default=None)


def _values(folders: Iterable[tuple[int, Path]], metric: str) -> Iterator[tuple[int, float]]:
    for version, folder in folders:
        with suppress(BrokenCheckpoint):
            measured = read_manifest(folder).measured
            if measured is not None and measured.metric == metric:
                yield version, measured.value


# -- model folders, replaced atomically -------------------------------------------------------------------------------
# If the replacing process is killed, the name refers to the old or to the new folder, at the latest after the next
# process has called :func:`finish_replacing`.


def partial_folder(folder: Path) -> Path:
    """Where a folder is written before it is complete: on the same disk, under a hidden name."""
    return folder.with_name(f".{folder.name}.partial")


def _old_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def replace_folder(folder: Path) -> None:
    """Rename the complete :func:`partial_folder` to ``folder``, and remove the previous folder. Raises OSError."""
    partial, old = partial_folder(folder), _old_folder(folder)
    for file in partial.iterdir():  # flushed first: the name must not be on disk before the content
        flush(file)
    flush(partial)
    finish_replacing(folder)
    if partial.exists():  # otherwise finish_replacing() has renamed it
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def finish_replacing(folder: Path) -> None:
    """Finish a :func:`replace_folder` whose process was killed. Must be called before anything is written to
    :func:`partial_folder` again. Raises OSError."""
    partial, old = partial_folder(folder), _old_folder(folder)
    if not old.exists():
        return
    if not folder.exists():  # killed between the two renames, the first of which happens after the new one is complete
        (partial if partial.exists() else old).rename(folder)
        flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def finish_all(parent: Path) -> None:
    """:func:`finish_replacing` for all folders in ``parent``. Raises OSError."""
    for old in parent.glob(".*.old"):
        finish_replacing(parent / old.name.removeprefix(".").removesuffix(".old"))


# -- reports of trainer ranks -----------------------------------------------------------------------------------------
# Defined here and not in ``tensors.py``, whose imports would take a third of the controller's start.


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged copy of a rank's tensors that is ready to be written."""

    version: int
    optimizer_steps: int
    seconds: float = 0.0
    """Duration of the copy, in seconds."""

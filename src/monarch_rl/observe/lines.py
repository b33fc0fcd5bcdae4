"""Line files that a run appends to, and how its JSON files are read back. If the disk is full or read-only, lines are
lost but the run continues."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from monarch_rl.errors import SettingsError

logger = logging.getLogger("monarch_rl")


class LineFile:
    """Appends lines to a file. A line is written whole or not at all, even if the disk is full or the process is
    killed.

    Lines that cannot be written are counted, and logged once until the disk accepts lines again. Only one thread may
    append.

    Args:
        path: a file in the run's folder, created with its first line. An incomplete line at its end is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._could_not = self._not_tried = 0
        """Lines that could not be written, and lines reported by :meth:`lose`, perhaps from another thread."""
        self._descriptor: int | None = None
        self._size = 0
        self._refused = False

    @property
    def lost(self) -> int:
        """Number of lines that are not in the file."""
        return self._could_not + self._not_tried

    def append(self, *lines: str) -> bool:
        """Append lines, given without line ends: all of them or none. Returns whether they were written."""
        if not lines:
            return True
        try:
            self._write("".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self._note_refused(error, len(lines))
            return False
        if self._refused:
            logger.warning("%s can be written again; %d lines are lost", self.path, self.lost)
            self._refused = False
        return True

    def lose(self, lines: int, reason: str) -> None:
        """Count lines that are dropped without an attempt to write them; logged the first time."""
        if not self._not_tried:
            logger.error("%s: lines are left out, and counted, while %s", self.path, reason)
        self._not_tried += lines

    def position(self) -> int:
        """Size of the file in bytes, after syncing it to disk. Raises OSError."""
        if self._descriptor is not None or self.path.exists():  # not open yet: it has lines from before the resume
            os.fsync(self._open())
        return self._size

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, data: bytes) -> None:
        descriptor = self._open()
        written = 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            try:
                os.ftruncate(descriptor, self._size)
            except OSError:
                self.close()  # an incomplete line may be left: opening the file removes it
            raise
        self._size += written

    def _open(self) -> int:
        if self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._size = _end_of_lines(descriptor)
            self._descriptor = descriptor
        return self._descriptor

    def _note_refused(self, error: OSError, lines: int) -> None:
        self._could_not += lines
        if not self._refused:
            logger.error("%s cannot be written (%s): the run continues without it", self.path, error.strerror or error)
        self._refused = True


def truncate(path: Path, nbytes: int) -> None:
    """Truncate a file to its size at a checkpoint, ``nbytes``. A file that is shorter or missing is left as it is.

    Raises OSError.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        size = 0
    if size > nbytes:
        os.truncate(path, nbytes)
    elif size < nbytes:
        logger.warning(
            "%s has %d bytes, but had %d at the checkpoint: lines at its end are missing, and new ones follow",
            path,
            size,
            nbytes,
        )
        return
    if nbytes and not _ends_a_line(path, nbytes):
        logger.warning(
            "%s is damaged: no line ends at byte %d, where one did at the checkpoint; what follows the line before is "
            "removed",
            path,
            nbytes,
        )


def _ends_a_line(path: Path, nbytes: int) -> bool:
    with path.open("rb") as file:
        file.seek(nbytes - 1)
        return file.read(1) == b"\n"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run.

    Raises:
        SettingsError: it cannot be read; names the file, and the place of the damage.
    """
    try:
        value = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is damaged ({error})") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} is damaged: it holds {str(value)[:40]!r}, not a JSON object")
    return value


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects in the complete lines of a file, and a text for each line that cannot be read: the file, the
    line, counted from 1, and its offset. Raises OSError."""
    rows, damage, offset = list[dict[str, Any]](), list[str](), 0
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line.decode())  # of bytes, it would take zeros for a sign of UTF-16 or UTF-32
            if not isinstance(row, dict):
                raise ValueError(f"{str(row)[:40]!r} is no JSON object")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            damage.append(f"{path}: line {number}, at byte {offset}, is damaged ({error})")
        offset += len(line) + 1
    return rows, damage


def _end_of_lines(descriptor: int) -> int:
    """Remove an incomplete line at the end, which a killed process left behind; returns the size in bytes."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65536)
        if (last := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            end = start + last + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return end

"""A log in pieces, so that its size on disk is bounded while lines are only appended."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from monarch_rl.observe.lines import LineFile, truncate

logger = logging.getLogger("monarch_rl")

PIECES = 16
"""A piece may be this fraction of the bound; then the next one begins."""


class PieceLog:
    """Appends lines to ``<stem>-000001.jsonl``, ``<stem>-000002.jsonl``, ... If together they exceed the bound, the
    oldest piece is deleted, but the first, which shows how the run began, is kept.

    Lines are written whole or not at all, as by :class:`LineFile`. Only one thread may append.

    Args:
        folder: folder of the pieces, created with the first line.
        stem: beginning of their names.
        bound: bytes of all pieces together.
    """

    def __init__(self, folder: Path, stem: str, bound: int) -> None:
        self._folder, self._stem, self._bound = folder, stem, bound
        existing = pieces_of(folder, stem)
        self._file = LineFile(existing[-1] if existing else self._path(1))
        self._lost = 0
        """Lines that earlier pieces lost."""

    @property
    def lost(self) -> int:
        """Number of lines that are in no piece."""
        return self._lost + self._file.lost

    def append(self, *lines: str) -> bool:
        """Append lines, given without line ends, as many to a piece as it may have. Returns whether all were
        written."""
        part, size, written = list[str](), 0, True
        for line in lines:
            part.append(line)
            size += len(line)
            if size >= self._bound // PIECES:
                written &= self._append(part)
                part, size = [], 0
        return self._append(part) and written

    def _append(self, lines: list[str]) -> bool:
        """Append lines to the newest piece, or to the next one if that is full: all of them or none."""
        try:
            self._folder.mkdir(exist_ok=True)
            if lines and _size(self._file.path) >= self._bound // PIECES:
                self._begin_next()
        except OSError as error:
            logger.debug("%s: %s", self._folder, error)  # the write fails, too, and is reported by the file
        return self._file.append(*lines)

    def lose(self, lines: int, reason: str) -> None:
        """Count lines that are dropped without an attempt to write them; logged the first time."""
        self._file.lose(lines, reason)

    def position(self) -> tuple[str, int]:
        """Name of the newest piece and its size in bytes, after syncing it to disk. Raises OSError."""
        return self._file.path.name, self._file.position()

    def close(self) -> None:
        self._file.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:06}.jsonl"

    def _begin_next(self) -> None:
        self._file.close()
        self._lost += self._file.lost
        self._file = LineFile(self._path(_number(self._file.path) + 1))
        first, *later = pieces_of(self._folder, self._stem)
        # The next piece may become as large as the others before it is looked at again.
        sizes = self._bound // PIECES + sum(map(_size, [first, *later]))
        for piece in later:
            if sizes <= self._bound:
                break
            sizes -= _size(piece)
            piece.unlink(missing_ok=True)


def pieces_of(folder: Path, stem: str) -> list[Path]:
    """The existing pieces of a log, oldest first."""
    pattern = re.compile(rf"{re.escape(stem)}-\d{{6,}}\.jsonl")
    return sorted((path for path in folder.glob(f"{stem}-*.jsonl") if pattern.fullmatch(path.name)), key=_number)


def truncate_pieces(folder: Path, piece: str, nbytes: int) -> None:
    """Return a log to its :meth:`PieceLog.position` at a checkpoint: delete later pieces, and truncate ``piece``.

    Raises OSError.
    """
    stem, newest = piece.rsplit("-", 1)[0], _number(Path(piece))
    for path in pieces_of(folder, stem):
        if _number(path) > newest:
            path.unlink(missing_ok=True)
    truncate(folder / piece, nbytes)


def _number(piece: Path) -> int:
    return int(piece.stem.rsplit("-", 1)[1])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

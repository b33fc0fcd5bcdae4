"""Rows for questions: JSONL and parquet files, and data sets of Hugging Face's ``datasets``.

Only the location of the rows is sent to other processes, each of which reads them itself, so every machine needs them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
COMPARED_ROWS = 1000
"""Number of rows of a data set, spread evenly, that are compared: enough to detect a different data set, and read
quickly."""


class StoredRows(Sequence[Row]):
    """Rows that are read on first use.

    Reading raises ValueError if they cannot be read, or differ from the rows in the process that created the object.
    """

    def __init__(self) -> None:
        self._rows: Sequence[Row] | None = None

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def _all(self) -> Sequence[Row]:
        if self._rows is None:
            self._rows = self._read()
        return self._rows

    @abstractmethod
    def _read(self) -> Sequence[Row]: ...


class FileRows(StoredRows):
    """Rows of a file.

    Args:
        path: path of the file.
        reader: returns all rows of the file.
    """

    def __init__(self, path: str | Path, reader: Callable[[Path], Sequence[Row]]) -> None:
        super().__init__()
        self._path, self._reader = Path(path).resolve(), reader
        self._digest: str | None = None
        """Digest of the file's bytes, once the file has been read or this object pickled."""

    def __getstate__(self) -> dict[str, Any]:
        if self._digest is None and self._path.is_file():
            self._digest = _file_digest(self._path)
        return super().__getstate__()

    def _read(self) -> Sequence[Row]:
        try:
            rows, digest = self._reader(self._path), _file_digest(self._path)
        except (OSError, ValueError) as error:
            raise ValueError(f"rows of {self._path} cannot be read: {error}") from error
        if self._digest not in (None, digest):
            raise ValueError(
                f"{self._path} has changed since the run began: processes would use different rows. Restore the file, "
                "or start a new run"
            )
        self._digest = digest
        return rows


class DataSetRows(StoredRows):
    """Rows of a data set of ``datasets``. Arguments as for :func:`data_set`."""

    def __init__(self, source: str | Path, config: str | None, split: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        folder = Path(source)
        self._source = str(folder.resolve()) if folder.is_dir() else str(source)
        self._config, self._split, self._options = config, split, options
        self._size: int | None = None
        """Number of rows, once they have been read."""
        self._digest: str | None = None
        """Digest of :data:`COMPARED_ROWS` of them."""

    def _read(self) -> Sequence[Row]:
        of = f"{self._source}{f' ({self._config})' if self._config else ''}, split {self._split}"
        try:
            rows: Sequence[Row] = self._load()
        except Exception as error:  # the library may raise anything
            raise ValueError(f"the data set {of} cannot be loaded: {error or repr(error)}") from error
        if self._size not in (None, len(rows)):
            raise ValueError(
                f"the data set {of} has {len(rows)} rows, and had {self._size} where the run was started: every "
                "machine needs the same data set"
            )
        digest = _rows_digest(rows)
        if self._digest not in (None, digest):
            raise ValueError(
                f"the data set {of} has other rows than where the run was started: every machine needs the same data "
                "set"
            )
        self._size, self._digest = len(rows), digest
        return rows

    def _load(self) -> Any:
        import datasets

        saved = Path(self._source)
        if (saved / "dataset_dict.json").is_file():
            return datasets.load_from_disk(self._source)[self._split]
        if (saved / "state.json").is_file():
            return datasets.load_from_disk(self._source)
        return datasets.load_dataset(self._source, self._config, split=self._split, **self._options)


def jsonl(path: str | Path) -> StoredRows:
    """Rows of a file with one JSON object per line."""
    return FileRows(path, _read_jsonl)


def parquet(path: str | Path) -> StoredRows:
    """Rows of a parquet file."""
    return FileRows(path, _read_parquet)


def data_set(source: str | Path, config: str | None = None, *, split: str = "train", **options: Any) -> StoredRows:
    """Rows of a data set that ``datasets`` loads.

    Args:
        source: a folder with data files or written by ``save_to_disk``, or a name on the Hugging Face Hub.
        config: configuration, for data sets that have several.
        split: split, such as ``train`` or ``train[:1000]``.
        options: further arguments of ``datasets.load_dataset``, such as ``revision``, which keeps a run repeatable.

    Raises ValueError if ``datasets`` is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"rows of {source} need the package datasets: pip install datasets")
    return DataSetRows(source, config, split, options)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _rows_digest(rows: Any) -> str:
    """Digest of some rows of a data set. The data set's own fingerprint depends on when its files were written."""
    places = range(0, len(rows), max(1, len(rows) // COMPARED_ROWS))
    decoded = [name for name, feature in rows.features.items() if hasattr(feature, "decode")]  # may contain paths
    table = rows.remove_columns(decoded).with_format("arrow")[list(places)]
    return hashlib.blake2b(repr(table.to_pylist()).encode(errors="surrogatepass")).hexdigest()


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not a JSON object: {line.strip()[:60]}")
                rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        rows: list[Row] = read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error
    return rows

"""Rows for questions: JSONL and parquet files, and data sets of Hugging Face's ``datasets``.

Only the location of the rows is sent to other processes, each of which reads them itself, so every machine needs them.

A row is the same from each of them: a column that it lacks is None, as in columnar formats. Within a column, such as
messages or tools, a key whose value is null is left out, because columnar formats add such keys. 3.0 is 3, because they
store a whole number next to others, or next to a missing one, as a float.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from monarch_rl.model.control_text import texts_of
from monarch_rl.tasks.template import DoesNotFit
from monarch_rl.values import lone_surrogate

T = TypeVar("T")
Row = Mapping[str, Any]
MOST_NAMED = 5
"""Number of rows with the same fault that a message names."""
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

    def __iter__(self) -> Iterator[Row]:
        return iter(self._all())

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the rows are, for messages."""
        ...

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

    @property
    def source(self) -> str:
        """Path of the file."""
        return str(self._path)

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

    @property
    def source(self) -> str:
        """Name, configuration and split of the data set."""
        return f"{self._source}{f' ({self._config})' if self._config else ''}, split {self._split}"

    def _read(self) -> Sequence[Row]:
        of = self.source
        try:
            rows = self._load()
        except Exception as error:  # the library may raise anything
            raise ValueError(f"the data set {of} cannot be loaded: {type(error).__name__}: {error}") from error
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
        return _LoadedRows(rows)

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

    Raises ValueError if ``datasets`` is not installed, and for ``streaming``.
    """
    if options.get("streaming"):
        raise ValueError(f"rows of {source} cannot be streamed: each item is read by its number. Omit streaming=")
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
    rows, end = list[dict[str, Any]](), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start, end = end, end + len(line)
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"line {number} is not JSON in UTF-8, from byte {start} of the file on ({error}). Repair or "
                        "remove it"
                    ) from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not a JSON object: {line.decode().strip()[:60]}")
                if _ESCAPED_SURROGATE.search(line):
                    _check_unicode(row, number)
                rows.append(_as_written(row))
    columns = dict.fromkeys(name for row in rows for name in row)
    return [row if len(row) == len(columns) else {name: row.get(name) for name in columns} for row in rows]


_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _check_unicode(row: Mapping[str, Any], line: int) -> None:
    for column, value in row.items():
        if problem := lone_surrogate(json.dumps([column, value], ensure_ascii=False)):
            raise ValueError(
                f"line {line} has text that is not Unicode in column {ascii(column)}: {problem}. Repair or remove the "
                "line; text that was cut within an emoji looks like this"
            )


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        table = read_table(path)
        single = _single_precision(table.schema)
        return [_as_written(row, single) for row in table.to_pylist(maps_as_pydicts="strict")]
    except KeyError as error:  # of a map
        raise ValueError(f"a mapping has the same key twice: {error.args[0]}") from error
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(table) or str(error)) from error
    except ArrowException as error:
        raise ValueError(str(error)) from error


def _not_utf8(table: Any) -> str:
    """Describes the first text of a table that is not UTF-8."""
    for column in table.column_names:
        for number, value in enumerate(table[column], 1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                return f"row {number} has text that is not UTF-8 in column {column} ({error}). Repair or remove it"
    return ""


class _LoadedRows(Sequence[Row]):
    """Rows of a ``datasets.Dataset``, like those of files."""

    def __init__(self, rows: Any) -> None:
        # A format (of NumPy, PyTorch or pandas) changes types only, but a transform is the user's own.
        self._rows = rows if rows.format["type"] == "custom" else rows.with_format(None)
        self._single = _single_precision(rows.features.arrow_schema)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return _as_written(self._rows[index], self._single)

    def __iter__(self) -> Iterator[Row]:
        return (_as_written(row, self._single) for row in self._rows)  # reads many rows at a time


def as_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """``rows``; those of a ``datasets.Dataset`` like the rows of a file with the same content.

    Raises ValueError if they cannot be counted, or are those of a DataFrame.
    """
    is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str | Mapping)
    if not is_sequence or hasattr(rows, "to_dict") and not hasattr(rows, "features"):
        raise ValueError(
            f"a {type(rows).__name__} is not a sequence of rows: give a list, such as data_frame.to_dict('records'), a "
            "reader, such as jsonl(path), or one split of a data set, which is not streamed"
        )
    return _LoadedRows(rows) if type(rows).__module__.startswith("datasets.") else rows


def read_all(rows: Sequence[Row], read: Callable[[Row], T], what: str, unfit: str) -> Iterator[T]:
    """``read(row)`` of all rows.

    Args:
        what: name of the rows, in the plural.
        unfit: what those cannot do for which ``read`` raises ValueError.

    Raises ValueError at the end if it raised for some rows; says for which, numbered from 1, and why.
    """
    faults: dict[str, tuple[str, list[int]]] = {}
    # As many as it says it has: map-style data sets of PyTorch may make a row for any number.
    for number, row in enumerate(itertools.islice(rows, len(rows)), 1):
        try:
            _check_row(row)
            result = read(row)  # its error names the message of a conversation
            _check_texts((column, value) for column, value in row.items() if not isinstance(value, str))
            yield result
        except ValueError as error:
            problem = error.problem if isinstance(error, DoesNotFit) else str(error)
            faults.setdefault(problem, (str(error), []))[1].append(number)
    if faults:
        of = f" of {rows.source}" if isinstance(rows, StoredRows) else ""
        count = sum(len(numbers) for _, numbers in faults.values())
        listed = "; ".join(f"{_named(numbers)}: {example}" for example, numbers in faults.values())
        advice = ". Fill them in, or leave them out with [row for row in rows if ...]" if count < len(rows) else ""
        raise ValueError(f"{count} of {len(rows)} {what}{of} {unfit}: {listed}{advice}")


def _check_row(row: Any) -> None:
    if not isinstance(row, Mapping):
        raise DoesNotFit(f"is a {type(row).__name__}, not a mapping of columns")
    _check_texts((column, value) for column, value in row.items() if isinstance(value, str))


def _check_texts(columns: Iterable[tuple[Any, Any]]) -> None:
    """Raise DoesNotFit for text that is not Unicode in columns, their names included."""
    for column, value in columns:
        for text in texts_of({column: value}):
            if isinstance(text, str) and (problem := lone_surrogate(text)):
                name = str(column).encode(errors="backslashreplace").decode()
                raise DoesNotFit(f"column {name} is not valid Unicode", f": {problem}")


def _named(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:MOST_NAMED]))
    return f"row {named}" if len(numbers) == 1 else f"rows {named}{', ...' if len(numbers) > MOST_NAMED else ''}"


def _single_precision(schema: Any) -> dict[str, Any]:
    """Types of the columns of an Arrow schema that contain numbers of single or half precision, by name."""
    types = {field.name: field.type for field in schema}
    return {name: kind for name, kind in types.items() if "float" in str(kind)}  # such as list<element: float>


def _as_written(row: Mapping[str, Any], single: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A row without what columnar formats add (see the top of this file).

    Args:
        single: Arrow types of columns that contain numbers of single or half precision, whose 0.1 would be read as
            0.10000000149011612.
    """
    if not single:
        return {name: compact(value) for name, value in row.items()}
    shortest = {name: _shortest(value, single[name]) if name in single else value for name, value in row.items()}
    return _as_written(shortest)


def compact(value: Any) -> Any:
    """A JSON value without keys whose value is null, and with whole numbers as ints."""
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [compact(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def _shortest(value: Any, kind: Any) -> Any:
    """``value``, of this Arrow type, with the shortest numbers that give the same in their precision."""
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind} if hasattr(kind, "get_field_index") else {}  # a structure
        return {key: _shortest(item, kinds.get(key, getattr(kind, "item_type", None))) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortest(item, getattr(kind, "value_type", None)) for item in value]
    precision = _PRECISION.get(str(getattr(kind, "value_type", kind)))  # also of a dictionary's values
    return float(str(precision(value))) if precision and isinstance(value, float) else value


_PRECISION = {"float": np.float32, "halffloat": np.float16}

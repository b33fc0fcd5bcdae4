"""Pickling a recipe's functions and classes by value, for other processes.

A worker cannot import the recipe's file, and on another host cannot even find it. cloudpickle pickles members of
``__main__`` by value and everything else by module and name, so the modules next to the recipe are registered with it
first.
"""

from __future__ import annotations

import functools
import pickle
import sys
import sysconfig
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle

T = TypeVar("T")

INSTALLED = tuple(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders from which every process can import."""
_INSTALLED = tuple(f"{path}/" for path in INSTALLED)
KEPT = 64
"""Number of unpickled objects that are cached: the most recently used."""


def register_modules(recipe: Path | None = None) -> list[str]:
    """From now on pickle the functions and classes of modules in the recipe's folder by value; returns the modules'
    names.

    Args:
        recipe: the recipe's file; None means the file of the running program.
    """
    file = recipe or getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return []
    folder = Path(file).resolve().parent
    if _installed(folder):  # a program such as pytest, or a recipe in a package: every process can import it
        return []
    names = []
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if name == "__main__" or origin is None or origin.startswith(_INSTALLED):  # nearly all modules
            continue
        path = Path(origin).resolve()
        if path.is_relative_to(folder) and not _installed(path):
            cloudpickle.register_pickle_by_value(module)
            names.append(name)
    return names


def _installed(path: Path) -> bool:
    own = Path(__file__).resolve().parents[1]
    return any(path.is_relative_to(folder) for folder in (*INSTALLED, Path(sys.prefix), own))


class ByValue(Generic[T]):
    """An object as bytes: cheap to pickle again, and unpickled once per process. Two are equal if their bytes are.

    Raises TypeError, which names the object, if cloudpickle cannot pickle it.
    """

    __slots__ = ("_data",)

    def __init__(self, value: T, what: str = "") -> None:
        self._data = _by_value(value, what or repr(value))

    @classmethod
    def of_bytes(cls, data: bytes) -> ByValue[T]:
        """Wrap bytes that were another instance's :attr:`data`."""
        made = cls.__new__(cls)
        made._data = data
        return made

    @property
    def data(self) -> bytes:
        """The object, pickled by cloudpickle."""
        return self._data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def load(self) -> T:
        """The object; within a process always the same one, while it is in the cache (:data:`KEPT`)."""
        value: T = _read(self._data)
        return value


@functools.lru_cache(maxsize=KEPT)
def _read(data: bytes) -> Any:
    return pickle.loads(data)


def to_bytes(value: object, what: str) -> bytes:
    """Pickle ``value``: by plain pickle, which is fast and sends functions and classes by name, or by value where that
    fails. Raises TypeError, which names ``what``."""
    try:
        return pickle.dumps(value)
    except Exception:  # whatever the objects raise
        return _by_value(value, what)


def _by_value(value: object, what: str) -> bytes:
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except Exception as error:  # whatever the objects raise
        raise TypeError(
            f"{what} cannot be pickled for another process ({error}). Functions and plain data can be pickled; create "
            "open files, locks and connections in the process that uses them"
        ) from error

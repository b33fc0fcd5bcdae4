"""What a recipe hands over, on its way to other processes: functions and classes travel themselves, not by name.

A worker cannot import the recipe's file, and on another host not even find it. cloudpickle sends what belongs to
``__main__`` by value, all else by module and name. So modules beside the recipe are registered with it first.
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
"""Every process can import what lies here."""
_INSTALLED = tuple(f"{path}/" for path in INSTALLED)
KEPT = 64
"""Objects whose bytes are kept, or which are kept once they are read; the newest ones."""


def register_modules(recipe: Path | None = None) -> list[str]:
    """From now on send the functions and classes of modules in the recipe's folder by value; returns their names.

    Args:
        recipe: the recipe's file; None is that of the running program.
    """
    file = recipe or getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return []
    folder = Path(file).resolve().parent
    if _installed(folder):  # a program such as pytest, or a recipe of a package: it can be imported everywhere
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
    """An object as bytes. Cheap to pickle again; a process reads the same bytes once. Equal if the bytes are.

    Raises TypeError, saying what cannot be sent, if cloudpickle refuses it.
    """

    __slots__ = ("_data",)

    def __init__(self, value: T, what: str = "") -> None:
        self._data = _by_value(value, what or repr(value))

    @classmethod
    def of_bytes(cls, data: bytes) -> ByValue[T]:
        """The object whose :attr:`data` these bytes are."""
        made = cls.__new__(cls)
        made._data = data
        return made

    @property
    def data(self) -> bytes:
        """The object as cloudpickle wrote it."""
        return self._data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def load(self) -> T:
        """The object; in one process always the same one, as long as it is among the last ones read."""
        value: T = _read(self._data)
        return value


@functools.lru_cache(maxsize=KEPT)
def _read(data: bytes) -> Any:
    return pickle.loads(data)


def to_bytes(value: object, what: str) -> bytes:
    """``value`` as a pickle: by the fast way, which sends functions and classes by name, or if that cannot be done by
    value. Raises TypeError, saying that ``what`` cannot be sent."""
    try:
        return pickle.dumps(value)
    except Exception:  # whatever the objects raise
        return _by_value(value, what)


def _by_value(value: object, what: str) -> bytes:
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except Exception as error:  # whatever the objects raise
        raise TypeError(
            f"{what} cannot be pickled for another process ({error}): functions and plain data can, but no open files, "
            "locks or connections; make those where they are used"
        ) from error

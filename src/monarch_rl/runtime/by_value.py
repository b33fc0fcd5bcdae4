"""Pickling a recipe's functions and classes by value, for other processes.

A worker cannot import the recipe's file, and on another host cannot even find it. cloudpickle pickles members of
``__main__`` by value and everything else by module and name, so the modules next to the recipe are registered with it
first.
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import inspect
import io
import pickle
import queue
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Generic, TypeVar

import cloudpickle

from monarch_rl.errors import NotUnpickled

T = TypeVar("T")

INSTALLED = tuple(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders from which every process can import."""
_INSTALLED = tuple(f"{path}/" for path in INSTALLED)
KEPT = 64
"""Number of unpickled objects that are cached: the most recently used."""
SEARCHED = 64
"""Maximum length of a list or mapping that is searched for a culprit: a longer one is data."""


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
        if name in ("__main__", "__mp_main__") or origin is None or origin.startswith(_INSTALLED):  # nearly all modules
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
    def checked(cls, value: T, what: str) -> ByValue[T]:
        """As the constructor, but first make a copy in this process, as others will. Raises TypeError, which names the
        variable, if ``value`` cannot be pickled or no copy can be made."""
        made = cls(value, what)
        try:
            from_bytes(made.data)
        except NotUnpickled as error:
            culprit = culprit_of(value)
            raise NotUnpickled(
                f"{what} cannot be sent to other processes: {f'{culprit}: ' if culprit else ''}{error}. Create it in "
                "the function that uses it"
            ) from error
        return made

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
    return from_bytes(data)


def from_bytes(data: bytes) -> Any:
    """The value that :func:`to_bytes` pickled, or a :class:`ByValue` holds. Raises NotUnpickled."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    try:
        value = unpickler.load()
        with suppress(EOFError):  # plain pickle, which has no names
            names = unpickler.load()
            if _main is not None:
                vars(_main).update((name, names[name]) for name in names.keys() - vars(_main).keys())
    except Exception as error:  # whatever the objects raise
        raise NotUnpickled(f"a copy cannot be made in this process: {type(error).__name__}: {error}") from error
    return value


def to_bytes(value: object, what: str) -> bytes:
    """Pickle ``value``: by plain pickle, which is fast and sends functions and classes by name, or by value where that
    fails. Raises TypeError, which names ``what``."""
    try:
        data = pickle.dumps(value)
    except Exception:  # whatever the objects raise
        return _by_value(value, what)
    # A name in the recipe means something only where the recipe's object of this name has arrived already.
    return _by_value(value, what) if b"__main__" in data else data


def _by_value(value: object, what: str) -> bytes:
    file = io.BytesIO()
    try:
        pickler = _Pickler(file)
        pickler.dump(value)
        pickler.dump(pickler.names)
    except Exception as error:  # whatever the objects raise
        culprit = culprit_of(value)
        raise TypeError(
            f"{what} cannot be pickled for another process ({f'{culprit}: ' if culprit else ''}{error}). Functions and "
            "plain data can be pickled; create open files, threads, generators and connections in the process that "
            "uses them"
        ) from error
    return file.getvalue()


_HEAVY = "torch", "transformers", "sglang", "torchtitan", "triton"
"""Packages that take seconds to import, in processes that do without them."""
_OF_ONE_PROCESS = threading.Thread, subprocess.Popen, Connection
"""Would be copied, now that locks can be, but what they stand for is not."""


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler, which also knows objects that scripts have as global variables: locks, caches, context
    variables. They arrive as new ones, unlocked and empty, since every process has its own."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: dict[str, Any] = {}
        """Global functions and classes of the recipe's file that were pickled by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _OF_ONE_PROCESS):
            raise TypeError(f"cannot pickle '{type(obj).__name__}' object")
        reduced = super().reducer_override(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and _by_name(obj) is None:
            reduced = _cached, (obj.__wrapped__, *obj.cache_parameters().values())
        if reduced is NotImplemented:
            return reduced
        if isinstance(obj, FunctionType):
            make, (code, start, *others), state, *_ = reduced
            # So that the schema of a tool can be made from its type hints.
            state[1]["__globals__"].update(_annotated_with(obj, obj.__globals__))
            if _is_of_recipe(obj.__globals__):
                reduced = make, (code, _Globals(start), *others), state, None, None, _set_state
        if getattr(obj, "__module__", "") == "__main__":
            variables = vars(sys.modules["__main__"])
            if variables.get(name := getattr(obj, "__qualname__", "")) is obj:  # not one that a decorator has replaced
                self.names[name] = obj
            if isinstance(obj, type):
                self.names.update(_annotated_with(obj, variables))
        return reduced


class _Globals:
    """Stands in a pickle for the global variables of a module of the recipe."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._start = start

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals, (self._start,)


_namespaces: dict[str, dict[str, Any]] = {}
"""Global variables of the recipe's modules in this process, by name, if it is not the recipe's own process."""


def _is_of_recipe(variables: dict[str, Any]) -> bool:
    """Whether these are the global variables of the recipe's file or of a module next to it, and not a copy, such as
    those that ``exec`` is given."""
    name = variables.get("__name__", "")
    if variables is _namespaces.get(name):
        return True
    own = name == "__main__" or name in cloudpickle.list_registry_pickle_by_value()
    return own and name in sys.modules and variables is vars(sys.modules[name])


def _globals(start: dict[str, Any]) -> dict[str, Any]:
    """The variables for functions that arrive: one dictionary per module, as in a script.

    Args:
        start: those that cloudpickle gives a new function, such as ``__name__``, the module's.
    """
    if _main is None:
        return start
    variables = _namespaces.setdefault(start["__name__"], start)
    variables.update((name, value) for name, value in start.items() if variables.get(name) is None)
    return variables


def _set_state(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Do as cloudpickle does, but let global variables that exist keep their values: functions that arrived earlier may
    have set them, such as a pool's initialiser."""
    arrived = state[1]["__globals__"]
    state[1]["__globals__"] = {name: arrived[name] for name in arrived.keys() - function.__globals__.keys()}
    cloudpickle.cloudpickle._function_setstate(function, state)


def _annotated_with(obj: Any, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The global variables that the annotations of a function or class name, which cloudpickle leaves out if they are
    text (``from __future__ import annotations``)."""
    annotations = vars(obj).get("__annotations__", {}) if isinstance(obj, type) else obj.__annotations__
    names: list[str] = []
    for text in annotations.values():
        with suppress(SyntaxError, ValueError):
            names += compile(text, "<annotation>", "eval").co_names if isinstance(text, str) else ()
    return {name: namespace[name] for name in names if name in namespace and not _is_heavy(namespace[name])}


def _is_heavy(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return name.partition(".")[0] in _HEAVY


def _new(kind: Callable[[], object]) -> Callable[[object], Any]:
    return lambda _: (kind, ())


_Pickler.dispatch_table = ChainMap(
    {
        type(threading.Lock()): _new(threading.Lock),
        type(threading.RLock()): _new(threading.RLock),
        threading.local: _new(threading.local),
        queue.SimpleQueue: _new(queue.SimpleQueue),
        contextvars.ContextVar: lambda var: (_context_variable, (var.name, *_default_of(var))),
        weakref.WeakKeyDictionary: lambda weak: (weakref.WeakKeyDictionary, (dict(weak),)),
        weakref.WeakValueDictionary: lambda weak: (weakref.WeakValueDictionary, (dict(weak),)),
    },
    cloudpickle.Pickler.dispatch_table,
)


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _context_variable(name: str, *default: Any) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar(name, default=default[0]) if default else contextvars.ContextVar(name)


def _default_of(var: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return (contextvars.Context().run(var.get),)
    except LookupError:
        return ()


def _by_name(obj: Any) -> Any:
    """The object itself, if other processes can import it by name; else None."""
    module = getattr(obj, "__module__", None) or ""
    found: Any = sys.modules.get(module)
    if found is None or module == "__main__" or module in cloudpickle.list_registry_pickle_by_value():
        return None
    for name in getattr(obj, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found if found is obj else None


def culprit_of(value: object) -> str:
    """Names of the variables and attributes that lead to what cannot be copied to another process; "" if it is
    ``value`` itself, or not found."""
    return _culprit(value, set()) or ""


def _culprit(value: Any, seen: set[int]) -> str | None:
    """As :func:`culprit_of`; None if ``value`` is in ``seen``."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    if isinstance(value, MethodType):
        return _culprit(value.__self__, seen)
    parts: dict[str, Any]
    if isinstance(value, functools.partial):
        function = getattr(value.func, "__name__", "func")
        parts = {function: value.func, **value.keywords}
    elif isinstance(value, FunctionType):
        # inspect.getclosurevars() alone leaves out what only a comprehension or an inner function uses.
        used = cloudpickle.cloudpickle._extract_code_globals(value.__code__)
        variables = {name: value.__globals__[name] for name in used if name in value.__globals__}
        parts = {**_defaults_of(value), **inspect.getclosurevars(value).nonlocals, **variables}
    elif isinstance(value, type):
        parts = dict(vars(value)) if _by_name(value) is None else {}
    elif isinstance(value, ModuleType):
        parts = {}
    elif isinstance(value, list | tuple) and len(value) <= SEARCHED:
        parts = {f"[{index}]": part for index, part in enumerate(value)}
    elif isinstance(value, dict) and len(value) <= SEARCHED:
        parts = {f"[{key!r}]": part for key, part in value.items()}
    else:
        slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
        parts = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        parts |= {**getattr(value, "__dict__", {}), type(value).__name__: type(value)}
    for name, part in parts.items():
        try:
            _Pickler(file := io.BytesIO()).dump(part)
            pickle.loads(file.getvalue())
        except Exception:  # whatever the objects raise
            if (deeper := _culprit(part, seen)) is not None:
                return f"{name} -> {deeper}" if deeper else name
    return ""


def _defaults_of(function: FunctionType) -> dict[str, Any]:
    """The default values of a function's arguments."""
    defaults = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


# -- processes that run a recipe's code without being its main program ------------------------------------------------


class _Main(ModuleType):
    @property
    def __file__(self) -> str:  # type: ignore[override]
        """Missing, although the variables have it: multiprocessing would run the recipe's file in each new process."""
        raise AttributeError("__file__")


_main: ModuleType | None = None
"""Takes the place of ``__main__`` in this process; None in the recipe's own."""
_program: ModuleType | None = None
"""The program of this process, whose functions still run."""


def run_recipe_code(names: dict[str, Any] | None = None) -> None:
    """Let the recipe's code find itself in this process as in a script: its functions and classes can be pickled, and
    used in processes that it starts by ``multiprocessing``, in whatever way those are started.

    Args:
        names: global variables of the recipe's functions, if this process has run its file; None: they are those of
            functions that arrive by value.
    """
    global _main, _program
    if _main is None:
        _main, _program = _Main("__main__"), sys.modules["__main__"]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = _main
        _namespaces["__main__"] = vars(_main) if names is None else names
        setattr(ForkingPickler, "reducer_override", _override)  # noqa: B010  a method for mypy
    vars(_main).update({name: value for name, value in (names or {}).items() if not name.startswith("__")})


def _override(pickler: object, obj: Any) -> Any:
    """Pickle what a process of ``multiprocessing`` may be unable to import by value."""
    if isinstance(obj, type | FunctionType) and _by_name(obj) is None:
        return _in_child, (_by_value(obj, repr(obj)),)
    return NotImplemented


def _in_child(data: bytes) -> Any:
    run_recipe_code()
    return _read(data)

"""Importing a library without modules that it imports itself and a run may never use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def imported_on_first_use(*modules: str) -> Iterator[None]:
    """Within the block, importing one of ``modules`` or a submodule gives a stand-in, whose names are placeholders.

    The first time that a placeholder is called or one of its attributes is read, the module itself is imported, and the
    call or attribute is passed on. Nothing is an instance of a placeholder before the module is imported; then the
    instances of its class are. Subclassing a placeholder raises TypeError. Imports after the block, or after the
    first use of a placeholder, give the modules themselves.

    Modules that are imported already are not replaced.
    """
    deferred = _Deferred(tuple(name for name in modules if name not in sys.modules))
    sys.meta_path.insert(0, deferred)  # type: ignore[arg-type]
    try:
        yield
    finally:
        deferred.end()


class _Deferred:
    """Finds and loads the stand-ins of ``modules``."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        deferred = any(f"{name}.".startswith(f"{module}.") for module in self._modules)
        return ModuleSpec(name, self, is_package=True) if deferred else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""

    def end(self) -> None:
        """From now on, import the modules themselves."""
        self._modules = ()
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn) and getattr(module.__spec__, "loader", None) is self:
                del sys.modules[name]
                package, _, leaf = name.rpartition(".")
                if package in sys.modules and vars(sys.modules[package]).get(leaf) is module:
                    delattr(sys.modules[package], leaf)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__spec__ is None:
            raise AttributeError(f"{self.__name__} has no {name} before it is imported", name=name)
        placeholder = _Placeholder(name, (), {"__module__": self.__name__, "_deferred": self.__spec__.loader})
        setattr(self, name, placeholder)
        return placeholder


class _Placeholder(type):
    """Stands for a class or function of a module that is not imported yet."""

    _deferred: _Deferred

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Placeholder:
        if bases:
            raise TypeError(f"the import of {bases[0].__module__} cannot be deferred: {name} derives from its class")
        return super().__new__(mcs, name, bases, namespace)

    def _real(cls) -> Any:
        cls._deferred.end()
        return getattr(importlib.import_module(cls.__module__), cls.__name__)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._real()(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} has no {name} before its module is imported", name=name)
        return getattr(cls._real(), name)

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules.get(cls.__module__)
        return module is not None and not isinstance(module, _StandIn) and isinstance(instance, cls._real())

"""``torch.compile`` in folders whose paths have a space.

TorchInductor writes the compiler's command as one line and leaves paths in it unquoted: those of libraries (torch 2.13;
pytorch/pytorch#191010), of sources and of what it makes. In an environment below a folder with a space it then cannot
link ("cannot find -ltorch"), and in such a cache folder it compiles nothing. Imports nothing heavy.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

MODULE = "torch._inductor.cpp_builder"


def allow_spaces() -> None:
    """From now on this process compiles in such folders, too. Costs nothing in a process that compiles nothing."""
    if MODULE in sys.modules:
        _mend(sys.modules[MODULE])
    elif not any(isinstance(finder, _MendedOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MendedOnImport())


class _MendedOnImport(MetaPathFinder):
    """Importing the module takes CPU-seconds, so it is changed only once somebody else imports it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _mend(module)

        loader.exec_module = exec_module
        return spec


def _mend(module: Any) -> None:
    """Have ``CppBuilder`` of torch 2.13 quote paths in its command; another torch's is left alone if it has none."""
    builder: Any = getattr(module, "CppBuilder", None)
    line = getattr(builder, "get_command_line", None)
    if line is None or getattr(line, "quotes_paths", False):
        return
    init = builder.__init__

    def remember_sources(self: Any, name: str, sources: str | list[str], *args: Any, **kwargs: Any) -> None:
        init(self, name, sources, *args, **kwargs)
        self.unquoted = [sources] if isinstance(sources, str) else list(sources)

    def get_command_line(self: Any) -> str:
        options = self._build_option
        paths = [*options.get_libraries_dirs(), *self.unquoted, self._target_file, options.precompiled_header or ""]
        return quote_paths(line(self), paths)

    get_command_line.quotes_paths = True  # type: ignore[attr-defined]
    builder.__init__, builder.get_command_line = remember_sources, get_command_line


def quote_paths(command: str, paths: Sequence[str]) -> str:
    """A shell's command line with those ``paths`` quoted that have to be and are not."""
    bare = sorted({path for path in paths if path and shlex.quote(path) != path}, key=len, reverse=True)
    if not bare:
        return command
    return re.sub(rf"(?<!')({'|'.join(map(re.escape, bare))})(?=\s|$)", lambda found: shlex.quote(found[0]), command)

"""``torch.compile`` in folders whose paths contain a space.

TorchInductor writes the compiler's command as one line and leaves the paths of libraries (torch 2.13;
pytorch/pytorch#191010), sources and outputs unquoted. If the environment lies below a folder with a space in its name,
it cannot link ("cannot find -ltorch"); if the cache folder does, it cannot compile at all. Imports nothing heavy.
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
    """Make compilation work in such folders in this process. Costs nothing in a process that does not compile."""
    if MODULE in sys.modules:
        _patch(sys.modules[MODULE])
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


class _PatchOnImport(MetaPathFinder):
    """Patches the module when it is first imported: importing it only to patch it would take CPU-seconds."""

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
            _patch(module)

        loader.exec_module = exec_module
        return spec


def _patch(module: Any) -> None:
    """Make ``CppBuilder`` of torch 2.13 quote paths in its command; does nothing on a torch without that class."""
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
    """A shell command line in which all ``paths`` that need quotes have them."""
    bare = sorted({path for path in paths if path and shlex.quote(path) != path}, key=len, reverse=True)
    if not bare:
        return command
    return re.sub(rf"(?<!')({'|'.join(map(re.escape, bare))})(?=\s|$)", lambda found: shlex.quote(found[0]), command)

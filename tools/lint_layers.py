"""Finds imports that go up or sideways between floors, and circles: run by ./tools/test over src/monarch_rl/.

    python tools/lint_layers.py [PACKAGE FOLDER]

A room is a folder of the package. Reported is
- a circle: files that import each other, directly or through others, in one room or several;
- an import of a room on a higher floor;
- an import of another room on the same floor;
- a room that is not on the list below, and a file that is in no room (the package's own ``__init__.py`` belongs to the
  floor of ``runtime``).

Every import counts, also inside functions and under ``TYPE_CHECKING``, because a reader has to follow it. An import of
a package is an import of its ``__init__.py``; that a package's ``__init__.py`` runs before its modules is not counted.
There are no exceptions.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from linting import Finding, report

PACKAGE = Path(__file__).parents[1] / "src" / "monarch_rl"
FLOORS = (
    {"recipes"},
    {"simulate"},
    {"pipeline"},
    {"trainer", "generator"},
    {"buffer", "rollout", "checkpoint", "weights"},
    {"episode", "tasks", "model", "algorithms", "observe", "runtime"},
    {"settings"},
)
"""From the top down: a room imports itself and rooms on lower floors."""
OUTSIDE = {"recipes"}
"""Rooms that are packages or folders beside this one."""
Graph = dict[str, dict[str, int]]
"""By file: the files that it imports, and in which line first."""


def lint(package: Path) -> list[Finding]:
    """The findings in the package in this folder. Raises SyntaxError."""
    files = {path.relative_to(package.parent).as_posix(): path for path in sorted(package.rglob("*.py"))}
    graph = {name: _imports(package, name, path) for name, path in files.items()}
    return sorted({*_homeless(graph), *_floors(graph), *_circles(graph)})


def _room(file: str) -> str:
    """The room of a file of the package, as ``package/room/file.py``; "" for a file directly in the package."""
    parts = Path(file).parts
    return parts[0] if parts[0] in OUTSIDE else parts[1] if len(parts) > 2 else ""


def _floor(room: str) -> int | None:
    """Counted from the top; None for a room that is not on the list."""
    return next((floor for floor, rooms in enumerate(FLOORS) if room in rooms), None)


def _imports(package: Path, name: str, path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        for module in _modules(node, name):
            target = _file(package, module)
            if target is not None and target != name:
                found[target] = min(found.get(target, node.lineno), node.lineno)  # type: ignore[attr-defined]
    return found


def _modules(node: ast.AST, importer: str) -> Iterator[str]:
    """The modules that an import may name; ``from a import b`` names a.b if that is a module, and a if not."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = Path(importer).parts[: -node.level]
            base = ".".join([*package, *([base] if base else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _file(package: Path, module: str) -> str | None:
    """The file of a module of the package, or of what a module of it holds; None for other packages."""
    parts = module.split(".")
    if parts[0] in OUTSIDE:
        return "/".join(parts[:2]) + ".py"
    if parts[0] != package.name:
        return None
    while parts:
        base = package.parent.joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path.relative_to(package.parent).as_posix()
        parts.pop()
    return None


def _homeless(graph: Graph) -> Iterator[Finding]:
    reported: set[str] = set()
    for file in graph:
        room = _room(file)
        if not room and Path(file).name != "__init__.py":
            yield Finding(file, 0, "is in no room: move it to one of the folders")
        elif room and _floor(room) is None and room not in reported:
            reported.add(room)
            yield Finding(file, 0, f"its room `{room}` is on no floor: add it to FLOORS in tools/lint_layers.py")


def _floors(graph: Graph) -> Iterator[Finding]:
    for file, imports in graph.items():
        for target, line in imports.items():
            here, there = _room(file), _room(target)
            if here == there or not there:
                continue
            above, below = _floor(there), _floor(here or "runtime")
            if below is None or above is None:
                continue  # a room without a floor is a finding of its own
            elif above < below:
                yield Finding(
                    file, line, f"imports {target}: `{there}` is on a floor above `{here or 'the package itself'}`"
                )
            elif above == below and here:
                yield Finding(file, line, f"imports {target}: `{there}` is on the same floor as `{here}`")


def _circles(graph: Graph) -> Iterator[Finding]:
    """For each set of files that reach each other, a shortest circle among them."""
    reach = {file: _reachable(graph, file) for file in graph}
    reported: set[str] = set()
    for file in graph:
        if file in reported or file not in reach[file]:
            continue
        circle = _shortest_circle(graph, file)
        reported |= {other for other in reach[file] if file in reach.get(other, ())}
        way = " -> ".join([*circle, file])
        yield Finding(file, graph[file][[*circle, file][1]], f"is in a circle: {way}")


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += graph.get(file, ())
    return found


def _shortest_circle(graph: Graph, start: str) -> list[str]:
    """The files of a shortest way from ``start`` back to it, ``start`` first."""
    ways = deque([[start]])
    seen = {start}
    while ways:
        way = ways.popleft()
        for file in graph.get(way[-1], ()):
            if file == start:
                return way
            if file not in seen:
                seen.add(file)
                ways.append([*way, file])
    raise AssertionError(f"{start} is in no circle")


def main(arguments: list[str]) -> int:
    package = Path(arguments[0]).resolve() if arguments else PACKAGE
    return report(lint(package), f"imports against the floors in {package.name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

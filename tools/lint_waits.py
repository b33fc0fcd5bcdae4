"""Finds waits on other processes or threads that could last forever. Run by ./tools/test on src/ and recipes/.

    python tools/lint_waits.py [FILE OR FOLDER ...]

It reports
- an ``await`` of anything unbounded. Bounded are ``within(...)``; ``asyncio.wait_for``, ``asyncio.wait`` with a
  timeout, ``asyncio.sleep``, and anything inside ``async with asyncio.timeout(...)``; work of this process on a thread
  (for files of a run use ``on_disk``, which has a deadline and names the disk: this is not checked); coroutines defined
  in the files that are read, because their own awaits are checked, even if an exit stack enters them;
  ``asyncio.gather`` and ``shield`` of bounded awaitables; a name to which only bounded awaitables are assigned. So
  actor endpoints, channels, queues, events, conditions, and bare futures and tasks are reported;
- a ``within`` without ``on``, the name of the process that it waits for;
- ``join()``, ``wait()``, ``get()``, ``acquire()``, ``recv()``, ``accept()``, ``communicate()`` without any argument,
  ``subprocess.run`` and similar calls without ``timeout``, and ``result()`` outside ``async def`` (asyncio's does not
  block);
- a torch.distributed world or group created without ``timeout``: nothing else bounds its collectives.

Locks are not reported, because the code that holds one follows the rules above; nor is ``get()`` of a ``ContextVar``
created in the files that are read. Coroutines are identified by name only, so a method of another library with the name
of one of ours is missed. A comment next to or above a statement makes an exception and states the reason:
``# waits: as long as the run; lost processes are Monarch's to report``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from linting import Excuses, Finding, parents_of, read, report

BOUNDED = {"within", "sleep", "to_thread", "run_in_executor"}
"""Last names of calls that are bounded."""
TIMEOUTS = {"timeout", "timeout_at"}
"""Context managers that bound the awaits inside them."""
TOGETHER = {"gather", "shield", "ensure_future", "create_task", "enter_async_context"}
"""Calls that are as bounded as their arguments."""
ENDPOINTS = {"call", "call_one", "choose"}
BLOCKING = {"join", "wait", "get", "acquire", "recv", "accept", "communicate"}
RUNNERS = {"run", "call", "check_call", "check_output"}
WORLDS = {"init_process_group", "new_group"}
REASON = re.compile(r"#\s*waits:\s*\S")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def lint(sources: dict[str, str]) -> list[Finding]:
    """The unbounded waits in files, given as text by path. Raises SyntaxError."""
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    known = {
        node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
    } - (ENDPOINTS | BLOCKING)
    variables = {name for tree in trees.values() for node in ast.walk(tree) for name in _context_variable(node)}
    files = (_File(path, sources[path], tree, known, variables) for path, tree in trees.items())
    return sorted(finding for file in files for finding in file.find())


def _context_variable(node: ast.AST) -> Iterator[str]:
    """The names to which a statement assigns a new ``ContextVar``."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
        return
    if _last_name(node.value.func) == "ContextVar":
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from filter(None, map(_last_name, targets))


class _File:
    def __init__(self, path: str, text: str, tree: ast.Module, known: set[str], variables: set[str]) -> None:
        self._path, self._tree, self._known, self._variables = path, tree, known, variables
        self._parents = parents_of(tree)
        self._excuses = Excuses(text, REASON)

    def find(self) -> Iterator[Finding]:
        for node in ast.walk(self._tree):
            message: str | None = None
            if isinstance(node, ast.Await):
                message = self._awaited(node)
            elif isinstance(node, ast.Call):
                message = self._called(node)
            if message and not self._excuses.covers(node, self._parents):
                yield Finding(self._path, getattr(node, "lineno", 0), message)

    def _awaited(self, node: ast.Await) -> str | None:
        if self._bounded(node.value, node) or self._in_timeout(node):
            return None
        return f"`await {_short(node.value)}` may last forever: use within(...), or state the reason in `# waits: ...`"

    def _called(self, node: ast.Call) -> str | None:
        name = _last_name(node.func)
        keywords = {keyword.arg for keyword in node.keywords}
        if name == "within" and not {"on", None} & keywords:
            return "within(...) does not name the process that it waits on: give on="
        if name in WORLDS and "timeout" not in keywords:
            return f"{name}() without timeout=: its collectives may last forever"
        if name in RUNNERS and _first_name(node.func) == "subprocess" and not {"timeout", None} & keywords:
            return f"subprocess.{name}() without timeout= may last forever"
        if not isinstance(node.func, ast.Attribute) or node.args or node.keywords or self._is_awaitable(node):
            return None
        if name == "get" and _last_name(node.func.value) in self._variables:
            return None
        if name in BLOCKING or (name == "result" and not isinstance(self._function(node), ast.AsyncFunctionDef)):
            return f"`{_short(node)}` may block forever: give it a timeout, or state the reason in `# waits: ...`"
        return None

    def _is_awaitable(self, node: ast.Call) -> bool:
        """Whether the call is awaited, or passed to a call that awaits it: then the rule for ``await`` applies."""
        parent = self._parents.get(node)
        while isinstance(parent, ast.Starred | ast.keyword):
            parent = self._parents.get(parent)
        if isinstance(parent, ast.Await):
            return True
        own = self._known | BOUNDED | TOGETHER | {"wait_for"}
        return isinstance(parent, ast.Call) and parent.func is not node and _last_name(parent.func) in own

    def _bounded(self, value: ast.expr, at: ast.AST, depth: int = 0) -> bool:
        if depth > 8:
            return False
        if isinstance(value, ast.IfExp):
            return self._bounded(value.body, at, depth + 1) and self._bounded(value.orelse, at, depth + 1)
        if isinstance(value, ast.Name):
            assigned = list(self._assigned(value.id, at))
            return bool(assigned) and all(self._bounded(found, at, depth + 1) for found in assigned)
        if isinstance(value, ast.Starred):
            return self._all_bounded(value.value, at, depth + 1)
        if not isinstance(value, ast.Call):
            return False
        name = _last_name(value.func)
        if name in TOGETHER:
            return all(self._bounded(argument, at, depth + 1) for argument in value.args)
        if name in ("wait", "wait_for") and _first_name(value.func) == "asyncio":
            return len(value.args) > 1 or any(keyword.arg == "timeout" for keyword in value.keywords)
        return name in BOUNDED or name in self._known

    def _all_bounded(self, value: ast.expr, at: ast.AST, depth: int) -> bool:
        """Whether every element of a list or comprehension is bounded."""
        if isinstance(value, ast.List | ast.Tuple):
            return all(self._bounded(element, at, depth) for element in value.elts)
        if isinstance(value, ast.ListComp | ast.GeneratorExp):
            return self._bounded(value.elt, at, depth)
        if isinstance(value, ast.Name):
            assigned = list(self._assigned(value.id, at))
            return bool(assigned) and all(self._all_bounded(found, at, depth + 1) for found in assigned)
        return False

    def _assigned(self, name: str, at: ast.AST) -> Iterator[ast.expr]:
        """The values assigned to ``name`` in the function that contains ``at``."""
        for node in ast.walk(self._function(at) or self._tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                targets = [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value = getattr(node, "value", None)
                if value is not None:
                    yield value

    def _function(self, node: ast.AST) -> Function | None:
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, Function):
            parent = self._parents.get(parent)
        return parent

    def _in_timeout(self, node: ast.AST) -> bool:
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, Function):
            if isinstance(parent, ast.AsyncWith) and any(
                isinstance(item.context_expr, ast.Call) and _last_name(item.context_expr.func) in TIMEOUTS
                for item in parent.items
            ):
                return True
            parent = self._parents.get(parent)
        return False


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _first_name(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute):
        function = function.value
    return getattr(function, "id", "")


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def main(arguments: list[str]) -> int:
    sources = read(arguments)
    return report(lint(sources), f"bare waits in {len(sources)} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Finds waits on others that could last forever: run by ./tools/test over src/ and recipes/.

    python tools/lint_waits.py [FILE OR FOLDER ...]

Reported is
- an ``await`` of anything that is not bounded. Bounded are ``within(...)``; ``asyncio.wait_for``, ``asyncio.wait`` with
  a timeout, ``asyncio.sleep``, anything inside ``async with asyncio.timeout(...)``;
  work of this process on a thread (where that is on files of a run, ``on_disk`` has a deadline and names the disk: this
  is not judged); a coroutine defined in the files that are read, because its own awaits are checked, also where an exit
  stack enters it; ``asyncio.gather`` and ``shield`` of bounded things; a name that only bounded things are assigned to.
  So an actor's endpoint, a channel, a queue, an event, a condition, a bare future or task is reported;
- a ``within`` that does not name, with ``on``, the process that it waits for;
- ``join()``, ``wait()``, ``get()``, ``acquire()``, ``recv()``, ``accept()``, ``communicate()`` without any argument,
  ``subprocess.run`` and its like without ``timeout``, and ``result()`` outside ``async def`` (asyncio's does not wait);
- a torch.distributed world or group made without ``timeout``: nothing else bounds its collectives.

Locks are not reported: the code that holds one follows the rules above; nor is ``get()`` of what a file makes a
``ContextVar``. Coroutines are known only by name, so a method
of another library with the name of one of ours is overlooked. An exception says why, beside its statement or above it:
``# waits: as long as the run; lost processes are Monarch's to report``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from linting import Excuses, Finding, parents_of, read, report

BOUNDED = {"within", "sleep", "to_thread", "run_in_executor"}
"""Calls that end by themselves, by their last name."""
TIMEOUTS = {"timeout", "timeout_at"}
"""Context managers that bound what is awaited in them."""
TOGETHER = {"gather", "shield", "ensure_future", "create_task", "enter_async_context"}
"""Calls that are as bounded as their arguments."""
ENDPOINTS = {"call", "call_one", "choose"}
BLOCKING = {"join", "wait", "get", "acquire", "recv", "accept", "communicate"}
RUNNERS = {"run", "call", "check_call", "check_output"}
WORLDS = {"init_process_group", "new_group"}
REASON = re.compile(r"#\s*waits:\s*\S")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def lint(sources: dict[str, str]) -> list[Finding]:
    """The bare waits in these files, given as text by path. Raises SyntaxError."""
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    known = {
        node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
    } - (ENDPOINTS | BLOCKING)
    variables = {name for tree in trees.values() for node in ast.walk(tree) for name in _context_variable(node)}
    files = (_File(path, sources[path], tree, known, variables) for path, tree in trees.items())
    return sorted(finding for file in files for finding in file.find())


def _context_variable(node: ast.AST) -> Iterator[str]:
    """The names that a statement gives to a new context variable."""
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
        return f"`await {_short(node.value)}` may last forever: put it into within(...), or say why in `# waits: ...`"

    def _called(self, node: ast.Call) -> str | None:
        name = _last_name(node.func)
        keywords = {keyword.arg for keyword in node.keywords}
        if name == "within" and not {"on", None} & keywords:
            return "within(...) does not say whom it waits on: give on="
        if name in WORLDS and "timeout" not in keywords:
            return f"{name}() without timeout=: its collectives may last forever"
        if name in RUNNERS and _first_name(node.func) == "subprocess" and not {"timeout", None} & keywords:
            return f"subprocess.{name}() without timeout= may last forever"
        if not isinstance(node.func, ast.Attribute) or node.args or node.keywords or self._is_awaitable(node):
            return None
        if name == "get" and _last_name(node.func.value) in self._variables:
            return None
        if name in BLOCKING or (name == "result" and not isinstance(self._function(node), ast.AsyncFunctionDef)):
            return f"`{_short(node)}` may block forever: give it a timeout, or say why in `# waits: ...`"
        return None

    def _is_awaitable(self, node: ast.Call) -> bool:
        """Whether it is awaited, or passed to a call that awaits it: then the rule for ``await`` judges it."""
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
        """What is assigned to ``name`` in the function around ``at``."""
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

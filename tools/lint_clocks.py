"""Finds tests that depend on the current speed of the machine. Run by ./tools/test on tests/.

    python tools/lint_clocks.py [FILE OR FOLDER ...]

It reports
- comparisons (``<``, ``<=``, ``>``, ``>=``) of the wall clock: of ``time.monotonic()``, ``time.time()``,
  ``time.perf_counter()`` and an event loop's ``time()``, and of values computed from these in the same function, in an
  attribute, or in a function of the same file that returns it. Loops with ``deadline = time.monotonic() + x`` have one;
- waits and timeouts of less than 60 s, or of the time left until a deadline: ``wait(10)``, ``join(10)``,
  ``result(10)``, ``poll(10)``, ``asyncio.wait_for(x, 10)``, ``asyncio.timeout(10)`` and anything with ``timeout=10``,
  where the seconds are a number, a constant of a module or a parameter's default. Less than 0.05 s is a tick, and
  ``while not x.wait(0.1)`` has no limit, so these are not reported;
- ``pytest.mark.timeout`` of less than 600 s.

Use the waits of ``tests/patience.py`` instead, which only count time in which the waiter ran. Virtual time is not the
wall clock: an event loop's ``time()`` counts as virtual in a file that contains ``run_virtual``. A comment next to or
above a statement makes an exception and states the reason: ``# clock: this timeout is to pass``.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import PurePath

from linting import ROOT, Excuses, Finding, parents_of, read, report

TESTS = ROOT / "tests"
PATIENCE = "tests/patience.py"
CLOCKS = {f"{name}{unit}" for name in ("monotonic", "time", "perf_counter") for unit in ("", "_ns")}
ARITHMETIC = {"abs", "float", "int", "list", "max", "min", "pairwise", "round", "sorted", "sum", "zip"}
"""Calls that return a time if an argument is one."""
RUNNERS = {"run", "run_until_complete"}
"""Calls that return the result of their argument."""
WAITS = {"acquire", "exception", "join", "poll", "result", "settimeout", "timeout", "wait", "wait_for"}
"""Calls with seconds among their positional arguments. Others are recognized by ``timeout=``."""
TICK_S, SHORT_S = 0.05, 60.0
SHORT_TEST_S = 600.0
REASON = re.compile(r"#\s*clock:\s*\S")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lint(sources: dict[str, str]) -> list[Finding]:
    """The findings in files, given as text by path relative to the root. Raises SyntaxError."""
    files: dict[str, _File] = {}
    for path, text in sources.items():
        files[path] = _File(path, text, files)
    return sorted(finding for path, file in files.items() if path != PATIENCE for finding in file.find())


class _File:
    def __init__(self, path: str, text: str, files: dict[str, _File]) -> None:
        self._path, self._files, self._tree = path, files, ast.parse(text, path)
        self._parents = parents_of(self._tree)
        self._excuses = Excuses(text, REASON)
        self._nodes = list(ast.walk(self._tree))
        self._is_virtual = "run_virtual" in text

    def find(self) -> Iterator[Finding]:
        for node in self._nodes:
            message: str | None = None
            if isinstance(node, ast.Compare):
                message = self._compared(node)
            elif isinstance(node, ast.Call):
                message = self._called(node)
            if message and not self._excuses.covers(node, self._parents):
                yield Finding(self._path, getattr(node, "lineno", 0), message)

    def _compared(self, node: ast.Compare) -> str | None:
        ordered = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
        if not ordered or not any(self._is_time(value) for value in (node.left, *node.comparators)):
            return None
        return f"`{_short(node)}` compares the wall clock: assert the cause, or wait with {PATIENCE}"

    def _called(self, node: ast.Call) -> str | None:
        name = _last_name(node.func)
        given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        given += node.args if name in WAITS and isinstance(node.func, ast.Attribute) else []
        if _is_condition(node, self._parents):
            return None
        if any(self._is_time(value) and _is_difference(value) for value in given):
            return f"`{_short(node)}` waits for the rest of a wall-clock deadline: wait with {PATIENCE}"
        seconds = [number for value in given if (number := self._number(value, node)) is not None]
        is_test_limit = ast.unparse(node.func) == "pytest.mark.timeout"
        if not any(TICK_S <= number < (SHORT_TEST_S if is_test_limit else SHORT_S) for number in seconds):
            return None
        if is_test_limit:
            return f"`{_short(node)}` is less than {SHORT_TEST_S:g} s, which a machine that pauses may take"
        return f"`{_short(node)}` waits for less than {SHORT_S:g} s: wait with {PATIENCE}"

    # -- values computed from a clock ----------------------------------------------------------------------------

    def _is_time(self, value: ast.expr) -> bool:
        return self._computed(value, self._times)

    def _computed(self, value: ast.AST, times: set[tuple[ast.AST | None, str]]) -> bool:
        """Whether an expression involves a clock, given the variables and functions that do."""
        if isinstance(value, ast.Call):
            name = _last_name(value.func)
            if self._is_clock(value) or (None, f"{name}()") in times:
                return True
            if name not in ARITHMETIC | RUNNERS:
                return False
        elif isinstance(value, ast.Name | ast.Attribute):
            return self._variable(value) in times
        elif isinstance(value, ast.Lambda):
            return False
        return any(self._computed(part, times) for part in ast.iter_child_nodes(value))

    def _is_clock(self, call: ast.Call) -> bool:
        function = call.func
        if isinstance(function, ast.Name):
            return function.id in CLOCKS - {"time"}
        if not isinstance(function, ast.Attribute) or function.attr not in CLOCKS:
            return False
        if ast.unparse(function.value) == "time":
            return True
        is_loop_time = function.attr == "time" and "loop" in _last_name(_called_function(function.value))
        return is_loop_time and not self._is_virtual

    @cached_property
    def _times(self) -> set[tuple[ast.AST | None, str]]:
        """Variables that hold a time, with their outermost function, and ``name()`` of functions that return one."""
        times: set[tuple[ast.AST | None, str]] = set()
        while found := set(self._assigned(times)) - times:
            times |= found
        return times

    def _assigned(self, times: set[tuple[ast.AST | None, str]]) -> Iterator[tuple[ast.AST | None, str]]:
        for node in self._nodes:
            for target, value in _assignments(node):
                if isinstance(target, ast.Name | ast.Attribute) and self._computed(value, times):
                    yield self._variable(target)
            if isinstance(node, ast.Return) and node.value is not None and self._computed(node.value, times):
                function = next(_around(node, self._parents), None)
                if function is not None:
                    yield None, f"{function.name}()"

    def _variable(self, node: ast.Name | ast.Attribute) -> tuple[ast.AST | None, str]:
        """The scope and name of a variable: names belong to a function, attributes to the whole file."""
        functions = list(_around(node, self._parents))
        return (functions[-1] if functions and isinstance(node, ast.Name) else None), ast.unparse(node)

    # -- the duration of a wait ----------------------------------------------------------------------------------

    def _number(self, value: ast.expr, at: ast.AST | None = None) -> float | None:
        """The value of a number, a module's constant, a parameter's default, or arithmetic of these; else None."""
        if isinstance(value, ast.Constant):
            return float(value.value) if isinstance(value.value, int | float) and value.value is not True else None
        if isinstance(value, ast.BinOp) and type(value.op) in OPERATORS:
            left, right = self._number(value.left, at), self._number(value.right, at)
            if left is None or right is None or (right == 0 and isinstance(value.op, ast.Div)):
                return None
            return float(OPERATORS[type(value.op)](left, right))
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            module = self._imported.get(value.value.id)
            return self._elsewhere(".".join(module), value.attr) if module else None
        if not isinstance(value, ast.Name):
            return None
        for function in _around(at, self._parents) if at is not None else ():
            if value.id in (parameters := _defaults(function)):
                default = parameters[value.id]
                return self._number(default) if default is not None else None
        if value.id in self._constants:
            return self._number(self._constants[value.id])
        return self._elsewhere(*self._imported[value.id]) if value.id in self._imported else None

    def _elsewhere(self, module: str, name: str) -> float | None:
        file = self._files.get(str(PurePath(*module.split(".")).with_suffix(".py")))
        return file._number(ast.Name(name)) if file is not None else None

    @cached_property
    def _constants(self) -> dict[str, ast.expr]:
        pairs = (pair for statement in self._tree.body for pair in _assignments(statement))
        return {target.id: value for target, value in pairs if isinstance(target, ast.Name)}

    @cached_property
    def _imported(self) -> dict[str, tuple[str, str]]:
        """By local name: the module of each imported object, and its name there."""
        imports = (node for node in self._nodes if isinstance(node, ast.ImportFrom) and node.module)
        return {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and values of a statement. Appending to a list assigns to the list; a loop assigns the iterable to its
    variables."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        yield from ((target, node.iter) for target in targets)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
        yield from ((node.func.value, value) for value in node.args)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
    elif isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield from ((part, value) for part in target.elts)


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[Function]:
    """The functions that contain a node, innermost first."""
    parent = parents.get(node)
    while parent is not None:
        if isinstance(parent, Function):
            yield parent
        parent = parents.get(parent)


def _defaults(function: Function) -> dict[str, ast.expr | None]:
    """The parameters of a function, with their defaults; None without a default."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    without: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    defaults = [*without, *given.defaults, *given.kw_defaults]
    return {found.arg: default for found, default in zip([*positional, *given.kwonlyargs], defaults, strict=True)}


def _is_condition(node: ast.Call, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a call is the whole condition of a loop: ``while not event.wait(0.1)``."""
    parent = parents[node]
    return isinstance(parent, ast.UnaryOp) and isinstance(loop := parents[parent], ast.While) and loop.test is parent


def _is_difference(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Sub) for node in ast.walk(value))


def _called_function(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def main(arguments: list[str]) -> int:
    sources = read(arguments or [str(TESTS)])
    return report(lint(sources), f"waits and comparisons by the wall clock in {len(sources)} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Finds work and waits on a stream that may belong to another thread. Run by ./tools/test on src/ and recipes/.

    python tools/lint_streams.py [FILE OR FOLDER ...]

Transfers and checksums must neither wait for training nor delay it (``runtime/streams.py``). It reports calls
- of ``current_stream``, ``default_stream``, ``synchronize`` or ``set_stream`` outside a ``with`` block that chooses a
  stream, such as ``with side_stream.use():`` or ``with torch.cuda.stream(...):``. A block around the function does not
  count;
- of ``wait_stream``, ``wait_event`` or ``block_current_stream`` anywhere, which make one stream wait for another.

A comment next to or above a statement makes an exception and states the reason:
``# streams: as long as it computes nothing else``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from linting import Excuses, Finding, parents_of, read, report

OF_A_STREAM = {"current_stream", "default_stream", "set_stream", "synchronize"}
BETWEEN_STREAMS = {"block_current_stream", "wait_event", "wait_stream"}
CHOOSES = re.compile(r"stream", re.IGNORECASE)
REASON = re.compile(r"#\s*streams:\s*\S")


def lint(path: str, text: str) -> list[Finding]:
    """The findings in a file. Raises SyntaxError."""
    tree = ast.parse(text, path)
    parents, excuses = parents_of(tree), Excuses(text, REASON)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [(node, message) for node in calls if (message := _message(node, parents))]
    return sorted(Finding(path, node.lineno, message) for node, message in found if not excuses.covers(node, parents))


def _message(node: ast.Call, parents: dict[ast.AST, ast.AST]) -> str | None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in BETWEEN_STREAMS:
        return f"`{name}` makes a stream wait for another one: wait in a thread instead, with runtime/streams.py"
    if name in OF_A_STREAM and not any(_chooses(block) for block in _blocks(node, parents)):
        return f"`{name}` outside a `with` block that chooses a stream: use runtime/streams.py, or add `# streams: ...`"
    return None


def _blocks(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.With | ast.AsyncWith]:
    """The ``with`` statements that contain a node, within its function."""
    child, parent = node, parents.get(node)
    while parent is not None and not isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        if isinstance(parent, ast.With | ast.AsyncWith) and child in parent.body:
            yield parent
        child, parent = parent, parents.get(parent)


def _chooses(block: ast.With | ast.AsyncWith) -> bool:
    return any(CHOOSES.search(ast.unparse(item.context_expr)) for item in block.items)


def main(arguments: list[str]) -> int:
    sources = read(arguments)
    findings = [finding for path, text in sources.items() for finding in lint(path, text)]
    return report(findings, f"calls on a stream of others in {len(sources)} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

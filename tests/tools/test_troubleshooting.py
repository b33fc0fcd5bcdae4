"""Each heading of docs/troubleshooting.md is a message of the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"
"""Stands for a value in a message of the source."""
HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)
ARGUMENT = re.compile(r"%[-.\d]*[sdgfr]")
"""A value in a message that a logger formats."""


def messages(source: str) -> Iterator[str]:
    """Yield all strings of a module, including f-strings, with :data:`VALUE` in place of each value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield ARGUMENT.sub(VALUE, node.value)


def missing(page: str, sources: list[str]) -> list[str]:
    """Return the headings whose literal parts occur in no message in this order with values between them."""
    texts = "\n".join(text.replace("\n", " ") for source in sources for text in messages(source))
    wrong = []
    for heading in HEADING.findall(page):
        literal = [re.escape(part) for part in heading.removeprefix("...").removesuffix("...").split("...")]
        if not re.search(f"[^\n]*{VALUE}[^\n]*".join(literal), texts):
            wrong.append(heading)
    return wrong


SOURCE = """
raise ValueError(f"no {kind} is left. The first loss was that of "
                 f"{name}: {cause}")
logger.error("no checkpoint of step %d: %s", step, error)
"""


def test_a_message_that_the_program_does_not_have_is_found() -> None:
    right = ["no ... is left. The first loss was that of ...", "no checkpoint of step ...", "... is left"]
    wrong = ["no generator is left", "no ... is gone", "no checkpoint of step 5", "is left. ... no"]
    page = "\n".join(f"### `{heading}`\nText." for heading in right + wrong)
    assert missing(page, [SOURCE]) == wrong


def test_every_heading_is_a_message_of_the_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(HEADING.findall(page)) == len(re.findall("^### ", page, re.MULTILINE)) >= 20
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))]
    wrong = missing(page, sources)
    assert not wrong, f"no such message in src/: {wrong}"

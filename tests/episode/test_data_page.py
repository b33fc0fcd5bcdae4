"""docs/data.md names types and functions that exist, in the named files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/monarch_rl"


def defined(text: str) -> set[str]:
    """Names of the classes, functions and constants in a source."""
    return set(re.findall(r"^(?: *(?:class|def|async def) )?(\w+)\b(?=[(:\[]| = )", text, re.MULTILINE))


def test_types_and_functions_of_the_page_exist_in_the_named_files() -> None:
    page = (ROOT / "docs/data.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \| (.*?) \| (.*?) \|", page, re.MULTILINE)
    types = {name for name, *_ in rows}
    assert {"Group", "SerializedGroup", "Batch", "PackedShard", "MicroBatch"} <= types
    for name, file, *_ in rows:
        assert name in defined((SOURCE / file).read_text()), f"{name} is not in {file}"
    (diagram,) = re.findall(r"## The path\n(.*?)\n## ", page, re.DOTALL)
    shapes = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b|\b(?:Turn|Completion|Group|Batch)\b", diagram))
    assert shapes - {"BufferCore"} <= types
    named = {name for row in rows for name in re.findall(r"`(?:\w+\.)?(\w+)`", " ".join(row[2:]))}
    named |= set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", diagram))
    everywhere = set().union(*(defined(path.read_text()) for path in SOURCE.rglob("*.py")))
    assert named - everywhere == set()

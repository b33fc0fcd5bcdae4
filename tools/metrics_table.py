"""Writes the tables in docs/metrics.md from the metrics registry.

python tools/metrics_table.py            write the tables
python tools/metrics_table.py --check    exit with 1 if the file is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from monarch_rl.observe.registry import table

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN = "<!-- made by tools/metrics_table.py from src/monarch_rl/observe/registry.py: begin -->"
END = "<!-- made by tools/metrics_table.py: end -->"


def updated(text: str) -> str:
    """The documentation ``text`` with the current tables between its markers. Raises ValueError without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCS} has no section between {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    text = DOCS.read_text()
    new = updated(text)
    if "--check" not in arguments:
        DOCS.write_text(new)
    elif new != text:
        print(f"{DOCS} is out of date: run python tools/metrics_table.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

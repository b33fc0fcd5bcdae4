"""Writes the page of a run that has ended, well or not, in a process of its own:
``python -m monarch_rl.report.at_end RUN``.

Prints a line of JSON for the run's last lines: ``page``, and ``problem``, the first sentence of the diagnosis, or null.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from monarch_rl.report.diagnose import evidence_of
from monarch_rl.report.page import make_page, write_page
from monarch_rl.report.read import read_run
from monarch_rl.report.rules import findings

NICE = 10
"""Niceness: the run's own processes may still be ending."""


def main() -> None:
    os.nice(NICE)
    run = Path(sys.argv[1])
    record, page = read_run(run), run / "report.html"
    write_page(make_page([record]), page)
    problems = [found for found in findings(evidence_of(record)) if found.level == "problem"]
    print(json.dumps({"page": str(page), "problem": problems[0].sentence if problems else None}))


if __name__ == "__main__":
    main()

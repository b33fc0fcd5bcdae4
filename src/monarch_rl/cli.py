"""The command ``monarch-rl``.

Each subcommand imports what it needs when it runs, so that the command itself starts quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

app = SubcommandApp()


@app.command
def convert(
    run: Positional[Path], *, to: Literal["csv", "perfetto"], output: Annotated[Path | None, arg(aliases=["-o"])] = None
) -> int:
    """Convert a run's files for other programs.

    Args:
        run: run folder.
        to: csv: a table of the metrics. perfetto: the timeline of all actors, for https://ui.perfetto.dev and
            chrome://tracing.
        output: file to write; by default in the run's folder.
    """
    if to == "perfetto":
        from monarch_rl.report.perfetto import to_perfetto

        output = output or run / "timeline.json.gz"
        print(f"wrote {output}: {to_perfetto(run, output)} spans. Open it in https://ui.perfetto.dev")
        return 0
    from monarch_rl.report.convert import to_csv

    output = output or run / "metrics.csv"
    rows = to_csv(run, output)
    print(f"wrote {output}: metrics of {rows} steps and evaluations")
    return 0


def main() -> None:
    """Entry point of ``monarch-rl``."""
    from monarch_rl.offline.program import run_program

    run_program(lambda: app.cli(prog="monarch-rl", description="Look at runs, and convert them.", config=()) or 0)


if __name__ == "__main__":
    main()

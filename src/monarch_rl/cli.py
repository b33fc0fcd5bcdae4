"""The command ``monarch-rl``.

Each subcommand imports what it needs when it runs, so that the command itself starts quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

from monarch_rl.errors import SettingsError

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


@app.command
def report(
    runs: Positional[tuple[Path, ...]],
    *,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    single: bool = False,
    predict: bool = False,
) -> int:
    """Write a page that shows runs: an HTML file that opens in any browser, without a network.

    Args:
        runs: run folders; several are drawn into the same charts.
        output: file to write; by default `report.html`, in the run's folder, or of several runs in the current one.
            Older rollouts are put into a folder beside it, which is named like the file without `.html`.
        single: put all rollouts into the file.
        predict: simulate the runs with another split of the devices and another lag bound, which takes seconds to
            minutes, and show what is predicted. It is kept in the run's folder, for later pages.
    """
    from monarch_rl.report.page import make_page, write_page
    from monarch_rl.report.read import read_run

    if not runs:
        raise SettingsError("no run was given: give the folder of a run, such as runs/NAME")
    output = output or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    if predict:
        from monarch_rl.report.predict import write_prediction

        for run in runs:
            write_prediction(run)
    page = make_page(
        [read_run(run) for run in runs],
        single=single,
        pieces_at=output.with_suffix("").name,
    )
    write_page(page, output)
    print(
        f"wrote {output}: {len(page.html) / 1e6:.1f} MB"
        + f" and {len(page.pieces)} files beside it" * bool(page.pieces)
    )
    return 0


@app.command
def diagnose(run: Positional[Path], *, json: bool = False) -> int:
    """Say in sentences why a run learns little, and what to change. The exit code is 1 if something is wrong.

    Args:
        run: run folder.
        json: print the findings as JSON.
    """
    from monarch_rl.report.diagnose import as_json, as_text
    from monarch_rl.report.diagnose import diagnose as findings_of

    found = findings_of(run)
    print(as_json(found) if json else as_text(found))
    return int(any(finding.level == "problem" for finding in found))


@app.command
def view(folder: Positional[Path] = Path("runs"), *, port: int = 0) -> int:
    """Show runs in a browser, also while they are running: a list, and the page of those that are chosen.

    Serves on 127.0.0.1 until Ctrl-C, at an address with a random key, which it prints. Nothing is written.

    Args:
        folder: folder of runs, or of one run.
        port: 0 lets the system choose one.
    """
    from monarch_rl.report.view import view as serve

    serve(folder, port)
    return 0


def main() -> None:
    """Entry point of ``monarch-rl``."""
    from monarch_rl.offline.program import run_program

    run_program(lambda: app.cli(prog="monarch-rl", description="Look at runs, and convert them.", config=()) or 0)


if __name__ == "__main__":
    main()

from __future__ import annotations

import io
import math
import re

from rich.console import Console as Terminal

from monarch_rl.observe.console import Console, bars

HEADINGS = ["step", "reward", "length", "cut", "held-out", "entropy", "grad norm", "lag", "tokens/s", "idle", "swap ms"]
VALUES = {
    "reward/mean": 0.4567,
    "length/mean": 7.25,
    "length/cut_share": 0.125,
    "trainer/entropy": 1.234,
    "trainer/grad_norm": 0.5217,
    "lag/mean": 1.25,
    "lag/max": 2.0,
    "tokens_per_second": 12345.6,
    "trainer/idle_share": 0.125,
    "generator/idle_share": math.nan,
    "weights/swap_ms": 81.24,
    "dropped/stale": 0.0,
    "dropped/score took over 1 s": 3.0,
    "trainer/loss": 9.0,
}


def shown(terminal: bool, steps: int, width: int = 140) -> str:
    out = io.StringIO()
    with Console(10, Terminal(file=out, force_terminal=terminal, width=width)) as console:
        console.note("run folder: runs/[a]")
        console.remember({"held_out/accuracy": 0.415})
        for step in range(1, steps + 1):
            console.show(step, VALUES if step == 1 else {"reward/mean": 0.1 * step})
    return out.getvalue()


def test_lines_without_a_terminal() -> None:
    note, first, second = shown(False, 2).splitlines()
    assert note == "run folder: runs/[a]"
    assert first == (
        "step 1/10 | reward 0.457 | length 7.2 | cut 12% | held-out 41.5% | entropy 1.23 | grad norm 0.522 | "
        "lag 1.25/2 | tokens/s 12,346 | idle 12%/- | swap ms 81.2 | dropped score took over 1 s: 3"
    )
    assert second.startswith("step 2/10 | reward 0.200 | length 7.2 | cut 12% | held-out 41.5% |")
    assert " | lag 1.25/2 | " in second


def test_table_in_a_terminal() -> None:
    text = shown(True, 12)
    assert "run folder: runs/[a]" in text
    last = text[text.rindex("step 12/10") :]
    row = re.sub(r"\x1b\[\d*m", "", last.splitlines()[1]).strip("\u2502 ")
    assert re.split("  +", row) == HEADINGS
    assert "1.25/2" in last and "12%/-" in last
    assert "1.200" in last and "0.457" not in last  # old steps scroll off
    assert "dropped score took over 1 s: 3" in last


def test_the_table_fits_in_120_columns() -> None:
    text = shown(True, 3, width=120)
    assert "\u2026" not in text  # rich's mark of a truncated cell
    assert "grad norm" in text and "1.25/2" in text


def test_rewards_of_turns_are_not_shown_for_a_step_without_them() -> None:
    out = io.StringIO()
    with Console(10, Terminal(file=out, width=120)) as console:
        console.show(1, {"reward/mean": 0.5, "turn_reward/game": 0.25})
        console.show(2, {"reward/mean": 0.5})
    first, second = out.getvalue().splitlines()
    assert "turn reward 0.250" in first and "turn reward" not in second


def test_a_column_without_a_metric_yet_is_left_out() -> None:
    out = io.StringIO()
    with Console(10, Terminal(file=out, force_terminal=True, width=120)) as console:
        console.show(1, {"reward/mean": 0.5, "generator/idle_share": 0.25})
    assert "idle" in out.getvalue() and "-/25%" in out.getvalue()
    assert "held-out" not in out.getvalue() and "entropy" not in out.getvalue()


def test_what_an_objective_or_a_task_reports_has_a_column() -> None:
    out = io.StringIO()
    with Console(10, Terminal(file=out, width=200)) as console:
        reported = {"trainer/reverse_kl": 0.25, "trainer/mine": 3.0, "turn_reward/a": 0.5, "turn_reward/b/white": 1.0}
        console.show(1, {"reward/mean": 0.5} | reported)
    assert out.getvalue() == "step 1/10 | reward 0.500 | reverse KL 0.25 | turn reward 0.500/1.000 | mine 3\n"


def test_bars() -> None:
    assert bars([0, math.nan, 7]) == "\u2581 \u2588"
    assert bars([2.0]) == "\u2581"
    assert bars([math.nan]) == bars([]) == ""

from __future__ import annotations

import io
import math
import re

from rich.console import Console as Terminal

from monarch_rl.observe.console import Console, LiveArea, bars, duration

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
    with Console(20, Terminal(file=out, force_terminal=terminal, width=width)) as console:
        console.note("run folder: runs/[a]")
        console.remember({"held_out/accuracy": 0.415}, 0)
        for step in range(1, steps + 1):
            console.show(step, VALUES if step in (1, 12) else {"reward/mean": 0.1 * step})
    return out.getvalue()


def tables(text: str) -> list[dict[int, dict[str, str]]]:
    """Each table in the output of a terminal: the texts of a row by their heading, by the row's step."""
    plain, found = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text), list[dict[int, dict[str, str]]]()
    for table in re.findall("\u256d.*?\u256f", plain, re.DOTALL):
        lines = [line.strip("\u2502") for line in table.splitlines()[1:-1]]
        ends = {match.end(): match[0] for match in re.finditer(r"\S+(?: \S+)*", lines[0])}
        rows = [{ends[match.end()]: match[0] for match in re.finditer(r"\S+", line)} for line in lines[1:]]
        found.append({int(row.pop("step")): row for row in rows})
    return found


def test_lines_without_a_terminal() -> None:
    note, first, second = shown(False, 2).splitlines()
    assert note == "run folder: runs/[a]"
    assert first == (
        "step 1/20 | reward 0.457 | length 7.2 | cut 12% | held-out 41.5% @0 | entropy 1.23 | grad norm 0.522 | "
        "lag 1.25/2 | tokens/s 12,346 | idle 12%/- | swap ms 81.2 | dropped score took over 1 s: 3"
    )
    assert second.startswith("step 2/20 | reward 0.200 | length 7.2 @1 | cut 12% @1 | held-out 41.5% @0 |")
    assert " | lag 1.25/2 @1 | " in second


def test_table_in_a_terminal() -> None:
    text = shown(True, 12)
    assert "run folder: runs/[a]" in text
    last = text[text.rindex("step 12/20") :]
    row = re.sub(r"\x1b\[\d*m", "", last.splitlines()[1]).strip("\u2502 ")
    assert re.split("  +", row) == HEADINGS
    assert "1.25/2" in last and "12%/-" in last
    assert "1.100" in last and "0.400" not in last  # old steps scroll off
    assert "dropped score took over 1 s: 3" in last


def test_a_value_stays_in_the_row_of_its_step() -> None:
    out = io.StringIO()
    with Console(20, Terminal(file=out, force_terminal=True, width=140)) as console:
        console.remember({"held_out/accuracy": 0.25}, 0)
        for step in range(1, 4):
            console.show(step, {"reward/mean": step / 4})
        console.remember({"held_out/accuracy": 0.5}, 3)
        rows = {0: {"held-out": "25.0%"}, 1: {"reward": "0.250"}, 2: {"reward": "0.500"}}
        assert tables(out.getvalue())[-1] == rows | {3: {"reward": "0.750", "held-out": "50.0%"}}
        console.remember({"held_out/accuracy": 0.75}, 2)  # of an evaluation next to training
        for step in range(4, 12):
            console.show(step, {"reward/mean": step / 4})
    *earlier, last = tables(out.getvalue())
    assert [table[3] for table in earlier if 3 in table][-1] == {"reward": "0.750", "held-out": "50.0%"}
    assert list(last) == list(range(4, 12)) and not [row for row in last.values() if "held-out" in row]
    assert "held-out 75.0% @2" in out.getvalue()[out.getvalue().rindex("step 11/20") :]


def test_notes_after_the_last_step_are_below_the_table() -> None:
    out = io.StringIO()
    with Console(2, Terminal(file=out, force_terminal=True, width=140)) as console:
        console.show(1, {"reward/mean": 0.25})
        console.note("a note between steps")
        console.show(2, {"reward/mean": 0.5})
        console.note("the last checkpoint")
        console.status("evaluating after step 2")
        console.note("the last evaluation")
    text = out.getvalue()
    table, after = text[: text.rindex("\u256f")], text[text.rindex("\u256f") :]
    assert "a note between steps" in table and "step 2/2" in table
    assert after.index("the last checkpoint") < after.index("the last evaluation")


def test_a_step_has_the_time_so_far_its_pace_and_what_is_left() -> None:
    clock, out = iter([100.0, 104.0, 165.0]), io.StringIO()
    with Console(10, Terminal(file=out, width=140), clock=lambda: next(clock)) as console:
        console.show(1, {"reward/mean": 0.5, "time/step_s": 4.0})
        console.show(10, {"reward/mean": 0.5, "time/step_s": 6.0})
    first, last = out.getvalue().splitlines()
    assert first == "step 1/10 | 4 s, 4 s/step, 36 s left | reward 0.500"
    assert last == "step 10/10 | 1 min 5 s, 5 s/step | reward 0.500"


def test_durations() -> None:
    times = {0: "0 s", 0.123: "0.12 s", 9.94: "9.9 s", 9.96: "10 s", 59.4: "59 s", 59.6: "1 min 0 s", 548: "9 min 8 s"}
    times |= {3599.7: "1 h 0 min", 99_500: "27 h 38 min"}
    assert {seconds: duration(seconds) for seconds in times} == times


def test_a_status_is_renewed_on_a_terminal_and_removed_and_is_not_logged() -> None:
    out, log = io.StringIO(), io.StringIO()
    area = LiveArea(Terminal(file=out, force_terminal=True, width=60), log)
    area.show("waiting for the engines for 1 s")
    area.show("waiting for the engines for 2 s")
    area.print("engines up")
    area.end(keep=False)
    screen = out.getvalue()
    assert screen.index("for 1 s") < screen.index("for 2 s") < screen.index("engines up")
    assert screen.endswith("\x1b[1A\x1b[2K"), "the area's line is erased"
    assert log.getvalue() == "engines up\n"
    silent = io.StringIO()
    area = LiveArea(Terminal(file=silent, width=60))
    area.show("waiting")
    area.end(keep=False)
    assert not silent.getvalue()


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

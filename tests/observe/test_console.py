from __future__ import annotations

import io
import math

from rich.console import Console as Terminal

from monarch_rl.observe.console import Console, bars

VALUES = {
    "reward/mean": 0.4567,
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


def shown(terminal: bool, steps: int) -> str:
    out = io.StringIO()
    with Console(10, Terminal(file=out, force_terminal=terminal, width=140)) as console:
        console.note("run folder: runs/[a]")
        for step in range(1, steps + 1):
            console.show(step, VALUES if step == 1 else {"reward/mean": 0.1 * step})
    return out.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    note, first, second = shown(False, 2).splitlines()
    assert note == "run folder: runs/[a]"
    assert first == (
        "step 1/10 | reward 0.457 | lag 1.25 | lag max 2 | tokens/s 12,346 | trainer idle 12% | swap ms 81.2 | "
        "dropped score took over 1 s: 3"
    )
    assert second.startswith("step 2/10 | reward 0.200 | lag 1.25")


def test_table_in_a_terminal() -> None:
    text = shown(True, 12)
    assert "run folder: runs/[a]" in text
    last = text[text.rindex("step 12/10") :]
    for heading in ("reward", "lag max", "tokens/s", "trainer idle", "generator idle", "swap ms"):
        assert heading in last
    assert "1.200" in last and "0.457" not in last  # old steps scroll off
    assert "dropped score took over 1 s: 3" in last


def test_bars() -> None:
    assert bars([0, math.nan, 7]) == "\u2581 \u2588"
    assert bars([2.0]) == "\u2581"
    assert bars([math.nan]) == bars([]) == ""

"""What a run shows while it runs: a live table in a terminal, a line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console as Terminal
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

COLUMNS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("lag/mean", "lag", "{:.2f}"),
    ("lag/max", "lag max", "{:.0f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("trainer/idle_share", "trainer idle", "{:.0%}"),
    ("generator/idle_share", "generator idle", "{:.0%}"),
    ("weights/swap_ms", "swap ms", "{:.1f}"),
)
"""The metrics that are shown: name, heading, format."""
DROPPED = "dropped/"
"""Metrics that begin so are groups dropped, or episodes lost, by reason."""
BARS = " " + "".join(chr(code) for code in range(0x2581, 0x2589))


class Console:
    """Shows the steps of a run.

    Args:
        total_steps: steps of the whole run.
        terminal: where to write; by default stdout.
        rows: steps that the live table keeps.
    """

    def __init__(self, total_steps: int, terminal: Terminal | None = None, rows: int = 8) -> None:
        self._total = total_steps
        self._terminal = terminal or Terminal()
        self._steps: deque[tuple[int, dict[str, float]]] = deque(maxlen=rows)
        self._rewards: deque[float] = deque(maxlen=60)
        self._latest: dict[str, float] = {}
        self._start = time.monotonic()
        self._live = Live(console=self._terminal, auto_refresh=False) if self._terminal.is_terminal else None

    def __enter__(self) -> Console:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._terminal.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step. Metrics that are not in :data:`COLUMNS` are left out, absent ones keep their last value."""
        self._latest.update(values)
        self._steps.append((step, dict(values)))
        self._rewards.append(values.get("reward/mean", math.nan))
        if self._live is None:
            self.note(self.line(step))
        else:
            self._live.update(self._panel(step), refresh=True)

    def line(self, step: int) -> str:
        """The step as one line of text."""
        shown = [f"{heading} {text}" for heading, text in self._cells(self._latest) if text]
        dropped = self._dropped()
        return " | ".join([f"step {step}/{self._total}", *shown, *([f"dropped {dropped}"] if dropped else [])])

    def _cells(self, values: Mapping[str, float]) -> list[tuple[str, str]]:
        return [
            (heading, form.format(values[name]) if math.isfinite(values.get(name, math.nan)) else "")
            for name, heading, form in COLUMNS
        ]

    def _dropped(self) -> str:
        counts = {name.removeprefix(DROPPED): n for name, n in self._latest.items() if name.startswith(DROPPED) and n}
        return ", ".join(f"{reason}: {count:.0f}" for reason, count in counts.items())

    def _panel(self, step: int) -> Panel:
        table = Table(box=None, expand=True, pad_edge=False)
        table.add_column("step", justify="right")
        for _, heading, _ in COLUMNS:
            table.add_column(heading, justify="right")
        for at, values in self._steps:
            shown = self._latest if at == step else values
            table.add_row(str(at), *(text for _, text in self._cells(shown)))
        seconds = time.monotonic() - self._start
        dropped = self._dropped()
        footer = f"reward {bars(list(self._rewards))}   dropped {dropped or 'none'}"
        return Panel(table, title=f"step {step}/{self._total}, {seconds:.0f} s", subtitle=footer)


def bars(values: list[float]) -> str:
    """The values as a row of small bars, from their least to their greatest; a space where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        BARS[1 + round((value - low) / span * (len(BARS) - 2))] if math.isfinite(value) else BARS[0] for value in values
    )

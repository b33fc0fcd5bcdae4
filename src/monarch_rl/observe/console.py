"""Console output of a run: a live table in a terminal, otherwise one line per step."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.console import ConsoleDimensions
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from monarch_rl.observe.console_relay import Relay
from monarch_rl.observe.registry import METRICS, OBJECTIVE, find

HEADINGS = list(dict.fromkeys(metric.heading for metric in METRICS if metric.heading))
"""The columns that every run may have, in the order of the registry."""
DROPPED = "dropped/"
"""Name prefix of the metrics of dropped groups and failed episodes; the reason follows."""
TURN_REWARD = "turn_reward/"
"""Name prefix of the mean rewards of a task's turns."""
BARS = " " + "".join(chr(code) for code in range(0x2581, 0x2589))


class Console:
    """Shows the steps of a run.

    Args:
        total_steps: number of steps of the whole run.
        terminal: output; stdout by default.
        rows: number of steps in the live table.
        log: gets what a terminal shows, with one line per step instead of the table; None if it is not logged here.
        sync: called before and after the live table, with which other output must not mix.
    """

    def __init__(
        self,
        total_steps: int,
        terminal: Terminal | None = None,
        rows: int = 8,
        log: TextIO | None = None,
        sync: Callable[[], object] = lambda: None,
    ) -> None:
        self._total = total_steps
        self._terminal = terminal or Terminal()
        self._log, self._sync = log, sync
        self._steps: deque[tuple[int, dict[str, float]]] = deque(maxlen=rows)
        self._rewards: deque[float] = deque(maxlen=60)
        self._latest: dict[str, float] = {}
        self._start = time.monotonic()
        self._live = Live(console=self._terminal, auto_refresh=False) if self._terminal.is_terminal else None

    def __enter__(self) -> Console:
        if self._live is not None:
            self._sync()
            self._live.start()
            if self._log is not None:  # until the table ends, which restores the streams
                for name in ("stdout", "stderr"):
                    setattr(sys, name, _Logged(getattr(sys, name), self._log))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._sync()

    def note(self, text: str) -> None:
        """Print a permanent line, above the live table."""
        self._to_log(text)
        self._terminal.print(text, highlight=False, markup=False, soft_wrap=True)

    def remember(self, values: Mapping[str, float]) -> None:
        """Store metrics, such as those of an evaluation, that the next steps show alongside their own."""
        self._latest.update(values)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step. Metrics without a heading are left out; absent ones keep their last value, but for rewards of
        turns, which a batch without such turns does not have."""
        self._latest = {name: value for name, value in self._latest.items() if not name.startswith(TURN_REWARD)}
        self.remember(values)
        self._steps.append((step, dict(values)))
        self._rewards.append(values.get("reward/mean", math.nan))
        if self._live is None:
            self.note(self.line(step))
        else:
            self._to_log(self.line(step))
            self._live.update(self._panel(step), refresh=True)

    def show_warm_up(self, step: int, steps: int, loss: float) -> None:
        """Show a supervised step: they precede the steps of the run."""
        text = f"warm-up {step}/{steps} | loss {loss:.3g}"
        if self._live is None or step == steps:
            self.note(text)
        else:
            self._to_log(text)
            self._live.update(text, refresh=True)

    def _to_log(self, line: str) -> None:
        if self._live is not None and self._log is not None:
            print(line, file=self._log, flush=True)

    def line(self, step: int) -> str:
        """The step as one line of text."""
        shown = [f"{heading} {text}" for heading, text in cells(self._latest).items()]
        dropped = self._dropped()
        return " | ".join([f"step {step}/{self._total}", *shown, *([f"dropped {dropped}"] if dropped else [])])

    def _dropped(self) -> str:
        counts = {name.removeprefix(DROPPED): n for name, n in self._latest.items() if name.startswith(DROPPED) and n}
        return ", ".join(f"{reason}: {count:.0f}" for reason, count in counts.items())

    def _panel(self, step: int) -> Panel:
        table = Table(box=None, expand=True, pad_edge=False)
        headings = list(cells(self._latest))
        for heading in ("step", *headings):
            table.add_column(heading, justify="right")
        for at, values in self._steps:
            shown = cells(self._latest if at == step else values)
            table.add_row(str(at), *(shown.get(heading, "") for heading in headings))
        seconds = time.monotonic() - self._start
        dropped = self._dropped()
        footer = f"reward {bars(list(self._rewards))}   dropped {dropped or 'none'}"
        return Panel(table, title=f"step {step}/{self._total}, {seconds:.0f} s", subtitle=footer)


def console_of(relay: Relay | None, total_steps: int) -> Console:
    """The console of a run whose output is relayed, or that prints itself."""
    if relay is None or relay.screen is None:
        return Console(total_steps)
    return Console(total_steps, _Screen(relay.screen, relay.consoles[1]), log=relay.log, sync=relay.sync)


class _Screen(Terminal):
    """A terminal that is written to through the relay's pipe."""

    def __init__(self, pipe: TextIO, terminal: int) -> None:
        self._descriptor = terminal
        super().__init__(file=pipe, force_terminal=True)

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        with suppress(OSError):  # it was closed
            width, height = os.get_terminal_size(self._descriptor)
            if width and height:
                return ConsoleDimensions(width, height)
        return super().size


class _Logged:
    """A standard stream whose text is shown above the live table, and logged."""

    def __init__(self, proxy: FileProxy, log: TextIO) -> None:
        self._proxy, self._log = proxy, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._proxy.write(text)


def cells(values: Mapping[str, float]) -> dict[str, str]:
    """The text of each column by its heading; "-" for a value that is missing or not finite. Columns without a finite
    value are left out."""
    named: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    """Names of the metrics in each column: those of the registry, and the given ones that match its patterns."""
    for metric in METRICS:
        if metric.heading and "*" not in metric.name:
            named[metric.heading].append(metric.name)
    for name in values:
        if (entry := find(name)) is None or entry.name == name:
            continue
        heading = name.removeprefix(OBJECTIVE[:-1]) if entry.name == OBJECTIVE else entry.heading
        if heading:
            named.setdefault(heading, []).append(name)
    return {
        heading: "/".join(_text(name, values.get(name, math.nan)) for name in names)
        for heading, names in named.items()
        if any(math.isfinite(values.get(name, math.nan)) for name in names)
    }


def _text(name: str, value: float) -> str:
    metric = find(name)
    form = metric.form if metric is not None and metric.form else "{:.3g}"
    return form.format(value) if math.isfinite(value) else "-"


def bars(values: list[float]) -> str:
    """The values as a row of small bars, scaled from minimum to maximum; a space for a value that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        BARS[1 + round((value - low) / span * (len(BARS) - 2))] if math.isfinite(value) else BARS[0] for value in values
    )

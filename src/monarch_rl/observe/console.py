"""Console output of a run: a live table in a terminal, otherwise one line per step."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.console import ConsoleDimensions, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from monarch_rl.observe.console_relay import Relay
from monarch_rl.observe.registry import METRICS, OBJECTIVE, find

HEADINGS = list(dict.fromkeys(metric.heading for metric in METRICS if metric.heading))
"""The columns that every run may have, in the order of the registry."""
DROPPED = "dropped/"
"""Name prefix of the metrics of dropped groups and failed episodes; the reason follows."""
TURN_REWARD = "turn_reward/"
"""Name prefix of the mean rewards of a task's turns."""
STEP_S = "time/step_s"
"""Seconds of a step."""
HELD_OUT = ("held-out", "held-out reward")
"""Columns of evaluations, of which few steps have a value."""
BARS = " " + "".join(chr(code) for code in range(0x2581, 0x2589))


class LiveArea:
    """The last lines of a terminal, which change while text that is printed meanwhile appears above them.

    Elsewhere than on a terminal it shows nothing.

    Args:
        terminal: output.
        log: gets what is printed above the area; None if it is not logged here.
        sync: called before and after the area is shown, with which other output must not mix.
    """

    def __init__(
        self, terminal: Terminal, log: TextIO | None = None, sync: Callable[[], object] = lambda: None
    ) -> None:
        self.terminal, self._log, self._sync = terminal, log, sync
        self._live: Live | None = None

    def show(self, content: RenderableType) -> None:
        """Show ``content`` in place of the earlier one; text as it is, without Rich's markup."""
        if not self.terminal.is_terminal:
            return
        if self._live is None:
            self._sync()
            self._live = Live(console=self.terminal, auto_refresh=False)
            self._live.start()
            if self._log is not None:  # until the area ends, which restores the streams
                for name in ("stdout", "stderr"):
                    setattr(sys, name, _Logged(getattr(sys, name), self._log))
        self._live.update(Text(content) if isinstance(content, str) else content, refresh=True)

    def end(self, keep: bool) -> None:
        """Print what follows below. ``keep`` leaves the last content there; otherwise it is removed."""
        live, self._live = self._live, None
        if live is not None:
            live.transient = not keep
            live.stop()
            self._sync()

    def print(self, text: str) -> None:
        """Print a permanent line, above the area."""
        if self._live is None and self._log is not None:
            print(text, flush=True)  # in the order of all other output, which `log` is not
            return
        self.log(text)
        self.terminal.print(text, highlight=False, markup=False, soft_wrap=True)

    def log(self, text: str) -> None:
        """Write a line to the log only: one in place of which the terminal shows the area."""
        if self._log is not None:
            print(text, file=self._log, flush=True)


class Console:
    """Shows the steps of a run.

    Args:
        total_steps: number of steps of the whole run.
        terminal: output; stdout by default.
        rows: number of steps in the live table.
        log: gets what a terminal shows, with one line per step instead of the table; None if it is not logged here.
        sync: called before and after the live table, with which other output must not mix.
        clock: returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        terminal: Terminal | None = None,
        rows: int = 8,
        log: TextIO | None = None,
        sync: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._area = LiveArea(terminal or Terminal(), log, sync)
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=rows)
        """Each step of the table with the values that are its own."""
        self._step_s: deque[float] = deque(maxlen=rows)
        self._rewards: deque[float] = deque(maxlen=60)
        self._latest: dict[str, tuple[float, int]] = {}
        """The newest value of each metric, and its step."""
        self._clock, self._start = clock, clock()
        self._step, self._status = 0, ""
        self._table: Panel | None = None

    @property
    def on_terminal(self) -> bool:
        """Whether :meth:`status` shows anything."""
        return self._area.terminal.is_terminal

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_area()

    def note(self, text: str) -> None:
        """Print a permanent line, above the live table."""
        self._area.print(text)

    def status(self, text: str) -> None:
        """Show on a terminal what is waited for, below the live table, until the next call; "" shows nothing."""
        if text != self._status:
            self._status = text
            self._refresh()

    def remember(self, values: Mapping[str, float], step: int) -> None:
        """Show metrics that belong to ``step``, such as those of an evaluation. Lines of later steps repeat them with
        the number of their step."""
        self._latest.update({name: (value, step) for name, value in values.items()})
        for at, of_step in self._rows:
            if at == step:
                of_step.update(values)
                break
        else:
            if not self._rows or self._rows[-1][0] < step:  # otherwise its row has left the table
                self._rows.append((step, dict(values)))
        if self._table is not None:
            self._table = self._panel(self._step)
            self._refresh()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step. Metrics without a heading are left out. A line repeats the last value of absent ones, but not
        rewards of turns, which a batch without such turns does not have."""
        self._latest = {name: found for name, found in self._latest.items() if not name.startswith(TURN_REWARD)}
        self._step = step
        self._rewards.append(values.get("reward/mean", math.nan))
        if STEP_S in values:
            self._step_s.append(values[STEP_S])
        self._status = ""
        self.remember(values, step)
        line = self.line(step)
        if not self.on_terminal:
            self.note(line)
            return
        if self._table is None:
            self._table = self._panel(step)
            self._refresh()
        self._area.log(line)  # later, since only what is printed next to the area has an order with it
        if step >= self._total:  # what comes after the last step, such as the last evaluation, belongs below the table
            self._end_area()

    def show_warm_up(self, step: int, steps: int, loss: float) -> None:
        """Show a supervised step: they precede the steps of the run."""
        text = f"warm-up {step}/{steps} | loss {loss:.3g}"
        if not self.on_terminal or step == steps:
            self._status = ""
            self._refresh()
            self.note(text)
        else:
            self.status(text)
            self._area.log(text)

    def _refresh(self) -> None:
        if self._table is None and not self._status:
            self._area.end(keep=False)
        else:
            self._area.show(Group(self._table or "", Text(self._status)))

    def _end_area(self) -> None:
        self._status = ""
        self._refresh()
        self._area.end(keep=True)
        self._table = None

    def line(self, step: int) -> str:
        """The step as one line of text. A value of an earlier step is followed by ``@`` and the number of that step."""
        shown = [f"{heading} {text}" for heading, text in self._latest_cells(step).items()]
        dropped = self._dropped()
        parts = [f"step {step}/{self._total}", *self._times(step), *shown]
        return " | ".join([*parts, *([f"dropped {dropped}"] if dropped else [])])

    def _times(self, step: int) -> list[str]:
        """Time so far, mean time of the last steps, and what is left at that pace; empty without times of steps."""
        if not self._step_s:
            return []
        step_s = sum(self._step_s) / len(self._step_s)
        left = f", {duration(step_s * (self._total - step))} left" if step < self._total else ""
        return [f"{duration(self._clock() - self._start)}, {duration(step_s)}/step{left}"]

    def _latest_cells(self, step: int) -> dict[str, str]:
        """The text of each column by its heading, from the newest values at ``step``."""
        values = {name: value for name, (value, _) in self._latest.items()}
        texts = cells(values)
        for heading, names in columns(values).items():
            if heading in texts:
                # A column of several metrics is as old as its oldest one.
                at = min(self._latest[name][1] for name in names if math.isfinite(values.get(name, math.nan)))
                texts[heading] += f" @{at}" if at != step else ""
        return texts

    def _dropped(self) -> str:
        counts = {name.removeprefix(DROPPED): n for name, (n, _) in self._latest.items() if name.startswith(DROPPED)}
        return ", ".join(f"{reason}: {count:.0f}" for reason, count in counts.items() if count)

    def _panel(self, step: int) -> Panel:
        table = Table(box=None, expand=True, pad_edge=False)
        latest = self._latest_cells(step)
        for heading in ("step", *latest):
            table.add_column(heading, justify="right")
        for at, values in self._rows:
            shown = cells(values)
            table.add_row(str(at), *(shown.get(heading, "") for heading in latest))
        held_out = [f"{name} {latest[name]}" for name in HELD_OUT if "@" in latest.get(name, "")]
        footer = [f"reward {bars(list(self._rewards))}", *held_out, f"dropped {self._dropped() or 'none'}"]
        title = ", ".join([f"step {step}/{self._total}", *self._times(step)])
        return Panel(table, title=title, subtitle="   ".join(footer))


def duration(seconds: float) -> str:
    """A time in its two largest units: ``0.42 s``, ``42 s``, ``9 min 8 s``, ``27 h 38 min``."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def console_of(relay: Relay | None, total_steps: int) -> Console:
    """The console of a run whose output is relayed, or that prints itself."""
    if relay is None or relay.screen is None:
        return Console(total_steps)
    return Console(total_steps, _Screen(relay.screen, relay.consoles[1]), log=relay.log, sync=relay.sync)


def area_of(relay: Relay | None) -> LiveArea:
    """The same for what is shown before there are steps."""
    if relay is None or relay.screen is None:
        return LiveArea(Terminal())
    return LiveArea(_Screen(relay.screen, relay.consoles[1]), relay.log, relay.sync)


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


def columns(names: Iterable[str]) -> dict[str, list[str]]:
    """The metrics of each column by its heading: those of the registry, and the given ones that match its patterns."""
    named: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    for metric in METRICS:
        if metric.heading and "*" not in metric.name:
            named[metric.heading].append(metric.name)
    for name in names:
        if (entry := find(name)) is None or entry.name == name:
            continue
        heading = name.removeprefix(OBJECTIVE[:-1]) if entry.name == OBJECTIVE else entry.heading
        if heading:
            named.setdefault(heading, []).append(name)
    return named


def cells(values: Mapping[str, float]) -> dict[str, str]:
    """The text of each column by its heading; "-" for a value that is missing or not finite. Columns without a finite
    value are left out."""
    return {
        heading: "/".join(_text(name, values.get(name, math.nan)) for name in names)
        for heading, names in columns(values).items()
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

"""Makes the page of one or several runs: one HTML file that opens offline, and files beside it with older rollouts.

All data is deflated JSON in base64, so no text that a model, a task or a tool wrote can end a script or a tag. The code
in ``static/`` shows it with ``textContent`` alone, and the page's policy (CSP) forbids every connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.errors import SettingsError
from monarch_rl.observe.registry import find
from monarch_rl.report.diagnose import evidence_of
from monarch_rl.report.read import Metrics, RunRecord, flat_settings, read_object
from monarch_rl.report.reduce import POINTS, reduce
from monarch_rl.report.rules import findings

GROUPS = 32
"""The newest groups, which are in the page itself as far as they fit, and the most groups of a piece."""
PAGE_GROUP_BYTES = 600_000
"""Deflated bytes of the groups in the page. A run's newest group may exceed them."""
PAGE_BYTES = 2_000_000
"""Bytes of a page that a run's newest group may fill."""
PIECE_BYTES = 8_000_000
"""Bytes of lines after which a piece ends; a larger group is a piece of its own."""
MOST_GROUPS = 5000
"""Groups of all runs of a page, each of which is listed in the page itself."""
OTHER_POINTS = 400
"""Points of a metric that is on no chart of the first screen."""
GAP_S = 60.0
"""Seconds without any span after which the run counts as not running."""
SPANS = 20_000
"""The newest spans of the timeline in the page."""
DEFLATED = 4
"""A group whose lines have more than this times the room left in the page is not tried: tokens deflate by less."""
REPACKED = 1.02
"""Base64 that is deflated and put into base64 again grows by less than this factor: by 1 %."""
CODE = ("data.js", "charts.js", "learn.js", "rollouts.js", "time.js", "run.js", "main.js")
"""Files of ``static/``, in the order in which they are joined."""

CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean",)),
    ("Held-out", ("held_out/accuracy", "held_out/reward")),
    ("Parts of the reward", ("reward/*/*",)),
    ("Length", ("length/mean", "length/max")),
    ("Cut at a limit", ("length/cut_share",)),
    ("Entropy", ("trainer/entropy",)),
    ("KL and mismatch", ("trainer/kl_reference", "trainer/mismatch_k3_on_policy", "trainer/mismatch_k3_all")),
    ("Gradient norm", ("trainer/grad_norm",)),
)
"""Charts of the first screen; a pattern stands for all metrics whose registry entry has that name."""
STACKED = ("reward/all_wrong_share", "reward/equal_groups_share", "reward/all_right_share")
INTERVALS = ("held_out/accuracy_low", "held_out/accuracy_high")

PREDICTION = "prediction.json"
"""File of a run's folder with what the simulator predicts."""
PIECE = "__piece("
"""Beginning of a piece's text."""

_Group = tuple[str, list[dict[str, Any]]]
"""Name of a group, and its rows."""


class Pieces(Mapping[int, str]):
    """The text of each piece, by number from 1. It is made whenever it is looked up: most pieces of a page that is
    served are not, and to deflate all of them takes most of the time that a page takes."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of the lines in all pieces."""
        self._groups: list[list[_Group]] = []

    def add(self, groups: list[_Group]) -> None:
        """Add a piece."""
        self._groups.append(groups)
        self.nbytes += sum(_nbytes(rows) for _, rows in groups)

    def __getitem__(self, number: int) -> str:
        if not 1 <= number <= len(self):
            raise KeyError(number)
        packed = {name: _packed(rows) for name, rows in self._groups[number - 1]}
        # Base64 and names made here: nothing in it needs escaping.
        return f'{PIECE}{number}, "{_packed(packed)}");\n'

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, len(self) + 1))

    def __len__(self) -> int:
        return len(self._groups)


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and the pieces beside it."""

    html: str
    policy: str
    """Its content security policy, which is also in the page."""
    pieces: Pieces
    """Text of the piece ``NNN.js``, by number."""


def write_page(page: Page, output: Path) -> None:
    """Write a page and its pieces, which are in a folder beside it, named like the page without ``.html``. Pieces of an
    earlier page that are left there are removed. If anything cannot be written, the earlier page stays as it was.

    Raises:
        SettingsError: ``output`` does not end in ``.html``, or a file cannot be written.
    """
    if output.suffix != ".html":
        raise SettingsError(f"{output} does not end in .html: its pieces are put into a folder of that name")
    folder = output.with_suffix("")
    pieces = {folder / piece_name(number): number for number in page.pieces}
    incomplete = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in (*pieces, output)}
    try:
        if page.pieces:
            folder.mkdir(exist_ok=True)
        try:
            for path, number in pieces.items():
                incomplete[path].write_text(page.pieces[number])
            incomplete[output].write_text(page.html)
            for path, written in incomplete.items():
                written.replace(path)
        finally:
            for path in incomplete.values():
                path.unlink(missing_ok=True)
        for old in folder.glob("[0-9][0-9][0-9]*.js"):
            if old not in pieces and old.is_file() and old.read_bytes().startswith(PIECE.encode()):
                old.unlink()
    except OSError as error:
        raise SettingsError(f"{output} cannot be written ({error.strerror or error})") from error


def piece_name(number: int) -> str:
    return f"{number:03}.js"


def make_page(
    runs: Sequence[RunRecord],
    *,
    single: bool = False,
    reload_s: float = 0.0,
    pieces_at: str = "report",
) -> Page:
    """The page of one or several runs.

    Args:
        runs: in the order in which they are shown.
        single: put all rollouts into the page.
        reload_s: seconds after which the page reloads itself if a run is running; 0: never.
        pieces_at: folder of the pieces, relative to the page.
    """
    most = MOST_GROUPS // max(1, len(runs))
    grouped = list[list[_Group]]()
    for number, record in enumerate(runs):
        groups = _groups(record.episodes, number)
        if len(groups) > most:
            newest = f"only the newest {most:,} of {len(groups):,} groups of rollouts are shown"
            record.notes.append(f"{record.folder}: {newest}")
        grouped.append(groups[:most])
    described = [
        _run(run, len(runs)) | {"groups": [_summary(name, rows) for name, rows in groups]}
        for run, groups in zip(runs, grouped, strict=True)
    ]
    names = sorted({name for run in described for name in run["series"]})
    data = {
        "made": time.time(),
        "reload_s": reload_s if any(run.state.get("state") == "running" for run in runs) else 0,
        "pieces_at": pieces_at,
        "charts": CHARTS,
        "stacked": STACKED,
        "metrics": {name: _described(name) for name in names},
        "runs": described,
    }
    title = ", ".join(run.name for run in runs)
    pieces = _Distribution(single, PAGE_BYTES - len(_html(title, _packed(data))[0]))
    for run, groups in zip(described, grouped, strict=True):
        places = pieces.add(groups)
        for summary in run["groups"]:
            summary["piece"] = places[summary["name"]]
    text, policy = _html(title, _packed(data | {"inside": pieces.inside}))
    return Page(text, policy, pieces.outside)


def _html(title: str, data: str) -> tuple[str, str]:
    """The page, and its policy."""
    static = files("monarch_rl.report") / "static"
    style = (static / "uPlot.min.css").read_text() + (static / "style.css").read_text()
    library = (static / "uPlot.iife.min.js").read_text()
    code = '"use strict";\n' + "".join((static / name).read_text() for name in CODE)
    policy = (
        f"default-src 'none'; script-src 'self' file: {content_hash(library)} {content_hash(code)}; "
        f"style-src {content_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">'
        f"<title>{html.escape(title.encode(errors='replace').decode())}</title><style>{style}</style></head><body>"
        "<noscript>This page needs JavaScript. It loads nothing from the network.</noscript>"
        f'<script type="text/plain" id="data">{data}</script><script>{library}</script><script>{code}</script>'
        "</body></html>\n"
    ), policy


def content_hash(text: str) -> str:
    """What a policy names a script or a style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(value: Any) -> str:
    """JSON, deflated, in base64."""
    return base64.b64encode(_deflated(value)).decode()


def _deflated(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":"), default=repr).encode(), 6)


def _array(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _described(name: str) -> list[str]:
    """Unit, meaning, and the registry's name of a metric."""
    metric = find(name)
    return ["", "", ""] if metric is None else [metric.unit, metric.meaning, metric.name]


# -- one run -------------------------------------------------------------------------------------------------------


def _run(run: RunRecord, number_of_runs: int) -> dict[str, Any]:
    axes, series = _series(run.metrics, run.settings, number_of_runs)
    differs, rest = _settings(run)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "differs": differs,
        "settings": rest,
        "axes": axes,
        "series": series,
        "lags": _lags(run.episodes),
        "lanes": _lanes(run.spans),
        "spans": [
            [span["lane"], span.get("kind"), span.get("what"), span.get("on", ""), span["from"], span["to"]]
            for span in run.spans[-SPANS:]
        ],
        "prediction": read_object(run.folder / PREDICTION, run.notes),
        "failures": run.failures,
        "resumes": run.resumes,
        "recipe": run.recipe,
        "log": run.log,
        "notes": run.notes,
        "findings": [asdict(finding) for finding in findings(evidence_of(run))],
    }


def _series(
    metrics: Metrics, settings: dict[str, Any], number_of_runs: int
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The horizontal axes, and per metric its axis and its mean, lowest and highest values (float32, base64)."""
    horizontal = _horizontal(metrics, settings)
    axes, known, series = list[dict[str, str]](), dict[tuple[int, int, bytes], int](), dict[str, Any]()
    for name, column in metrics.columns.items():
        points = (POINTS if _is_first(name) else OTHER_POINTS) // number_of_runs
        values = reduce(column.values, max(points, 50))
        if np.isnan(values.mean).all():
            continue
        rows = np.asarray(column.rows)[values.at]
        key = (len(rows), len(column.rows), rows.tobytes())
        if key not in known:
            known[key] = len(axes)
            axes.append({axis: _array(at[rows]) for axis, at in horizontal.items()})
        series[name] = {"axis": known[key], "mean": _array(values.mean), "last": _last(column.values)}
        if values.low is not values.mean:
            series[name] |= {"low": _array(values.low), "high": _array(values.high)}
    return axes, series


def _last(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if math.isfinite(value)), None)


def _is_first(name: str) -> bool:
    """Whether a metric is on a chart of the first screen."""
    entry = _described(name)[2]
    return name in STACKED + INTERVALS or any(name in chart or entry in chart for _, chart in CHARTS)


def _horizontal(metrics: Metrics, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Per axis of choice, the position of each row."""
    rows = len(metrics.steps)
    axes = {"step": np.asarray(metrics.steps, dtype=np.float64), "hours": np.asarray(metrics.seconds) / 3600}
    if (tokens := metrics.columns.get("trainer/tokens")) is not None:
        added = np.zeros(rows)
        added[np.asarray(tokens.rows)] = np.nan_to_num(np.asarray(tokens.values))
        axes["tokens"] = np.cumsum(added)
    rollout = settings.get("rollout")
    size = rollout.get("group_size") if isinstance(rollout, dict) else None
    trained = metrics.columns.get("buffer/trained")
    if trained is not None and isinstance(size, int):
        total = np.zeros(rows)
        total[np.asarray(trained.rows)] = np.nan_to_num(np.asarray(trained.values)) * size
        axes["episodes"] = np.maximum.accumulate(total)  # an evaluation's row takes that of the step before
    return axes


def _settings(run: RunRecord) -> tuple[list[Any], list[Any]]:
    """Settings as ``[flag, value, default]`` where they are not the recipe's defaults, and the others as
    ``[flag, value]``: all of them in runs of earlier versions."""
    recorded = run.state.get("changed")
    changed = {
        name.replace("_", "-"): pair[0]
        for name, pair in (recorded.items() if isinstance(recorded, dict) else ())
        if isinstance(pair, list) and pair
    }
    flat = flat_settings(run.settings).items()
    differs = [[name, value, changed[name]] for name, value in flat if name in changed]
    return differs, [[name, value] for name, value in flat if name not in changed]


# -- rollouts ------------------------------------------------------------------------------------------------------


class _Distribution:
    """Distributes groups over the page and its pieces: numbers from 1, and 0 for the page itself.

    Args:
        single: put all groups into the page.
        room: bytes that the page may still grow by for the newest groups of its runs.
    """

    def __init__(self, single: bool, room: int) -> None:
        self.inside: dict[str, str] = {}
        """By name of the group, its packed rows."""
        self.outside = Pieces()
        self._single = single
        self._room = room
        self._nbytes = 0
        """Bytes of the groups in the page, in base64."""

    def add(self, groups: list[_Group]) -> dict[str, int]:
        """Add a run's groups, newest first. Returns each group's piece."""
        places: dict[str, int] = {}
        piece: list[_Group] = []
        nbytes = 0
        for count, (name, rows) in enumerate(groups):
            if self._put_inside(name, rows, count):
                places[name] = 0
                continue
            size = _nbytes(rows)
            if piece and (len(piece) >= GROUPS or nbytes + size > PIECE_BYTES):
                self.outside.add(piece)
                piece, nbytes = [], 0
            piece.append((name, rows))
            places[name] = len(self.outside) + 1
            nbytes += size
        if piece:
            self.outside.add(piece)
        return places

    def _put_inside(self, name: str, rows: list[dict[str, Any]], newer: int) -> bool:
        """Put a group into the page if it fits. ``newer``: number of the run's newer groups."""
        room = PAGE_GROUP_BYTES * 4 // 3 - self._nbytes
        if newer and not self._single and (newer >= GROUPS or _nbytes(rows) > DEFLATED * room):
            return False
        packed = _packed(rows)
        fits = len(packed) <= room or (newer == 0 and (self._nbytes + len(packed)) * REPACKED <= self._room)
        if fits or self._single:
            self.inside[name] = packed
            self._nbytes += len(packed)
        return fits or self._single


def _nbytes(rows: list[dict[str, Any]]) -> int:
    """Bytes of the lines of rows that were read from a file."""
    return sum(row.get("bytes", 0) for row in rows)


def _groups(episodes: list[dict[str, Any]], run: int) -> list[_Group]:
    """The rows of each group by the group's name, which no other run of the page has; newest group first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for episode in episodes:
        evaluated = "held_out" in episode and repr((episode["held_out"], episode.get("version")))
        key = (episode["group"], repr(episode.get("attempt", 0)), evaluated)
        groups.setdefault(key, []).append(episode)
    named = [(f"{run}.{number}", rows) for number, rows in enumerate(groups.values())]
    named.reverse()
    return named


def _summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the list of rollouts shows of a group."""
    first = rows[0]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    return {
        "name": name,
        "group": first["group"],
        "attempt": first.get("attempt", 0),
        "kinds": sorted({str(row.get("kind")) for row in rows}),
        "step": max(steps, default=None),
        "version": max((version for row in rows for version, _ in _versions(row)), default=None),
        "task": str(first.get("task", "")),
        "index": first.get("task_index"),
        "set": first.get("held_out"),
        "episodes": len(rows),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "best": max(rewards, default=None),
        "finish": sorted({str(row["finish_reason"]) for row in rows if row.get("finish_reason")}),
        "prompt": str(first.get("prompt") or "")[-300:],
        "piece": 0,
    }


def _versions(row: dict[str, Any]) -> list[tuple[int, int]]:
    spans = row.get("versions")
    return [
        (span[0], span[1])
        for span in (spans if isinstance(spans, list) else [])
        if isinstance(span, list) and len(span) == 2 and all(isinstance(value, int) for value in span)
    ]


def _lags(episodes: list[dict[str, Any]]) -> dict[int, int]:
    """Trained tokens by lag: the number of updates between the version that sampled a token and the one that the
    step updated. Of the episodes whose step is known."""
    lags: dict[int, int] = {}
    for episode in episodes:
        if episode.get("kind") == "train" and isinstance(step := episode.get("step"), int):
            for version, tokens in _versions(episode):
                lag = step - 1 - version
                lags[lag] = lags.get(lag, 0) + tokens
    return dict(sorted(lags.items()))


# -- time ----------------------------------------------------------------------------------------------------------


def _lanes(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per lane, the shares of the recorded time that it worked, and waited for each other actor. Gaps in which no lane
    has anything, as before a resume, do not count."""
    lanes: dict[str, dict[str, float]] = {}
    whole, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: float(span["from"])):
        gap = span["from"] - until
        whole += max(0.0, span["to"] - (span["from"] if gap > GAP_S else until))
        until = max(until, span["to"])
        shares = lanes.setdefault(span["lane"], {})
        what = "work" if span.get("kind") == "work" else f"wait: {span.get('on') or span.get('what')}"
        shares[what] = shares.get(what, 0.0) + max(0.0, span["to"] - span["from"])
    whole = max(whole, 1e-9)
    return [{"lane": lane, "shares": {what: s / whole for what, s in shares.items()}} for lane, shares in lanes.items()]

"""Table and plot of algorithms.py, from the lines of its results file."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from algorithms_cases import ALIKE, FOUR, LAGS, MENDED

from monarch_rl.algorithms.estimates import wilson_interval

HELD_OUT = 200
"""Items of an evaluation."""
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Half the width of a 95 % interval in standard errors of the mean, by degrees of freedom (Student's t)."""
Rows = list[dict[str, Any]]
COLUMNS = (
    ("entropy", "entropy_first_tenth", "entropy_last_tenth"),
    ("KL to the behaviour policy", "kl"),
    ("largest", "kl_max"),
    ("clipped", "clipped"),
    ("weight", "weight"),
    ("wasted tokens", "wasted"),
    ("groups of equal rewards", "equal_groups"),
)
"""Headings and keys of the columns other than accuracy; columns in ``SHARES`` are percentages."""
SHARES = {"clipped", "wasted tokens", "groups of equal rewards"}


def interval(values: list[float], items: int = HELD_OUT) -> tuple[float, float]:
    """Return the 95 % interval of a mean over seeds, by Student's t; for one seed, that of its share of ``items``."""
    if len(values) == 1:
        return wilson_interval(values[0], items)
    half = STUDENT[min(len(values) - 1, 4)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def grouped(rows: Rows) -> dict[tuple[str, int], Rows]:
    """Return the runs by case and lag, in the order of the table."""
    found: dict[tuple[str, int], Rows] = defaultdict(list)
    for row in rows:
        found[row["name"], row["lag"]].append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0][0] not in FOUR, item[0][1])))


def accuracies(runs: Rows, place: int) -> list[float]:
    """Return the accuracy of each run at an evaluation."""
    return [run["accuracy"][place][1] for run in runs]


def table(rows: Rows) -> str:
    """Return a row for each case and lag, with means over seeds; then sentences about the losses of the four objectives
    by the lag, the gains of corrections, and the noise of equal runs."""
    head = ["", "lag", "seeds", "accuracy: start", "end", "95 %", *(column[0] for column in COLUMNS)]
    lines = [head, ["---"] * len(head)]
    for (name, lag), runs in grouped(rows).items():
        ends = accuracies(runs, -1)
        low, high = np.clip(interval(ends), 0.0, 1.0)
        accuracy = [f"{np.mean(accuracies(runs, 0)):.1%}", f"{np.mean(ends):.1%}", f"{low:.1%} to {high:.1%}"]
        lines.append([name, str(lag), str(len(runs)), *accuracy, *(_cell(runs, *column) for column in COLUMNS)])
    shown = [
        "\n".join("| " + " | ".join(line) + " |" for line in lines),
        *losses_by_lag(rows),
        *gains_by_correction(rows),
        *noise(rows),
    ]
    return "\n\n".join(shown)


def _cell(runs: Rows, heading: str, *names: str) -> str:
    means = [float(np.mean([run[name] for run in runs])) for name in names]
    return " to ".join(f"{mean:.1%}" if heading in SHARES else f"{mean:.3g}" for mean in means)


def losses_by_lag(rows: Rows) -> list[str]:
    """Return, for each of the four, a sentence about its accuracy at the larger lag minus that at the smaller one."""
    cases = (((name, LAGS[1]), (name, LAGS[0]), f"lag {LAGS[0]}") for name in FOUR)
    return [sentence for case in cases if (sentence := _difference(rows, *case))]


def gains_by_correction(rows: Rows) -> list[str]:
    """Return such sentences for objectives with a correction at the larger lag, relative to both lags without it."""
    pairs = ((name, without, lag) for name, without in MENDED.items() for lag in reversed(LAGS))
    cases = (((name, LAGS[1]), (without, lag), f"{without} at lag {lag}") for name, without, lag in pairs)
    return [sentence for case in cases if (sentence := _difference(rows, *case))]


def _difference(rows: Rows, one: tuple[str, int], other: tuple[str, int], reference: str) -> str:
    """Return a sentence about the accuracy of one case minus that of another, over common seeds; empty without any."""
    by_case = grouped(rows)
    found, others = ({run["seed"]: run for run in by_case.get(case, [])} for case in (one, other))
    seeds = sorted(found.keys() & others.keys())
    if not seeds:
        return ""
    differences = [found[seed]["accuracy"][-1][1] - others[seed]["accuracy"][-1][1] for seed in seeds]
    sentence = f"{one[0]}: lag {one[1]} ends {np.mean(differences):+.1%} beside {reference}"
    if len(seeds) == 1:
        return sentence + ", of one seed."
    low, high = interval(differences)
    return sentence + f" (95 %: {low:+.1%} to {high:+.1%}; {len(seeds)} seeds)."


def noise(rows: Rows) -> list[str]:
    """Return, for each of ``ALIKE``, a sentence about the standard deviation of runs of one seed, pooled over seeds."""
    sentences = []
    for lag, names in ALIKE.items():
        by_seed: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if row["lag"] == lag and row["name"] in names:
                by_seed[row["seed"]].append(row["accuracy"][-1][1])
        several = [ends for ends in by_seed.values() if len(ends) > 1]
        if several:
            squares = sum(float(np.var(ends)) * len(ends) for ends in several)
            deviation = math.sqrt(squares / sum(len(ends) - 1 for ends in several))
            spread = max(max(ends) - min(ends) for ends in several)
            sentences.append(
                f"{'; '.join(names)} at lag {lag} have one gradient: runs of one seed lie up to {spread:.1%} apart "
                f"(standard deviation {deviation:.1%}, of {len(several)} x {len(several[0])} runs)."
            )
    return sentences


def draw(rows: Rows, path: Path) -> None:
    """Plot the held-out accuracy of the four over steps, and of all cases at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_case = grouped(rows)
    figure, (curves, ends) = pyplot.subplots(1, 2, figsize=(13, 0.24 * len(by_case) + 3), layout="constrained")
    colours = dict(zip(FOUR, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for (name, lag), runs in by_case.items():
        if name not in FOUR or lag not in LAGS:
            continue
        steps = [step for step, _ in runs[0]["accuracy"]]
        means = np.mean([[value for _, value in run["accuracy"]] for run in runs], axis=0)
        style = "-" if lag == LAGS[0] else "--"
        curves.plot(steps, means, style, color=colours[name], marker=".", label=f"{name}, lag {lag} ({len(runs)})")
    curves.set(xlabel="optimiser step", ylabel="held-out accuracy, mean over seeds (their number)")
    curves.legend(fontsize="small")
    curves.grid(alpha=0.3)
    for place, ((name, _), runs) in enumerate(by_case.items()):
        values = accuracies(runs, -1)
        low, high = interval(values)
        ends.plot([low, high], [place, place], color=colours.get(name, "gray"), alpha=0.6)
        ends.plot(values, [place] * len(values), ".", color=colours.get(name, "gray"))
        ends.plot(accuracies(runs, 0), [place] * len(values), "|", color="black", alpha=0.4)
    ends.set_yticks(range(len(by_case)), [f"{name}, lag {lag}" for name, lag in by_case], fontsize="small")
    ends.invert_yaxis()
    ends.set(xlabel="held-out accuracy after training: seeds, 95 %; black: before", xlim=(0, 1))
    ends.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=90)

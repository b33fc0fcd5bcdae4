"""The rules of the diagnosis: each looks for one reason why a run learns little, and says what to change.

A rule is a pure function of the :class:`Evidence` of a run. Thresholds were chosen on runs of
``benchmarks/diagnose.py``, and hold on others that were recorded afterwards.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

logger = logging.getLogger("monarch_rl")

WINDOW = 20
"""Steps that a rule looks at: the newest ones, and for a change also as many before."""
FEWEST = 5
"""Steps below which a run is too short to say anything."""
K3_LIMITS = {"float32": 1e-8, "bfloat16": 2e-3}
"""Highest k3 of engine and trainer for the same weights, in nats per token: the limits of ``tools/parity.py``."""

MEDIAN_LIMIT = 0.05
"""Highest median of |log-prob of engine - trainer|, in nats, where tokens may have been sampled with keys and values
of earlier weights (``generator.in_flight``)."""

Level = Literal["problem", "note"]
Confidence = Literal["sure", "likely", "perhaps"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found."""

    sentence: str
    value: float
    """The number behind the sentence."""
    metric: str
    """Where the number comes from, a name in ``metrics.jsonl``."""
    since: int
    """First step from which on it has been so."""
    change: str
    """What to change: flags with values, or the part of the recipe."""
    confidence: Confidence
    lost: float
    """Share of the learning signal that is lost, from 0 to 1."""
    level: Level = "problem"
    """Whether something is wrong, or only worth knowing."""
    rule: str = ""
    """Name of the rule, filled in by :func:`findings`."""


@dataclass(frozen=True, slots=True)
class SampledEpisode:
    """A trained episode of a logged group."""

    step: int
    reward: float
    cut: bool
    """Whether a limit of tokens ended it."""


@dataclass(frozen=True)
class Evidence:
    """What the rules read of a run."""

    metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """By name: int64[n] steps, ascending, and float64[n] values, finite."""
    settings: Mapping[str, Any]
    """By flag without dashes, as in ``trainer.lr``."""
    episodes: Sequence[SampledEpisode] = ()
    failures: Counter[str] = field(default_factory=Counter)
    """Failed episodes by reason and place, as far as they are logged."""
    on_gpu: bool | None = None
    """Whether the run had GPUs, on which automatic dtypes are coarser; None if that is not known."""

    def steps(self) -> int:
        """Number of steps with a batch of episodes."""
        return len(self.metrics["reward/mean"][0]) if "reward/mean" in self.metrics else 0

    def newest(self, name: str, count: int = WINDOW) -> float:
        """Mean of the newest ``count`` values; nan if there are none."""
        values = self._values(name)[-count:]
        return float(values.mean()) if len(values) else math.nan

    def first(self, name: str, count: int = WINDOW) -> float:
        """Mean of the first ``count`` values; nan if there are none."""
        values = self._values(name)[:count]
        return float(values.mean()) if len(values) else math.nan

    def near(self, name: str, step: float, count: int = 10) -> float:
        """Mean of the values of the ``count`` steps up to ``step``; nan if there are none."""
        steps, values = self.metrics.get(name, (np.zeros(0), np.zeros(0)))
        chosen = values[(steps <= step) & (steps > step - count)]
        return float(chosen.mean()) if len(chosen) else math.nan

    def before(self, name: str, count: int = WINDOW) -> float:
        """Mean of the ``count`` values before the newest ``count``; nan if there are none."""
        values = self._values(name)[-2 * count : -count]
        return float(values.mean()) if len(values) else math.nan

    def since(self, name: str, holds: Callable[[float], bool]) -> int:
        """First step of the newest spell in which ``holds`` is true of the values, averaged over 3 steps."""
        steps, values = self.metrics[name]
        smooth = [float(values[max(0, i - 1) : i + 2].mean()) for i in range(len(values))]
        start = len(values) - 1
        while start > 0 and holds(smooth[start - 1]):
            start -= 1
        return int(steps[start])

    def _values(self, name: str) -> np.ndarray:
        return self.metrics[name][1] if name in self.metrics else np.zeros(0)


Rule = Callable[[Evidence], Finding | None]


def small_updates(e: Evidence) -> Finding | None:
    """No weight changes in the dtype in which weights are served, although there is a gradient."""
    rates, shares = (e.metrics.get(f"trainer/{name}", (None, np.zeros(0)))[1] for name in ("lr", "changed_share"))
    if not len(shares) or len(rates) != len(shares) or not e.newest("trainer/grad_norm") > 0:
        return None
    share = float(shares[rates >= rates.max() / 2][-WINDOW:].mean())  # not of steps whose rate has decayed
    if not share < 1e-3:
        return None
    return Finding(
        sentence=f"The updates are too small: they change {share:.2%} of the weights as generators hold them.",
        value=share,
        metric="trainer/changed_share",
        since=e.since("trainer/changed_share", lambda value: value < 1e-3),
        change=f"--trainer.lr {10 * float(rates.max()):.0e} or more, or --generator.dtype float32",
        confidence="sure",
        lost=1.0 - share,
    )


def failing_episodes(e: Evidence) -> Finding | None:
    """Episodes fail: their code or the reward raises, hangs, or returns no number."""
    failed = sum(
        float(values[-1] - values[-WINDOW] if len(values) > WINDOW else values[-1])
        for name, (_, values) in e.metrics.items()
        if name.startswith("dropped/episode") and len(values)
    )
    size = int(e.settings.get("rollout.group-size", 1)) * int(e.settings.get("groups-per-step", 1))
    share = failed / max(failed + size * min(WINDOW, e.steps()), 1.0)
    if share < 0.02:
        return None
    worst = max(
        (name for name in e.metrics if name.startswith("dropped/episode")), key=lambda name: e.metrics[name][1][-1]
    )
    where = f", mostly: {e.failures.most_common(1)[0][0]}" if e.failures else ""
    return Finding(
        sentence=f"{share:.0%} of the episodes fail ({worst.removeprefix('dropped/')}){where}.",
        value=share,
        metric=worst,
        since=int(e.metrics[worst][0][np.argmax(e.metrics[worst][1] > 0)]),
        change="the code that raises; tools/play.py runs single episodes",
        confidence="sure",
        lost=share,
    )


def cut_answers(e: Evidence) -> Finding | None:
    """A limit of tokens ends answers, and those earn less than the others."""
    share, most = e.newest("length/cut_share"), int(e.settings.get("rollout.max-new-tokens", 0))
    if not share > 0.1:
        return None
    of_cut, whole = ([one.reward for one in e.episodes if one.cut == cut] for cut in (True, False))
    if of_cut and whole and np.mean(of_cut) > np.mean(whole):
        return None
    earn = f"; they earn {np.mean(of_cut):.2f}, the others {np.mean(whole):.2f}" if of_cut and whole else ""
    return Finding(
        sentence=f"{share:.0%} of the answers are cut off by a limit of tokens{earn}.",
        value=share,
        metric="length/cut_share",
        since=e.since("length/cut_share", lambda value: value > 0.1),
        change=f"--rollout.max-new-tokens {2 * most}",
        confidence="sure" if of_cut and whole else "likely",
        lost=share,
    )


def part_never_earned(e: Evidence) -> Finding | None:
    """A part of the reward is 0 in all episodes so far."""
    parts: dict[str, float] = {}
    for name, (_, values) in e.metrics.items():
        if name.startswith("reward/") and name.count("/") == 2 and not name.endswith("/mean"):
            parts[name] = float(np.abs(values).max())
    never = sorted(name for name, largest in parts.items() if largest == 0)
    if not never or e.steps() < WINDOW:
        return None
    _, task, part = never[0].split("/")
    penalty = any(word in part.lower() for word in ("penalty", "cost", "repeat", "repetition", "overlong"))
    return Finding(
        sentence=f"The part {part!r} of the reward of {task} is 0 in all episodes so far: it teaches nothing.",
        value=0.0,
        metric=never[0],
        since=int(e.metrics[never[0]][0][0]),
        change=f"the prompt, so that answers sometimes earn {part!r}, or a reward that gives partial credit",
        confidence="perhaps" if penalty else "likely",
        lost=0.0 if penalty else len(never) / len(parts),
        level="note" if penalty else "problem",
    )


def few_rows(e: Evidence) -> Finding | None:
    """The same rows are seen often."""
    epochs = e.newest("data/epochs", 1)
    if not epochs > 20:
        return None
    # Also false if there are no evaluations, which say nothing.
    flat = e.newest("held_out/accuracy", 1) <= e.first("held_out/accuracy", 1)
    return Finding(
        sentence=f"Each training row was seen about {epochs:.0f} times"
        f"{', and held-out items do not improve' if flat else ''}.",
        value=epochs,
        metric="data/epochs",
        since=e.since("data/epochs", lambda value: value > 20),
        change="more rows, or fewer --steps",
        confidence="likely" if flat else "perhaps",
        lost=1 - 1 / epochs,
        level="problem" if flat else "note",
    )


def gaming(e: Evidence) -> Finding | None:
    """The reward rises, but not what it stands for: success on held-out items, or the reward on rows not trained on."""
    if len(e.metrics.get("held_out/accuracy", ((), ()))[0]) < 2 or e.steps() < 2 * WINDOW:
        return None
    at = int(e.metrics["held_out/accuracy"][0][-1])
    before, now = e.first("reward/mean", FEWEST), e.near("reward/mean", at)
    first, last = e.first("held_out/accuracy", 1), e.newest("held_out/accuracy", 1)
    reward, chance = e.newest("held_out/reward", 1), e.newest("held_out/accuracy_high", 1) - last
    wrong_aim = last <= first and reward - e.first("held_out/reward", 1) > 0.05 * max(1.0, abs(now))
    apart = now <= 1 and now - reward > max(chance, (now - before) / 3)  # the interval is of rewards of 0 and 1
    if not now - before > 0.05 * max(1.0, abs(before)) or not (wrong_aim or apart):
        return None
    held_out = f"accuracy is {last:.0%} after {first:.0%}" if wrong_aim else f"reward is {reward:.2f}"
    return Finding(
        sentence=f"The reward rises from {before:.2f} to {now:.2f}, but held-out {held_out}.",
        value=now - before,
        metric="reward/mean",
        since=int(e.metrics["reward/mean"][0][FEWEST]),
        change="the reward: look at the best answers" if wrong_aim else "more rows, or fewer --steps",
        confidence="likely",
        lost=1.0 if wrong_aim else 0.5,
    )


def low_entropy(e: Evidence) -> Finding | None:
    """The policy hardly varies its answers any more, or soon will not."""
    now, before = e.newest("trainer/entropy", 10), e.before("trainer/entropy", 20)
    collapsed = now < 0.05
    if not collapsed and not now < 0.5 * before:
        return None
    equal = e.newest("reward/equal_groups_share", 10)
    return Finding(
        sentence=f"The entropy of the policy is {now:.3f} nats"
        f"{'' if collapsed else f', less than half of the {before:.2f} before'}: answers to a prompt become the same, "
        "and cannot be compared.",
        value=now,
        metric="trainer/entropy",
        since=e.since("trainer/entropy", lambda value: value < (0.05 if collapsed else 0.5 * before)),
        change=f"--trainer.lr {float(e.settings.get('trainer.lr', 0.0)) / 10:.0e}, or "
        "--trainer.loss.entropy-coefficient 0.001",
        confidence="likely" if collapsed else "perhaps",
        lost=max(0.9, equal) if collapsed else 0.0,
        level="problem" if collapsed else "note",
    )


def mismatch(e: Evidence) -> Finding | None:
    """Engine and trainer disagree about the same tokens of the same weights, by more than rounding."""
    dtype = _coarser_dtype(e)
    k3, limit = e.newest("trainer/mismatch_k3_on_policy"), K3_LIMITS.get(dtype, math.inf)
    # Tokens after a swap of weights see keys of the earlier version, but the median token does not.
    stale_keys = e.settings.get("generator.in-flight") == "continue"
    if not k3 > limit or (stale_keys and not e.newest("trainer/logprob_difference_p50") > MEDIAN_LIMIT):
        return None
    outside = e.newest("trainer/ratio_outside")
    return Finding(
        sentence=f"Engine and trainer disagree by {k3:.2g} nats per token on the weights that both hold, more than "
        f"rounding in {dtype} explains ({limit:g}).",
        value=k3,
        metric="trainer/mismatch_k3_on_policy",
        since=e.since("trainer/mismatch_k3_on_policy", lambda value: value > limit),
        change="find the layer with tools/parity.py; a stage that writes log-probs is another cause",
        confidence="sure",
        lost=min(1.0, max(outside, 0.1)),
    )


def clipped_away(e: Evidence) -> Finding | None:
    """The objective clips, or corrections drop, a large share of the tokens."""
    clipped, corrected = e.newest("trainer/clipped"), 1 - e.newest("trainer/importance_weight")
    by_clip = clipped >= corrected or math.isnan(corrected)
    lost = clipped if by_clip else corrected
    if not lost > 0.2:
        return None
    what = (
        f"The objective clips {clipped:.0%} of the tokens" if by_clip else f"Corrections remove {lost:.0%} of the loss"
    )
    return Finding(
        sentence=f"{what}: they have no gradient.",
        value=lost,
        metric="trainer/clipped" if by_clip else "trainer/importance_weight",
        since=e.since("trainer/clipped", lambda value: value > 0.2) if by_clip else int(e.metrics["reward/mean"][0][0]),
        change="the objective's clip range, --trainer.epochs 1, or a lower --trainer.lr or --buffer.max-policy-lag",
        confidence="sure",
        lost=lost,
    )


def no_signal(e: Evidence) -> Finding | None:
    """The episodes of most groups have the same reward, so they cannot be compared."""
    equal = e.newest("reward/equal_groups_share")
    if not equal > 0.6:
        return None
    wrong, right = e.newest("reward/all_wrong_share"), e.newest("reward/all_right_share")
    hard = not right > wrong
    size = int(e.settings.get("rollout.group-size", 8))
    return Finding(
        sentence=f"{equal:.0%} of the groups have equal rewards ({wrong:.0%} all wrong, {right:.0%} all right): they "
        "teach nothing.",
        value=equal,
        metric="reward/equal_groups_share",
        since=e.since("reward/equal_groups_share", lambda value: value > 0.6),
        change=f"{'easier items or partial credit' if hard else 'harder items'}, --rollout.group-size {2 * size}, or "
        "--buffer.drop-equal-rewards",
        confidence="sure",
        lost=equal,
        level="problem" if equal > 0.8 else "note",
    )


def noisy_evaluation(e: Evidence) -> Finding | None:
    """The held-out items are too few to say whether the run has improved."""
    if len(e.metrics.get("held_out/accuracy", ((), ()))[0]) < 2:
        return None
    first, last = e.first("held_out/accuracy", 1), e.newest("held_out/accuracy", 1)
    items = _items(e)
    pooled = min(max((first + last) / 2, 0.5 / max(items, 1)), 1 - 0.5 / max(items, 1))
    width = 1.96 * math.sqrt(2 * pooled * (1 - pooled) / max(items, 1))
    if not items or abs(last - first) > width:
        return None
    needed = math.ceil(2 * pooled * (1 - pooled) * (1.96 / 0.05) ** 2)
    if needed <= items:  # it is certain that there is no change of 5 points
        return None
    return Finding(
        sentence=f"Held-out accuracy changed by {100 * (last - first):+.0f} points, within chance "
        f"(+-{100 * width:.0f}) of {items} items: it is too noisy to say. {needed} items would show 5 points.",
        value=last - first,
        metric="held_out/accuracy",
        since=int(e.metrics["held_out/accuracy"][0][0]),
        change=f"--held-out {needed}",
        confidence="sure",
        lost=0.0,
        level="note",
    )


def waiting_side(e: Evidence) -> Finding | None:
    """Trainer or generators are idle most of the time."""
    trainer, generators = e.newest("trainer/idle_share"), e.newest("generator/idle_share")
    if not (trainer > 0.7 or generators > 0.7):
        return None
    metric = "generator/idle_share" if generators >= trainer or math.isnan(trainer) else "trainer/idle_share"
    replicas, lag = e.settings.get("generator.replicas"), e.settings.get("buffer.max-policy-lag")
    if min(trainer, generators) > 0.5:
        who, change = "Trainer and generators wait", "the episodes' own code: scores, tools and judges take the time"
    elif metric == "trainer/idle_share":
        who, change = "The trainer waits", f"--generator.replicas {int(replicas or 1) + 1}, or fewer trainer ranks"
    else:
        who = "Generators wait"
        change = f"--buffer.max-policy-lag {int(lag or 0) + 1}, more --trainer.ranks, or fewer replicas"
    return Finding(
        sentence=f"{who} most of the time: trainer {trainer:.0%}, generators {generators:.0%} idle.",
        value=trainer if metric == "trainer/idle_share" else generators,
        metric=metric,
        since=e.since(metric, lambda value: value > 0.7),
        change=f"{change}; tools/simulate.py --from-run RUN compares splits",
        confidence="likely",
        lost=0.0,
        level="note",
    )


RULES: tuple[Rule, ...] = (
    small_updates,
    failing_episodes,
    low_entropy,
    cut_answers,
    part_never_earned,
    few_rows,
    gaming,
    mismatch,
    clipped_away,
    no_signal,
    waiting_side,
    noisy_evaluation,
)
"""Causes come before what they lead to: findings that lose about as much are in this order."""


def findings(evidence: Evidence) -> list[Finding]:
    """What the rules find, problems first, then by the share of the learning signal that is lost, in tenths."""
    if evidence.steps() < FEWEST:
        return []
    found = []
    for rule in RULES:
        try:
            finding = rule(evidence)
        except Exception:  # a recipe's settings and metrics may be of any kind: the other rules are worth having
            logger.exception("the rule %s failed", rule.__name__)
            continue
        if finding is not None:
            found.append(replace(finding, rule=rule.__name__))
    return sorted(found, key=lambda one: (one.level != "problem", -round(one.lost, 1)))


def _coarser_dtype(e: Evidence) -> str:
    """The coarser of the dtypes in which engine and trainer compute; empty if it is not known."""
    automatic = "" if e.on_gpu is None else "bfloat16" if e.on_gpu else "float32"
    dtypes = {e.settings.get(flag, "auto") for flag in ("generator.dtype", "trainer.compute-dtype")}
    computed = {automatic if dtype == "auto" else dtype for dtype in dtypes}
    return "bfloat16" if "bfloat16" in computed else "" if "" in computed else "float32"


def _items(e: Evidence) -> int:
    """Number of held-out episodes of an evaluation: as set, or else from the width of the interval."""
    items, samples = e.settings.get("held-out"), e.settings.get("evaluation.samples", 1)
    if isinstance(items, int) and isinstance(samples, int) and items > 0:
        return items * samples
    share, half = e.newest("held_out/accuracy", 1), e.newest("held_out/accuracy_high", 1)
    variance, half = max(share * (1 - share), 0.01), half - share
    return round(variance * (1.96 / half) ** 2) if half > 0 else 0

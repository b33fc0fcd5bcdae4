"""Search for the best lag bound and device split by simulation, and the recommendation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from monarch_rl.errors import SettingsError
from monarch_rl.simulate.run import Plan, RunMetrics

ENOUGH = 1.05
"""The smallest lag whose step time is at most this many times the fastest is recommended, because stale tokens are less
useful for training."""

Predict = Callable[[Plan], RunMetrics]


@dataclass(frozen=True)
class Case:
    """One simulated setting."""

    plan: Plan
    found: RunMetrics

    @property
    def max_policy_lag(self) -> int:
        lag = self.plan.buffer.max_policy_lag
        assert lag is not None, "a search needs a bound on the lag"
        return lag


def with_lag(plan: Plan, lag: int) -> Plan:
    """The plan with another lag bound, without its reject-lag if that has no effect under the new bound."""
    reject = plan.buffer.reject_lag
    keep = None if reject is None or reject >= lag else reject
    return replace(plan, buffer=replace(plan.buffer, max_policy_lag=lag, reject_lag=keep))


def splits(plan: Plan, devices: int, most: int = 8) -> list[Plan]:
    """At most ``most`` evenly spaced splits of ``devices`` between trainer and replicas; for 0 devices, only the plan's
    own split.

    Raises:
        ValueError: there are not enough devices for a replica and a trainer device.
    """
    if devices == 0:
        return [plan]
    largest = (devices - 1) // plan.tp
    if largest < 1:
        raise SettingsError(
            f"{devices} devices are too few for a trainer device and a replica of {plan.tp}: use at least {plan.tp + 1}"
        )
    counts = sorted({1 + round(i * (largest - 1) / max(1, min(most, largest) - 1)) for i in range(min(most, largest))})
    return [_split(plan, devices, count) for count in counts]


def search(plan: Plan, devices: int, max_lag: int, predict: Predict) -> list[Case]:
    """Simulate all lags up to ``max_lag`` at evenly spaced splits, then at splits between the best one and its
    neighbours."""
    coarse = splits(plan, devices)
    lags = range(max_lag + 1)
    cases = [Case(p, predict(p)) for split in coarse for p in [with_lag(split, lag) for lag in lags]]
    done = {split.replicas for split in coarse}
    while devices:
        best = recommend(cases).plan.replicas
        below = max((count for count in done if count < best), default=best)
        above = min((count for count in done if count > best), default=best)
        between = {(below + best) // 2, (best + above) // 2} - done
        if not between:
            break
        for count in sorted(between):
            done.add(count)
            cases += [Case(p, predict(p)) for p in (with_lag(_split(plan, devices, count), lag) for lag in lags)]
    return cases


def recommend(cases: Sequence[Case]) -> Case:
    """The case with the smallest lag whose step time is within :data:`ENOUGH` of the fastest, at that lag's fastest
    split."""
    fastest = min(case.found.step_s for case in cases)
    enough = [case for case in cases if case.found.step_s <= ENOUGH * fastest]
    return min(enough, key=lambda case: (case.max_policy_lag, case.found.step_s))


def gain(cases: Sequence[Case], case: Case) -> float:
    """Speed-up of ``case`` over lag 0 at its best split: a ratio of step times."""
    return min(other.found.step_s for other in cases if other.max_policy_lag == 0) / case.found.step_s


def _split(plan: Plan, devices: int, replicas: int) -> Plan:
    return replace(plan, replicas=replicas, trainer_devices=devices - replicas * plan.tp)

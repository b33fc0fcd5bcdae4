"""Simulated runs: deterministic, within the lag bound, and as long as computed by hand."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.simulate.costs import Costs, DecodeCosts, Distribution, TrainerCosts
from monarch_rl.simulate.fit import CALLS
from monarch_rl.simulate.run import Plan, RunMetrics, predict
from monarch_rl.simulate.search import Case, gain, recommend, search, splits
from tests.patience import run

TOKENS, GROUPS, SIZE, REPLICAS = 20, 4, 2, 2
CONSTANT = Costs(
    length=Distribution(TOKENS),
    prompt_tokens=1,
    decode=DecodeCosts(step_s=0.1, sequence_s=0.0),
    trainer=TrainerCosts(step_s=0.5, token_s=0.01),
    score=Distribution(0.25),
    snapshot_s=0.125,
    transfer_s=0.3,
    commit_s=0.2,
)
ROLLOUT_S = TOKENS * 0.1 + 0.25
TRAINING_S = 0.5 + 0.01 * TOKENS * GROUPS * SIZE / 2 + 0.125
PUBLISHING_S = 0.3 + 0.2


def plan(lag: int, **more: Any) -> Plan:
    settings = {"buffer": BufferSettings(lag, window=0), "scorer_processes": 64, **more}
    return Plan(GROUPS, SIZE, trainer_devices=2, replicas=REPLICAS, **settings)


def comparable(found: RunMetrics) -> dict[str, Any]:
    return {**asdict(found), "wall_s": None}


def test_depth_zero_is_sequential() -> None:
    found = predict(plan(0), CONSTANT, steps=6, warm_up=1, grain=1)
    step_s = ROLLOUT_S + TRAINING_S + PUBLISHING_S
    assert found.step_s == pytest.approx(step_s)
    assert found.trainer_idle_share == pytest.approx(1 - TRAINING_S / step_s)
    assert found.generator_idle_share == pytest.approx(1 - TOKENS * 0.1 / step_s)
    assert found.tokens_per_s == pytest.approx(GROUPS * SIZE * TOKENS / step_s)
    assert found.running == pytest.approx(GROUPS * SIZE / REPLICAS)
    assert found.lag == (1.0,)


@pytest.mark.parametrize("token_s", [0.001, 0.01, 0.05])
def test_depth_one_is_the_slower_of_trainer_and_half_a_round(token_s: float) -> None:
    """With two batches in progress, two steps take a round (sample, train, publish), or the trainer is always busy."""
    costs = replace(CONSTANT, trainer=TrainerCosts(0.5, token_s), commit_s=0.0)
    training_s = 0.5 + token_s * TOKENS * GROUPS * SIZE / 2 + 0.125
    found = predict(plan(1), costs, steps=21, warm_up=5, grain=1)
    assert found.step_s == pytest.approx(max(training_s, (ROLLOUT_S + training_s + 0.3) / 2))
    assert found.step_s < predict(plan(0), costs, steps=6, warm_up=1, grain=1).step_s


def test_training_groups_twice_halves_the_rollouts_within_the_bound() -> None:
    once, twice = (
        predict(plan(3, buffer=BufferSettings(3, window=0, replay=replay)), CONSTANT, steps=41, warm_up=9, grain=1)
        for replay in (1, 2)
    )
    assert len(twice.lag) == 4 and twice.wasted_share == 0
    assert once.tokens_per_s * once.step_s == pytest.approx(GROUPS * SIZE * TOKENS, rel=0.05)
    assert twice.tokens_per_s * twice.step_s == pytest.approx(GROUPS * SIZE * TOKENS / 2, rel=0.05)


def test_a_scorer_with_one_process_is_sequential() -> None:
    found = predict(plan(0, scorer_processes=1), CONSTANT, steps=4, warm_up=1, grain=1)
    waits = (GROUPS * SIZE - 1) * 0.25
    assert found.step_s == pytest.approx(ROLLOUT_S + waits + TRAINING_S + PUBLISHING_S)


def test_a_stage_runs_as_many_groups_as_its_concurrency() -> None:
    costs = replace(CONSTANT, stage=Distribution(0.75))
    bare = predict(plan(0), CONSTANT, steps=4, warm_up=1, grain=1).step_s
    for concurrency, rounds in ((GROUPS, 1), (GROUPS // 2, 2), (1, GROUPS)):
        found = predict(plan(0, stage_concurrency=concurrency), costs, steps=4, warm_up=1, grain=1)
        assert found.step_s == pytest.approx(bare + rounds * 0.75)


def test_groups_in_a_stage_release_their_rollout_places() -> None:
    """One group runs at a time, and each spends more time in the stage than in rollouts: the engines do not wait."""
    costs = replace(CONSTANT, stage=Distribution(2 * ROLLOUT_S), trainer=TrainerCosts(0.0, 0.0), commit_s=0.0)
    bare, staged = (
        predict(plan(3, concurrent_groups=1), found, steps=12, warm_up=6, grain=1)
        for found in (replace(costs, stage=Distribution()), costs)
    )
    assert staged.step_s == pytest.approx(bare.step_s) == pytest.approx(GROUPS * ROLLOUT_S)
    one_at_a_time = predict(plan(3, concurrent_groups=1, stage_concurrency=1), costs, steps=12, warm_up=6, grain=1)
    assert one_at_a_time.step_s == pytest.approx(GROUPS * 2 * ROLLOUT_S)


@settings(max_examples=10)
@given(lag=st.integers(0, 2), mean=st.floats(0.1, 20), concurrency=st.integers(1, 4), seed=st.integers(0, 99))
def test_slow_stages_cause_waiting_and_never_break_the_bound(
    lag: int, mean: float, concurrency: int, seed: int
) -> None:
    costs = replace(CONSTANT, stage=Distribution(mean, 1.0), length=Distribution(TOKENS, 0.5))
    found = predict(plan(lag, stage_concurrency=concurrency, seed=seed), costs, steps=6, warm_up=1, grain=1)
    assert len(found.lag) <= lag + 1 and found.wasted_share == 0


def test_calls_take_their_time() -> None:
    bare, slow = (predict(plan(0), replace(CONSTANT, call_s=c), 4, 1, grain=1).step_s for c in (0.0, 0.01))
    assert 7 <= round((slow - bare) / 0.01, 6) <= 25  # sequential calls, from a batch to the slots of the next one


def test_a_busy_trainer_waits_for_the_calls_that_a_fit_divides_by() -> None:
    costs = replace(CONSTANT, trainer=TrainerCosts(20.0, 0.0), call_s=0.01)
    found = predict(plan(3), costs, steps=12, warm_up=6, grain=1)
    # One more call is take, which counts as waiting for the batch. Reading the buffer's counts once is in the mean.
    assert round((found.step_s - 20.125) / 0.01) == CALLS + 1


LONG_TAIL = replace(CONSTANT, length=Distribution(30, 1.0, 200, group_share=0.3), decode=DecodeCosts(0.02, 0.004, 0.01))


@pytest.mark.parametrize("grain", [1, 4])
def test_the_same_seed_gives_the_same_run_in_every_process(grain: int) -> None:
    here = comparable(predict(plan(2), LONG_TAIL, steps=8, warm_up=2, grain=grain))
    assert here == comparable(predict(plan(2), LONG_TAIL, steps=8, warm_up=2, grain=grain))
    assert here != comparable(predict(plan(2, seed=1), LONG_TAIL, steps=8, warm_up=2, grain=grain))
    code = (
        "from tests.simulate.test_run import *\n"
        f"print(comparable(predict(plan(2), LONG_TAIL, steps=8, warm_up=2, grain={grain})))"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.strip() == str(here), done.stderr


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 4),
    st.sampled_from(["continue", "recompute", "drain"]),
    st.integers(0, 1000),
    st.sampled_from([0.001, 0.02, 0.2]),
    st.integers(1, 3),
)
def test_no_lag_exceeds_the_bound_and_no_token_is_wasted(
    lag: int, in_flight: Any, seed: int, token_s: float, workers: int
) -> None:
    costs = replace(LONG_TAIL, trainer=TrainerCosts(0.1, token_s))
    made = replace(plan(lag, in_flight=in_flight, seed=seed, workers=workers), buffer=BufferSettings(lag))
    found = predict(made, costs, steps=8, warm_up=0, grain=2)
    assert len(found.lag) == lag + 1 and sum(found.lag) == pytest.approx(1)
    assert found.wasted_share == 0
    assert 0 <= found.trainer_idle_share <= 1 and 0 <= found.generator_idle_share <= 1


def test_generators_faster_than_the_trainer_reach_the_bound() -> None:
    costs = replace(CONSTANT, trainer=TrainerCosts(20.0, 0.0))
    found = predict(plan(3), costs, steps=12, warm_up=6, grain=1)
    assert found.lag[3] == pytest.approx(1.0)
    assert found.step_s == pytest.approx(20.125)


def test_filtered_groups_cost_tokens() -> None:
    filtering = replace(plan(1), buffer=BufferSettings(1, drop_equal_rewards=True))
    found = predict(filtering, replace(CONSTANT, equal_rewards=0.5), steps=20, warm_up=2, grain=1)
    assert 0.35 < found.wasted_share < 0.65


def test_a_coarser_grain_hardly_changes_the_step_time() -> None:
    costs = replace(LONG_TAIL, length=Distribution(400, 1.0, 4000))
    exact, coarse = (predict(plan(1), costs, steps=12, warm_up=2, grain=grain).step_s for grain in (1, 6))
    assert coarse == pytest.approx(exact, rel=0.02)


def test_the_search_finds_the_best_split_and_the_smallest_sufficient_lag() -> None:
    def predicted(made: Plan) -> RunMetrics:
        """Times of trainer and generators fall with their devices; a lag of 2 or more hides the smaller time."""
        lag = made.buffer.max_policy_lag or 0
        parts = sorted([100 / made.trainer_devices, 300 / (made.replicas * made.tp)])
        step_s = parts[1] + parts[0] * {0: 1.0, 1: 0.5}.get(lag, 0.02 if lag == 2 else 0.0)
        return RunMetrics(step_s, 0, 0, 0, 0, (1.0,), 0, 0, 1, 1, 1)

    cases = search(plan(0, tp=2), 64, 4, predicted)
    best = recommend(cases)
    assert (best.max_policy_lag, best.plan.trainer_devices, best.plan.replicas) == (2, 16, 24)
    at_depth_0 = min(case.found.step_s for case in cases if case.max_policy_lag == 0)
    assert gain(cases, best) == pytest.approx(at_depth_0 / best.found.step_s) and gain(cases, best) > 1.5
    assert all(case.plan.trainer_devices + 2 * case.plan.replicas == 64 for case in cases)
    assert isinstance(best, Case)


def test_a_split_needs_room_for_both_sides() -> None:
    assert [made.replicas for made in splits(plan(0), 5)] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="2 devices.* 2"):
        splits(plan(0, tp=2), 2)


def test_a_stream_must_set_its_concurrent_groups() -> None:
    with pytest.raises(ValueError, match="concurrent-groups"):
        Plan(buffer=BufferSettings(None))

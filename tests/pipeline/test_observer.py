from __future__ import annotations

from typing import Any, cast

import pytest

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.pipeline.observer import Observer


def test_a_counter_that_was_not_written_is_zero_and_an_unknown_one_is_left_out() -> None:
    nobody = cast(Any, None)  # restoring and reading counters asks no actor
    observer = Observer(nobody, nobody, nobody)
    observer.restore({"drawn": 5, "workers": {"worker": "earlier", "pid": 0, "episodes": 3, "of_another_version": 7}})
    counters = observer.counters()
    assert (counters["drawn"], counters["device_s"]) == (5, 0.0)
    assert (counters["workers"]["episodes"], counters["workers"]["groups_dropped"]) == (3, 0)
    assert "of_another_version" not in counters["workers"]


@pytest.mark.parametrize(("first", "admitted", "epochs"), [(0, 0, 0.0), (0, 5, 1.25), (6, 3, 2.25)])
def test_epochs_are_the_items_that_groups_were_started_for(first: int, admitted: int, epochs: float) -> None:
    buffer = BufferCore(2, BufferSettings(max_policy_lag=9), task_cursor=first)
    for _ in range(admitted):
        assert buffer.admit() is not None
    nobody = cast(Any, None)  # metrics of a step without rollouts ask no actor
    trained = [{"step_s": 1.0}]
    assert Observer(nobody, nobody, nobody, 4).without_rollouts(trained, buffer.counts())["data/epochs"] == epochs
    assert "data/epochs" not in Observer(nobody, nobody, nobody).without_rollouts(trained, buffer.counts())

from __future__ import annotations

from typing import Any, cast

from monarch_rl.pipeline.observer import Observer


def test_a_counter_that_was_not_written_is_zero_and_an_unknown_one_is_left_out() -> None:
    nobody = cast(Any, None)  # restoring and reading counters asks no actor
    observer = Observer(nobody, nobody, nobody)
    observer.restore({"drawn": 5, "workers": {"worker": "earlier", "pid": 0, "episodes": 3, "of_another_version": 7}})
    counters = observer.counters()
    assert (counters["drawn"], counters["device_s"]) == (5, 0.0)
    assert (counters["workers"]["episodes"], counters["workers"]["groups_dropped"]) == (3, 0)
    assert "of_another_version" not in counters["workers"]

"""A pending step at a pause, on a stub of SGLang's scheduler; test_in_flight has the real one."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.generator import scheduler_process


class Scheduler:
    """SGLang's queue of results, and the two methods that are replaced."""

    def __init__(self, *pending: str) -> None:
        self.log: list[str] = []
        self.result_queue: deque[tuple[Any, Any]] = deque((SimpleNamespace(reqs=["a"]), name) for name in pending)
        self.process_batch_result = partial(scheduler_process.process_batch_result, self, Scheduler._process)

    def _process(self, batch: Any, result: str) -> None:
        self.log.append(result)

    def pause(self, mode: str) -> None:
        def original(request: Any) -> None:
            self.log.append(f"pause {request.mode}")

        scheduler_process.pause_generation(self, lambda _, request: original(request), SimpleNamespace(mode=mode))


def test_results_are_read_once_before_the_pause_and_the_loop_finds_the_expected_number() -> None:
    scheduler = Scheduler("step 7")
    scheduler.pause("in_place")
    scheduler.pause("in_place")  # a version was refused and is repeated
    assert scheduler.log == ["step 7", "pause in_place", "pause in_place"]
    ((batch, result),) = scheduler.result_queue
    assert batch.reqs == [], "SGLang would leave these out of the next step if one more token ended them"
    scheduler.process_batch_result(batch, result)
    assert scheduler.log.count("step 7") == 1
    scheduler.process_batch_result(batch, "step 8")
    assert scheduler.log[-1] == "step 8"


@pytest.mark.parametrize("pending", [[], ["step 7"]])
def test_a_pause_that_retracts_sequences_leaves_reading_to_sglang(pending: list[str]) -> None:
    scheduler = Scheduler(*pending)
    scheduler.pause("retract")
    assert scheduler.log == ["pause retract"] and len(scheduler.result_queue) == len(pending)


def test_without_a_pending_step_nothing_is_read() -> None:
    scheduler = Scheduler()
    scheduler.pause("in_place")
    assert scheduler.log == ["pause in_place"] and not scheduler.result_queue

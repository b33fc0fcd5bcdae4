"""From the waits of all processes to the culprit, and to the message that describes the stall."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.runtime.device_work import GpuOperation
from monarch_rl.runtime.monitor import ProcessReport, ProcessState
from monarch_rl.runtime.wait_registry import Wait
from monarch_rl.watch.stall import Process, RunPicture, describe_chain, list_processes

NOW = 1000.0
SILENCE_S = 15.0


def process(name: str, *waits: tuple[str, str, float], status: str = "sleeping", **fields: float) -> Process:
    """A process with waits ``(for what, on whom, seconds so far)``; ``fields`` are ``blocked_s`` and attributes."""
    pending = [Wait(name, what, on, NOW - since, math.inf) for what, on, since in waits]
    blocked = fields.pop("blocked_s", 0.0)
    report = ProcessReport(name, 100, "m", NOW, pending, {}, blocked, [], {})
    asked = None if name.startswith("the engine") else report
    made = Process(name, 100, "m", asked, state=ProcessState(status, 0.0))
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def with_operation(made: Process, what: str, seconds: float, limit_s: float) -> Process:
    """The process with a GPU operation that has run for some seconds."""
    made.operation, made.operation_s = GpuOperation(what, NOW - seconds, limit_s), seconds
    return made


def picture(*processes: Process) -> RunPicture:
    return RunPicture({process.name: process for process in processes}, SILENCE_S)


def sentence(seen: RunPicture) -> str:
    return describe_chain(seen.chain(), SILENCE_S)


def assert_names(seen: RunPicture, *facts: str) -> None:
    """The message contains these facts, in this order."""
    assert re.search(".*".join(map(re.escape, facts)), sentence(seen)), sentence(seen)


CONTROLLER = process("controller", ("trainer ranks to make step 41", "trainer ranks", 20.0))
RANK_0 = process("trainer rank 0", ("the batch of step 41", "buffer", 21.0))
GROUP = "group 327, held by rollout worker 2 (7 of 8 groups of the batch are in)"
BUFFER = process("buffer", (GROUP, "rollout worker 2", 25.0))
WORKER_1 = process("rollout worker 1", ("a slot from the buffer", "buffer", 20.0))
WORKER_2 = process(
    "rollout worker 2",
    ("a slot from the buffer", "buffer", 30.0),
    ("turn 0 of an episode of group 327 from the generators", "generators", 25.0),
    ("generator 1 to answer a request of group 326", "generator 1", 26.0),
    ("generator 1 to answer a request of group 327", "generator 1", 25.0),
)
GENERATOR_1 = process("generator 1", ("new tokens after 9 prompt tokens", "the engine of generator 1", 25.0))
ENGINE_1 = process("the engine of generator 1")


def test_the_chain_leads_from_the_trainer_to_a_stopped_process() -> None:
    stopped = process("generator 1", status="stopped", silent_s=17.0, not_running_s=16.0)
    seen = picture(CONTROLLER, RANK_0, BUFFER, WORKER_1, WORKER_2, stopped)
    assert seen.culprits() == [stopped]
    links = ["trainer rank 0", "21 s", "the batch of step 41; buffer", "25 s", f"{GROUP}; rollout worker 2", "25 s"]
    assert_names(seen, *links, "a request of group 327; generator 1", "17 s", "process 100 is stopped")
    assert sentence(seen).count(";") == 4 and "worker 1" not in sentence(seen)


def test_the_chain_continues_into_an_engine() -> None:
    engine = process("the engine of generator 1", status="stopped", not_running_s=16.0)
    seen = picture(RANK_0, BUFFER, WORKER_2, GENERATOR_1, engine)
    assert seen.culprits() == [engine]
    assert_names(seen, "generator 1 has", "25 s", "; the engine of generator 1", "stopped", "16 s", "process 100")


def test_the_controllers_wait_leads_to_a_blocked_trainer_rank() -> None:
    blocked = process("trainer rank 1", blocked_s=18.0)
    seen = picture(CONTROLLER, process("trainer rank 0"), blocked, BUFFER)
    assert seen.culprits() == [blocked]
    assert_names(seen, "controller", "20 s", "step 41; trainer rank 1", "blocked", "18 s", "process 100", "0%")


def test_a_culprit_is_named_even_if_nobody_waits_for_it() -> None:
    stopped = process("generator 1", status="stopped", silent_s=17.0, not_running_s=16.0)
    seen = picture(RANK_0, process("buffer"), stopped)
    assert sentence(seen).startswith("generator 1 ")
    assert_names(seen, "17 s", "process 100 is stopped")


def test_a_machine_without_answering_processes_is_reported() -> None:
    lost = process("generator 1", silent_s=17.0)
    lost.state = None
    assert picture(lost).culprits() == [lost]
    assert "no process on its machine answers" in sentence(picture(lost))


@pytest.mark.parametrize(
    "busy",
    [
        process("trainer rank 1", cpu_share=0.9, silent_s=100.0),
        process("trainer rank 1", cpu_share=0.9, blocked_s=100.0),
        process("trainer rank 1", silent_s=14.0),
        process("trainer rank 1", cpu_share=0.01, queued_share=0.97, silent_s=100.0),
        process("trainer rank 1", cpu_share=0.01, queued_share=0.97, blocked_s=100.0),
        process("trainer rank 1", status="stopped", not_running_s=3.0),
        process("trainer rank 1", status="gone", silent_s=30.0, not_running_s=30.0),
    ],
    ids=[
        "a long call",
        "a loop at work",
        "not yet",
        "silent without a core",
        "blocked without a core",
        "stopped just now",
        "lost, before Monarch reports it",
    ],
)
def test_a_busy_or_slightly_late_process_is_not_a_culprit(busy: Process) -> None:
    assert picture(CONTROLLER, busy).culprits() == []


def test_an_unnoticed_loss_eventually_makes_a_culprit() -> None:
    lost = process("trainer rank 1", status="gone", silent_s=38.0, not_running_s=38.0)
    assert picture(CONTROLLER, lost).culprits() == [lost]
    just = process("trainer rank 1", status="gone", silent_s=5.0, not_running_s=5.0)
    assert picture(CONTROLLER, just).at_work(), "otherwise the run would end as stuck before Monarch reports the loss"


def test_a_process_without_a_core_counts_as_busy_whoever_waits_for_it() -> None:
    """It may be the process that must pass on a message."""
    idle = process("generator 1", cpu_share=0.01, queued_share=0.1)
    assert not picture(RANK_0, BUFFER, idle).at_work() and picture(idle).starved() == []
    starved = process("generator 1", cpu_share=0.01, queued_share=0.9)
    worse = process("controller", cpu_share=0.01, queued_share=0.95)
    assert picture(RANK_0, BUFFER, starved, worse).at_work()
    assert picture(RANK_0, BUFFER, starved, worse).starved() == [worse, starved]
    assert re.search("1%.* 90%", starved.describe(SILENCE_S))


def limited(made: Process, block_limit_s: float) -> Process:
    """The process with a limit on how long its event loop may be blocked."""
    assert made.report is not None
    made.report = replace(made.report, block_limit_s=block_limit_s, blocked_at="mistakes.py:62")
    return made


def test_a_blocked_worker_that_uses_the_cpu_is_named_and_not_the_generator_that_it_waits_for() -> None:
    """It does not notice that the generator has answered."""
    evaluates = process("controller", ("rollout worker 2 to run the held-out items", "rollout worker 2", 33.0))
    blocked = process(WORKER_2.name, cpu_share=1.0, blocked_s=33.0)
    assert WORKER_2.report is not None and blocked.report is not None
    blocked.report = replace(blocked.report, waits=WORKER_2.report.waits, blocked_at="mistakes.py:62")
    for seen in (picture(CONTROLLER, RANK_0, BUFFER, blocked, process("generator 1")), picture(evaluates, blocked)):
        assert seen.culprits() == [] and seen.at_work()
        assert_names(seen, "; rollout worker 2 has blocked", "33 s", "mistakes.py:62", "100%")
        assert "generator 1" not in sentence(seen)


@given(st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 1), st.floats(0.05, 1))
def test_a_loop_blocked_beyond_its_limit_makes_a_culprit_however_much_cpu_is_used(
    blocked_s: float, silent_s: float, queued: float, cpu: float
) -> None:
    """A call that holds the GIL blocks the monitor, too, so that the process is silent."""
    made = process("rollout worker 2", cpu_share=cpu, blocked_s=blocked_s, silent_s=silent_s, queued_share=queued)
    seen = picture(CONTROLLER, limited(made, 330.0))
    too_long = (blocked_s + silent_s) * (1 - queued) >= 330.0
    assert seen.culprits() == ([made] if too_long else [])


def test_a_stopped_process_is_a_culprit_even_if_it_lacked_a_core_before() -> None:
    stopped = process("generator 1", status="stopped", silent_s=17.0, not_running_s=16.0, queued_share=0.5)
    assert picture(CONTROLLER, stopped).culprits() == [stopped]


def test_a_busy_process_counts_only_if_the_trainer_waits_for_it() -> None:
    busy = process("the engine of generator 1", cpu_share=0.9)
    assert picture(RANK_0, BUFFER, WORKER_2, GENERATOR_1, busy).at_work()
    assert not picture(RANK_0, BUFFER, WORKER_1, GENERATOR_1, busy).at_work()
    assert not picture(RANK_0, process("controller", cpu_share=0.9)).at_work()


def test_a_wait_for_something_outside_the_run_counts_as_work() -> None:
    outside = process("rollout worker 2", ("the episode's own code", "an episode's code", 40.0))
    assert picture(RANK_0, BUFFER, outside).at_work()
    assert_names(picture(RANK_0, BUFFER, outside), "; rollout worker 2 answers", "process 100", "0%")


def test_the_recipe_waits_if_neither_the_controller_nor_a_rank_waits_for_a_process() -> None:
    idle = process("controller")
    assert picture(idle, process("trainer rank 0"), BUFFER, WORKER_2).recipe_waits()
    assert not picture(CONTROLLER, process("trainer rank 0")).recipe_waits()
    assert not picture(idle, RANK_0, BUFFER).recipe_waits()
    assert not picture(process("trainer rank 0")).recipe_waits(), (
        "a controller that does not answer may wait for all of them"
    )


def test_a_stall_without_a_culprit_is_described_to_the_end_of_its_chain() -> None:
    seen = picture(CONTROLLER, RANK_0, BUFFER, process("rollout worker 2"))
    assert seen.culprits() == [] and not seen.at_work()
    assert_names(seen, "; rollout worker 2 waits for no process", "process 100", "0%")


def test_a_circle_of_waits_is_described_once() -> None:
    circle = process("buffer", ("version 7 to be served", "controller", 30.0))
    seen = picture(CONTROLLER, RANK_0, circle)
    assert not seen.at_work()
    assert_names(seen, "trainer rank 0", "21 s", "the batch of step 41; buffer", "30 s")
    assert sentence(seen).count("trainer rank 0 has") == 1


def test_all_processes_and_their_waits_are_listed() -> None:
    lines = list_processes([WORKER_2, ENGINE_1], SILENCE_S).splitlines()
    assert lines[0].startswith("rollout worker 2 (process 100): answers") and len(lines) == 6
    waited = "rollout worker 2 has waited 25 s for generator 1 to answer a request of group 327"
    assert f"    {waited} [generator 1]" in lines


NAMES = ["trainer rank 0", "controller", *[f"rollout worker {i}" for i in range(6)]]


@given(
    st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=4)), st.sampled_from(NAMES[2:])
)
def test_the_chain_is_a_path_of_waits_that_ends_at_the_culprit(waits: dict[str, list[str]], culprit: str) -> None:
    """For any waits, including circles; the chain exists whenever a path exists."""
    everybody = [process(name, *[(on, on, 1.0) for on in waits.get(name, [])]) for name in NAMES if name != culprit]
    stopped = process(culprit, status="stopped", silent_s=20.0)
    chain = picture(*everybody, stopped).chain()
    assert chain[-1].process is stopped
    for before, link in zip(chain, chain[1:], strict=False):
        assert link.before is before and link.process.name in waits[before.process.name]
    assert len({link.process.name for link in chain}) == len(chain)

    open_ends, reached = [name for name in NAMES[:2] if waits.get(name) or name == "controller"], set()
    while open_ends:
        name = open_ends.pop()
        if name not in reached and name != culprit:
            reached.add(name)
            open_ends += waits.get(name, [])
        reached.add(name)
    if culprit in reached:
        assert chain[0].process.name in NAMES[:2]
    else:
        assert len(chain) == 1


@given(st.floats(0, 500), st.floats(20, 400), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_a_device_that_exceeds_its_limit_is_a_culprit_however_much_cpu_is_used(
    seconds: float, limit_s: float, cpu: float, queued: float, waited_for: bool
) -> None:
    """A thread that waits for a GPU spins. Within the limit the process is treated like any other."""
    spins = with_operation(
        process("trainer rank 1", cpu_share=cpu, queued_share=queued), "a micro-batch of 8192 tokens", seconds, limit_s
    )
    seen = picture(*([CONTROLLER] if waited_for else []), spins)
    assert seen.culprits() == ([spins] if seconds >= limit_s else [])
    if seconds >= limit_s:
        assert not spins.at_work and not (seen.at_work() and not spins.starved)
        share = [f"{queued:.0%}"] * spins.starved
        work = [f"{seconds:.0f} s", "device", "a micro-batch of 8192 tokens", f"{limit_s:.0f} s", "process 100"]
        assert_names(seen, "trainer rank 1", *work, f"{cpu:.0%}", *share)


def test_the_first_device_to_hang_is_named_among_devices_that_wait_for_each_other() -> None:
    """In NCCL all ranks hang with it, from their own collective on. A process that does not answer is blamed first."""
    ranks = [
        with_operation(
            process(f"trainer rank {rank}", cpu_share=1.0), "an optimiser step of 8192 tokens", seconds, 60.0
        )
        for rank, seconds in enumerate((70.0, 75.0, 68.0))
    ]
    seen = picture(CONTROLLER, *ranks)
    assert seen.culprits() == [ranks[1], ranks[0], ranks[2]]
    assert_names(seen, "; trainer rank 1", "75 s", "device")
    stopped = process("trainer rank 3", status="stopped", not_running_s=16.0)
    assert picture(CONTROLLER, *ranks, stopped).culprits()[0] is stopped


def test_an_engine_whose_gpu_hangs_is_named_at_the_end_of_the_chain() -> None:
    engine = with_operation(
        process("the engine of generator 1", cpu_share=1.0), "a step of decoding of 64 tokens", 61.0, 60.0
    )
    seen = picture(RANK_0, BUFFER, WORKER_2, GENERATOR_1, engine)
    assert seen.culprits() == [engine]
    work = ["61 s", "device", "a step of decoding of 64 tokens", "60 s"]
    assert_names(seen, "the engine of generator 1 has", *work, "process 100", "100%")
    assert re.search(".*".join(work), list_processes([engine], SILENCE_S))

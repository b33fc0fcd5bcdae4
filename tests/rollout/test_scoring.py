from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.rollout.scorer_output import SHOWN_BYTES
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.scoring_failed import ScorerBroken, ScoringFailed
from monarch_rl.runtime import presence, starvation
from monarch_rl.runtime.fork_context import ForkedProcess
from monarch_rl.runtime.starvation import CoreTime, Look
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource, load_data_set, score
from monarch_rl.tasks.task import Outcome
from tests.rollout import helpers


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of how busy the machine is depends how often a score is computed: here it has cores for all."""
    monkeypatch.setattr(starvation, "look", lambda: Look(time.monotonic(), {1: CoreTime(0.0, 0.0)}))


async def reason(scorer: Scorer, text: str) -> str:
    with pytest.raises(ScoringFailed) as failure:
        await scorer.score(helpers.touchy_score, text)
    return failure.value.reason


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_dead(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there after {seconds} s"
        time.sleep(0.05)


def test_failures_cost_one_score_each_and_have_a_reason() -> None:
    async def test() -> None:
        scorer = Scorer(2, deadline_s=1.0)
        try:
            start = time.monotonic()
            reasons = asyncio.gather(*(reason(scorer, text) for text in "0123"))
            good = await asyncio.gather(*(scorer.score(helpers.touchy_score, "7") for _ in range(20)))
            assert good == [Outcome(7.0)] * 20
            assert await reasons == [
                "score raised KeyError",
                "score took over 1 s",
                "score ended its process",
                "score raised SystemExit",
            ]
            assert time.monotonic() - start < 20
            assert await scorer.score(helpers.touchy_score, "8") == Outcome(8.0)
            parts = await scorer.score(helpers.in_parts)
            assert json.dumps([parts.reward, parts.parts]) == '[0.5, {"format": 0.25, "answer": 1.0}]'
            with pytest.raises(ScoringFailed, match="score raised ValueError: could not convert"):
                await scorer.score(helpers.not_a_number)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_a_score_that_forks_answers_once() -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=10.0)
        try:
            for value in range(20):  # a copy that lived on would take some of these, and answer others twice
                assert await scorer.score(helpers.forks, value) == Outcome(float(value))
                assert await scorer.score(helpers.answer, value + 0.5) == Outcome(value + 0.5)
            for function, given, reason in (
                (helpers.recurses, 0, "score raised RecursionError"),
                (helpers.in_many_parts, 101, "score raised ValueError"),
            ):
                with pytest.raises(ScoringFailed, match=reason):
                    await scorer.score(function, given)
            assert (await scorer.score(helpers.in_many_parts, 100)).reward == 100.0
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_quick_scores_travel_together_and_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them hangs, ends its process or cannot be sent."""

    async def test() -> None:
        scorer = Scorer(1, deadline_s=1.0)
        calls = list[int]()
        schedule = scorer._pool.schedule

        def count(function: Any, args: Any, timeout: float) -> Any:
            calls.append(len(args[0]) if len(args) == 1 else 1)
            return schedule(function, args=args, timeout=timeout)

        try:
            for _ in range(10):
                await scorer.score(helpers.touchy_score, "9")
            monkeypatch.setattr(scorer._pool, "schedule", count)
            assert (
                await asyncio.gather(*(scorer.score(helpers.touchy_score, "7") for _ in range(8))) == [Outcome(7.0)] * 8
            )
            assert calls == [8]
            good = asyncio.gather(*(scorer.score(helpers.touchy_score, "8") for _ in range(4)))
            assert await reason(scorer, "0") == "score raised KeyError" and await good == [Outcome(8.0)] * 4
            for bad, why in (("1", "score took over 1 s"), ("2", "score ended its process")):
                good = asyncio.gather(*(scorer.score(helpers.touchy_score, "6") for _ in range(10)))
                assert await reason(scorer, bad) == why
                assert await good == [Outcome(6.0)] * 10
            good = asyncio.gather(*(scorer.score(helpers.touchy_score, "5") for _ in range(10)))
            with pytest.raises(TypeError, match="pickle"):
                await scorer.score(helpers.touchy_score, threading.Lock())
            assert await good == [Outcome(5.0)] * 10
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


async def failure(scorer: Scorer, function: Any, *args: Any) -> ScoringFailed:
    with pytest.raises(ScoringFailed) as caught:
        await scorer.score(function, *args)
    return caught.value


class Counting:
    """A score that is an object."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, added: float) -> float:
        return self.value + added


def test_what_a_function_holds_is_that_of_the_time_of_the_call() -> None:
    board, counting = {"moves": 1.0}, Counting(1.0)

    def closure(added: float) -> float:
        return board["moves"] + added

    def default(added: float, board: dict[str, float] = board) -> float:
        return board["moves"] + added

    recipe: dict[str, Any] = {"__name__": "__main__"}  # whose functions are sent by value
    exec("def attribute(added): return attribute.board['moves'] + added", recipe)
    recipe["attribute"].board = board

    functions: list[Any] = [closure, default, counting, counting.__call__, recipe["attribute"]]
    functions.append(functools.partial(lambda held, added: held["moves"] + added, board))

    async def test() -> None:
        scorer = Scorer(1, deadline_s=30.0)
        try:
            for moves in (1.0, 2.0, 3.0):
                board["moves"] = counting.value = moves
                rewards = [(await scorer.score(function, 0.5)).reward for function in functions]
                assert rewards == [moves + 0.5] * len(functions)
            for added in (0.0, 1.0):
                assert (await scorer.score(helpers.answer, added)).reward == added
            assert len(scorer._functions) == 1  # a plain function's bytes are made once
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def line_of(function: Any, text: str) -> str:
    """File and line of a function's line with ``text``."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + number for number, line in enumerate(lines) if text in line]
    return f"{helpers.__file__}:{found}"


def test_a_failure_says_in_which_file_and_line_also_if_the_process_was_ended() -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=2.0)
        try:
            raised = await failure(scorer, helpers.touchy_score, "0")
            assert raised.place == line_of(helpers.touchy_score, "KeyError")
            file, _, line = raised.place.rpartition(":")
            assert raised.report.splitlines()[:2] == [
                "Traceback (most recent call last):",
                f'  File "{file}", line {line}, in touchy_score',
            ]
            assert raised.report.endswith("KeyError: 'no such answer'")

            crashed = await failure(scorer, helpers.crashes, "a")
            assert crashed.reason == "score ended its process by SIGSEGV"
            assert "Fatal Python error: Segmentation fault" in crashed.report
            assert crashed.place == line_of(helpers.crashes, "string_at")
            file, _, line = crashed.place.rpartition(":")
            assert f'  File "{file}", line {line} in crashes' in crashed.report
            assert "by another process, and each time: it was ended by SIGSEGV" in crashed.report
            assert "pebble" not in crashed.report

            for hanging, text in ((helpers.touchy_score, "time.sleep"), (helpers.hangs_in_c, "sleep(600)")):
                late = await failure(scorer, hanging, "1")
                assert late.reason == "score took over 2 s"
                assert late.place == line_of(hanging, text)
                assert "--rollout.score-deadline-s" in late.report

            ended = await failure(scorer, helpers.touchy_score, "2")
            assert ended.reason == "score ended its process" and "it ended with exit code 9" in ended.report

            long = await failure(scorer, helpers.raises_much, 10**7)
            assert long.reason == "score raised ValueError" and len(long.report) < 20_000
            assert "characters ...]" in long.report and len(str(long)) < 20_000
            infinite = await failure(scorer, helpers.answer, float("nan"))
            assert infinite.report.endswith("ValueError: the reward is nan, not a finite number of float32")
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_what_scores_print_is_shown_up_to_a_bound_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=60.0)
        try:
            await scorer.score(helpers.prints, "hello")
            await scorer.score(helpers.prints_much, 10**7)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())
    shown = capfd.readouterr().err
    for words in ("python says hello\n", "the descriptor says something\n", "a program says something\n"):
        assert words in shown
    assert len(shown) < SHOWN_BYTES + 1000
    assert "have printed more than 64 KiB within 60 s: the rest is left out]" in shown
    left_out = re.search(r"\[([\d,]+) bytes that the scoring processes of .* printed were left out\]", shown)
    assert left_out and 10**7 - SHOWN_BYTES <= int(left_out[1].replace(",", "")) <= 10**7


def test_a_score_that_hangs_among_others_costs_its_deadline_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=10.0)
        calls: list[tuple[int, float]] = []
        try:
            for _ in range(10):
                await scorer.score(helpers.touchy_score, "9")
            schedule = scorer._pool.schedule

            def count(function: Any, args: Any, timeout: float) -> Any:
                calls.append((len(args[0]) if len(args) == 1 else 1, timeout))
                return schedule(function, args=args, timeout=min(timeout, 2.0))

            monkeypatch.setattr(scorer._pool, "schedule", count)
            good = asyncio.gather(*(scorer.score(helpers.touchy_score, "6") for _ in range(5)))
            await reason(scorer, "1")
            assert await good == [Outcome(6.0)] * 5
        finally:
            await asyncio.to_thread(scorer.close)
        assert calls[0] == (6, 1.0), "together they get a tenth"
        assert [timeout for size, timeout in calls if size == 1] == [10.0] * 6

    asyncio.run(test())


def test_a_fork_server_that_is_stuck_does_not_hold_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool asks it for processes when it is first used, and again when it is replaced."""
    asked, go_on = threading.Event(), threading.Event()
    fork = ForkedProcess._Popen

    def stuck(process: Any) -> Any:
        asked.set()
        assert go_on.wait(60)
        return fork(process)

    monkeypatch.setattr(ForkedProcess, "_Popen", staticmethod(stuck))

    async def test() -> None:
        scorer = Scorer(1, deadline_s=60.0)
        try:
            scoring = asyncio.gather(*(scorer.score(helpers.answer, 1.0) for _ in range(50)))
            async with asyncio.timeout(60):
                while not asked.is_set():
                    await asyncio.sleep(0.01)
            for _ in range(20):  # the loop runs meanwhile
                await asyncio.sleep(0)
            assert not scoring.done()
            assert "scoring processes to be started by the fork server" in {wait.what for wait in presence.waits()}
            go_on.set()
            assert await scoring == [Outcome(1.0)] * 50
        finally:
            go_on.set()
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_event_loop_goes_on_while_a_score_hangs() -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=1.0)
        try:
            hanging = asyncio.ensure_future(reason(scorer, "1"))
            turns = 0
            while not hanging.done():
                await asyncio.sleep(0.01)
                turns += 1
            assert turns > 20
            assert await hanging == "score took over 1 s"
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_a_score_whose_process_is_killed_is_computed_again(tmp_path: Path) -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=60.0)
        try:
            scoring = asyncio.ensure_future(scorer.score(helpers.hangs_once, str(tmp_path)))
            async with asyncio.timeout(30):
                while not (files := list(tmp_path.iterdir())):
                    await asyncio.sleep(0.01)
                os.kill(int(files[0].name), signal.SIGKILL)
                assert await scoring == Outcome(3.0)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_calls_that_wait_for_a_process_are_counted(tmp_path: Path) -> None:
    async def test() -> None:
        scorer, file = Scorer(2, deadline_s=60.0), tmp_path / "end"
        try:
            assert await scorer.score(helpers.answer, 1.0) == Outcome(1.0) and scorer.queue == ""
            scoring = asyncio.gather(*(scorer.score(helpers.waits_for, str(file)) for _ in range(5)))
            async with asyncio.timeout(30):
                while scorer.queue != "3 calls wait for the 2 scoring processes of the worker":
                    await asyncio.sleep(0.01)
            file.touch()
            assert await scoring == [Outcome(1.0)] * 5 and scorer.queue == ""
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_a_process_that_is_stopped_while_it_has_nothing_to_do_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_rl.rollout.scoring.STUCK_S", 9.0)

    async def test() -> None:
        scorer = Scorer(1, deadline_s=1.0)
        try:
            stopped = int((await scorer.score(helpers.own_process_id)).reward)
            os.kill(stopped, signal.SIGSTOP)
            scores = [scorer.score(helpers.touchy_score, "7") for _ in range(3)]
            assert await asyncio.wait_for(asyncio.gather(*scores), 60) == [Outcome(7.0)] * 3
            await asyncio.to_thread(wait_until_dead, stopped, 10)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_processes_are_light_and_end_with_close() -> None:
    async def test() -> int:
        settings = TaskSettings(name="chain_sum", pass_mark=0.5)
        scorer = Scorer(1, 20.0, functools.partial(load_data_set, settings, "train"))
        try:
            item = TaskSource(settings).item(3)
            assert await scorer.score(score, settings, item.entry, item.answer) == Outcome(1.0, {"score": 1.0})
            assert (await scorer.score(helpers.heavy_modules)).reward == 0
            return int((await scorer.score(helpers.own_process_id)).reward)
        finally:
            await asyncio.to_thread(scorer.close)

    wait_until_dead(asyncio.run(test()), 5)


def test_processes_that_cannot_start_end_the_run() -> None:
    async def test() -> None:
        scorer = Scorer(1, 5.0, helpers.fail_to_start)
        try:
            with pytest.raises(ScorerBroken, match="do not run") as broken:
                await asyncio.wait_for(scorer.score(helpers.answer, 1.0), 30)
            assert "no data here" in str(broken.value)  # what the process printed
            with pytest.raises(ScorerBroken, match="do not run"):
                await scorer.score(helpers.answer, 1.0)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


PARENT = """
import asyncio
from monarch_rl.rollout.scoring import Scorer
from tests.rollout import helpers

async def main():
    scorer = Scorer(1, 600.0)
    print(int((await scorer.score(helpers.own_process_id)).reward), flush=True)
    await scorer.score(helpers.touchy_score, "1")

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's parent-death signal")
def test_sigkill_of_the_parent_leaves_no_scorer(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            assert parent.stdout is not None
            scorer = int(parent.stdout.readline())
            assert alive(scorer)
        finally:
            parent.send_signal(signal.SIGKILL)
    wait_until_dead(scorer, 5)


FULL = """
import asyncio, pathlib
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.scoring_failed import ScoringFailed
from tests.rollout import helpers

async def main():
    scorer = Scorer(1, 60.0)
    for _ in range(2):
        try:
            await scorer.score(helpers.own_process_id)
        except ScoringFailed as error:
            print(error)
    pathlib.Path("/dev/shm/fill").unlink()
    print((await scorer.score(helpers.own_process_id)).reward > 1)
    await asyncio.to_thread(scorer.close)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_shared_memory_that_is_full_costs_the_scores_of_that_time(tmp_path: Path) -> None:
    """In a mount namespace, which has another /dev/shm."""
    (script := tmp_path / "full.py").write_text(FULL)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    fill = "mount -t tmpfs -o size=16k tmpfs /dev/shm || exit 77; head -c 100000 /dev/zero >/dev/shm/fill; exec"
    command = ["unshare", "--mount", "sh", "-c", f"{fill} {sys.executable} {script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a /dev/shm of its own needs the right to mount: {done.stderr}")
    assert done.returncode == 0, done.stderr
    *refused, answered = done.stdout.splitlines()
    said = "scoring processes could not start: their locks lie in /dev/shm, which is full"
    assert len(refused) == 2 and all(line.startswith(said) for line in refused) and answered == "True"


STOPPED_WORKER = """
import asyncio, sys
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.runtime import presence
from tests.rollout import helpers

async def main():
    presence.register("rollout worker 0")
    scorer = Scorer(1, deadline_s=4.0)
    try:
        print((await scorer.score(helpers.in_small_steps, sys.argv[1])).reward, flush=True)
    finally:
        await asyncio.to_thread(scorer.close)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_stop_of_the_worker_is_not_the_scores_fault(tmp_path: Path) -> None:
    """A stop that is longer than the deadline; the score is computed once more."""
    script, begun = tmp_path / "worker.py", tmp_path / "begun"
    script.write_text(STOPPED_WORKER)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    command = [sys.executable, str(script), str(begun)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as worker:
        try:
            assert worker.stdout is not None
            deadline = time.monotonic() + 120
            while not begun.exists():
                assert worker.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            os.killpg(worker.pid, signal.SIGSTOP)
            time.sleep(6.0)
            os.killpg(worker.pid, signal.SIGCONT)
            assert worker.stdout.readline() == "5.0\n"
            assert len(begun.read_text().splitlines()) in (1, 2), "once, if it ended before it was looked at"
            assert worker.wait(60) == 0
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)


def test_a_late_score_of_a_machine_without_cores_is_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "look", lambda: Look(time.monotonic(), {1: CoreTime(0.0, time.monotonic())}))

    async def test() -> None:
        scorer = Scorer(1, deadline_s=2.0)
        timeouts = list[float]()
        try:
            await scorer.score(helpers.touchy_score, "9")
            schedule = scorer._pool.schedule

            def note(function: Any, args: Any, timeout: float) -> Any:
                timeouts.append(timeout)
                return schedule(function, args=args, timeout=min(timeout, 2.0))

            monkeypatch.setattr(scorer._pool, "schedule", note)
            assert await reason(scorer, "1") == "score took over 2 s"
        finally:
            await asyncio.to_thread(scorer.close)
        assert timeouts == [2.0, 17.0]

    asyncio.run(test())

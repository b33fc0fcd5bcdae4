from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pebble import ProcessPool

from monarch_rl.errors import ScorerBroken, ScoringFailed
from monarch_rl.rollout import scoring
from monarch_rl.rollout.scoring import APART, MOST_GATHERED, SHOWN_BYTES, Scorer
from monarch_rl.runtime import starvation, wait_registry
from monarch_rl.runtime.forking.fork_context import ForkedProcess
from monarch_rl.runtime.starvation import CoreTime, Look
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource, load_data_set, score
from monarch_rl.tasks.task import Outcome
from tests import patience
from tests.rollout import scores
from tests.rollout.cores import AMPLE_S, with_cores

HANGING_S = 2.0
"""Maximum deadline of calls that hang."""


@dataclass
class Calls:
    """The deadlines that the scorer gives to the calls of all pools."""

    deadlines: list[float] = field(default_factory=list)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Deadlines pass only on calls that hang, however slow the machine is or however long it stalls."""
    with_cores(monkeypatch)
    noted, schedule = Calls(), ProcessPool.schedule

    def with_another_deadline(pool: ProcessPool, function: Any, args: tuple[Any, ...], timeout: float) -> Any:
        (call,) = args
        noted.deadlines.append(timeout)
        hangs = pickle.loads(call.args[-1]) == ("1",)
        return schedule(pool, function, args=args, timeout=min(timeout, HANGING_S) if hangs else AMPLE_S)

    monkeypatch.setattr(ProcessPool, "schedule", with_another_deadline)
    return noted


async def reason(scorer: Scorer, text: str) -> str:
    with pytest.raises(ScoringFailed) as failure:
        await scorer.score(scores.touchy_score, text)
    return failure.value.reason


def state(pid: int) -> str:
    """State of a process in Linux: "T" is stopped, "Z" has ended; "" is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def wait_until_dead(pid: int) -> None:
    patience.wait_until(lambda: not alive(pid), f"the end of process {pid}")


def test_each_failure_affects_one_score_and_has_a_reason() -> None:
    async def test() -> None:
        scorer = Scorer(2, deadline_s=1.0)
        try:
            reasons = asyncio.gather(*(reason(scorer, text) for text in "0123"))
            good = await asyncio.gather(*(scorer.score(scores.touchy_score, "7") for _ in range(20)))
            assert good == [Outcome(7.0)] * 20
            assert await reasons == [
                "score raised KeyError",
                "score took over 1 s",
                "score ended its process",
                "score raised SystemExit",
            ]
            for function, text, infrastructure in (
                (scores.touchy_score, "0", False),
                (scores.touchy_score, "2", False),
                (scores.crashes, "", False),
                (scores.is_killed, "", True),
                (scores.needs_sandbox, "", True),
            ):
                assert (await failure(scorer, function, text)).infrastructure == infrastructure, function
            good_ones = asyncio.gather(*(scorer.score(scores.touchy_score, "8") for _ in range(4)))
            with pytest.raises(TypeError, match="pickle"):
                await scorer.score(scores.touchy_score, (number for number in range(3)))
            assert await good_ones == [Outcome(8.0)] * 4
            parts = await scorer.score(scores.in_parts)
            assert json.dumps([parts.reward, parts.parts]) == '[0.5, {"format": 0.25, "answer": 1.0}]'
            with pytest.raises(ScoringFailed, match="score returned an unusable value"):
                await scorer.score(scores.not_a_number)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_scores_of_a_group_are_those_of_single_calls(calls: Calls, tmp_path: Path) -> None:
    """In one call of the pool while they are fast; a slow one, or one that ends its process, costs the others
    nothing but another call."""
    scorer = Scorer(2, AMPLE_S)

    async def each(function: Any, *texts: str) -> list[Any]:
        found: dict[int, Any] = {}
        await scorer.score_each(function, [(text,) for text in texts], found.__setitem__)
        outcomes = [found[place] for place in range(len(texts))]
        return [each.reward if isinstance(each, Outcome) else each.reason for each in outcomes]

    async def run() -> None:
        assert await each(scores.touchy_score, "5", "0", "4", "3") == [
            5.0,
            "score raised KeyError",
            4.0,
            "score raised SystemExit",
        ]
        assert len(calls.deadlines) == 1
        assert await each(scores.touchy_score, "7", "2", "8") == [7.0, "score ended its process", 8.0]
        before = len(calls.deadlines)
        assert await each(scores.touchy_score, "5", "6") == [5.0, 6.0]
        assert len(calls.deadlines) == before + 2, "scored apart, after one that ended its process"
        scorer._apart = 0
        assert await each(scores.touchy_score, "6", "9", "1") == [6.0, 9.0, f"score took over {AMPLE_S:g} s"]
        scorer._apart = 0
        before = len(calls.deadlines)
        assert await each(scores.slow_score, "1", "2", "3") == [1.0, 2.0, 3.0]
        assert len(calls.deadlines) == before + 3, "those that had not begun were computed by all processes"
        found: dict[int, Any] = {}
        with pytest.raises(TypeError):
            await scorer.score_each(scores.touchy_score, [((text for text in "5"),), ("5",)], found.__setitem__)
        row = {"answer": "5"}
        scorer._apart = 0
        await scorer.score_each(scores.pops, [(row,), (row,)], found.__setitem__)
        assert found == {0: Outcome(5.0), 1: Outcome(5.0)}, "each call has its own row"

    try:
        asyncio.run(run())
    finally:
        scorer.close()


class Unloadable:
    """Can be pickled; no copy can be made."""

    def __reduce__(self) -> Any:
        return int, ("five",)


def test_calls_that_are_gathered_fail_crash_and_time_out_one_by_one(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast ones are computed in one call of the pool; one that is not fast this time costs the others nothing."""
    monkeypatch.setattr(scoring, "FAST_S", AMPLE_S)
    monkeypatch.setattr(scoring, "TOGETHER_S", AMPLE_S)

    async def each(scorer: Scorer, function: Any, *texts: Any) -> tuple[list[Any], int]:
        """Reward or reason of each call, and the number of calls of the pool."""
        before = len(calls.deadlines)
        asked = (scorer.score(function, text) for text in texts)
        outcomes: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        found = [each.reward if isinstance(each, Outcome) else each.reason for each in outcomes]
        return found, len(calls.deadlines) - before

    async def test() -> None:
        scorer, score = Scorer(2, AMPLE_S), scores.touchy_score
        fast = "7" * APART
        try:
            assert await each(scorer, score, *fast) == ([7.0] * APART, APART), "not known as fast"
            raised = ["score raised KeyError", "score raised SystemExit"]
            assert await each(scorer, score, *"5043") == ([5.0, raised[0], 4.0, raised[1]], 1)
            unloaded = await each(scorer, score, "5", Unloadable(), "6")
            assert unloaded == ([5.0, "score raised NotUnpickled", 6.0], 1)
            most = "5" * (MOST_GATHERED + 2)
            assert await each(scorer, score, *most) == ([5.0] * len(most), 2)
            partial = functools.partial(scores.touchy_score)
            for _ in range(2):
                assert await each(scorer, partial, *fast) == ([7.0] * APART, APART), "may hold state"
            crashed, _ = await each(scorer, score, *"728")
            assert crashed == [7.0, "score ended its process", 8.0]
            again = APART * MOST_GATHERED + APART
            assert await each(scorer, score, *"7" * (again - 1)) == ([7.0] * (again - 1), again - 1), "apart"
            assert await each(scorer, score, "7") == ([7.0], 1)
            late, _ = await each(scorer, score, *"691")
            assert late == [6.0, 9.0, f"score took over {AMPLE_S:g} s"]
            assert (await each(scorer, score, *"56"))[1] == 2, "by themselves, after one that was not fast"
            scorer._functions[id(score)].fast_scores = APART
            monkeypatch.setattr(scoring, "FAST_S", -1.0)
            assert (await each(scorer, score, *fast))[1] == 1, "gathered, and slower than before"
            for _ in range(2):
                assert (await each(scorer, score, *fast))[1] == APART, "too slow to be gathered"
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_calls_that_are_gathered_are_as_at_the_time_of_the_call_and_end_if_abandoned(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scoring, "FAST_S", AMPLE_S)
    monkeypatch.setattr(scoring, "TOGETHER_S", AMPLE_S)

    async def test() -> None:
        scorer, file, row = Scorer(1, AMPLE_S), tmp_path / "end", {"answer": "5"}

        async def change() -> None:
            row["answer"] = "6"

        try:
            for _ in range(APART):
                await scorer.score(scores.pops, row)
            before = len(calls.deadlines)
            old, _, new = await asyncio.gather(scorer.score(scores.pops, row), change(), scorer.score(scores.pops, row))
            assert (old, new) == (Outcome(5.0), Outcome(6.0)) and len(calls.deadlines) == before + 1
            with pytest.raises(TypeError, match="pickle"):
                await scorer.score(scores.pops, (number for number in range(3)))

            file.touch()
            for _ in range(APART):
                await scorer.score(scores.waits_for, str(file))
            file.unlink()
            waiting = [asyncio.ensure_future(scorer.score(scores.waits_for, str(file))) for _ in range(3)]
            queue = "2 calls wait for the 1 scoring processes of the worker"
            await patience.until(lambda: scorer.queue == queue, lambda: f"another queue than {scorer.queue!r}")
            for task in waiting[:2]:
                task.cancel()
            await asyncio.wait(waiting[:2])
            assert scorer.queue == queue and not waiting[2].done()
            waiting[2].cancel()
            asked = scorer.score(scores.answer, 3.0)
            assert await patience.patiently(asked, "the process that no call needs any more") == Outcome(3.0)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_a_score_that_forks_answers_once() -> None:
    async def test() -> None:
        scorer = Scorer(1, AMPLE_S)
        try:
            for value in range(20):  # a surviving copy would take some of these, and answer others twice
                assert await scorer.score(scores.forks, value) == Outcome(float(value))
                assert await scorer.score(scores.answer, value + 0.5) == Outcome(value + 0.5)
            for function, given, reason in (
                (scores.recurses, 0, "score raised RecursionError"),
                (scores.in_many_parts, 101, "score returned an unusable value"),
            ):
                with pytest.raises(ScoringFailed, match=reason):
                    await scorer.score(function, given)
            assert (await scorer.score(scores.in_many_parts, 100)).reward == 100.0
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


def test_a_function_is_sent_with_its_state_at_the_time_of_the_call() -> None:
    board, counting = {"moves": 1.0}, Counting(1.0)

    def closure(added: float) -> float:
        return board["moves"] + added

    def default(added: float, board: dict[str, float] = board) -> float:
        return board["moves"] + added

    recipe: dict[str, Any] = {"__name__": "__main__"}  # its functions are sent by value
    exec("def attribute(added): return attribute.board['moves'] + added", recipe)
    recipe["attribute"].board = board

    functions: list[Any] = [closure, default, counting, counting.__call__, recipe["attribute"]]
    functions.append(functools.partial(lambda held, added: held["moves"] + added, board))

    async def test() -> None:
        scorer = Scorer(1, AMPLE_S)
        try:
            for moves in (1.0, 2.0, 3.0):
                board["moves"] = counting.value = moves
                rewards = [(await scorer.score(function, 0.5)).reward for function in functions]
                assert rewards == [moves + 0.5] * len(functions)
            for added in (0.0, 1.0):
                assert (await scorer.score(scores.answer, added)).reward == added
            assert len(scorer._functions) == 1  # a plain function is pickled once
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def line_of(function: Any, text: str) -> str:
    """File and line of a function's line with ``text``."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + number for number, line in enumerate(lines) if text in line]
    return f"{scores.__file__}:{found}"


def test_a_failure_names_its_file_and_line_even_if_the_process_ended() -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=2.0)
        try:
            raised = await failure(scorer, scores.touchy_score, "0")
            assert raised.place == line_of(scores.touchy_score, "KeyError")
            file, _, line = raised.place.rpartition(":")
            assert raised.report.splitlines()[:2] == [
                "Traceback (most recent call last):",
                f'  File "{file}", line {line}, in touchy_score',
            ]
            assert raised.report.endswith("KeyError: 'no such answer'")

            crashed = await failure(scorer, scores.crashes, "a")
            assert crashed.reason == "score ended its process by SIGSEGV"
            assert "Segmentation fault" in crashed.report
            assert crashed.place == line_of(scores.crashes, "string_at")
            file, _, line = crashed.place.rpartition(":")
            assert f'  File "{file}", line {line} in crashes' in crashed.report
            assert "twice" in crashed.report
            assert "pebble" not in crashed.report

            for hanging, text in ((scores.touchy_score, "time.sleep"), (scores.hangs_in_c, "sleep(600)")):
                late = await failure(scorer, hanging, "1")
                assert late.reason == "score took over 2 s"
                assert late.place == line_of(hanging, text)
                assert "--rollout.score-deadline-s" in late.report

            ended = await failure(scorer, scores.touchy_score, "2")
            assert ended.reason == "score ended its process" and "exit code 9" in ended.report
            quiet = await failure(scorer, scores.leaves_quietly, "")
            assert quiet.reason == "score ended its process" and "exit code 0" in quiet.report

            long = await failure(scorer, scores.raises_much, 10**7)
            assert long.reason == "score raised ValueError" and len(long.report) < 20_000
            assert "characters ...]" in long.report and len(str(long)) < 20_000
            infinite = await failure(scorer, scores.answer, float("nan"))
            assert infinite.reason == "score returned an unusable value" and "nan" in infinite.report
            assert infinite.place == line_of(scores.answer, "def answer") and infinite.place in infinite.report
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_output_of_scores_is_bounded_and_truncation_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=60.0)
        try:
            await scorer.score(scores.prints, "hello")
            await scorer.score(scores.prints_much, 10**7)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())
    shown = capfd.readouterr().err
    for words in ("python prints hello\n", "the descriptor prints something\n", "a program prints something\n"):
        assert words in shown
    assert len(shown) < SHOWN_BYTES + 1000
    assert "64 KiB" in shown
    left_out = re.search(r"\[([\d,]+) bytes .* left out\]", shown)
    assert left_out and 10**7 - SHOWN_BYTES <= int(left_out[1].replace(",", "")) <= 10**7


def test_a_fork_server_that_is_stuck_does_not_hold_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool asks it for processes at its first use, and again when it is replaced."""
    asked, resumed = threading.Event(), threading.Event()
    fork = ForkedProcess._Popen

    def stuck(process: Any) -> Any:
        asked.set()
        patience.happened(resumed, "the test to resume the fork server")
        return fork(process)

    monkeypatch.setattr(ForkedProcess, "_Popen", staticmethod(stuck))

    async def test() -> None:
        scorer = Scorer(1, AMPLE_S)
        try:
            scoring = asyncio.gather(*(scorer.score(scores.answer, 1.0) for _ in range(50)))
            await patience.until(asked.is_set, "the fork server to be asked")
            for _ in range(20):  # the loop runs meanwhile
                await asyncio.sleep(0)
            assert not scoring.done()
            assert any("fork server" in wait.what for wait in wait_registry.waits())
            resumed.set()
            assert await scoring == [Outcome(1.0)] * 50
        finally:
            resumed.set()
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_the_event_loop_runs_while_a_score_hangs(tmp_path: Path) -> None:
    """The score hangs until the loop has run."""

    async def test() -> None:
        scorer, file = Scorer(1, AMPLE_S), tmp_path / "end"
        try:
            hanging = asyncio.ensure_future(scorer.score(scores.waits_for, str(file)))
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert not hanging.done()
            file.touch()
            assert await hanging == Outcome(1.0)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_a_score_whose_process_is_killed_is_computed_again(tmp_path: Path) -> None:
    async def test() -> None:
        scorer = Scorer(1, AMPLE_S)
        try:
            scoring = asyncio.ensure_future(scorer.score(scores.hangs_once, str(tmp_path)))
            (file,) = await patience.until(lambda: list(tmp_path.iterdir()), "the score to begin")
            os.kill(int(file.name), signal.SIGKILL)
            assert await patience.patiently(scoring, "the second computation") == Outcome(3.0)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_calls_that_wait_for_a_process_are_counted(tmp_path: Path) -> None:
    async def test() -> None:
        scorer, file = Scorer(2, AMPLE_S), tmp_path / "end"
        try:
            assert await scorer.score(scores.answer, 1.0) == Outcome(1.0) and scorer.queue == ""
            scoring = asyncio.gather(*(scorer.score(scores.waits_for, str(file)) for _ in range(5)))
            queue = "3 calls wait for the 2 scoring processes of the worker"
            await patience.until(lambda: scorer.queue == queue, lambda: f"another queue than {scorer.queue!r}")
            file.touch()
            assert await scoring == [Outcome(1.0)] * 5 and scorer.queue == ""
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_a_stopped_idle_process_holds_up_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scorer = Scorer(1, deadline_s=1.0)
        make_pool = scorer._make_pool

        def anew() -> ProcessPool:
            monkeypatch.setattr(scoring, "STUCK_S", AMPLE_S)
            return make_pool()

        try:
            stopped = int((await scorer.score(scores.own_process_id)).reward)
            os.kill(stopped, signal.SIGSTOP)
            monkeypatch.setattr(scoring, "STUCK_S", 1.0)
            scorer._make_pool = anew  # type: ignore[assignment]
            asked = [scorer.score(scores.touchy_score, "7") for _ in range(3)]
            assert await patience.patiently(asyncio.gather(*asked), "scores by another process") == [Outcome(7.0)] * 3
            await asyncio.to_thread(wait_until_dead, stopped)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


@pytest.mark.slow
def test_processes_are_light_with_a_data_set() -> None:
    async def test() -> None:
        settings = TaskSettings(name="chain_sum", pass_mark=0.5)
        scorer = Scorer(1, AMPLE_S, functools.partial(load_data_set, settings, "train"))
        try:
            item = TaskSource(settings).item(3)
            assert await scorer.score(score, settings, item.entry, item.answer) == Outcome(1.0, {"score": 1.0})
            assert (await scorer.score(scores.heavy_modules)).reward == 0
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


def test_processes_are_light_and_end_with_close() -> None:
    async def test() -> int:
        scorer = Scorer(1, AMPLE_S)
        try:
            assert (await scorer.score(scores.heavy_modules)).reward == 0
            return int((await scorer.score(scores.own_process_id)).reward)
        finally:
            await asyncio.to_thread(scorer.close)

    wait_until_dead(asyncio.run(test()))


def test_processes_that_cannot_start_end_the_run() -> None:
    async def test() -> None:
        scorer = Scorer(1, AMPLE_S, scores.fail_to_start)
        try:
            with pytest.raises(ScorerBroken) as broken:
                await patience.patiently(scorer.score(scores.answer, 1.0), "the processes to break")
            assert "no data here" in str(broken.value)  # printed by the process
            with pytest.raises(ScorerBroken):
                await scorer.score(scores.answer, 1.0)
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())


PARENT = """
import asyncio
from monarch_rl.rollout.scoring import Scorer
from tests.rollout import scores

async def main():
    scorer = Scorer(1, 600.0)
    print(int((await scorer.score(scores.own_process_id)).reward), flush=True)
    await scorer.score(scores.touchy_score, "1")

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
    wait_until_dead(scorer)


FULL = """
import asyncio, pathlib
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.errors import ScoringFailed
from tests.rollout import scores

async def main():
    scorer = Scorer(1, 600.0)
    for _ in range(2):
        try:
            await scorer.score(scores.own_process_id)
        except ScoringFailed as error:
            print(error)
    pathlib.Path("/dev/shm/fill").unlink()
    print((await scorer.score(scores.own_process_id)).reward > 1)
    await asyncio.to_thread(scorer.close)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_full_shared_memory_fails_only_scores_started_meanwhile(tmp_path: Path) -> None:
    """In a mount namespace with its own /dev/shm."""
    (script := tmp_path / "full.py").write_text(FULL)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    fill = "mount -t tmpfs -o size=16k tmpfs /dev/shm || exit 77; head -c 100000 /dev/zero >/dev/shm/fill; exec"
    command = ["unshare", "--mount", "sh", "-c", f"{fill} {shlex.join([sys.executable, str(script)])}"]
    done = patience.run(command, env=environment)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a /dev/shm of its own needs the right to mount: {done.stderr}")
    assert done.returncode == 0, done.stderr
    *refused, answered = done.stdout.splitlines()
    assert len(refused) == 2 and all("/dev/shm" in line for line in refused) and answered == "True"


STOPPED_WORKER = """
import asyncio, sys
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.runtime import wait_registry
from tests.rollout import scores

async def main():
    wait_registry.register("rollout worker 0")
    scorer = Scorer(1, deadline_s=3.0)
    try:
        scorer.deadline_s = 600.0  # however long the process takes to start
        await scorer.score(scores.answer, 1.0)
        scorer.deadline_s = 3.0
        print("warm", flush=True)
        print((await scorer.score(scores.stops_its_worker, sys.argv[1])).reward, flush=True)
    finally:
        await asyncio.to_thread(scorer.close)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_stop_of_the_worker_is_not_blamed_on_the_score(tmp_path: Path) -> None:
    """The score is late after a stop longer than its deadline, and is computed again."""
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

            def stopped() -> bool:
                assert worker.poll() is None
                return state(worker.pid) == "T"

            assert worker.stdout.readline() == "warm\n"
            began = time.monotonic()
            patience.wait_until(stopped, "the score to stop its worker")
            # Most of the elapsed time, even if the worker was stopped before it knew that the score had begun: the pool
            # then counts the deadline from the end of the stop.
            time.sleep(10.0 + 2 * (time.monotonic() - began))
            os.killpg(worker.pid, signal.SIGCONT)
            assert worker.stdout.readline() == "5.0\n"
            assert begun.read_text().splitlines() == ["begun"] * 2
            assert patience.exit_code(worker) == 0
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)


def test_a_score_that_was_late_without_cores_is_computed_again(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setattr(starvation, "look", lambda: Look(time.monotonic(), {1: CoreTime(0.0, time.monotonic())}))
    monkeypatch.setattr(scoring, "STUCK_S", 30.0)

    async def test() -> None:
        scorer = Scorer(1, deadline_s=2.0)
        try:
            await scorer.score(scores.touchy_score, "9")
            calls.deadlines.clear()
            assert await reason(scorer, "1") == "score took over 2 s"
        finally:
            await asyncio.to_thread(scorer.close)
        assert calls.deadlines == [2.0, 17.0]

    asyncio.run(test())

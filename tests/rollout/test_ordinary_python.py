"""Code of a recipe in a scoring process and in an episode: it works as in a script, or says what to do instead."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.errors import ScoringFailed
from monarch_rl.rollout.play import value_or_exit
from monarch_rl.rollout.process_limits import survive_exits
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.tracebacks import describe
from monarch_rl.runtime.by_value import ByValue
from tests import patience
from tests.rollout import ordinary
from tests.rollout.cores import AMPLE_S

HOST = """
import sys
from pathlib import Path
from monarch_rl.rollout.process_limits import refuse_alarms
from monarch_rl.rollout.scoring import read_nothing
from monarch_rl.runtime.by_value import run_recipe_code
from tests.rollout.test_ordinary_python import results

if __name__ == "__main__":
    run_recipe_code()
    read_nothing()
    refuse_alarms()
    results(Path(sys.argv[1]))
"""


@dataclass(frozen=True)
class Results:
    in_script: dict[str, float]
    here: dict[str, float | str]
    """A reward, or the report of a failure."""
    tidied: bool


def results(pickled: Path) -> None:
    """Print, as JSON, what all functions do in scoring processes and, coroutines, on an event loop of a thread, where
    Monarch runs episodes."""
    functions: dict[str, Any] = {
        name: ByValue.of_bytes(data).load() for name, data in pickle.loads(pickled.read_bytes()).items()
    }
    found: dict[str, float | str] = {}

    async def run() -> None:
        survive_exits(asyncio.get_running_loop())
        scorer = Scorer(1, AMPLE_S)
        try:
            for name, function in functions.items():
                try:
                    if asyncio.iscoroutinefunction(function):
                        ended = await value_or_exit(function())
                        found[name] = describe(ended)[1] if isinstance(ended, BaseException) else ended
                    else:
                        found[name] = (await scorer.score(function)).reward
                except ScoringFailed as failed:
                    found[name] = failed.report
                except Exception as error:
                    found[name] = describe(error)[1]
        finally:
            await asyncio.to_thread(scorer.close)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()  # waits: its scores have deadlines
    print(f"\n{json.dumps(found)}")  # behind the prompt of input()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The recipe as a script, and its functions in a process whose program is another one."""
    folder, root = tmp_path_factory.mktemp("ordinary"), Path(__file__).parents[2]
    (folder / "recipe").mkdir()
    recipe = folder / "recipe" / "recipe.py"
    shutil.copy(ordinary.__file__, recipe)
    module = "from dataclasses import dataclass\n@dataclass\nclass Mark:\n    value: float\n"
    (recipe.parent / "beside.py").write_text(f"{module}def half(mark):\n    return mark.value / 2\n")
    (folder / "host.py").write_text(HOST)
    path = os.pathsep.join([str(root), str(root / "src"), str(recipe.parent)])  # as for the processes of a host
    environment = os.environ | {"PYTHONPATH": path, "TIDIED": str(folder / "tidied")}
    printed = []
    for arguments in ([recipe, folder / "pickled", recipe.parent], [folder / "host.py", folder / "pickled"]):
        done = patience.run([sys.executable, *map(str, arguments)], env=environment, seconds=AMPLE_S)
        assert done.returncode == 0, done.stderr
        printed.append(json.loads(done.stdout.splitlines()[-1]))
    return Results(in_script=printed[0], here=printed[1], tidied=(folder / "tidied").exists())


@pytest.mark.parametrize("name", [function.__name__ for function in ordinary.WORKS])
def test_code_of_a_recipe_does_what_it_does_in_a_script(ran: Results, name: str) -> None:
    assert ran.here[name] == ran.in_script[name]


@pytest.mark.parametrize(
    ("name", "ways_out"),
    [
        ("exits", ["SystemExit: no reward"]),
        ("asks", ["standard input"]),
        ("episode_asks", ["standard input"]),
        ("pickles_an_object_of_a_module_next_to_the_recipe", ["beside.Mark", "within the function"]),
        ("evaluates_text", ["NameError", "eval", "name it in the function"]),
        ("handles_signals", ["main thread", "policy.in_scorer"]),
        ("sets_an_alarm", ["alarm", "asyncio.timeout", "policy.in_scorer"]),
        ("sets_a_timer", ["setitimer", "asyncio.timeout", "policy.in_scorer"]),
        ("nests_event_loops", ["await", "asyncio.to_thread"]),
        ("runs_its_own_event_loop", ["await", "asyncio.to_thread"]),
        ("runs_a_new_event_loop", ["await", "asyncio.to_thread"]),
        ("runs_anyio", ["await", "asyncio.to_thread"]),
        ("handles_signals_of_the_loop", ["policy.in_scorer"]),
        ("exits_in_a_task", ["SystemExit: 3", "sys.exit(status)"]),
        ("exits_in_a_group_of_tasks", ["SystemExit: 3", "sys.exit(status)"]),
    ],
)
def test_what_does_not_work_fails_only_its_episode_and_says_what_to_do(
    ran: Results, name: str, ways_out: list[str]
) -> None:
    report = ran.here[name]
    assert isinstance(report, str) and all(part in report for part in ways_out), report


def test_an_alarm_that_a_score_leaves_does_not_interrupt_the_next_one(ran: Results) -> None:
    assert (ran.here["leaves_an_alarm"], ran.here["is_not_interrupted"]) == (1.0, 1.0)


def test_a_scoring_process_leads_a_group_and_runs_its_exit_handlers(ran: Results) -> None:
    """It can be ended with all that it started, and signals to its group reach nothing else."""
    assert ran.here["leads_a_group"] == 1.0
    assert ran.here["tidies"] == 1.0 and ran.tidied

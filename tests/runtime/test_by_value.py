"""Functions of a recipe, and of modules next to it, in processes that can import neither."""

from __future__ import annotations

import asyncio
import functools
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.rollout.scoring import Scorer
from monarch_rl.runtime.by_value import ByValue, culprit_of, register_modules, to_bytes
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.task import Outcome
from tests import patience
from tests.patience import run

RECIPE = """
import pickle, sys
from pathlib import Path
from monarch_rl.runtime.by_value import ByValue, register_modules
from monarch_rl.tasks.questions import Questions
import beside, package.deeper

FACTOR = 3

class Row:
    value = 2

def reward(row, answer):
    return FACTOR * beside.doubled(len(answer)) + package.deeper.Deeper().one() + Row.value

if __name__ == "__main__":
    names = register_modules()
    assert sorted(names) == ["beside", "package", "package.deeper"], names
    task = Questions([{"question": "?"}], reward)
    Path(sys.argv[1]).write_bytes(pickle.dumps(ByValue((task, reward, lambda: FACTOR))))
"""
READER = """
import asyncio, pickle, sys
from pathlib import Path
task, reward, closure = pickle.loads(Path(sys.argv[1]).read_bytes()).load()
assert not {"beside", "package"} & set(sys.modules)
from monarch_rl.rollout.scoring import Scorer

async def main():
    scorer = Scorer(1, 300.0)
    try:
        print(reward(None, "abc"), closure(), (await scorer.score(reward, task.items(0), "abc")).reward)
    finally:
        await asyncio.to_thread(scorer.close)

if __name__ == "__main__":
    asyncio.run(main())
"""


POOLED = """
import multiprocessing
FACTOR = None

def set_factor():
    global FACTOR
    FACTOR = 3.0

def scaled(value):
    return FACTOR * value

def reward():
    with multiprocessing.Pool(1, set_factor) as pool:
        return pool.apply(scaled, (2.0,))
"""
TOOL = """
import asyncio, runpy, sys
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.runtime.by_value import run_recipe_code

async def main():
    scorer = Scorer(1, 300.0)
    try:
        print((await scorer.score(reward)).reward)
    finally:
        await asyncio.to_thread(scorer.close)

if __name__ == "__main__":
    reward = runpy.run_path(sys.argv[1], run_name="__main__")["reward"]
    run_recipe_code(reward.__globals__)
    asyncio.run(main())
"""


def test_functions_of_a_recipe_that_a_tool_has_run_share_their_global_variables_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(POOLED)
    (tmp_path / "tool.py").write_text(TOOL)
    done = run([sys.executable, str(tmp_path / "tool.py"), str(tmp_path / "recipe.py")], seconds=600)
    assert done.stdout.split() == ["6.0"], done.stderr


def test_a_recipe_and_its_modules_are_sent_to_processes_that_cannot_import_them(tmp_path: Path) -> None:
    """Also to scoring processes; each step has its own working directory."""
    folder, elsewhere, there = tmp_path / "recipe", tmp_path / "elsewhere", tmp_path / "there"
    (folder / "package").mkdir(parents=True)
    elsewhere.mkdir()
    there.mkdir()
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "beside.py").write_text("TWO = 2\ndef doubled(x):\n    return TWO * x\n")
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "deeper.py").write_text("class Deeper:\n    def one(self):\n        return 1\n")
    (there / "reader.py").write_text(READER)
    sent = tmp_path / "sent"
    for script, cwd in ((folder / "recipe.py", elsewhere), (there / "reader.py", there)):
        done = run([sys.executable, script, sent], cwd=cwd)
        assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["21", "3", "21.0"]


PACKAGED = """
import sys
from pathlib import Path
from monarch_rl.runtime.by_value import ByValue, register_modules

def reward():
    from .helper import one
    return one()

if __name__ == "__main__":
    register_modules()
    Path(sys.argv[1]).write_bytes(ByValue(reward).data)
"""
LOADER = """
import sys
from pathlib import Path
from monarch_rl.runtime.by_value import ByValue, run_recipe_code
run_recipe_code()
print(ByValue.of_bytes(Path(sys.argv[1]).read_bytes()).load()())
"""


def test_functions_of_a_recipe_in_a_package_import_its_modules_elsewhere(tmp_path: Path) -> None:
    """The workers of a run have the recipe's search path (``runtime/cluster.py``)."""
    (package := tmp_path / "package").mkdir()
    (package / "recipe.py").write_text(PACKAGED)
    (package / "helper.py").write_text("def one():\n    return 1.0\n")
    for program in (["-m", "package.recipe"], ["-c", LOADER]):
        done = run([sys.executable, *program, str(tmp_path / "sent")], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1.0"]


def test_an_unpicklable_value_is_named() -> None:
    numbers = iter(range(3)), (number for number in range(3))

    def reward(row: object, answer: str) -> object:
        return numbers

    with pytest.raises(TypeError, match=r"my task .*-> reward -> numbers.* generator"):
        ByValue(Questions([{"question": "?"}], reward), "my task")
    with pytest.raises(TypeError, match="the arguments of f"):
        to_bytes(numbers, "the arguments of f")


def test_a_culprit_is_found_in_partials_comprehensions_and_inner_functions() -> None:
    names: dict[str, Any] = {"__name__": "recipe", "numbers": (number for number in range(3))}
    exec("def inner():\n  def f(): return numbers\n  return f\ndef listed(): return [numbers for _ in 'ab']", names)
    for name in ("inner", "listed"):
        assert culprit_of(names[name]) == "numbers"
        assert culprit_of(functools.partial(names[name])) == f"{name} -> numbers"
    assert culprit_of(functools.partial(print, end=names["numbers"])) == "end"


class Uncopied:
    """Like the templates of jinja2: it is pickled, but not unpickled."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return Uncopied, ()


@dataclass(slots=True)
class Slotted:
    grader: object


def test_what_leads_to_a_value_that_cannot_be_copied_is_named_wherever_it_stands() -> None:
    uncopied = Uncopied("a")

    def by_default(answer: str, length: int = 1, grader: Uncopied = uncopied) -> float:
        return float(answer == grader.text)

    def by_name(answer: str, *, grader: Uncopied = uncopied) -> float:
        return float(answer == grader.text)

    class OfClass:
        grader = uncopied

        def __call__(self, answer: str) -> float:
            return float(answer == self.grader.text)

    ways: list[tuple[Any, str]] = [
        (by_default, "grader"),
        (by_name, "grader"),
        (OfClass, "grader"),
        (OfClass(), "OfClass -> grader"),
        (OfClass().__call__, "OfClass -> grader"),
        ({"a": [0, uncopied]}, "['a'] -> [1]"),
        (Slotted(uncopied), "grader"),
    ]
    for value, culprit in ways:
        assert culprit_of(value) == culprit
        with pytest.raises(TypeError, match=rf"^my function .*{re.escape(culprit)}: .*argument"):
            ByValue.checked(value, "my function")
    assert ByValue.checked(Slotted(1), "my function") == ByValue(Slotted(1))


@pytest.mark.parametrize("make", [threading.Thread, lambda: subprocess.Popen(["true"]), lambda: Pipe()[0]])
def test_what_belongs_to_a_process_is_refused_although_its_locks_are_not(make: Callable[[], Any]) -> None:
    ByValue({"lock": threading.Lock(), "event": threading.Event()}, "a task")
    with pytest.raises(TypeError, match=r"a task .*cannot pickle '(Thread|Popen|Connection)'"):
        ByValue({"thing": (thing := make())}, "a task")
    if isinstance(thing, subprocess.Popen):
        patience.exit_code(thing)


def test_installed_modules_and_this_package_are_sent_by_name() -> None:
    assert register_modules(Path(pytest.__file__)) == []
    assert len(pickle.dumps(ByValue(Outcome))) < 300 and ByValue(Outcome).load() is Outcome


def test_an_unreadable_argument_fails_only_its_own_score() -> None:
    class Unreadable:
        def __reduce__(self) -> tuple[type[int], tuple[str]]:
            return int, ("not a number",)

    async def test() -> None:
        scorer = Scorer(1, 300.0)
        try:
            scores = [scorer.score(len, [0, 0]) for _ in range(20)]
            unreadable = asyncio.ensure_future(scorer.score(len, Unreadable()))
            assert await asyncio.gather(*scores) == [Outcome(2.0)] * 20
            with pytest.raises(Exception, match="ValueError"):
                await unreadable
        finally:
            await asyncio.to_thread(scorer.close)

    asyncio.run(test())

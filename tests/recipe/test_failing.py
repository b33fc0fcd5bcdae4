"""A task that fails, in a run as a user starts it: the run ends at once and reports why and where."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.recipe import failing_reward
from tests.recipe.running import RUN_S, STAND_IN, assert_no_traceback, recipe
from tests.runtime.launched import Start

pytestmark = pytest.mark.slow

FAILING = Path(__file__).with_name("failing.py")
REWARD = Path(failing_reward.__file__)


def line_of(text: str) -> int:
    (line,) = [number for number, line in enumerate(REWARD.read_text().splitlines(), 1) if text in line]
    return line


@pytest.mark.parametrize(("held_out", "engine"), [("0", []), ("8", [STAND_IN])], ids=["training", "held-out items"])
def test_a_reward_with_a_typo_ends_the_run_at_once_with_its_traceback(
    start: Start, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: str, engine: list[str]
) -> None:
    """Also from a scoring process; one that crashes is named, and one that prints 10 MB does not bury the rest."""
    monkeypatch.setenv("HELD_OUT", held_out)
    _, *arguments = recipe(model, tmp_path / "runs", "--generator.replicas=1")
    run = start([sys.executable, *engine, str(FAILING), *arguments])
    assert run.wait(RUN_S) == 1, run.output()
    run.assert_gone()
    output = run.output()
    assert len(output) < failing_reward.PRINTED_BYTES / 50
    assert_no_traceback(output)

    typo = f'  File "{REWARD}", line {line_of("rewrad")}, in typo\n'
    traceback = r"(Traceback \(most recent call last\):\n(?: .*\n)*KeyError: 'rewrad')"
    error = re.search(rf"^error: (.*)\n{traceback}$", output, re.MULTILINE)
    assert error, output
    failed = r"all of the first \d+ groups" if held_out == "0" else r"\d of 8 held-out items"
    assert re.match(rf"score raised KeyError: {failed} ", error[1]), error[1]
    assert typo in error[2]
    assert len(re.findall("^an episode failed, .*: score raised KeyError$", output, re.MULTILINE)) == 1

    if held_out == "0":  # it ends before the crash is known, because that score is retried after the others
        return
    crash = output.split("score ended its process by SIGSEGV\n")[1]
    assert f'  File "{REWARD}", line {line_of("string_at")} in crash\n' in crash.split("an episode failed")[0]
    assert re.search(r"^Item \d+, prompt: '\w+ -> '$", crash, re.MULTILINE)
    assert "printed more than 64 KiB" in output

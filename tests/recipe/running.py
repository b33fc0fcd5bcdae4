"""Helpers to run the recipe as a user does, on a tiny model, and to check the files of a run."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.observe.pieces import pieces_of
from tests import patience
from tests.forking import run_forked
from tests.runtime.launched import Launched
from tools.make_tiny_model import Settings as TinyModel
from tools.make_tiny_model import write_random_model

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "grpo.py"
SLOW = Path(__file__).with_name("slow.py")
"""The same recipe with slow episodes, for tests that do not wait for steps."""
STAND_IN = str(Path(__file__).with_name("stand_in.py"))
"""Goes before the script in a command that is to use stand-in engines."""
RUN_S = 420.0
"""Deadline of a whole run of a few steps by the clock of ``tests/patience.py``; about 20 s when nothing else runs."""
POLL_S = 0.25
"""Interval of polling a run's output; the test shares the cores with the run."""
STEPS = 3
SMALL_RUN: dict[str, Any] = {
    "held-out": 8,
    "groups-per-step": 8,
    "rollout.max-new-tokens": 8,
    "trainer.lr": 1e-3,
    "trainer.lr-warmup-steps": 0,
    "task.template": "{word} -> ",
    "task.pass-mark": 0,
    "checkpoint.restarts": 0,
    "steps": STEPS,
    "trainer.ranks": 2,
    "generator.replicas": 2,
}
"""Flags of a small run: partial marks count, or a random model would never get a reward; a failed run ends; several
processes of each kind, whatever the machine's defaults are."""
ROW = {
    *("kind", "group", "attempt", "episode", "rollout", "seat", "fork", "task", "task_index", "messages", "prompt"),
    *("turns", "reward", "parts", "info", "finish_reason", "tokens", "versions", "worker", "began", "ended"),
    *("generate_s", "tool_s", "score_s"),
}
"""The keys of a sampled rollout."""


def recipe(model: Path, output: Path, *more: str, script: Path = RECIPE) -> list[str]:
    """Return script and arguments of a small run."""
    return [str(script), f"--model={model}", f"--output={output}", *as_arguments(SMALL_RUN), *more]


def as_arguments(changed: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments of the command line."""
    arguments = []
    for flag, value in changed.items():
        if isinstance(value, bool):
            prefix, _, name = flag.rpartition(".")
            arguments.append(f"--{prefix}{'.' if prefix else ''}{'' if value else 'no-'}{name}")
        elif isinstance(value, tuple):
            arguments += [f"--{flag}", *map(str, value)]
        else:
            arguments.append(f"--{flag}={value}")
    return arguments


def engines(run: Launched) -> int:
    """Return the number of SGLang scheduler processes that the run has now."""
    return sum("sglang::scheduler" in process for process in run.left())


def process_named(run: Launched, name: str) -> psutil.Process:
    """Return the process of the run with this title (``trainer-1``, ``sglang::scheduler``)."""
    processes = run.processes()
    for process, command in processes.items():
        if command.removeprefix("monarch_rl::").split(" ")[0] == name:
            return process
    raise AssertionError(f"no process {name} among {list(processes.values())}")


def finished(run: Launched) -> None:
    """Wait until a run of a few steps ends with exit code 0 and leaves no process."""
    assert run.wait(RUN_S) == 0, run.output()
    run.assert_gone()


def wait_for_step(run: Launched) -> None:
    """Wait until the run has printed its first step."""
    wait_for_line(run, r"^step 1/")


def random_model(folder: Path, kind: Literal["dense", "moe"] = "dense", recipe: Path | None = None) -> Path:
    """Write a tiny random Qwen3 with a character tokenizer to ``folder``; with a chat template if for a ``recipe``."""
    write_random_model(folder, TinyModel(hidden_size=64, layers=2, kind=kind, recipe=recipe))
    return folder


def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the environment of SGLang's processes, by which tests find them, when they change their title."""
    monkeypatch.setenv("SPT_NOENV", "1")


def wait_for_line(run: Launched, pattern: str, after: re.Match[str] | None = None) -> re.Match[str]:
    """Wait until the run has printed a line that matches, later than ``after``."""
    searching, searched = re.compile(pattern, re.MULTILINE), after.end() if after else 0

    def look() -> re.Match[str] | None:
        nonlocal searched
        code = run.process.poll()  # before reading the output, to see its last lines
        output = run.output()
        found = searching.search(output, searched)
        assert found or code is None, f"ended early with {code}, without {pattern}\n{output}"
        searched = max(searched, output.rfind("\n"))  # an incomplete line is searched again
        return found

    return patience.wait_until(look, lambda: f"{pattern}\n{run.output()}", RUN_S, POLL_S)


def send(run: Launched, process: str, number: signal.Signals) -> None:
    """Send a signal to a process of the run, as soon as it has printed a step."""
    wait_for_step(run)
    victim = process_named(run, process)  # the search takes time in which a step may end
    first = wait_for_line(run, r"^step 1/")
    wait_for_line(run, r"^step \d+/", after=first)
    victim.send_signal(number)


def wait_for_more_steps(run: Launched, after: re.Match[str]) -> None:
    """Wait until a run makes five more steps, later than ``after``."""
    step = int(wait_for_line(run, r"^step (\d+)/\d+", after=after)[1])
    wait_for_line(run, rf"^step {step + 5}/\d+", after=after)


def end_by_signal(run: Launched, number: signal.Signals, code: int, to_group: bool = False) -> None:
    """Check that a signal to the recipe's process, or to its group, ends the run with ``code`` and no process."""
    before = len(run.output())
    (os.killpg if to_group else os.kill)(run.process.pid, number)
    assert run.wait() == code, run.output()
    run.assert_gone()
    assert_no_traceback(run.output()[before:])


def steps_logged(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of steps in the metrics of the only run in ``folder``, which evaluates before its first step."""
    (file,) = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows][:2] == [0, 1]
    return [row for row in rows if "lag/max" in row]


def assert_no_traceback(output: str) -> None:
    """Check that the recipe printed no traceback; torchrun, or a hurried shutdown of Monarch, may print one."""
    assert f'File "{RECIPE}"' not in output, output


def window_of(max_policy_lag: int) -> int:
    """Return the default window of a run with 8 groups per step."""
    return BufferSettings(max_policy_lag).window_for(8) or 0


def check_log(folder: Path, output: str) -> None:
    """Check that ``console.log`` has the lines of the console, each with a time and its process."""
    lines = (folder / "console.log").read_text().splitlines()
    found = [re.fullmatch(r"[-0-9]{10} [:0-9]{8}\.\d{3} \| ([^|]+) \| (.*)", line) for line in lines]
    logged = [(match[1], match[2]) for match in found if match]
    assert len(logged) == len(lines), lines
    monarch = [text for _, text in logged if text.startswith("Monarch internal logs are ")]
    assert len(monarch) == len({*monarch}) >= 1 and "Monarch internal logs" not in output
    assert {text for _, text in logged} - {*monarch} <= set(output.splitlines())
    assert any(process == "controller" and text.startswith(f"step {STEPS}/{STEPS} ") for process, text in logged)


def check_described(folder: Path) -> None:
    """Check that ``run.json`` says what was run, on what, and its result."""
    found = json.loads((folder / "run.json").read_text())
    assert (found["format"], found["state"], found["steps"]) == (1, "finished", STEPS)
    assert re.fullmatch(rf"{found['name']}-\d{{8}}-\d{{6}}(-\d+)?", folder.name), folder
    assert "--steps" in " ".join(found["command"]) and found["ended"] > 0
    assert (folder / "recipe.py").read_text() == Path(found["recipe"]["path"]).read_text()
    assert found["packages"]["torchmonarch"] and found["hosts"][0]["cores"] >= 1
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [[row["step"], row["held_out/accuracy"]] for row in rows if "held_out/accuracy" in row]
    assert found["held_out"] == {"metric": "held_out/accuracy", "first": values[0], "last": values[-1]}


def check_run(output: str, start_model: Path, max_policy_lag: int) -> None:
    """Check everything that a finished run printed and wrote."""
    assert_no_traceback(output)
    found = re.search(r"Run folder: (\S+)$", output, re.MULTILINE)
    assert found, output
    folder = Path(found[1])
    assert re.search(rf"^files: +metrics.* model .*{folder}$", output, re.MULTILINE), output
    check_log(folder, output)
    check_described(folder)
    window = window_of(max_policy_lag)
    slots = 8 * (max_policy_lag + 1) - window
    assert re.search(rf"lag <= {max_policy_lag}; .* {slots} groups; .* {window} groups", output), output
    assert json.loads((folder / "settings.json").read_text())["buffer"]["max_policy_lag"] == max_policy_lag
    check_metrics(folder, max_policy_lag)
    check_rollouts(folder, max_policy_lag)
    check_model(folder / "model", start_model)


def check_metrics(folder: Path, max_policy_lag: int) -> None:
    """Check that ``metrics.jsonl`` and TensorBoard have all steps, within the lag, between two evaluations."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "held_out/accuracy" in line]
    steps = [line for line in lines if "held_out/accuracy" not in line]
    assert [line["step"] for line in evaluations] == [0, STEPS]
    assert all(0 <= line["held_out/accuracy"] <= 1 for line in evaluations)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert 0 <= line["reward/mean"] <= 1 and line["trainer/grad_norm"] >= 0, line
        assert 0 <= line["lag/mean"] <= line["lag/max"] <= max_policy_lag, line
        assert line["buffer/trained"] == 8 * line["step"], line
        assert not [name for name in line if name.startswith("dropped/")], line
    # A step samples no tokens if its batch is ready.
    assert max(line["tokens_per_second"] for line in steps) > 0
    assert max(line["reward/std"] for line in steps) > 0, "all rewards were equal: there was nothing to learn"

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    scalars = {event.step: event.value for event in board.Scalars("1_learning/reward/mean")}
    assert scalars == pytest.approx({line["step"]: line["reward/mean"] for line in steps}), "float32"


def check_rollouts(folder: Path, max_policy_lag: int) -> None:
    """Check that trained groups are recorded with messages, tokens and the versions that sampled them, and held-out
    episodes of both evaluations."""
    rows = check_episodes(folder)
    trained, held_out = ([row for row in rows if row["kind"] == kind] for kind in ("train", "held_out"))
    blocks = {row["group"] // 8 for row in trained}
    assert blocks >= set(range(STEPS)), "one group of each 8 is logged"
    assert sum("item" in row for row in trained) == len({row["group"] for row in trained})
    for row in trained:
        assert set(row) - {"item"} == ROW
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][0]["content"] in row["prompt"] and row["turns"][0]["read"] == row["prompt"]
        assert row["prompt"].endswith(" -> ") and row["tokens"] <= 8
        (turn,) = row["turns"]
        ends = np.frombuffer(base64.b64decode(turn["text_ends"]), "<u4")
        assert len(ends) == turn["tokens"] == row["tokens"] and ends[-1] == len(turn["sampled"].encode())
        assert turn["seconds"] > 0 <= turn["replica"] and row["began"] < row["ended"]
        # A group is trained at the step of its place in the order, or later if groups of the window overtake it.
        step, latest = row["group"] // 8, (row["group"] + window_of(max_policy_lag)) // 8
        first, last = row["versions"][0][0], row["versions"][-1][0]
        assert sum(tokens for _, tokens in row["versions"]) == row["tokens"], row
        assert max(0, step - max_policy_lag) <= first <= last <= latest, row
    assert [sorted({row["version"][place] for row in held_out}) for place in (0, 1)] == [[0, STEPS]] * 2
    records = [json.loads(line) for line in (folder / "rollouts/tokens-000001.jsonl").read_text().splitlines()]
    assert {row["step"] for row in records} == set(range(1, 1 + STEPS))
    known = {(row["group"], row["attempt"], row["episode"]) for row in trained}
    assert {(row["group"], row["attempt"], row["episode"]) for row in records} <= known
    for row in records:
        # A group that overtakes others is trained before its place, but not before the version that admits it.
        earliest, latest = row["group"] // 8 - max_policy_lag, (row["group"] + window_of(max_policy_lag)) // 8
        assert max(0, earliest) <= row["step"] - 1 <= latest, row


def check_episodes(folder: Path) -> list[dict[str, Any]]:
    """Check that all lines about episodes are whole and none stands twice; returns them."""
    pieces = [piece.read_bytes() for piece in pieces_of(folder / "rollouts", "episodes")]
    rows: list[dict[str, Any]] = [json.loads(line) for piece in pieces for line in piece.splitlines()]
    keys = Counter((row["kind"], row["group"], row["attempt"], row["episode"], str(row.get("version"))) for row in rows)
    assert [key for key, count in keys.items() if count > 1] == []
    return rows


def check_model(saved: Path, start: Path) -> None:
    """Check that the saved model loads with transformers alone, generates, and differs from the initial model."""
    script = Path(__file__).with_name("load_saved.py")
    done = run_forked("transformers", [script, start, saved], RUN_S)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["strangers"] == []
    assert report["same_tensors"] and report["same_dtype"]
    assert report["new_tokens"] == 8 and report["prompt"].endswith("cat")
    # AdamW's first steps move a weight by at most about the learning rate each, here 1e-3.
    assert 1e-5 < report["largest_change"] < 5e-3 * STEPS

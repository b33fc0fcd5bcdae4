"""A run that loses a trainer rank, the buffer or the controller resumes automatically with an unchanged result."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monarch_rl.checkpoint.folders import complete, verify
from monarch_rl.runtime.network import free_port
from tests.recipe.running import (
    RECIPE,
    RUN_S,
    SLOW,
    STAND_IN,
    check_episodes,
    end_by_signal,
    process_named,
    recipe,
    wait_for_line,
)
from tests.runtime.launched import TORCHRUN, Launched, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * RUN_S)]

WARM_RESTART = r"^resuming \S+ from step-0000\d\d, .* kept: \S"
REPLAYED = r"^steps? [\d to]+ .*journal.*bit for bit, after all [1-9]"
SURVIVORS = ["generator0-0", "rollout0-0"]
"""Processes, besides the engine, that survive the loss of a trainer rank or the buffer."""
LOSSES = [("trainer-1", signal.SIGKILL), ("buffer-0", signal.SIGKILL), ("trainer-0", signal.SIGSTOP)]
"""Successive losses, each of a process without which a run cannot continue."""
SUPERVISED = [sys.executable, "-m", "monarch_rl.runtime.supervisor"]


def controller(folder: Path) -> psutil.Process:
    """Return the process of the recipe."""
    return psutil.Process(json.loads((folder / "run.json").read_text())["pid"])


def has_imported_torchtitan(process: psutil.Process) -> bool:
    """Return whether torchtitan is imported, which loads Triton (80 MiB, and blocks for seconds)."""
    return any("libtriton" in mapped.path for mapped in process.memory_maps())


def wait_for_two_steps(run: Launched, after: re.Match[str]) -> None:
    """Wait until the run has printed two more steps, so that the journal has the first of them."""
    wait_for_line(run, r"^step \d+/", after=wait_for_line(run, r"^step \d+/", after=after))


def folder_of(output: Path) -> Path:
    (folder,) = output.iterdir()
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps, without evaluations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "lag/max" in row]


@pytest.mark.parametrize(
    ("sglang", "steps", "every", "losses"),
    [
        pytest.param(False, 24, 6, LOSSES[:2], marks=pytest.mark.core, id="stand-in"),
        pytest.param(True, 40, 10, LOSSES, id="SGLang"),
    ],
)
def test_a_lost_trainer_rank_buffer_or_controller_costs_no_journaled_batch(
    start: Start,
    model: Path,
    tmp_path: Path,
    sglang: bool,
    steps: int,
    every: int,
    losses: list[tuple[str, signal.Signals]],
) -> None:
    """Steps after the checkpoint are replayed, bit for bit. Each group is trained once, each step is logged once, and
    no lag exceeds the bound. Engines and workers survive unless the controller is lost."""
    output = tmp_path / "runs"
    often = [f"--checkpoint.every-steps={every}", f"--steps={steps}", "--generator.replicas=1", "--stall-s=8"]
    often += ["--rollout.logged-groups=8"]  # all groups of a step, to find one that is trained twice
    often += ["--journal.mib=8", "--checkpoint.restarts=2"]
    survivors = [*SURVIVORS, "sglang::scheduler"] if sglang else SURVIVORS
    command = recipe(model, output, *often, script=RECIPE if sglang else SLOW)
    run = start([*SUPERVISED, *command] if sglang else [*SUPERVISED, STAND_IN, *command])
    match = wait_for_line(run, rf"^checkpoint of step {every} ")
    before = {name: process_named(run, name).pid for name in survivors}
    for victim, number in losses:
        wait_for_two_steps(run, match)
        process_named(run, victim).send_signal(number)
        match = wait_for_line(run, REPLAYED, after=wait_for_line(run, WARM_RESTART, after=match))
        match = wait_for_line(run, r"^checkpoint of step ", after=match)
    assert {name: process_named(run, name).pid for name in survivors} == before
    wait_for_two_steps(run, match)
    assert has_imported_torchtitan(process_named(run, "trainer-0"))
    assert not has_imported_torchtitan(controller(folder_of(output))), (
        "an answer of trainer ranks made it import torchtitan"
    )
    controller(folder_of(output)).kill()
    match = wait_for_line(run, r"^resuming .*\(restart 1 of 2\): the controller ended by SIGKILL$", after=match)
    match = wait_for_line(run, REPLAYED, after=match)
    match = wait_for_line(run, r"^step \d+/", after=match)
    if sglang:  # the new controller can do a warm restart, too
        process_named(run, "buffer-0").kill()
        wait_for_line(run, WARM_RESTART, after=match)
    assert run.wait(RUN_S) == 0, run.output()
    run.assert_gone()

    folder = folder_of(output)
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["buffer/trained"] for row in rows] == [8 * row["step"] for row in rows]
    assert max(row["lag/max"] for row in rows) <= 2
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("1_learning/reward/mean")] == [row["step"] for row in rows]
    steps_of: dict[int, set[int]] = {}
    for row in map(json.loads, (folder / "rollouts/tokens-000001.jsonl").read_text().splitlines()):
        steps_of.setdefault(row["group"], set()).add(row["step"])
    assert len(steps_of) == 8 * steps and all(len(trained) == 1 for trained in steps_of.values()), (
        "a group was trained twice"
    )
    check_episodes(folder)
    resumes = [json.loads(line) for line in (folder / "resumes.jsonl").read_text().splitlines()]
    assert [row["generation"] for row in resumes] == list(range(1, len(losses) + 2 + sglang))
    rows = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    assert {row["who"] for row in rows} == {"trainer with its buffer"}, "an engine or worker was considered lost"
    assert not any(row["differences"] for row in resumes)
    for checkpoint in complete(folder / "checkpoints").values():
        verify(checkpoint)


def test_torchrun_resumes_a_run_that_lost_its_controller_but_not_after_an_error_of_the_recipe(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """The second attempt resumes and raises an error; the third would raise it again."""
    output = tmp_path / "runs"
    settings = ["--steps=500", "--checkpoint.every-steps=2", "--generator.replicas=1"]
    job = [*TORCHRUN, "--nproc-per-node=3", "--max-restarts=2"]
    run = start([*job, *recipe(model, output, *settings, script=Path(__file__).with_name("mistaken.py"))])
    checkpoint = wait_for_line(run, r"^checkpoint of step \d+ ")
    folder = folder_of(output)
    controller(folder).kill()
    wait_for_line(run, r"^Resumed after step \d+ \(resume 1 of this run\)", after=checkpoint)
    assert run.wait(RUN_S) == 1, run.output()
    run.assert_gone()
    refused = rf"^error: torchrun .*{folder} .*ValueError: a mistake"
    assert len(re.findall(refused, run.output(), re.MULTILINE)) == 1, run.output()
    (resumed,) = [json.loads(line) for line in (folder / "resumes.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows_of(folder_of(output))]
    assert steps[-1] > resumed["step"] and steps == list(range(1, len(steps) + 1))


def test_sigusr1_saves_and_prints_how_to_resume_and_other_settings_are_listed_or_refused(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """The run resumes with other numbers of trainer ranks, replicas and machines."""
    output = tmp_path / "runs"
    command = [sys.executable, *recipe(model, output, "--steps=500", "--generator.replicas=1")]
    run = start(command)
    wait_for_line(run, r"^step 2/")
    end_by_signal(run, signal.SIGUSR1, 138)
    folder = folder_of(output)
    assert re.search(rf"^interrupted: .*138.*--resume {folder}", run.output(), re.MULTILINE)
    (version,) = complete(folder / "checkpoints")
    assert [row["step"] for row in rows_of(folder)] == list(range(1, version + 1))

    refused = start([*command, "--resume=auto", "--groups-per-step=4"])
    assert refused.wait(RUN_S) == 1
    assert re.search(r"^error: .*--groups-per-step was 8 and is now 4, .* bound", refused.output(), re.MULTILINE)

    machines = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    others = ["--resume=auto", f"--steps={version + 2}", "--held-out=4", "--trainer.ranks=1", "--generator.replicas=2"]
    job = [*TORCHRUN, *machines, f"--rdzv-endpoint=127.0.0.1:{free_port()}", *command[1:], *others]
    agents = [start(job), start(job)]
    output_of_agents = ""
    for agent in agents:
        assert agent.wait(RUN_S) == 0, agent.output()
        agent.assert_gone()
        output_of_agents += agent.output()
    assert [row["step"] for row in rows_of(folder)] == list(range(1, version + 3))
    for differs in ("trainer.ranks 2 -> 1", "held_out 8 -> 4", "generator.replicas 1 -> 2"):
        assert differs in output_of_agents
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"

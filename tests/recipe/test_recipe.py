"""The recipe end to end: under Python, torchrun and two torchrun agents; and with bad settings."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from monarch_rl.buffer.ledger import EQUAL_REWARDS, REJECTED
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.observe.lines import read_rows
from monarch_rl.observe.pieces import pieces_of
from monarch_rl.pipeline.run import launch
from monarch_rl.pipeline.settings import check
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.devices import devices
from monarch_rl.runtime.network import free_port
from monarch_rl.tasks.reasoning_gym import TaskSettings
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.transport import transports_on
from tests import patience
from tests.forking import run_forked
from tests.recipe.flags import flags
from tests.recipe.running import (
    POLL_S,
    RECIPE,
    RUN_S,
    SMALL_RUN,
    STAND_IN,
    STEPS,
    assert_no_traceback,
    check_run,
    engines,
    finished,
    keep_environment,
    random_model,
    recipe,
    wait_for_step,
)
from tests.report.browser import chromium, needs_chromium
from tests.runtime.launched import TORCHRUN, Launched, Start, launching

# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A successful run of the recipe under Python, with checkpoints and a journal; its folder is in ``runs``, next
    to its log."""
    scratch = tmp_path_factory.mktemp("python")
    files = ["--journal.mib=8", "--checkpoint.every-steps=2", "--checkpoint.keep=2"]
    with pytest.MonkeyPatch.context() as patch, launching(scratch) as start:
        keep_environment(patch)
        run = start([sys.executable, *recipe(model, scratch / "runs", *files)])
        finished(run)
        yield run


@pytest.fixture
def run_folder(ended: Launched) -> Path:
    """The folder of the run."""
    found = re.search(r"Run folder: (\S+)$", ended.output(), re.MULTILINE)
    assert found, ended.output()
    return Path(found[1])


@pytest.mark.core
@pytest.mark.timeout(1800)
def test_python(ended: Launched, run_folder: Path, model: Path, tmp_path: Path) -> None:
    check_run(ended.output(), model, max_policy_lag=2)
    refused = re.findall(r"started without the fork server: .* differ", ended.output())
    assert not refused, "processes were not forked by the fork server"
    check_phases(ended.output())
    described = (RECIPE.parents[1] / "docs" / "run_folder.md").read_text()
    described_run = json.loads((run_folder / "run.json").read_text())
    assert described_run["recipe"]["path"] == str(RECIPE) and described_run["name"] == "grpo"
    names = [path.name + "/" * path.is_dir() for path in run_folder.iterdir()]
    assert len(names) >= 8 and not [name for name in names if f"`{name}`" not in described]
    check_timeline(run_folder)
    check_exported(run_folder, tmp_path / "exported")
    check_evaluated_again(run_folder)
    check_replayed(run_folder)


@needs_chromium
@pytest.mark.timeout(1800)
def test_the_page_that_a_run_wrote_is_whole_in_a_browser(run_folder: Path, tmp_path: Path) -> None:
    """Every chart of every screen has pixels, and nothing fails or is asked from elsewhere."""
    tokens = "document.querySelector('.tokens span')"
    with chromium(tmp_path) as browser:
        browser.open(run_folder / "report.html", "#kind=train")
        browser.run("document.querySelectorAll('details').forEach(group => (group.open = true))")
        for key, shown in (
            ("1", f"plots.length > 20 && Math.max(...plots[0].data[0]) === {STEPS}"),
            ("2", f"{tokens} && document.querySelectorAll('.answer').length === 8"),
            ("3", "document.querySelector('.lanes') && plots.length === 2"),
            ("4", "document.querySelector('main').textContent.includes('grpo.py')"),
        ):
            if key != "1":
                browser.press(key)
            browser.wait_for(shown)
            assert not browser.charts_without_pixels(), key
            assert not browser.unreadable(), key
        browser.run("setState({screen: 'rollouts', color: 'trainer log-prob'}); show()")
        browser.wait_for(f"{tokens}?.style.backgroundColor")
        assert not browser.errors
        assert browser.requests and all(address.startswith("file://") for address in browser.requests)


def check_timeline(folder: Path) -> None:
    """Every step is in the timeline, with the time for which the trainer waited for it, and nothing overlaps."""
    spans = [row for piece in pieces_of(folder / "timeline", "spans") for row in read_rows(piece)[0]]
    steps: dict[tuple[str, str], set[int]] = defaultdict(set)
    for span in spans:
        if span["step"] is not None:
            steps[span["lane"], span["what"]].add(span["step"])
    trained, served = set(range(1, STEPS + 1)), set(range(STEPS + 1))
    for rank in range(2):
        assert steps[f"trainer rank {rank}", "update"] == trained
        assert steps[f"trainer rank {rank}", "snapshot"] >= served
        assert steps[f"trainer rank {rank}, transfers", "transfer"] >= served
        assert steps[f"trainer rank {rank}", "copy for a checkpoint"] >= {STEPS}
    for replica in range(2):
        assert steps[f"generator {replica}", "swap of weights"] == served
    assert steps["controller, evaluations", "evaluation"] == {0, STEPS}
    assert steps["controller, checkpoints", "checkpoint"] >= {STEPS}
    work = {(span["lane"], span["what"]) for span in spans if span["kind"] == "work"}
    assert work >= {("trainer rank 1", "start"), ("generator 0", "generation"), ("generator 1", "generation")}
    waited_on = {(span["lane"], span["on"]) for span in spans if span["kind"] == "wait"}
    assert ("controller", "rollout worker 0") in waited_on
    assert any(lane.startswith("rollout worker") and on.startswith("generator") for lane, on in waited_on)
    assert not any(span["lane"].startswith(("process", "the watch")) for span in spans)

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wait_s = sum(row.get("trainer/wait_s", 0.0) for row in rows)
    batches = [span for span in spans if span["lane"] == "trainer rank 0" and span["on"] == "buffer"]
    assert all(span["what"].startswith("the batch of step ") for span in batches)
    shortest_s = 0.005 * STEPS  # waits that are too short for the timeline
    assert sum(span["to"] - span["from"] for span in batches) == pytest.approx(wait_s, rel=0.05, abs=shortest_s)

    lanes: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        lanes[span["lane"], span["kind"], span["on"]].append(span)
    for of_lane in lanes.values():
        assert all(span["from"] < span["to"] for span in of_lane)
        assert all(first["to"] <= second["from"] for first, second in pairwise(of_lane))


def test_a_run_continues_after_its_console_was_closed(start: Start, model: Path, tmp_path: Path) -> None:
    """What reads standard output ends after the first line, which every process of the run could notice."""
    command = shlex.join([sys.executable, STAND_IN, *recipe(model, tmp_path / "runs")])
    run = start(["bash", "-c", f"{command} 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}"])
    finished(run)
    (folder,) = (tmp_path / "runs").iterdir()
    log = (folder / "console.log").read_text()
    assert "Broken pipe" in log and re.search(rf"\| controller \| step {STEPS}/{STEPS} ", log), log
    assert len(run.output().splitlines()) == 1 and re.search(rf"\| files: .* are in {folder}$", log, re.MULTILINE), log
    *_, resume, page = log.splitlines()
    assert re.search(rf"\| resume: .* --resume {folder} ", resume) and page.endswith(f"{folder / 'report.html'}"), log


def check_phases(log: str) -> None:
    """The phases of a run are printed in order, from its first line to its last."""
    phases = [
        "checking the settings for ",
        "starting the hosts$",
        "Run folder: ",
        f"Each step trains on 8 prompts x 8 episodes = {8 * 8} episodes;",
        "Asynchronous: ",
        "trying an item of the task$",
        "starting 2 trainer ranks, 2 generators, .* and the buffer$",
        "version 0 is served$",
        "evaluating 8 held-out items before training$",
        "before training, version 0: held-out accuracy ",
        rf"step 1/{STEPS} \| .*/step, .* left \| reward .*held-out [0-9.]+% @0 ",
        rf"step {STEPS}/{STEPS} \| .*/step \| reward .*held-out [0-9.]+% @0 ",
        f"after step {STEPS}, version {STEPS}: held-out accuracy ",
        rf"done: +{STEPS} steps in .*; held-out accuracy [0-9.]+% @0 -> [0-9.]+% @{STEPS} \[.*\]$",
        "files: ",
        "look: +monarch-rl view ",
        "curves: +tensorboard --logdir ",
        "table: +monarch-rl convert ",
        "model: +python tools/export.py ",
        "evaluate: +python tools/evaluate.py .* --task .*grpo.py$",
        "resume: +the same command with --resume ",
        "page: +.*/report.html$",
    ]
    found = [re.search(f"^{phase}", log, re.MULTILINE) for phase in phases]
    assert None not in found, f"not printed: {phases[found.index(None)]}\n{log}"
    places = [match.start() for match in found if match is not None]
    assert places == sorted(places), log
    for part in ("trainer ranks up: ", "generators up: ", "rollout workers up: "):
        assert re.search(f"^{part}", log, re.MULTILINE), f"not reported: {part}"


@pytest.mark.timeout(1800)
def test_a_run_is_exported_in_bfloat16_and_replayed_in_part_and_with_another_objective(
    run_folder: Path, tmp_path: Path
) -> None:
    """transformers loads the exported model; another objective makes other updates."""
    half, loads = tmp_path / "half", tmp_path / "loads.py"
    program("export.py", run_folder / "checkpoints" / "latest", str(half), "--dtype=bfloat16")
    loads.write_text(LOADS)
    done = run_forked("transformers", [loads, half], RUN_S)
    assert done.stdout.strip() == "torch.bfloat16", done.stderr
    saved, halves = load_file(run_folder / "model" / "model.safetensors"), load_file(half / "model.safetensors")
    assert all(halves[name].equal(tensor.bfloat16()) for name, tensor in saved.items())
    last = program("replay.py", run_folder, f"--from={STEPS}")
    assert re.search("1 of 1 steps .*bit for bit", last) and " 2  " not in last
    other = program("replay.py", run_folder, "--to=2", "--open=2", "--objective=supervised")
    assert "2  differ" in other and other.count("episode ") == 64 and "bit for bit" not in other
    tokens = [line for line in other.splitlines() if line.startswith(("'", '"'))]
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    trained = next(row["trainer/tokens"] for row in rows if row["step"] == 2 and "trainer/tokens" in row)
    assert len(tokens) == trained


LOADS = """
import sys, transformers
print(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").dtype)
"""


def check_exported(folder: Path, exported: Path) -> None:
    """tools/export.py writes the last checkpoint as the model that the run saved at its end, in several files with an
    index."""
    program("export.py", folder / "checkpoints" / "latest", str(exported), "--file-mib=0.1")
    saved, index = load_file(folder / "model" / "model.safetensors"), exported / "model.safetensors.index.json"
    found = {name: tensor for file in exported.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert len(list(exported.glob("*.safetensors"))) > 1 and set(json.loads(index.read_text())["weight_map"]) == set(
        saved
    )
    assert found.keys() == saved.keys() and all(found[name].equal(tensor) for name, tensor in saved.items())


def check_evaluated_again(folder: Path) -> None:
    """tools/evaluate.py repeats the last evaluation of the run with the same result; it needs no flags of the run."""
    *_, summary, metrics = program("evaluate.py", folder, f"--task={RECIPE}").splitlines()
    assert f"version {STEPS}: held-out accuracy" in summary
    again = json.loads(metrics)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "held_out/accuracy" in row][-1]
    assert [last["held_out/oldest_version"], last["held_out/newest_version"]] == [last["step"]] * 2
    expected = {name: value for name, value in last.items() if name.startswith("held_out/")}
    assert len(expected) >= 7 and expected == {name: again[name] for name in expected}


def check_replayed(folder: Path) -> None:
    """tools/replay.py replays the updates of the run, bit for bit."""
    output = program("replay.py", folder)
    assert re.search(f"{STEPS} of {STEPS} steps .*bit for bit", output)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [f"{row['trainer/loss']:.5g}" for row in rows if "trainer/loss" in row]
    assert all(row["journal/lost"] == 0 for row in rows if "trainer/loss" in row)
    table = [line.split() for line in output.splitlines() if " equal " in line]
    assert [int(line[0]) for line in table] == list(range(1, STEPS + 1))
    assert [line[2] for line in table] == [line[3] for line in table] == losses
    assert (folder / "checkpoints" / "step-000002").is_dir()


def program(name: str, folder: Path, *flags: str) -> str:
    """Run a program of tools/ on a run's folder and return its output."""
    preload = ENGINE_PRELOAD if name == "evaluate.py" else "trainer"
    done = run_forked(preload, [f"tools/{name}", folder, *flags], RUN_S, folder=RECIPE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- runs with sampled flags that do not affect the checks ----------------------------------------------------------

ONE_REPLICA = {"generator.replicas": 1}
"""Each engine is half of the start-up cost."""
FIXED = (
    r"trainer\.(compile|weight-decay|epochs|minibatches|compute-dtype|max-grad-norm|lr.*|lora\.(rank|alpha))"
    r"|buffer\..*|evaluate-every|rollout\.(max-.*|logged-groups)|generator\.max-running-requests"
)
"""Flags that are not sampled: they change which groups, evaluations and rollouts are logged, or how much a weight
changes; or they make a run costly (a compiled trainer, an engine that generates few sequences at once)."""


def test_adapters(run_sample: Callable[..., Launched], model: Path, tmp_path: Path) -> None:
    """The model is saved merged, and stops as in training; the adapter next to it belongs to the model that the run
    started from."""
    model = Path(shutil.copytree(model, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')  # config.json and the tokenizer have 1
    run = run_sample("grpo_lora", model, given=SMALL_RUN | ONE_REPLICA, fixed=FIXED, share=0.8)
    check_run(run.output(), model, max_policy_lag=2)
    (adapter,) = (tmp_path / "runs").glob("*/model_adapter/adapter_config.json")
    config = json.loads(adapter.read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (8, str(model))
    assert adapter.with_name("adapter_model.safetensors").is_file()
    saved = json.loads((adapter.parents[1] / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 1]
    program("export.py", adapter.parents[1], str(tmp_path / "alone"), "--adapter")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "alone" / name).read_bytes() == adapter.with_name(name).read_bytes()
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 2
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    export = ["tools/export.py", str(adapter.parents[1] / "checkpoints" / "latest"), str(tmp_path / "merged")]
    refused = run_forked("trainer", export, RUN_S, folder=RECIPE.parents[1])
    assert refused.returncode and "model.layers.1 (" in refused.stderr + refused.stdout
    assert not (tmp_path / "merged").exists()


def test_self_play(run_sample: Callable[..., Launched], model: Path, tmp_path: Path) -> None:
    """Both seats of a game train one policy; held-out games are played against a frozen engine of the initial model."""
    small = {"steps": 2, "groups-per-step": 8, "stones": 6, "held-out": 12, "checkpoint.restarts": 0}
    fixed = r"trainer\.(compile|loss\.overlong-.*)|buffer\.(reject.*|late|partial)|evaluate-every"
    fixed += r"|rollout\.(max-.*|logged-groups)|generator\.max-running-requests"
    run = run_sample("game", model, given=small | ONE_REPLICA, fixed=fixed, share=0.8)
    assert_no_traceback(run.output())
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "rollouts/episodes-000001.jsonl").read_text().splitlines()]
    games: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in (row for row in rows if row["kind"] == "train"):
        games.setdefault((row["attempt"], row["group"], row["rollout"]), {})[row["seat"]] = row["reward"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * len(row["turns"])
    assert games and all(sorted(game.values()) == [-1.0, 1.0] for game in games.values())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "held_out/accuracy" in line]
    assert [line["step"] for line in evaluations] == [0, 2]
    assert all(-1 <= line[f"held_out/seat/{seat}"] <= 1 for line in evaluations for seat in ("first", "second"))
    steps = [line for line in lines if "lag/max" in line]
    assert steps and all(line["reward/mean"] == 0 for line in steps)  # a zero-sum game


def test_distillation(run_sample: Callable[..., Launched], model: Path, tmp_path: Path) -> None:
    """The teacher starts with the student's weights, so that both agree on the first batch and differ on the next one.
    Then the teacher loads the student's new weights."""
    small: dict[str, Any] = {
        "steps": 2,
        "snapshot-every": 2,
        "groups-per-step": 4,
        "rollout.group-size": 4,
        "held-out": 8,
    }
    small |= {"buffer.max-policy-lag": 0, "trainer.lr": 1e-2, "trainer.lr-warmup-steps": 0, "trainer.ranks": 1}
    small |= {"checkpoint.restarts": 0, "objective.top": 4}
    fixed = rf"{FIXED}|objective.*|trainer\.(loss|lora)\..*|generator\.dtype|rollout\.(temperature|top-.|min-p|keep-.*)"
    run = run_sample("distill", model, given=small | ONE_REPLICA, fixed=fixed, share=0.8)
    assert_no_traceback(run.output())
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, second = (line for line in lines if "lag/max" in line)
    assert abs(first["trainer/reverse_kl"]) < 1e-5
    assert first["advantage/std"] < 1e-5 < 1e-3 < second["advantage/std"]
    assert 10 * abs(first["trainer/top_k_kl"]) < second["trainer/top_k_kl"]
    for line in (first, second):
        assert line["stage/teacher/seconds"] > 0 <= line["stage/teacher/waited_s"]
        assert line["frozen/teacher/device_s"] > 0 and line["frozen/teacher/requests"] >= 16 * line["step"]
    assert "frozen/teacher/version" not in first and second["frozen/teacher/version"] == 2
    assert [path.name for path in (folder / "snapshots").iterdir()] == ["version-00000002"]


def test_a_critic(run_sample: Callable[..., Launched], model: Path, tmp_path: Path) -> None:
    """The critic of recipes/ppo.py predicts values before each policy update and is trained after it."""
    fixed = rf"{FIXED}|trainer\.(critic|loss)\..*"
    run = run_sample("ppo", model, given=SMALL_RUN | ONE_REPLICA, fixed=fixed, share=0.8)
    check_run(run.output(), model, max_policy_lag=2)
    (folder,) = (tmp_path / "runs").iterdir()
    trainer = json.loads((folder / "settings.json").read_text())["trainer"]
    assert trainer["critic"]["lr"] > 0 and trainer["loss"]["advantage"] == "gae"
    steps = [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "lag/max" in row]
    assert len(steps) == STEPS and all(row["critic/loss"] > 0 for row in steps)
    assert all(math.isfinite(row["critic/explained_variance"]) for row in steps)


def test_experts(run_sample: Callable[..., Launched], tmp_path: Path) -> None:
    """Experts are divided among the trainer ranks; the trainer uses the engine's routes and sampling masks.

    By default the engine continues with keys and values of older weights, which would make its log-probs differ from
    the trainer's."""
    model = random_model(tmp_path / "model", kind="moe")
    small = SMALL_RUN | ONE_REPLICA | {"generator.in-flight": "recompute"}
    fixed = rf"{FIXED}|trainer\.(expert-parallel|router-replay)|generator\.dtype"
    fixed += r"|rollout\.(temperature|top-.|min-p|keep-.*)"
    run = run_sample("grpo_moe", model, given=small, fixed=fixed, share=0.8)
    check_run(run.output(), model, max_policy_lag=2)
    (file,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    steps = [row for row in map(json.loads, file.read_text().splitlines()) if "lag/max" in row]
    assert all(0.05 < row["trainer/kept_mass"] < 0.9 and row["trainer/routes_differ"] < 0.5 for row in steps)
    on_policy = [row for row in steps if "trainer/logprob_difference_max" in row]
    assert on_policy and all(row["trainer/logprob_difference_max"] < 1e-4 for row in on_policy)


# -- other runs -------------------------------------------------------------------------------------------------------

OWN_RECIPE = """
import os
import sys
import torch
sys.path.insert(0, {folder!r})
import grpo
from monarch_rl.algorithms.functions import needs
from monarch_rl.pipeline.run import launch
from monarch_rl.rollout.stages import Stage
from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.settings.cli import cli
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.loss_settings import LossSettings

SHIFT = 5.0

def shifted(group):
    return torch.full_like(group.rewards, SHIFT)

async def offset(item, group):
    for episode in group.episodes:
        episode.fill_column("offset", episode.logprobs + 1)

@needs("offset")
def halved(token_logprobs, batch):
    assert bool((batch.advantages == SHIFT).all()), "not the recipe's advantage"
    assert torch.equal(batch.columns["offset"], batch.behaviour_logprobs + 1), "not the stage's column"
    assert torch.are_deterministic_algorithms_enabled() and torch._C._get_cudnn_deterministic()
    assert not torch._C._get_deterministic_fill_uninitialized_memory() and not torch._C._get_cudnn_benchmark()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    loss, sums = loss_function(PPOClip(), LossSettings(lag_discount=0.5))(token_logprobs, batch)
    return loss / 2, sums | {{"own_metric": 7 * sums["tokens"]}}

async def train(run, s):
    stages = [Stage(offset, fills=("offset",), concurrency=4)]
    await run.start(grpo.task(s), advantage=shifted, objective=halved, stages=stages)
    await run.evaluate()
    answers = {{"abc -> ": "cba", "xyz -> ": "zyx", "hello -> ": "olleh"}}
    rows = [{{"prompt": prompt, "answer": answer}} for prompt, answer in answers.items()]
    await run.supervised(rows, steps=1, rows_per_step=10)
    await run.mix(rows, share=0.25)
    async for step in run.steps(s.steps):
        metrics = await run.update()
        await run.publish()
        await run.log(metrics)
        await run.evaluate_after(step)

launch(train, cli(grpo.Settings))
"""


def test_own_functions_evaluations_during_training_and_a_stream_that_filters_and_rejects(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """Advantage, objective and a stage (which fills a column that the objective reads) are functions of the recipe's
    file. Held-out items are evaluated during training. A supervised step comes first, and rows are mixed into the
    others; all steps can be replayed from the journal, also by a run that resumes from a checkpoint. Trainer ranks are
    deterministic (``--trainer.deterministic``) in the run and in the replay. Without a lag bound the buffer still
    filters groups by its rules, counts them, and fills the batches."""
    (own := tmp_path / "own.py").write_text(OWN_RECIPE.format(folder=str(RECIPE.parent)))
    rules = ["--buffer.max-policy-lag=None", "--buffer.reject-lag=0", "--buffer.drop-equal-rewards"]
    rules += ["--evaluate-every=2", "--trainer.deterministic"]
    rules += ["--steps=3", "--journal.mib=8", "--checkpoint.every-steps=3", "--checkpoint.keep=5"]
    _, *arguments = recipe(model, tmp_path / "runs", *rules)
    run = start([sys.executable, str(own), *arguments])
    finished(run)
    assert_no_traceback(run.output())
    (file,) = (tmp_path / "runs").glob("own-*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [row for row in rows if "lag/max" in row]
    assert [row["trainer/own_metric"] for row in steps] == [7.0] * len(steps) and steps
    assert all(0 < row["stage/offset/seconds"] <= row["seconds"] for row in steps)
    assert all(row["stage/offset/waited_s"] >= 0 for row in steps)
    assert [row["step"] for row in rows if "held_out/accuracy" in row] == [0, 3]
    assert re.search(r"step 2, versions? [0-9 to]+: held-out", run.output())
    assert re.search(r"^warm-up 1/1 \| loss \d", run.output(), re.MULTILINE)
    assert re.findall(r"^step (\d+)/", run.output(), re.MULTILINE) == ["1", "2", "3"]

    assert re.search(r"^Asynchronous without a bound: ", run.output(), re.MULTILINE)
    assert [row["buffer/trained"] for row in steps] == [8, 16, 24]
    assert {row["lag/max"] for row in steps} == {0}
    last = steps[-1]
    dropped = {name.removeprefix("dropped/"): count for name, count in last.items() if name.startswith("dropped/")}
    assert dropped and set(dropped) <= {EQUAL_REWARDS, REJECTED}
    assert last["wasted/tokens"] >= sum(dropped.values()) and last["wasted/seconds"] > 0
    check_supervised(file.parent, rows)

    shutil.rmtree(file.parent / "checkpoints" / "step-000004")  # as if the run had been lost before it
    again = start([sys.executable, str(own), *arguments, f"--resume={file.parent}", "--steps=4"])
    finished(again)
    assert re.search(r"^step 4 .*journal.*bit for bit, after all 1", again.output(), re.MULTILINE), again.output()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "lag/max" in line] == [2, 3, 4, 5]
    assert rows_taken(file.parent, 5) == 10 + 4 * round(0.25 / 0.75 * 8 * 8)


def check_supervised(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The supervised step has 10 rows; in all others a quarter of the sequences are rows."""
    losses = {row["step"]: row["trainer/supervised_loss"] for row in rows if "trainer/supervised_loss" in row}
    assert list(losses) == [1, 2, 3, 4] and losses[4] < losses[1]
    first, *others = (row for row in rows if "trainer/tokens" in row)
    assert first["trainer/tokens"] == 0 and first["buffer/admitted"] == 0 and "reward/mean" not in first
    assert [row["trainer/optimizer_steps"] for row in (first, *others)] == [0, 1, 2, 3]
    mixed = round(0.25 / 0.75 * 8 * 8)
    for step in (3, 4):
        assert rows_taken(folder, step) == 10 + (step - 1) * mixed
    for arguments, steps in (([], 4), (["--from=4"], 1)):
        output = program("replay.py", folder, *arguments)
        assert re.search(f"{steps} of {steps} steps .*bit for bit", output)


def rows_taken(folder: Path, step: int) -> int:
    """Return how many supervised rows were trained according to a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:06d}" / "trainer" / "functions.1.pt"
    return int(torch.load(path, weights_only=False)["supervised rows"])


def test_a_version_that_is_not_finite_ends_the_run_and_names_tensor_and_step(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """AdamW multiplies each weight by 1 - lr x weight decay = -99. The embedding of a character that occurs in no word
    is large and overflows at the first step; all other weights stay finite."""
    name = "model.embed_tokens.weight"
    shutil.copytree(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["lm_head.weight"] = tensors[name].clone()
    row = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]["~"]
    tensors[name][row, 3] = 1e37
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    wild = ["--trainer.lr=1", "--trainer.weight-decay=100", "--trainer.ranks=1", "--generator.replicas=1"]
    wild += ["--buffer.max-policy-lag=0"]  # otherwise step 2, which finds the same weight, may come first
    run = start([sys.executable, *recipe(tmp_path / "model", tmp_path / "runs", *wild)])
    assert run.wait(RUN_S) == 1, run.output()
    run.assert_gone()
    message = rf"version 1, .*step 1\b.*: {re.escape(name)} .*\[{row}, 3\]"
    assert re.search(rf"^\S*PublishError: {message}", run.output(), re.MULTILINE), run.output()
    assert "is lost" not in run.output() and "retrying" not in run.output(), run.output()


@pytest.mark.core
def test_torchrun_without_lag_and_with_two_engine_ranks(start: Start, model: Path, tmp_path: Path) -> None:
    """Trained in float32 and served in bfloat16, as on a GPU, over the fastest transport of this machine. Trainer and
    engine are tensor parallel."""
    settings = ["--buffer.max-policy-lag=0", "--generator.dtype=bfloat16", "--weights.transport=auto"]
    settings += ["--generator.replicas=1", "--generator.tp=2", "--trainer.tp=2"]
    run = start([*TORCHRUN, "--nproc-per-node=4", *recipe(model, tmp_path / "runs", *settings)])
    wait_for_step(run)
    assert engines(run) == 2, run.left()
    finished(run)
    check_run(run.output(), model, max_policy_lag=0)
    chosen = re.search(r"^Weights .* by (\w+): .* took (.*)\.$", run.output(), re.MULTILINE)
    assert chosen and chosen[2].startswith(chosen[1]), run.output()
    assert {measured.split()[0] for measured in chosen[2].split(", ")} == set(transports_on(on_gpu=False))


@pytest.mark.slow
def test_one_device_for_a_trainer_rank_and_a_replica(start: Start, model: Path, tmp_path: Path) -> None:
    """They share the only device of the launch; versions are sent through its memory. The rank compiles its blocks when
    it starts."""
    arguments = recipe(model, tmp_path / "runs", "--trainer.ranks=1", "--generator.replicas=1")
    run = start([*TORCHRUN, "--nproc-per-node=1", *arguments])
    assert run.wait(RUN_S) != 0 and re.search("2 ranks .*--colocate", run.output())
    run.assert_gone()
    run = start([*TORCHRUN, "--nproc-per-node=1", *arguments, "--colocate", "--trainer.compile"])
    finished(run)
    check_run(run.output(), model, max_policy_lag=2)
    (file,) = (tmp_path / "runs").glob("*/settings.json")
    assert json.loads(file.read_text())["weights"]["transport"] == "shared_memory"


@pytest.mark.core
@pytest.mark.timeout(1800)
def test_two_nodes(start: Start, model: Path, tmp_path: Path) -> None:
    """Two agents simulate two machines: the first has the trainer ranks, the second the generators; transport is RDMA.
    The advantage is a function of a module next to the recipe, which is not on ``sys.path`` of other processes."""
    (folder := tmp_path / "recipe").mkdir()
    (folder / "sibling.py").write_text("def centred(group):\n    return group.rewards - group.rewards.mean()\n")
    own = RECIPE.read_text().replace("from monarch_rl import (\n", "import sibling\n\nfrom monarch_rl import (\n")
    (folder / RECIPE.name).write_text(own.replace("advantage=s.trainer.loss.advantage", "advantage=sibling.centred"))
    assert "sibling.centred" in (folder / RECIPE.name).read_text()
    job = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    job += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", str(folder / RECIPE.name)]
    job += recipe(model, tmp_path / "runs", "--buffer.max-policy-lag=1")[1:]
    job += ["--weights.transport=rdma", "--weights.delta"]
    machines = [tmp_path / "one", tmp_path / "other"]
    for machine in machines:
        machine.mkdir()
    agents = [start(["env", "-C", str(machine), *TORCHRUN, *job]) for machine in machines]
    # Either agent may become the first machine, where the controller runs and prints.
    first = wait_for_the_controller(agents)
    (second,) = (agent for agent in agents if agent is not first)
    assert (engines(first), engines(second)) == (0, 2)
    for agent in agents:
        finished(agent)
    check_run(first.output(), model, max_policy_lag=1)
    (state,) = (tmp_path / "runs").glob("*/run.json")
    (host,) = json.loads(state.read_text())["hosts"]  # of a single machine, which both agents are on
    assert host["name"] == socket.gethostname() and "may be missing" not in first.output()


def wait_for_the_controller(agents: Sequence[Launched]) -> Launched:
    """Wait until one of the agents has printed the first step of the run, and return it."""

    def printing() -> Launched | None:
        assert all(agent.process.poll() is None for agent in agents), [agent.output() for agent in agents]
        return next((agent for agent in agents if re.search(r"^step 1/", agent.output(), re.MULTILINE)), None)

    what = "a step of a run on two machines"
    return patience.wait_until(printing, lambda: f"{what}: {[agent.output() for agent in agents]}", RUN_S, POLL_S)


# -- bad settings -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpo() -> Any:
    """The recipe as a module."""
    spec = importlib.util.spec_from_file_location("grpo_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def refusal(grpo: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns a function that runs the recipe with changed settings and returns its error; nothing may be spawned."""

    def refuse(**changes: Any) -> str:
        refused_late = "bad settings were not refused before the launch"
        monkeypatch.setattr("monarch_rl.pipeline.run.launch_cluster", lambda _: pytest.fail(refused_late))
        settings = grpo.Settings(**{"model": str(model), "output": tmp_path / "runs"} | changes)
        with pytest.raises(SystemExit) as ended:
            launch(grpo.train, settings, grpo.task)
        message = str(ended.value.code)  # what Python prints on stderr; the exit code is then 1
        assert message.startswith("error: ")
        return message

    return refuse


def test_the_defaults_are_accepted(grpo: Any, model: Path, tmp_path: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    assert check(grpo.Settings(model=str(model), output=tmp_path / "runs"), devices()).folder == model


TWO_RANKS = {"trainer": TrainerSettings(ranks=2)}
TURNS_OF_16 = RolloutSettings(max_new_tokens=16)
MIN_P = RolloutSettings(top_k=20, min_p=0.1, keep_sampling_mask=True)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"trainer": TrainerSettings(router_replay="replay")},
            ["trainer.router-replay replay", "experts"],
        ),
        (
            {"rollout": MIN_P, "generator": GeneratorSettings(deterministic=True)},
            ["rollout.min-p", "deterministic=True"],
        ),
        ({"buffer": BufferSettings(window=65)}, ["buffer.window 65", "max-policy-lag 2 x", "= 64"]),
        ({"held_out": 201}, ["held-out 201", "200", "spell_backward", "task.held-out-size"]),
        ({"rollout": RolloutSettings(group_size=1)}, ["rollout.group-size", "at least 2"]),
        ({"rollout": RolloutSettings(temperature=0.0)}, ["rollout.temperature", "at least"]),
        ({"groups_per_step": 1, "trainer": TrainerSettings(ranks=3)}, ["8 episodes", "3 data ranks"]),
        (
            {
                "groups_per_step": 4096,
                "trainer": TrainerSettings(ranks=4096),
                "generator": GeneratorSettings(replicas=2),
            },
            ["4098 ranks", "4096 trainer ranks", "2 generator replicas"],
        ),
        ({"generator": GeneratorSettings(replicas=5000), **TWO_RANKS}, ["5002 ranks", "5000 generator replicas"]),
        (
            {"generator": GeneratorSettings(replicas=700, tp=4), **TWO_RANKS},
            ["2802 ranks", "700 generator replicas of 4"],
        ),
        ({"generator": GeneratorSettings(tp=3)}, ["tp 3 "]),
        ({"task": TaskSettings("spel_backward")}, ["'spel_backward'", "spell_backward"]),
        ({"task": TaskSettings("chain_sum", "{min_terms: 2}")}, ["task.config", "JSON", "{min_terms: 2}"]),
        ({"task": TaskSettings("chain_sum", '{"terms": 2}')}, ["task.config", "chain_sum", "min_terms"]),
        ({"task": TaskSettings("chain_sum", template="{word}")}, ["task.template '{word}'", "expression"]),
        ({"model": "/no/such/folder"}, ["model", "/no/such/folder"]),
        ({"rollout": RolloutSettings(max_new_tokens=1024)}, ["rollout.max-new-tokens 1024", "context", "1024"]),
        (
            {"rollout": TURNS_OF_16, "generator": GeneratorSettings(context_length=16)},
            ["generator.context-length", "16"],
        ),
        ({"generator": GeneratorSettings(context_length=2048)}, ["generator.context-length 2048", "1024"]),
        (
            {"rollout": TURNS_OF_16, "trainer": TrainerSettings(tokens_per_microbatch=16)},
            ["rollout.max-new-tokens 16", "trainer.tokens-per-microbatch"],
        ),
    ],
)
def test_bad_settings_are_refused(refusal: Callable[..., str], changes: dict[str, Any], parts: list[str]) -> None:
    message = refusal(**changes)
    assert [part for part in parts if part not in message] == [], message


def test_ranks_that_do_not_fill_hosts_are_refused(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """3 trainer ranks on two machines of 2: the second machine would be shared with a generator."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("monarch_rl.runtime.devices.visible_devices", lambda: [])  # also on a GPU machine
    message = refusal(groups_per_step=3, trainer=TrainerSettings(ranks=3), generator=GeneratorSettings(replicas=1))
    assert re.search("trainer.ranks 3 .* 2", message)


@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}'),
            ["GPT2LMHeadModel", "Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2"],
        ),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["safetensors"]),
    ],
    ids=["architecture", "config.json", "weights"],
)
def test_a_folder_that_cannot_be_trained_is_refused(
    refusal: Callable[..., str], model: Path, tmp_path: Path, break_it: Callable[[Path], object], parts: list[str]
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    break_it(folder)
    message = refusal(model=str(folder))
    assert [part for part in (*parts, str(folder)) if part not in message] == [], message


def test_an_output_folder_that_cannot_be_made_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refusal(output=tmp_path / "file" / "runs")
    assert str(tmp_path / "file" / "runs") in message and "output" in message


def on_command_line(*command: str | Path, columns: int = 200) -> subprocess.CompletedProcess[str]:
    return run_forked("text", command, RUN_S, {"COLUMNS": str(columns)})


def nothing_started(output: str) -> bool:
    """Whether a program printed no more than that it checks its settings."""
    return re.fullmatch(r"(checking the settings for \S+\n)?", output) is not None


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--model=no-such/model"], 1, ["error: ", "no-such/model"]),
        (["--buffer.max-policy-lag=-1"], 2, ["max-policy-lag", "-1"]),
        (["--trainer.ranks=0"], 2, ["trainer.ranks", "at least 1", "0"]),
        (["--steps=0"], 2, ["steps", "at least 1", "0"]),
        (["--rollout.top-p=0.9"], 2, ["top-p", "rollout.keep-sampling-mask"]),
        (["--step=3"], 2, ["--step", "--steps"]),
    ],
)
def test_bad_settings_on_the_command_line(arguments: list[str], code: int, parts: list[str]) -> None:
    done = on_command_line(RECIPE, *arguments)
    assert done.returncode == code
    assert [part for part in parts if part not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr and nothing_started(done.stdout)


def test_a_mistake_in_the_code_of_a_task_is_shown_with_its_traceback(tmp_path: Path) -> None:
    """Even a ValueError, which is printed as one line if this package raises it."""
    script = tmp_path / "mine.py"
    lines = [f"import sys; sys.path.insert(0, {str(RECIPE.parent)!r})", "import grpo", "def task(s):"]
    lines += ["    return int('no number')", "grpo.launch(grpo.train, grpo.Settings(), task)"]
    script.write_text("\n".join(lines))
    done = on_command_line(script)
    assert done.returncode == 1 and nothing_started(done.stdout)
    assert f'File "{script}", line 4, in task\n' in done.stderr
    assert done.stderr.endswith("\nValueError: invalid literal for int() with base 10: 'no number'\n")


@pytest.mark.heavy
def test_a_reward_that_cannot_be_sent_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    lines = ["from monarch_rl import Questions, RunSettings, launch", "NUMBERS = (number for number in range(3))"]
    lines += ["def reward(row, answer):", "    return float(next(NUMBERS))"]
    lines += ["def task(s):", "    return Questions([{'question': str(n)} for n in range(9)], reward, held_out=1)"]
    lines += [f"launch(None, RunSettings(model={str(model)!r}, held_out=1), task)"]
    script.write_text("\n".join(lines))
    done = on_command_line(script)
    assert done.returncode == 1 and nothing_started(done.stdout)
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done.stderr
    assert "(episode -> reward -> NUMBERS: cannot pickle 'generator'" in done.stderr


@pytest.mark.heavy
def test_more_ranks_than_torchrun_started(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # GPUs would be counted instead
    command = [*TORCHRUN, "--nproc-per-node=2", *recipe(model, tmp_path / "runs")]
    done = patience.run(command, seconds=RUN_S)
    assert done.returncode == 1
    message = r"error: 4 ranks .*2 trainer ranks \+ 2 generator replicas.* 2\D.*--nproc-per-node=4"
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("Traceback") == 1 and "ChildFailedError" in done.stderr, "only torchrun's own traceback"
    assert not (tmp_path / "runs").exists()


def test_help_describes_every_setting(grpo: Any) -> None:
    done = on_command_line(RECIPE, "--help", columns=80)
    assert done.returncode == 0
    lines = [line.strip("\u2502 ") for line in done.stdout.splitlines()]  # without the frame
    described = {
        option.split()[0].rstrip(",")
        for option, below in pairwise(lines)
        if option.startswith("--") and not below.startswith(("--", "(default"))
    }
    assert {f"--{flag}" for flag, _, _ in flags(grpo.Settings())} - described == set()

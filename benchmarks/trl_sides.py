"""The two jobs of trl.py, and how each side is launched for them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

import grpo  # noqa: E402

from monarch_rl.algorithms.objectives import PPOClip  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402

JobName = Literal["main", "syllogism"]
MODEL_DEADLINE_S = 1800.0
LOSS_TYPES = {"constant": "dr_grpo", "token_mean": "dapo", "sequence_mean": "grpo"}
"""TRL's name for each of our aggregations, with the same token weights (grpo_trainer.py, ``_compute_loss``)."""
REWARD_SCALES = {"dr_grpo": "none", "grpo": "group"}
"""TRL's name for each of our advantages."""


@dataclass(frozen=True)
class Job:
    """A job as flags of the recipe, from which TRL's settings follow."""

    arguments: tuple[str, ...]
    """Of recipes/grpo.py."""
    steps: int
    warm_up: int
    """Steps that do not count for speed."""
    held_out: int


SYLLOGISM = (
    "--groups-per-step 4 --task.name syllogism --task.config {} --task.template {question} --task.pass-mark 0 "
    "--trainer.lr 1e-5 --trainer.logprob-chunk 128"
)
JOBS = {"main": Job((), 250, 10, 200), "syllogism": Job(tuple(SYLLOGISM.split()), 20, 2, 40)}
"""The recipe's default job, and the README's example of a real model."""


@dataclass(frozen=True)
class Side:
    """A layout of this project, or TRL with some threads."""

    name: str
    arguments: tuple[str, ...] = ()
    """Further arguments of the recipe."""
    threads: int = 0
    """TRL's threads; 0 is not TRL."""


def sides(devices: int) -> dict[str, Side]:
    """Return all sides by a short name.

    Args:
        devices: number of GPUs, which this project divides equally between trainer and engines; 0 is a CPU.
    """
    lag0 = ("--buffer.max-policy-lag", "0")
    if devices:
        ranks = devices // 2
        split = ("--trainer.ranks", str(ranks), "--generator.replicas", str(devices - ranks))
        all_sides = [Side(f"{ranks} + {devices - ranks}", split), Side("lag 0", split + lag0), Side("TRL", threads=1)]
        return dict(zip(("default", "lag0", "trl"), all_sides, strict=True))
    one, two = (("--trainer.ranks", n, "--generator.replicas", n) for n in "12")
    return {
        "default": Side("2 ranks, 2 replicas, lag 2", two),
        "lag0": Side("lag 0", two + lag0),
        "one": Side("1 rank + 1 replica", one),
        "trl1": Side("TRL, 1 thread", threads=1),
        "trl2": Side("TRL, 2 threads", threads=2),
    }


def make_model(job: JobName, seed: int, scratch: Path) -> Path:
    """Return the initial model of both sides. Seeds other than 0 have their own random weights in the main job."""
    if job == "syllogism":
        folder = ROOT / ".cache" / "smollm2-135m-instruct"
        command = ["tools/smollm2.py", "--output", str(folder)]
    elif seed == 0:
        folder = ROOT / ".cache" / "tiny-qwen3"
        command = ["tools/make_tiny_model.py", "--output", str(folder)]
    else:
        folder = scratch / f"model{seed}"
        command = ["tools/make_tiny_model.py", "--seed", str(seed), "--task.seed", str(seed), "--output", str(folder)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=MODEL_DEADLINE_S)
    return folder


def recipe_arguments(job: Job, model: Path, seed: int, steps: int) -> list[str]:
    """Return the arguments of recipes/grpo.py for all sides. One held-out item: accuracy is measured afterwards."""
    seeds = ["--task.seed", str(seed), "--generator.random-seed", str(1000 * seed)]
    return ["--model", str(model), "--steps", str(steps), "--held-out", "1", *seeds, *job.arguments]


def ours(side: Side, arguments: list[str], folder: Path) -> list[str]:
    """Return the command of our side. TRL's loss is divided by the maximum number of tokens of a completion."""
    tokens = cli(grpo.Settings, args=arguments).rollout.max_new_tokens
    loss = ["--trainer.loss.max-tokens", str(tokens)]
    recipe = str(ROOT / "recipes" / "grpo.py")
    return [sys.executable, recipe, *arguments, *loss, *side.arguments, "--output", str(folder)]


def theirs(python: Path, description: Path, devices: int) -> list[str]:
    """Return the command of TRL's side: one process, or one per GPU."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={devices}"] if devices else []
    # -P: not this folder's trl.py
    return [str(python), "-P", *launcher, str(ROOT / "benchmarks" / "trl_train.py"), str(description)]


def describe(arguments: list[str], side: Side, seed: int, held_out: int, folder: Path) -> dict[str, Any]:
    """Return the job for trl_train.py and trl_evaluate.py that equals the recipe with ``arguments``."""
    s = cli(grpo.Settings, args=arguments)
    if not isinstance(s.objective, PPOClip):
        raise ValueError(
            f"--objective {s.objective.name}: TRL's side of this benchmark has PPO's clip only. Leave it out"
        )
    return {
        "folder": str(folder),
        "model": s.model,
        "task": asdict(s.task),
        "steps": s.steps,
        "groups_per_step": s.groups_per_step,
        "group_size": s.rollout.group_size,
        "max_new_tokens": s.rollout.max_new_tokens,
        "temperature": s.rollout.temperature,
        "lr": s.trainer.lr,
        "betas": s.trainer.betas,
        "weight_decay": s.trainer.weight_decay,
        "lr_warmup_steps": s.trainer.lr_warmup_steps,
        "max_grad_norm": s.trainer.max_grad_norm,
        "clip_low": s.objective.clip_low,
        "clip_high": s.objective.clip_high,
        "loss_type": LOSS_TYPES[s.trainer.loss.aggregation],
        "scale_rewards": REWARD_SCALES[s.trainer.loss.advantage],
        "threads": side.threads,
        "seed": seed,
        "held_out": held_out,
    }


def write(description: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(description, indent=2))
    return path

"""How far `continue` moves the log-probs of a sequence that continues across a commit, compared with `recompute`.

    python benchmarks/old_past.py

The main job is trained for some steps, and the versions of the last ones are saved. Then, under each rule, an engine
generates answers of the job and longer sequences while these versions are committed one after the other. Measured are
tokens that the newer version sampled in sequences that the older one began: the difference between the engine's
log-prob and that of transformers under the newer version alone, and the difference between the two versions for these
tokens. Prints the measurements last, as one line of JSON; benchmarks/README.md describes them.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import run_benchmark, short
from safetensors.torch import load_file

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.engine import Engine
from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.folder import resolve_model
from monarch_rl.model.messages import user
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.start import save
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.tasks.reasoning_gym import TaskSource
from monarch_rl.weights.area import Area
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import make_manifest

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402

DEADLINE_S = 300.0
RULES = ("continue", "recompute")
Completions = list[tuple[list[int], Completion]]
"""Prompts with their completions."""


@dataclass(frozen=True)
class Settings:
    """Log-probs over an older past (see the top of this file)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name of the model to train."""
    job: grpo.Settings = field(default_factory=grpo.Settings)
    """The job. Its learning rate, batch and lag are used; its model, steps and output folder are not."""
    steps: int = 30
    """Optimiser steps of the job."""
    commits: int = 8
    """Number of the last steps whose versions are committed to the engines."""
    answers: int = 48
    """Answers of the job in flight."""
    sequences: int = 16
    """Longer sequences in flight at each commit; they ignore the end token."""
    new_tokens: int = 128
    """Tokens of a longer sequence."""

    def __post_init__(self) -> None:
        if not 1 <= self.commits <= self.steps or min(self.answers, self.sequences, self.new_tokens) < 1:
            raise ValueError("commits must be from 1 to steps; answers, sequences and new-tokens at least 1")


# ---- the versions --------------------------------------------------------------------------------------------


async def train(cluster: Cluster, s: Settings, model: Path, scratch: Path) -> list[Path]:
    """Run the recipe and save each of the last versions; returns ``commits`` + 1 folders, oldest first."""
    job, folders = replace(s.job, steps=s.steps), []

    async def save_version(run: Run) -> None:
        if run.version >= s.steps - s.commits:
            folders.append(scratch / f"version{run.version}")
            await save(run.actors.trainer, folders[-1])

    async with Run.open(replace(job, model=str(model)), cluster) as run:
        await run.start(grpo.task(job), advantage=job.trainer.loss.advantage, objective=job.objective)
        async for _ in run.steps(s.steps):
            await save_version(run)
            await run.update()
            await run.publish()
        await save_version(run)
    print(f"trained {s.steps} steps of {s.model} at learning rate {job.trainer.lr:g}", flush=True)
    return folders


# ---- sequences that cross commits -----------------------------------------------------------------------------


async def generate(
    s: Settings, rule: str, folders: list[Path], prompts: list[list[int]], stops: tuple[int, ...]
) -> Any:
    """Return ``(answers, longer sequences)`` around each commit, from an engine under ``rule``, in float32."""
    settings = replace(s.job.generator, in_flight=rule, dtype="float32")  # type: ignore[arg-type]
    engine = await Engine.start(str(folders[0]), settings)
    answer = Sampling(max_new_tokens=s.job.rollout.max_new_tokens, stop_token_ids=stops)
    sequence = Sampling(max_new_tokens=s.new_tokens)
    answers: list[Completions] = []
    sequences: list[Completions] = []
    try:
        for version, folder in enumerate(folders[1:], 1):
            committed = asyncio.Event()
            longer = [ask(engine, prompts[i % len(prompts)], sequence) for i in range(s.sequences)]
            places = [keep_asking(engine, prompts[i % len(prompts)], answer, committed) for i in range(s.answers)]
            requests = asyncio.gather(asyncio.gather(*longer), asyncio.gather(*places))
            await half_way(engine, s.answers * s.new_tokens // 2)
            await commit(engine, version, folder)
            committed.set()
            found = await within(DEADLINE_S, requests, f"requests around version {version}")
            sequences.append(list(found[0]))
            answers.append([pair for place in found[1] for pair in place])
    finally:
        await engine.shutdown()
    return answers, sequences


async def ask(engine: Engine, prompt: list[int], sampling: Sampling) -> tuple[list[int], Completion]:
    return prompt, await engine.generate(prompt, sampling)


async def keep_asking(engine: Engine, prompt: list[int], sampling: Sampling, until: asyncio.Event) -> Completions:
    """Generate one answer after the other; the last one is in flight when ``until`` is set."""
    found = []
    while not until.is_set():
        found.append(await ask(engine, prompt, sampling))
    return found


async def half_way(engine: Engine, tokens: int) -> None:
    """Wait until answers have about this many tokens; the engine counts those of longer sequences only at their end."""
    before = engine.requests.generated_tokens

    async def generated() -> None:
        while engine.requests.generated_tokens < before + tokens:
            await asyncio.sleep(0.005)

    await within(DEADLINE_S, generated(), f"{tokens} tokens of answers")


async def commit(engine: Engine, version: int, folder: Path) -> None:
    weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    whole = [(name, 0, value.numel()) for name, value in weights.items()]
    manifest = make_manifest([(name, tuple(value.shape), value.dtype) for name, value in weights.items()], [whole])
    area = Area(manifest.nbytes)
    for spec in manifest.tensors:
        spec.view(area.buffer).copy_(weights[spec.name])
    checksums = np.array([int(tensor_checksum(value)) for value in weights.values()])
    await within(DEADLINE_S, engine.commit(version, manifest, area.handle, checksums), f"version {version}")


# ---- reference log-probs -------------------------------------------------------------------------------------


def reference(folder: Path, asked: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    """Return transformers' float32 log-probs of sampled tokens. Runs in a separate process: SGLang patches
    transformers."""
    if "sglang" in sys.modules:
        raise RuntimeError("a reference must be computed in a process that has not imported sglang")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for prompt, sampled in asked:
            logprobs = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found.append(logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0].numpy())
    return found


def compare(pool: ProcessPoolExecutor, folders: list[Path], around: list[Completions]) -> dict[str, float]:
    """Return the differences of tokens after a commit, in nats, over all commits; see benchmarks/README.md."""
    apart, before, change = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for version, completions in enumerate(around, 1):
        crossed = [
            (prompt, c) for prompt, c in completions if set(c.policy_versions.tolist()) == {version - 1, version}
        ]
        asked = [(prompt, completion.token_ids.tolist()) for prompt, completion in crossed]
        older, newer = (
            pool.submit(reference, folders[number], asked).result(DEADLINE_S) for number in (version - 1, version)
        )
        for (_, completion), old, new in zip(crossed, older, newer, strict=True):
            after = completion.policy_versions == version
            apart.append((completion.logprobs - new)[after])
            before.append((completion.logprobs - old)[~after])
            change.append((new - old)[after])
    found, versions = np.abs(np.concatenate(apart)), np.abs(np.concatenate(change))
    if not len(found):
        raise RuntimeError("no sequence was in flight at a commit: ask for more (--answers, --new-tokens)")
    return {
        "tokens": len(found),
        "mean": float(found.mean()),
        "max": float(found.max()),
        "versions_mean": float(versions.mean()),
        "versions_max": float(versions.max()),
        "mean_over_versions": float(found.mean() / versions.mean()),
        "before_commit_max": float(np.abs(np.concatenate(before)).max()),
    }


def main(s: Settings) -> None:
    model = resolve_model(s.model).folder.resolve()
    quiet_imports()
    with tempfile.TemporaryDirectory() as scratch:
        with launch_cluster() as cluster:
            if cluster is None:
                return
            folders = asyncio.run(train(cluster, s, model, Path(scratch)))
            kind = cluster.devices.kind
        template, tasks = ChatTemplate(str(model)), TaskSource(s.job.task, "held_out")
        asked = range(max(s.answers, s.sequences))
        prompts = [template.opening([user(tasks.item(index).prompt)]) for index in asked]
        result: dict[str, Any] = {}
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            for rule in RULES:
                pairs = asyncio.run(generate(s, rule, folders, prompts, template.stop_token_ids))
                names = ("answers", "sequences")
                result[rule] = {n: compare(pool, folders, d) for n, d in zip(names, pairs, strict=True)}
                print(f"{rule}: {json.dumps(short(result[rule]))}", flush=True)
    done = {"benchmark": "old_past", "device": kind, "cores": os.cpu_count(), "model": s.model}
    done |= {"lr": s.job.trainer.lr, "steps": s.steps, "commits": s.commits}
    print(json.dumps(done | short(result)))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)

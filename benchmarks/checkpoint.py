"""Cost of checkpoints, of the journal, and of a loss.

    python benchmarks/checkpoint.py                          all parts
    python benchmarks/checkpoint.py --parts sizes,journal    two of them; these need no quiet machine for their bytes

steps      real runs of the main job, alternately: the time of a step with checkpoints every ten steps over one without
sizes      a single trainer rank with random weights in the shapes of the tiny model, of SmolLM2-135M and of 1 GB:
           bytes of a checkpoint; seconds of the copy, of saving and of reading, compared with one plain write and one
           plain read of as many bytes
loss       a supervised run of the main job, some of whose processes are killed by SIGKILL: seconds to the next step
journal    bytes per token in the journal over those of token ids and log-probs: for the main job, and for answers of
           1,000 random tokens

The last line of each part is JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from reporting import run_benchmark, short

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from monarch_rl.buffer.groups import Batch  # noqa: E402
from monarch_rl.buffer.shards import ShardPlan, cut  # noqa: E402
from monarch_rl.checkpoint import folders  # noqa: E402
from monarch_rl.checkpoint.folders import Manifest, newest_whole  # noqa: E402
from monarch_rl.checkpoint.journal import FOLDER, JournalWriter  # noqa: E402
from monarch_rl.episode.episode import Episode, Group, Turn  # noqa: E402
from monarch_rl.episode.serialization import SerializedGroup, serialize_group  # noqa: E402
from monarch_rl.offline.parity import run_ranks  # noqa: E402
from monarch_rl.runtime.network import held_port  # noqa: E402
from tools.gpu_parts.common import TINY, Bench, make_model  # noqa: E402
from tools.replay import sizes as journal_sizes  # noqa: E402

START_S, POLL_S, RUN_S, END_S = 900.0, 0.02, 3600.0, 60.0
FIRST = 5
"""Steps of a run that do not count."""
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""The shape of HuggingFaceTB/SmolLM2-135M."""
ONE_GB = TINY | {
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""1 GB in float32."""
SHAPES = {"tiny": TINY | {"vocab_size": 64, "tie_word_embeddings": True}, "SmolLM2-135M": SMOLLM2, "1 GB": ONE_GB}


@dataclass(frozen=True)
class Settings:
    """Costs of checkpoints and of the journal (see the top of this file)."""

    parts: str = "steps,sizes,loss,journal"
    """Parts to run, separated by commas."""
    steps: int = 60
    """Steps of each run of `steps`."""
    every: int = 10
    """Steps between two checkpoints."""
    rounds: int = 2
    """Runs with checkpoints, and as many without."""
    kills: int = 3
    """Losses of each process of `loss`."""
    victims: str = "trainer-1,buffer-0,controller"
    """Processes that `loss` kills: titles without monarch_rl::, or the controller."""
    models: str = ",".join(SHAPES)
    """Shapes of `sizes`."""
    model: Path = ROOT / ".cache" / "tiny-qwen3"
    """Model that is trained in `steps`, `loss` and `journal`."""


def command(s: Settings, output: Path, every: int, *more: str) -> list[str]:
    flags = [f"--model={s.model}", f"--output={output}", "--held-out=1", f"--checkpoint.every-steps={every}"]
    flags += ["--checkpoint.every-minutes=0", "--trainer.ranks=2", "--generator.replicas=1", "--groups-per-step=8"]
    flags += more
    return [sys.executable, "-m", "monarch_rl.runtime.supervisor", str(ROOT / "recipes" / "grpo.py"), *flags]


def run_folder(s: Settings, output: Path, every: int, *more: str) -> Path:
    """Run the recipe to its end; returns the run folder."""
    subprocess.run(command(s, output, every, *more), check=True, stdout=subprocess.DEVNULL, timeout=RUN_S)
    (folder,) = output.iterdir()
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/step_s" in row]


# -- steps -----------------------------------------------------------------------------------------------------------


def steps(s: Settings, scratch: Path) -> dict[str, Any]:
    """The goal is at least 0.97 of the speed, so at most 1.03 times the time."""
    times: dict[int, list[float]] = {0: [], s.every: []}
    copies: list[float] = []
    for number in range(s.rounds):
        for every, step_times in times.items():
            rows = rows_of(run_folder(s, scratch / f"{number}-{every}", every, f"--steps={s.steps}"))[FIRST:]
            step_times += [row["time/step_s"] for row in rows]
            copies += [row["checkpoint/copy_ms"] for row in rows if every and "checkpoint/copy_ms" in row]
    without, saving = times[0], times[s.every]
    speed = {name: of(without) / of(saving) for name, of in (("mean", statistics.mean), ("median", statistics.median))}
    print(
        f"speed with checkpoints every {s.every} steps over that without, {len(saving)} steps each: mean "
        f"{speed['mean']:.3f}, median {speed['median']:.3f} (goal 0.97); "
        f"a copy takes {statistics.median(copies):.1f} ms"
    )
    return {"speed": speed, "steps": len(saving), "copy_ms": statistics.median(copies)}


# -- sizes -----------------------------------------------------------------------------------------------------------


def sizes(s: Settings, scratch: Path) -> dict[str, Any]:
    """Measure one trainer rank; more ranks write as many bytes in total."""
    import torch

    found = {}
    for name in s.models.split(","):
        folder = scratch / "model"
        make_model(Bench(torch.device("cpu"), scratch), SHAPES[name], folder.name)
        with held_port() as port:
            run_ranks(save_and_read, (folder, port), 1, START_S, "a trainer rank to save and read")
        found[name] = numbers = json.loads((folder / "numbers.json").read_text())
        shutil.rmtree(folder)
        print(
            f"{name}: {numbers['parameters'] / 1e6:,.1f} M parameters, checkpoint {numbers['bytes'] / 1e6:,.1f} MB "
            f"({numbers['bytes'] / numbers['parameters']:.1f} bytes each); copy {numbers['copy_s']:.3f} s, save "
            f"{numbers['save_s']:.2f} s ({numbers['save_s'] / numbers['plain_write_s']:.2f} plain writes), verify and "
            f"read {numbers['read_s']:.2f} s ({numbers['read_s'] / numbers['plain_read_s']:.2f} plain reads)",
            flush=True,
        )
    return found


def save_and_read(rank: int, folder: Path, port: int) -> None:
    """Save and read a checkpoint on the rank, and write the measurements into ``folder``."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    import torch

    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.settings import TrainerSettings

    torch.set_num_threads(1)
    policy = Policy(folder, TrainerSettings(ranks=1), total_steps=1)
    for parameter in policy.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    policy.optimizers.step()  # otherwise AdamW has no state
    policy.optimizers.zero_grad()
    root, checkpoint = folder / "checkpoints", policy.checkpoint
    checkpoint.stage()  # the first copy allocates memory
    copy_s = seconds(checkpoint.stage)

    def save() -> None:
        partial = folders.begin(root, 1)
        files = checkpoint.write(partial)
        folders.commit(root, Manifest(1, 1, 0, 0.0, {}, ranks=1, files=files))

    save_s = seconds(save)
    written, manifest = newest_whole(root)

    def read() -> None:
        newest_whole(root)
        checkpoint.restore(written, 1)

    numbers = {
        "parameters": sum(parameter.numel() for parameter in policy.module.parameters()),
        "bytes": manifest.nbytes,
        "copy_s": copy_s,
        "save_s": save_s,
        "read_s": seconds(read),
        "plain_write_s": seconds(lambda: plain_write(folder / "plain", manifest.nbytes)),
        "plain_read_s": seconds(lambda: plain_read(folder / "plain")),
    }
    (folder / "numbers.json").write_text(json.dumps(numbers))
    policy.close()


CHUNK = 2**22


def plain_write(path: Path, nbytes: int) -> None:
    chunk = np.random.default_rng(0).bytes(CHUNK)
    with path.open("wb") as file:
        for start in range(0, nbytes, CHUNK):
            file.write(chunk[: min(CHUNK, nbytes - start)])
        file.flush()
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    room = bytearray(CHUNK)
    with path.open("rb") as file:
        while file.readinto(room):
            pass


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# -- loss ------------------------------------------------------------------------------------------------------------


def loss(s: Settings, scratch: Path) -> dict[str, Any]:
    """The goal is less than 40 s on two quiet cores."""
    log, output = scratch / "log", scratch / "runs"
    with log.open("w") as output_file:
        run = subprocess.Popen(
            command(s, output, s.every, "--steps=100000"),
            stdout=output_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    took: dict[str, list[float]] = {}
    position = 0
    try:
        for victim in s.victims.split(",") * s.kills:
            position = wait_for(log, r"^checkpoint of step ", run, position)
            (folder,) = output.iterdir()
            took.setdefault(victim, []).append(seconds(lambda: kill_and_wait(run, folder, log, victim)))  # noqa: B023
            print(f"from SIGKILL of {victim} to the next step: {took[victim][-1]:.1f} s", flush=True)
            position = len(log.read_text())
    finally:
        run.terminate()
        run.wait(END_S)
    for victim, values in took.items():
        print(f"{victim}: median {statistics.median(values):.1f} s of {len(values)} (goal 40 s)")
    return took


def kill_and_wait(run: subprocess.Popen[bytes], folder: Path, log: Path, victim: str) -> None:
    """Kill a process of the run, and wait for the first step after the resume."""
    resumes = folder / "resumes.jsonl"
    before = resumes.read_text().count("\n") if resumes.exists() else 0
    process_of(run, folder, victim).kill()
    wait(lambda: resumes.exists() and resumes.read_text().count("\n") > before, "another resume", run, log)
    wait_for(log, r"^step \d+/", run, len(log.read_text()))


def process_of(run: subprocess.Popen[bytes], folder: Path, victim: str) -> psutil.Process:
    if victim == "controller":
        return psutil.Process(json.loads((folder / "run.json").read_text())["pid"])
    there = psutil.Process(run.pid).children(recursive=True)
    return next(process for process in there if f"monarch_rl::{victim}" in " ".join(process.cmdline()))


def wait_for(log: Path, pattern: str, run: subprocess.Popen[bytes], after: int) -> int:
    """Wait for the first match in the log after position ``after``; returns the position of its end."""
    searching = re.compile(pattern, re.MULTILINE)
    wait(lambda: searching.search(log.read_text(), after), pattern, run, log)
    found = searching.search(log.read_text(), after)
    assert found is not None
    return found.end()


def wait(condition: Callable[[], object], what: str, run: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {what} in\n{log.read_text()[-3000:]}")
        time.sleep(POLL_S)


# -- journal ---------------------------------------------------------------------------------------------------------


def journal(s: Settings, scratch: Path) -> dict[str, Any]:
    """The goal is at most 1.5 times token ids and log-probs."""
    folder = run_folder(s, scratch / "runs", 0, "--steps=12", "--journal.mib=64")
    writer = JournalWriter(scratch / "long", 0, 2**30)
    packed = [SerializedGroup.read(serialize_group(long_group(number))) for number in range(4)]
    trained = sum(episode.tokens for group in packed for episode in group.episodes)
    whole = Batch(0, packed, None, np.asarray([trained]))
    writer.batch(cut(whole, ShardPlan(1, 16_384))[0])
    writer.close()
    found = {}
    for name, place in (("main job", folder / FOLDER), ("1,000 random tokens", scratch / "long")):
        sizes = journal_sizes(place)
        print(f"{name}: {sizes} (goal 1.5)")
        found[name] = float(re.search(r"([\d.]+) times", sizes)[1])  # type: ignore[index]
    return found


def long_group(number: int) -> Group:
    """Return eight answers of 1,000 tokens to a prompt of 200, uniform over a large vocabulary: the worst
    compression."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, 150_000, 200)

    def answer() -> Episode:
        sampled = np.arange(1200) >= 200
        turn = Turn(
            token_ids=np.concatenate([prompt, rng.integers(0, 150_000, 1000)]).astype(np.int32),
            logprobs=np.where(sampled, -rng.exponential(1.0, 1200), 0).astype(np.float32),
            policy_versions=np.where(sampled, 0, -1).astype(np.int32),
            trainable=sampled,
        )
        return Episode([turn], float(rng.integers(0, 2)), "stop")

    return Group(number, number, [answer() for _ in range(8)])


PARTS: dict[str, Callable[[Settings, Path], dict[str, Any]]] = {
    "steps": steps,
    "sizes": sizes,
    "loss": loss,
    "journal": journal,
}


def main(s: Settings) -> None:
    names = s.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"unknown parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in names:
        print(f"-- {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as scratch:
            result = PARTS[name](s, Path(scratch))
        print(json.dumps({"benchmark": "checkpoint", "part": name} | short(result)), flush=True)


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)

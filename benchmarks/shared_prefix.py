"""Gain by computing shared prefixes once: CPU time of an update, shared and separate, alternately.

    python benchmarks/shared_prefix.py [--model FOLDER] [--prompt 8] [--answer 8] [--groups 32] [--group-size 8]

One trainer rank, random prompts, random answers of the same length. The last line is JSON: tokens and CPU milliseconds
of a forward pass, backward pass and optimiser step, packing included; medians over rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.runtime.network import held_port
from monarch_rl.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Settings:
    """Gain by computing shared prefixes once (see the top of this file)."""

    model: Path = Path(".cache/tiny-qwen3")
    """Hugging Face folder."""
    prompt: int = 8
    """Tokens of a prompt."""
    answer: int = 8
    """Tokens of an answer."""
    groups: int = 32
    """Groups of a micro-batch."""
    group_size: int = 8
    """Episodes of a group."""
    rounds: int = 10
    """Measured updates of each kind, after two that warm up."""


def episodes(s: Settings, vocabulary: int) -> list[Episode]:
    """Return random episodes, group by group."""
    rng, n = np.random.default_rng(0), s.prompt + s.answer
    trainable = np.arange(n) >= s.prompt
    logprobs = np.where(trainable, -np.log(vocabulary), 0).astype(np.float32)
    versions, found = np.where(trainable, 0, -1).astype(np.int32), []
    for _ in range(s.groups):
        prompt = rng.integers(0, vocabulary, s.prompt)
        for _ in range(s.group_size):
            ids = np.concatenate([prompt, rng.integers(0, vocabulary, s.answer)]).astype(np.int32)
            found.append(Episode([Turn(ids, logprobs, versions, trainable)], float(rng.integers(0, 2)), "stop"))
    return found


def main(s: Settings) -> None:
    torch.set_num_threads(1)
    with held_port() as port:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        from monarch_rl.trainer.policy import Policy

        policy = Policy(s.model, TrainerSettings(ranks=1, lr=0.0), total_steps=1)
    from monarch_rl.trainer.batch import pack
    from monarch_rl.trainer.objective import supervised

    batch_episodes = episodes(s, policy.model.hf_config.vocab_size)
    advantages, weights = torch.ones(len(batch_episodes)), torch.full((len(batch_episodes),), 1.0 / len(batch_episodes))
    kinds = {"separate": None, "shared": [index // s.group_size for index in range(len(batch_episodes))]}
    tokens: dict[str, int] = {}
    cpu_ms: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(s.rounds + 2):
        for name, groups in kinds.items():
            started = time.process_time()
            batch = pack(batch_episodes, advantages, weights, 0, policy.device, groups)
            policy.update([batch], supervised)
            tokens[name] = batch.num_tokens
            if number >= 2:
                cpu_ms[name].append((time.process_time() - started) * 1e3)
    policy.close()
    medians = {name: round(statistics.median(values), 1) for name, values in cpu_ms.items()}
    result = {
        "tokens": tokens,
        "cpu_ms": medians,
        "fewer_tokens": round(tokens["separate"] / tokens["shared"], 2),
        "less_cpu": round(medians["separate"] / medians["shared"], 2),
    }
    print(json.dumps(result | asdict(s), default=str))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))

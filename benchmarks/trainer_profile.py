"""CPU time of a trainer step by part, next to the same step as TRL computes it, in one process, alternately.

    python benchmarks/trainer_profile.py
    python benchmarks/trainer_profile.py --rounds 200 --answer-tokens 4 64

One rank trains on groups that it gets as the buffer sends them. TRL's side is its computation alone: transformers'
model, one padded batch without shared prefixes, log-probs and entropies, the clipped loss, ``clip_grad_norm_`` and
fused AdamW, as in ``GRPOTrainer``; without Accelerate, its data loader and its logging. Each part is the CPU time of
the whole process, less that of the parts within it. The times of a part are its mean over all rounds: CPU time needs
no quiet machine, although other work makes it somewhat longer.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import run_benchmark, short

from monarch_rl.algorithms.advantages import dr_grpo
from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import PackedShard
from monarch_rl.runtime.network import held_port
from monarch_rl.trainer import policy as policy_module
from monarch_rl.trainer import step as step_module
from monarch_rl.trainer.functions import LoadedFunctions
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.checksum import ShardChecksums
from monarch_rl.weights.manifest import make_manifest

STEP = "other"
"""The part of a step that no other part covers."""
LOGPROB_BOUND = 1e-4
"""Nats by which both sides' mean log-prob of the first batch may differ (fp32)."""
BUFFER = "read, split and pickle (the buffer's)"


@dataclass(frozen=True)
class Settings:
    """Profile of a trainer step (see the top of this file). The defaults are the main job's sizes."""

    model: Path = Path(".cache/tiny-qwen3")
    groups: int = 32
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (7, 9)
    """Fewest and most tokens of a prompt."""
    answer_tokens: tuple[int, int] = (4, 8)
    """Fewest and most tokens of an answer."""
    rounds: int = 60
    """Measured steps of each side."""
    warm_up: int = 5


class Parts:
    """CPU seconds by part; the time of a part within another one counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within: list[str] = []
        self._since = 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        self._count()
        self._within.append(part)
        try:
            yield
        finally:
            self._count()
            self._within.pop()

    def _count(self) -> None:
        moment = time.process_time()
        if self._within:
            self.seconds[self._within[-1]] += moment - self._since
        self._since = moment

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Measure a function or method, from now on, as ``part``."""
        function: Callable[..., Any] = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.measure(part):
                return function(*args, **kwargs)

        setattr(owner, name, measured)


def make_groups(settings: Settings, vocabulary: int, seed: int) -> list[Group]:
    """Random episodes whose engine log-probs are those of an untrained model."""
    rng = np.random.default_rng(seed)

    def ids(bounds: tuple[int, int]) -> np.ndarray:
        return rng.integers(2, vocabulary, rng.integers(bounds[0], bounds[1] + 1)).astype(np.int32)

    def episode(prompt: np.ndarray) -> Episode:
        tokens = np.concatenate([prompt, ids(settings.answer_tokens)])
        trainable = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.where(trainable, -np.log(vocabulary), 0).astype(np.float32)
        turn = Turn(tokens, logprobs, np.where(trainable, 0, -1).astype(np.int32), trainable)
        return Episode([turn], float(rng.integers(0, 2)), "stop", parts={"right": 1.0})

    groups = []
    for number in range(settings.groups):
        prompt = ids(settings.prompt_tokens)
        episodes = [episode(prompt) for _ in range(settings.group_size)]
        groups.append(Group(number, number, episodes, task="benchmark", success_reward=1.0))
    return groups


class Ours:
    """A trainer rank's work in a step, without its actor: what it does with the buffer's bytes, until the checksums of
    the weights that it sends."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self._parts = parts
        self._settings = TrainerSettings(ranks=1, lr=3e-4)
        steps = settings.warm_up + settings.rounds
        self.policy = policy = Policy(settings.model, self._settings, total_steps=steps)
        self._functions = LoadedFunctions(dr_grpo, loss_function(PPOClip(), self._settings.loss))
        self._normaliser_tokens = settings.answer_tokens[1]
        published = policy.published
        tensors = [(name, shape, torch.float32) for name, shape in published.tensors()]
        manifest = make_manifest(tensors, [published.owned_spans()])
        views = [torch.empty(shard.numel * 4, dtype=torch.uint8) for shard in manifest.shards[0]]
        self._snapshot = published.plan_snapshot(manifest, views)
        self._checksums = ShardChecksums(manifest, 0, views)
        wrap = parts.wrap
        for name in ("group_views", "advantages_of", "fingerprint", "with_overlong_penalty"):
            wrap(step_module, name, "advantages")
        wrap(step_module, "check_agreement", "metrics and agreement of ranks")
        wrap(step_module, "pack_shard", "pack")
        wrap(step_module, "batch_metrics", "metrics and agreement of ranks")
        wrap(PackedShard, "deserialize", "deserialise")
        for name in ("reduced_metrics", "waste_metrics", "common_sums"):
            wrap(policy_module, name, "metrics and agreement of ranks")
        for name in ("finite_only", "evaluate_loss"):
            wrap(policy_module, name, "loss")
        wrap(policy, "token_logprobs", "forward")
        wrap(torch.Tensor, "backward", "backward")
        wrap(policy, "_step", "other of the optimiser step")
        wrap(policy_module.dist_utils, "clip_grad_norm_", "clip")
        for owner, name in ((policy.optimizers, "step"), (policy.optimizers, "zero_grad"), (policy.schedulers, "step")):
            wrap(owner, name, "optimiser")

    def step(self, data: list[bytes]) -> float:
        """Train on serialized groups; returns the mean log-prob of the sampled tokens."""
        measure = self._parts.measure
        with measure(BUFFER):
            groups = [SerializedGroup.read(group) for group in data]
            lags = np.asarray([sum(group.trainable for group in groups)])
            plan = ShardPlan(1, self._settings.tokens_per_microbatch)
            taken = pickle.dumps(cut(Batch(0, groups, None, lags), plan)[0], pickle.HIGHEST_PROTOCOL)
        with measure("take"):
            shard = pickle.loads(taken)
        with measure(STEP):
            metrics, *_ = step_module.train(self.policy, shard, self._functions, self._normaliser_tokens)
        with measure("snapshot"):
            self.policy.published.snapshot(self._snapshot)
        with measure("checksums"):
            self._checksums.take()
        return metrics["logprob"]


class TRLs:
    """A step of TRL's ``GRPOTrainer`` on the same episodes: its computation alone."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        from transformers import AutoModelForCausalLM

        self._parts, self._normaliser_tokens = parts, settings.answer_tokens[1]
        self.model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, groups: list[Group]) -> float:
        measure = self._parts.measure
        with measure("pack"):
            ids, mask, sampled, advantages = self._padded(groups)
        with measure("forward"):
            hidden = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
            logits = self.model.lm_head(hidden)
            logprobs = logits.log_softmax(-1)
            token_logprobs = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
            with torch.no_grad():
                _ = -(logprobs.exp() * logprobs).sum(-1)  # the entropies, a metric
        with measure("loss"):
            ratio = (token_logprobs - token_logprobs.detach()).exp()
            token_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = (token_loss * sampled).sum() / (len(ids) * self._normaliser_tokens)
        with measure("backward"):
            torch.autograd.backward(loss)  # not by Tensor.backward, which counts for the other side
        with measure("clip"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with measure("optimiser"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        return float((token_logprobs.detach() * sampled).sum() / sampled.sum())

    @staticmethod
    def _padded(groups: list[Group]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts padded on the left and answers on the right, int64[episodes, tokens], with their mask, the mask of
        the sampled targets, and the advantages, float32[episodes, 1]."""
        turns = [episode.turns[0] for group in groups for episode in group.episodes]
        starts = [int(turn.trainable.argmax()) for turn in turns]
        prompt = max(starts)
        width = prompt + max(len(turn.token_ids) - start for turn, start in zip(turns, starts, strict=True))
        ids = torch.zeros(len(turns), width, dtype=torch.int64)
        mask, sampled = torch.zeros_like(ids), torch.zeros(len(turns), width - 1)
        for row, (turn, start) in enumerate(zip(turns, starts, strict=True)):
            columns = slice(prompt - start, prompt - start + len(turn.token_ids))
            ids[row, columns], mask[row, columns] = torch.from_numpy(turn.token_ids).long(), 1
            sampled[row, prompt - 1 : columns.stop - 1] = 1
        rewards = torch.tensor([group.rewards.tolist() for group in groups])
        return ids, mask, sampled, (rewards - rewards.mean(1, keepdim=True)).reshape(-1, 1)


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    parts, theirs_parts = Parts(), Parts()
    with held_port() as port:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        ours = Ours(settings, parts)
    theirs = TRLs(settings, theirs_parts)
    vocabulary = theirs.model.config.vocab_size
    for number in range(settings.warm_up + settings.rounds):
        groups = make_groups(settings, vocabulary, number)
        data = [serialize_group(group) for group in groups]
        if number == settings.warm_up:
            parts.seconds.clear()
            theirs_parts.seconds.clear()
        logprobs = ours.step(data), theirs.step(groups)
        if number == 0 and abs(logprobs[0] - logprobs[1]) > LOGPROB_BOUND:
            raise RuntimeError(f"the sides do not compute the same: their mean log-probs are {logprobs}")
    ours.policy.close()
    report(parts, theirs_parts, settings)


def report(ours: Parts, theirs: Parts, settings: Settings) -> None:
    mine, other = ({part: 1e3 * s / settings.rounds for part, s in parts.seconds.items()} for parts in (ours, theirs))
    print(f"{settings.groups} groups x {settings.group_size} episodes, one rank, one thread. CPU-ms a step:")
    print(f"  {'':42s}{'ours':>8s}{'TRL':>8s}")
    for part in sorted(mine, key=lambda part: (part == BUFFER, -mine[part])):
        print(f"  {part:42s}{mine[part]:8.1f}{other.get(part, 0.0):8.1f}")
    total = sum(ms for part, ms in mine.items() if part != BUFFER)
    print(f"  {'sum, without the buffer':42s}{total:8.1f}{sum(other.values()):8.1f}")
    result = {"benchmark": "trainer_profile", "ours_ms": total, "trl_ms": sum(other.values())}
    print(json.dumps(short(result | {"ours_by_part_ms": mine, "trl_by_part_ms": other})))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)

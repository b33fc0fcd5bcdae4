"""transformers' side of the trainer's tests: makes tiny models, their logits, and plainly trained models.

A program of its own, so that nothing has patched transformers in its process:  reference.py FOLDER
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from monarch_rl.episode.episode import Episode, Group
from tests.trainer.batches import LR, MAX_NEW_TOKENS, SHARE, STEPS, VOCABULARY, WEIGHT_DECAY, batch, rows_of

TOKENS = 50
"""Tokens of each sequence whose logits are compared."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
}
QWEN3 = {**SHAPE, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
# 9 heads on 2 ranks: shards end within heads, as SmolLM2's do.
LLAMA = {**SHAPE, "hidden_size": 72, "intermediate_size": 96, "num_attention_heads": 9, "num_key_value_heads": 3}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MOE = {
    **QWEN3,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
CONFIGS = {
    "qwen3": Qwen3Config(**QWEN3, head_dim=16, tie_word_embeddings=False),
    "qwen3_tied": Qwen3Config(**QWEN3, head_dim=16, tie_word_embeddings=True),
    "llama_tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama3_rope": LlamaConfig(**LLAMA, tie_word_embeddings=False, rope_parameters=SCALED),
    "qwen3_bf16": Qwen3Config(**QWEN3, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**MOE),
    "qwen2": Qwen2Config(**LLAMA, tie_word_embeddings=False),
    "qwen2_tied": Qwen2Config(**QWEN3, tie_word_embeddings=True),
    # Its head width is explicit, and its window is as long as the tokens, so that it attends to all of them.
    "mistral": MistralConfig(**QWEN3 | {"head_dim": 16, "max_position_embeddings": TOKENS, "sliding_window": TOKENS}),
}
BF16 = "qwen3_bf16"
"""Saved in bfloat16, computed in float32."""


def make(folder: Path) -> None:
    """Write each model with its logits for some tokens."""
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms of exactly 1 would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        if name == BF16:
            model.to(torch.bfloat16)
        model.save_pretrained(folder / name)
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        tokens = torch.randint(0, VOCABULARY, (3, TOKENS))
        with torch.no_grad():
            save_file({"tokens": tokens, "logits": model(tokens).logits}, folder / f"{name}.logits")


def train(
    folder: Path, name: str, loss: Callable[[Any, list[Group]], torch.Tensor], kind: str = "qwen3", share: float = 0.0
) -> None:
    """Train a model plainly on the made-up batches: one episode at a time, no packing, no sharding. Supervised rows
    have a ``share`` of the loss."""
    model = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        if share < 1:
            ((1 - share) * loss(model, batch(step))).backward()
        if share:
            (share * cross_entropy(model, rows_of(step))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save_file(model.state_dict(), folder / f"{name}.safetensors")


def cross_entropy(model: Any, rows: list[dict[str, list[int]]]) -> torch.Tensor:
    """Mean over the tokens of all answers."""
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor([*row["prompt"], *row["answer"]])
        logits = model(ids[None]).logits[0, len(row["prompt"]) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(row["answer"]), reduction="sum")
    return total / sum(len(row["answer"]) for row in rows)


def write_gradient(folder: Path) -> None:
    """Write the gradient of the supervised rows of the first step."""
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    cross_entropy(model, rows_of(0)).backward()
    save_file({name: p.grad for name, p in model.named_parameters()}, folder / "rows.gradient")


def anchored(model: Any, groups: list[Group], start: Any) -> torch.Tensor:
    """Dr.GRPO as below, and 0.5 times k2 of the KL from the initial model, with the same weights."""
    total = torch.zeros(())
    for group in groups:
        for episode in group.episodes:
            with torch.no_grad():
                before = logprobs_of_sampled(start, episode)
            for (logprob, behaviour), (reference, _) in zip(logprobs_of_sampled(model, episode), before, strict=True):
                ratio = torch.exp(logprob.detach() - behaviour).clamp(max=2.0)
                total = total + ratio * 0.5 * (logprob - reference).square() / 2
    return dr_grpo(model, groups) + total / (sum(len(group.episodes) for group in groups) * MAX_NEW_TOKENS)


def train_several(folder: Path, name: str) -> None:
    """The same with four optimiser steps per batch: two epochs over two mini-batches, of one group and of two."""
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        groups = batch(step)
        with torch.no_grad():
            old = {
                id(e): [logprob for logprob, _ in logprobs_of_sampled(model, e)]
                for group in groups
                for e in group.episodes
            }
        for part in [groups[:1], groups[1:]] * 2:
            optimizer.zero_grad()
            proximal(model, part, old).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    save_file(model.state_dict(), folder / f"{name}.safetensors")


def proximal(model: Any, groups: list[Group], old: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    """PPO's clip of the ratio to the policy at the start of the batch, times the truncated weight of the behaviour
    policy, averaged over the tokens of these groups."""
    losses = []
    for group in groups:
        mean = statistics.mean(episode.reward for episode in group.episodes)
        for episode in group.episodes:
            advantage = episode.reward - mean
            for (logprob, behaviour), before in zip(logprobs_of_sampled(model, episode), old[id(episode)], strict=True):
                weight = torch.exp(before - behaviour).clamp(max=2.0)
                floor, ceiling = (0.0, 1.28) if advantage > 0 else (0.8, float("inf"))
                losses.append(-weight * advantage * torch.exp(logprob - before).clamp(floor, ceiling))
    return torch.stack(losses).mean()


def logprobs_of_sampled(model: Any, episode: Episode) -> list[tuple[torch.Tensor, float]]:
    """Log-prob under the model and under the behaviour policy, of each trainable token."""
    ids = torch.tensor(episode.token_ids.tolist())
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return [(logprobs[i - 1], float(episode.logprobs[i])) for i in range(1, len(ids)) if episode.trainable[i]]


def dr_grpo(model: Any, groups: list[Group]) -> torch.Tensor:
    """Dr.GRPO with truncated importance sampling."""
    total = torch.zeros(())
    for group in groups:
        mean = sum(episode.reward for episode in group.episodes) / len(group.episodes)
        for episode in group.episodes:
            for logprob, behaviour in logprobs_of_sampled(model, episode):
                ratio = torch.exp(logprob.detach() - behaviour).clamp(max=2.0)
                total = total - ratio * (episode.reward - mean) * logprob
    return total / (sum(len(group.episodes) for group in groups) * MAX_NEW_TOKENS)


def clipped_grpo(model: Any, groups: list[Group], *, by_episode: bool) -> torch.Tensor:
    """GRPO with PPO's ratio to the behaviour policy, clipped at 0.8 and 1.28, averaged by episodes or by tokens."""
    losses = []
    for group in groups:
        rewards = [episode.reward for episode in group.episodes]
        deviation = statistics.stdev(rewards)
        for episode in group.episodes:
            advantage = (episode.reward - statistics.mean(rewards)) / (deviation + 1e-6)
            tokens = []
            for logprob, behaviour in logprobs_of_sampled(model, episode):
                ratio = torch.exp(logprob - behaviour)
                floor, ceiling = (0.0, 1.28) if advantage > 0 else (0.8, float("inf"))
                tokens.append(-advantage * ratio.clamp(floor, ceiling))
            losses.append(torch.stack(tokens))
    if by_episode:
        return torch.stack([tokens.mean() for tokens in losses]).mean()
    return torch.cat(losses).mean()


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    make(target)
    train(target, "trained", dr_grpo)
    train(target, "biased", dr_grpo, "qwen2")
    train(target, "clipped_sequence_mean", partial(clipped_grpo, by_episode=True))
    train(target, "clipped_token_mean", partial(clipped_grpo, by_episode=False))
    train_several(target, "several")
    start = AutoModelForCausalLM.from_pretrained(target / "qwen3", dtype=torch.float32)
    train(target, "supervised", dr_grpo, share=1.0)
    train(target, "mixed", dr_grpo, share=SHARE)
    write_gradient(target)
    train(target, "anchored", partial(anchored, start=start))

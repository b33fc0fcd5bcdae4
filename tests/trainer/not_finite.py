"""A trainer rank with values that are not finite:  not_finite.py FOLDER

Loads each model in the folder, and writes its error to ``<model>.message``. Then it writes such values into parameters
of ``good`` and ``experts``, with and without LoRA, and writes to ``messages.json`` the messages of snapshots and
updates, and the contents of a checkpoint after failed updates.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from monarch_rl.algorithms.advantages import SeatBaselines, gae
from monarch_rl.algorithms.functions import needs
from monarch_rl.algorithms.group_view import Advantage, GroupView
from monarch_rl.algorithms.objectives import PPOClip
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import PackedShard
from monarch_rl.errors import NotFinite
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.network import held_port
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.functions import LoadedFunctions
from monarch_rl.trainer.loss_settings import CriticSettings
from monarch_rl.trainer.objective import LossFunction, Sums, loss_function, supervised
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.shards import local_span
from monarch_rl.trainer.step import train
from monarch_rl.trainer.supervised import SupervisedPlan, SupervisedRows
from monarch_rl.trainer.token_logprobs import TokenLogprobs
from monarch_rl.weights.checksum import ShardChecksums
from monarch_rl.weights.manifest import make_manifest
from tests.trainer.batches import MAX_NEW_TOKENS, batch, shard
from tests.trainer.ranks import packed

LORA = LoraSettings(rank=2, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
PROJECTION, EXPERT = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
TOKENS = 20
"""Vocabulary size of the tiny models."""


def policy_of(folder: Path, lora: LoraSettings = FULL_TRAINING) -> Policy:
    return Policy(folder, TrainerSettings(ranks=1, lr=0.0, lora=lora), total_steps=1)


def message_of(call: Callable[[], Any]) -> str:
    """The message of NotFinite; empty if the call succeeds."""
    try:
        call()
    except NotFinite as error:
        return str(error)
    return ""


def publish(policy: Policy, dtype: torch.dtype) -> str:
    """The message of a snapshot's checksums."""
    runs = policy.published.owned_spans()
    manifest = make_manifest([(name, shape, dtype) for name, shape in policy.published.tensors()], [runs])
    views = [torch.empty(shard.numel * dtype.itemsize, dtype=torch.uint8) for shard in manifest.shards[0]]
    policy.published.snapshot(policy.published.plan_snapshot(manifest, views))
    return message_of(ShardChecksums(manifest, 0, views).take)


def update(policy: Policy, objective: LossFunction | None = None) -> str:
    """The message of an update."""
    groups = batch(0)
    for episode in (episode for group in groups for episode in group.episodes):
        episode.turns[0].token_ids[:] %= TOKENS
    batches = packed(shard(groups, 0, 0, 1, tokens_per_microbatch=500), policy)
    return message_of(lambda: policy.update(batches, objective or loss_function(PPOClip(), policy.settings.loss)))


def spoiled(state: dict[str, torch.Tensor], name: str, place: tuple[int, ...], value: float) -> None:
    with torch.no_grad():
        local_span(state[name])[0][place] = value


def nan_loss(output: TokenLogprobs, _: MicroBatch) -> tuple[torch.Tensor, Sums]:
    return output.logprobs.sum() * math.nan, {"tokens": torch.tensor(1.0)}


def steep_loss(output: TokenLogprobs, _: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """Finite, with a derivative that is not finite."""
    return (output.logprobs - output.logprobs.detach()).clamp(min=0).sqrt().sum(), {"tokens": torch.tensor(1.0)}


def messages_after_loading(folder: Path) -> dict[str, Any]:
    """The messages of snapshots and updates, by what was done before them."""
    messages = {}
    good = policy_of(folder / "good")
    messages["good"] = publish(good, torch.float32) + publish(good, torch.bfloat16) + update(good)
    messages["nan loss"], messages["steep loss"] = update(good, nan_loss), update(good, steep_loss)
    spoiled(good.model.hf_state(), PROJECTION, (5, 2), torch.finfo(torch.float32).max)
    messages["float32"], messages["bfloat16"] = publish(good, torch.float32), publish(good, torch.bfloat16)
    spoiled(good.model.hf_state(), PROJECTION, (5, 2), -math.inf)
    messages["infinite"], messages["update"] = publish(good, torch.float32), update(good)
    experts = policy_of(folder / "experts")
    spoiled(experts.model.hf_state(), EXPERT, (7, 1), math.nan)
    messages["expert"] = publish(experts, torch.bfloat16)
    adapters = policy_of(folder / "good", LORA)
    lora = adapters.model.lora_state()
    name = next(name for name in lora if "1.self_attn.q_proj.lora_B" in name)
    spoiled(lora, name, (3, 1), math.nan)
    messages["lora"], messages["lora name"] = publish(adapters, torch.float32), name
    merged = policy_of(folder / "experts", LORA)
    lora = merged.model.lora_state()
    spoiled(lora, next(name for name in lora if "1.mlp.experts.3.up_proj.lora_B" in name), (4, 0), math.inf)
    messages["merged"] = publish(merged, torch.bfloat16)
    return messages


def part_of(minibatches: int = 1, last_reward: float = 1.0, wrong: tuple[int, int] | None = None) -> PackedShard:
    """A batch of three groups in one seat. An episode, given by group and place, may be ``wrong``: its first log-prob
    is not finite."""
    groups = batch(0)
    for group in groups:
        group.task = "game"
        for episode in group.episodes:
            episode.turns[0].token_ids[:] %= TOKENS
            episode.seat, episode.reward = "white", 1.0
    groups[-1].episodes[0].reward = last_reward
    if wrong is not None:
        turn = groups[wrong[0]].episodes[wrong[1]].turns[0]
        turn.logprobs[turn.trainable.argmax()] = math.nan
    packed_groups = [SerializedGroup.read(serialize_group(group)) for group in groups]
    trainable = np.asarray([sum(group.trainable for group in packed_groups)])
    return cut(Batch(0, packed_groups, None, trainable), ShardPlan(1, 500, ("behaviour",), minibatches))[0]


def state_after_a_failure(folder: Path) -> dict[str, Any]:
    """The advantage's state in a checkpoint, after an update that failed when the advantage had been called."""
    policy, advantage = policy_of(folder / "good"), SeatBaselines()
    functions = LoadedFunctions(advantage, loss_function(PPOClip(), policy.settings.loss))
    train(policy, part_of(), functions, MAX_NEW_TOKENS)
    made = advantage.state_dict()
    policy.checkpoint.note(1, functions.state_dict())
    failing = replace(functions, objective=nan_loss)
    failed = message_of(lambda: train(policy, part_of(), failing, MAX_NEW_TOKENS))
    policy.checkpoint.stage()
    policy.checkpoint.write(folder / "staged")
    restored = policy.checkpoint.restore(folder / "staged", 1)
    return {"failed": failed, "made": made, "ahead": advantage.state_dict(), "restored": restored["advantage"]}


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """The output of the project's logger in the block."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    logging.getLogger("monarch_rl").addHandler(handler)
    yield output
    logging.getLogger("monarch_rl").removeHandler(handler)


@needs("behaviour")
def surprise(group: GroupView) -> torch.Tensor:
    sums = torch.stack([values.sum() for values in group.columns["behaviour"]])
    return sums - sums.mean()


def left_out(folder: Path) -> dict[str, float | str]:
    """The log of a step whose advantage reads log-probs of which one is not finite: its episode has no part in the
    advantages of the others, and these are trained."""
    policy, trained = policy_of(folder / "good"), list[torch.Tensor]()

    def recorded(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        trained.append(batch.advantages)
        return supervised(output, batch)

    part = part_of(wrong=(1, 2))
    with logged() as output:
        metrics, *_ = train(policy, part, LoadedFunctions(surprise, recorded), MAX_NEW_TOKENS)
    expected = list[torch.Tensor]()
    for group, (columns, lengths) in enumerate(zip(part.columns["behaviour"], part.lengths, strict=True)):
        sums = {place: float(values.sum()) for place, values in enumerate(columns) if (group, place) != (1, 2)}
        mean = sum(sums.values()) / len(sums)
        expected += [torch.full((int(lengths[place]),), value - mean) for place, value in sums.items()]
    found, wanted = torch.cat(trained).sort().values, torch.cat(expected).sort().values
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert math.isfinite(metrics["advantage/std"]) and metrics["advantage/std"] > 0
    return {"episodes": metrics["masked_episodes"], "logged": output.getvalue()}


class WithBadHead(Policy):
    """In each micro-batch of supervised rows, the log-prob of the last row's first token is not finite."""

    def token_logprobs(self, batch: MicroBatch, *args: Any, **kwargs: Any) -> TokenLogprobs:
        output = super().token_logprobs(batch, *args, **kwargs)
        if not batch.supervised:
            return output
        first = int((batch.sequences == batch.sequences.max()).int().argmax())
        wrong = torch.arange(len(output.logprobs)) == first
        return output._replace(logprobs=output.logprobs.masked_fill(wrong, math.nan))


def rows_left_out(folder: Path) -> dict[str, Any]:
    """The log of supervised rows mixed into a batch, and of rows alone, if a log-prob is not finite; and the number of
    rows that are counted."""
    policy = WithBadHead(folder / "good", TrainerSettings(ranks=1, lr=0.0), total_steps=2)
    rows = [{"prompt": [1] * (1 + row), "answer": [2, 3]} for row in range(5)]
    functions = LoadedFunctions(surprise, supervised)
    found: dict[str, Any] = {}
    for kind, share in (("mixed", 0.5), ("alone", 1.0)):
        plan = SupervisedPlan(ByValue(rows), len(rows), share)
        taken = SupervisedRows(plan, lambda row: (row["prompt"], row["answer"]), 12, 1).take(0, 0)
        part = PackedShard.of_rows(0, taken) if share == 1 else replace(part_of(), supervised=taken)
        with logged() as output:
            metrics, *_ = train(policy, part, functions, MAX_NEW_TOKENS)
        lengths = [of_microbatch[-1][0] for of_microbatch in taken.lengths]
        found[kind] = {
            "logged": output.getvalue(),
            "expected": [length - 3 for length in lengths],
            "masked": metrics["masked_episodes"],
        }
    return found


def half_updated(folder: Path) -> dict[str, str]:
    """The message of a checkpoint of a critic that has made the first of two updates, while it learns alone: the square
    of the second one's reward is beyond float32."""
    critic = CriticSettings(lr=1e-3, warmup=1)
    policy = Policy(folder / "good", TrainerSettings(ranks=1, lr=0.0, minibatches=2, critic=critic), total_steps=2)
    functions = LoadedFunctions(cast(Advantage, gae), loss_function(PPOClip(), policy.settings.loss))
    policy.checkpoint.note(0, {})
    policy.checkpoint.stage()
    failed = message_of(lambda: train(policy, part_of(2, last_reward=1e30), functions, MAX_NEW_TOKENS))
    try:
        policy.checkpoint.stage()
    except RuntimeError as error:
        return {"failed": failed, "staged": str(error)}
    return {"failed": failed, "staged": ""}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with held_port() as port:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        for model in [path for path in folder.iterdir() if path.is_dir()]:
            try:
                policy_of(model)
                message = ""
            except ValueError as error:
                message = str(error)
            (folder / f"{model.name}.message").write_text(message)
        later = messages_after_loading(folder)
        later |= {"state": state_after_a_failure(folder), "half updated": half_updated(folder)}
        later["left out"], later["rows left out"] = left_out(folder), rows_left_out(folder)
        (folder / "messages.json").write_text(json.dumps(later))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The trainer's side, on every rank of a torchrun job:  ranks.py FOLDER

Writes, for each model of reference.py, logits and the saved folder; then trains, and checks snapshots.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from monarch_rl.algorithms.advantages import ADVANTAGES, dr_grpo
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.losses import Aggregation, mismatch_k3
from monarch_rl.algorithms.objectives import CISPO, Objective, PolicyGradient, PPOClip
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import PackedShard
from monarch_rl.errors import NotFinite
from monarch_rl.model.lora import LoraSettings
from monarch_rl.runtime import device_work
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.device_work import GpuOperation
from monarch_rl.trainer.advantages import advantages_of, group_views
from monarch_rl.trainer.attention_layout import separate_layout
from monarch_rl.trainer.batch import MicroBatch, pack, pack_shard
from monarch_rl.trainer.functions import LoadedFunctions
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.metrics import check_agreement, reduced_metrics
from monarch_rl.trainer.objective import LossFunction, Sums, loss_function, supervised
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.publishing import changed_share
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.step import train as make_step
from monarch_rl.trainer.step_journal import weights_checksums
from monarch_rl.trainer.supervised import SupervisedPlan, SupervisedRows
from monarch_rl.trainer.token_logprobs import TokenLogprobs
from monarch_rl.weights.checksum import ShardChecksums, tensor_checksum
from monarch_rl.weights.manifest import make_manifest
from tests.episode.trees import distinct_inputs
from tests.trainer.batches import (
    LR,
    MAX_NEW_TOKENS,
    ROWS,
    SHARE,
    STEPS,
    WEIGHT_DECAY,
    batch,
    rows,
    rows_of,
    shard,
)
from tests.trainer.programs import saved
from tests.trainer.reference import CONFIGS

CLIPPED: tuple[Aggregation, ...] = ("sequence_mean", "token_mean")
PPO_CLIP = PPOClip()


def round_trip(folder: Path, name: str, settings: TrainerSettings, written: str) -> Policy:
    """Write the logits of a model to ``<written>.rank0`` and so on, and save it to ``<written>.saved``."""
    policy = Policy(folder / name, settings, total_steps=1)
    tokens = load_file(folder / f"{name}.logits")["tokens"]
    positions = torch.arange(tokens.shape[1]).repeat(tokens.shape[0])[None]
    masks = separate_layout([tokens.shape[1]] * tokens.shape[0], policy.device)
    with torch.no_grad():
        logits = policy.module(tokens.flatten()[None], positions=positions, attention_masks=masks)[0]
    save_file({"logits": logits.contiguous()}, folder / f"{written}.rank{policy.rank}")
    policy.save(folder / f"{written}.saved")
    return policy


def packed(part: PackedShard, policy: Policy) -> list[MicroBatch]:
    """The micro-batches of a shard, by the policy's loss settings."""
    loss = policy.settings.loss
    advantages = advantages_of(group_views(part), ADVANTAGES[loss.advantage]())
    (microbatches,) = pack_shard(part, advantages, loss.aggregation, MAX_NEW_TOKENS, policy.device)
    return microbatches


class Marks:
    """Marks of a device."""

    def __init__(self) -> None:
        self.recorded = 0

    def make(self) -> Marks:
        return self

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return True


def train(
    folder: Path, name: str, settings: TrainerSettings, kind: str = "qwen3", objective: Objective = PPO_CLIP
) -> Policy:
    """Train on the synthetic batches; in micro-batches of at most 50 tokens, so that there are several."""
    policy = Policy(folder / kind, settings, total_steps=STEPS)
    for step in range(STEPS):
        part = shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50)
        assert len(part.places) > 1
        batches, changes, marks = packed(part, policy), list[GpuOperation | None](), Marks()
        device_work.use_device("cuda", changes.append, marks.make)
        metrics = policy.update(batches, loss_function(objective, settings.loss))
        device_work.use_device("cpu")
        # The operations that detect a hanging GPU: each micro-batch, then the one that waits for all of them.
        sizes = [each.token_ids.numel() for each in batches]
        operations = [f"a pass for log-probs of {size} tokens" for size in sizes] if settings.reference else []
        operations += ["the end of the reference's passes"] if settings.reference else []
        operations += [f"a micro-batch of {size} tokens" for size in sizes] + [
            f"an optimiser step of {sum(sizes)} tokens"
        ]
        operations.append("the metrics of a batch")
        whats = [None if change is None else change.what for change in changes]
        assert whats == [what for operation in operations for what in (operation, None)]
        passes = (2 + settings.reference) * len(batches)
        assert marks.recorded == passes * len(policy.module.layers) or settings.reference, "forward and backward"
        assert metrics["tokens"] == part.trainable_tokens
        assert (metrics.get("reference_device_s", 0.0) > 0) == settings.reference
        assert metrics["drift_k3"] == 0 and metrics["optimizer_steps"] == step + 1
        assert 0 <= metrics["imbalance"] < 0.5
        computed = sum(distinct_inputs(group.episodes) for group in batch(step))
        inputs = sum(episode.num_tokens - 1 for group in batch(step) for episode in group.episodes)
        assert computed / inputs <= metrics["computed_share"] < 1
    policy.save(folder / name)
    return policy


def train_by_hand(folder: Path, name: str, settings: TrainerSettings) -> None:
    """The update in four lines: one forward and one backward pass of each micro-batch, clip, step."""
    policy = Policy(folder / "qwen3", settings, total_steps=STEPS)
    for step in range(STEPS):
        policy.optimizers.zero_grad()
        for microbatch in packed(
            shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50), policy
        ):
            loss_function(PPOClip(), settings.loss)(policy.token_logprobs(microbatch), microbatch)[0].backward()
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), settings.max_grad_norm, foreach=True)
        policy.optimizers.step()
    policy.save(folder / name)


def train_several(folder: Path, name: str) -> None:
    """Two epochs over two mini-batches; the ratio is to the policy at the start of each batch."""
    loss = LossSettings(aggregation="token_mean")
    settings = TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY, epochs=2, minibatches=2, loss=loss)
    policy = Policy(folder / "qwen3", settings, total_steps=STEPS * settings.updates_per_batch)
    for step in range(STEPS):
        part = shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=30, minibatches=2)
        advantages = advantages_of(group_views(part), ADVANTAGES[loss.advantage]())
        minibatches = pack_shard(part, advantages, loss.aggregation, MAX_NEW_TOKENS, policy.device)
        assert len(minibatches) == 2 and len(minibatches[1]) > 1
        metrics = policy.update_batch(minibatches, loss_function(PPOClip(), loss), settings.epochs)
        assert metrics["tokens"] == part.trainable_tokens
        assert metrics["optimizer_steps"] == 4 * (step + 1)
        assert metrics["drift_k3"] > 1e-5  # within the batch; the drift of single updates is 0
        assert metrics["clipped"] > 0
    policy.save(folder / name)


def check_old_and_drift(folder: Path) -> None:
    """With several updates per batch, whatever the objective reads: ``old`` belongs to the policy before the first
    update, and takes a pass of its own only for mini-batches that are trained later; mismatch is measured against it,
    and drift from it."""
    objectives: list[tuple[str, LossFunction]] = [
        ("ratio to the engine", loss_function(PPOClip(ratio_to="behaviour"), LossSettings())),
        ("cispo", loss_function(CISPO(ratio_to="behaviour"), LossSettings())),
        ("pg", loss_function(PolicyGradient(), LossSettings(corrections=()))),
        ("of a recipe", supervised),
    ]
    for name, objective in objectives:
        policy = Policy(folder / "qwen3", TrainerSettings(lr=LR, epochs=2, minibatches=2), total_steps=8)
        part = shard(batch(0), 0, policy.rank, policy.world_size, tokens_per_microbatch=30, minibatches=2)
        advantages = advantages_of(group_views(part), dr_grpo)
        minibatches = pack_shard(part, advantages, "constant", MAX_NEW_TOKENS, policy.device)
        flat, changes, marks = [each for own in minibatches for each in own], list[GpuOperation | None](), Marks()
        with torch.no_grad():
            before = [policy.token_logprobs(each).logprobs for each in flat]
        device_work.use_device("cuda", changes.append, marks.make)
        metrics = policy.update_batch(minibatches, objective, epochs=2)
        device_work.use_device("cpu")
        passes = [change.what for change in changes if change is not None and "pass for log-probs" in change.what]
        assert len(passes) == len(minibatches[1]), (name, passes)
        for each, expected in zip(flat, before, strict=True):
            assert torch.equal(each.columns["old"], expected), name
        assert metrics["drift_k3"] > 1e-5, (name, metrics["drift_k3"])
        mismatch = [mismatch_k3(each.columns["old"], each.behaviour_logprobs).sum() for each in flat]
        total = torch.stack(mismatch).sum()
        dist.all_reduce(total)
        assert math.isclose(metrics["mismatch_k3_all"], float(total) / metrics["tokens"], rel_tol=1e-4), name


def check_token_records(folder: Path) -> None:
    """Two epochs over two mini-batches: the records of this rank's sequences have the log-probs that each sequence
    alone has before the first update, and before the last update with it. Together the ranks have all sequences.
    Weights and metrics are the same, bit for bit, if nothing is logged."""
    loss = LossSettings(aggregation="token_mean")
    settings = TrainerSettings(lr=LR, epochs=2, minibatches=2, loss=loss)
    functions = LoadedFunctions(dr_grpo, loss_function(PPO_CLIP, loss))
    noting, other, plain = (Policy(folder / "qwen3", settings, total_steps=4) for _ in range(3))
    part = shard(batch(0), 0, noting.rank, noting.world_size, tokens_per_microbatch=30, minibatches=2)
    logged = make_step(noting, part, functions, MAX_NEW_TOKENS, LoggedGroups(3, 3))
    unlogged = make_step(other, part, functions, MAX_NEW_TOKENS)
    assert logged.metrics == unlogged.metrics and not unlogged.records
    checksums = [weights_checksums(policy) for policy in (noting, other, plain)]
    assert np.array_equal(checksums[0], checksums[1]) and not np.array_equal(checksums[0], checksums[2])
    records = {(record.group_id, record.place): record for record in logged.records}
    gathered: list[list[tuple[int, int]]] = [[] for _ in range(noting.world_size)]
    dist.all_gather_object(gathered, list(records))
    everywhere = sorted(place for of_rank in gathered for place in of_rank)
    assert everywhere == [(group.group_id, place) for group in batch(0) for place in range(len(group.episodes))]

    minibatches = pack_shard(part, logged.advantages, loss.aggregation, MAX_NEW_TOKENS, plain.device)
    sequences = iter(zip(part.places, part.deserialize(), strict=True))
    by_minibatch = [[next(sequences) for _ in microbatches] for microbatches in minibatches]

    def alone(number: int) -> dict[tuple[int, int], torch.Tensor]:
        """Log-probs of each sequence of a mini-batch. Both ranks make as many passes, some of them again."""
        own = [
            (place[:2], one)
            for places, episodes in by_minibatch[number]
            for place, one in zip(places, episodes, strict=True)
        ]
        computed = {}
        with torch.no_grad():
            for index in range(part.minibatches[number].episodes):
                place, one = own[index % len(own)]
                row = pack([one], torch.zeros(1), torch.zeros(1), 0, plain.device)
                computed[place] = plain.token_logprobs(row).logprobs
        return computed

    old, new = alone(0) | alone(1), dict[tuple[int, int], torch.Tensor]()
    for microbatches, of_minibatch in zip(minibatches, by_minibatch, strict=True):
        for each, (places, _) in zip(microbatches, of_minibatch, strict=True):
            each.columns["old"] = torch.cat([old[place[:2]] for place in places])
    for _ in range(settings.epochs):
        for number, microbatches in enumerate(minibatches):
            new |= alone(number)
            plain.update(microbatches, functions.objective)
    for place, record in records.items():
        for name, expected in (("trainer_logprobs", old), ("new_logprobs", new)):
            np.testing.assert_allclose(record.arrays[name], expected[place].numpy(), rtol=0, atol=2e-5, err_msg=name)
    moved = [np.abs(record.arrays["new_logprobs"] - record.arrays["trainer_logprobs"]) for record in records.values()]
    assert np.concatenate(moved).max() > 1e-2


def packed_shard(policy: Policy, step: int) -> PackedShard:
    """This rank's shard of a batch, as the buffer sends it."""
    groups = [SerializedGroup.read(serialize_group(group)) for group in batch(step)]
    trainable = np.asarray([sum(group.trainable for group in groups)])
    return cut(Batch(step, groups, None, trainable), ShardPlan(policy.world_size, 50))[policy.rank]


def with_rows(policy: Policy, step: int, share: float) -> PackedShard:
    """A shard with a step's supervised rows mixed in, or the rows alone."""
    plan = SupervisedPlan(ByValue(rows()), ROWS, share)
    taken = SupervisedRows(plan, lambda row: (row["prompt"], row["answer"]), 22, policy.world_size)
    mine = taken.take(step * ROWS, policy.rank)
    if share == 1:
        return PackedShard.of_rows(step, mine)
    part = packed_shard(policy, step)
    part.supervised = mine
    return part


def train_on_rows(folder: Path, name: str, share: float, temperature: float) -> None:
    """Rows are trained at temperature 1, whatever the policy's temperature is."""
    settings = TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY)
    policy = Policy(folder / "qwen3", settings, total_steps=STEPS, temperature=temperature)
    functions = LoadedFunctions(dr_grpo, loss_function(PPOClip(), settings.loss))
    for step in range(STEPS):
        metrics, *_ = make_step(policy, with_rows(policy, step, share), functions, MAX_NEW_TOKENS)
        assert metrics["supervised_tokens"] == sum(len(row["answer"]) for row in rows_of(step))
        assert 3 < metrics["supervised_loss"] < 6 and metrics["lr"] == LR
        assert metrics["optimizer_steps"] == (0 if share == 1 else step + 1), "supervised steps are not in the schedule"
        sampled = sum(episode.num_trainable for group in batch(step) for episode in group.episodes)
        assert metrics["tokens"] == (0 if share == 1 else sampled)
        assert share < 1 or math.isclose(metrics["loss"], metrics["supervised_loss"], rel_tol=1e-5)
    policy.save(folder / name)


def check_mixed_gradient(folder: Path) -> None:
    """The gradient of a batch with rows is the weighted sum of the two. Writes the gradient of the rows."""
    still = TrainerSettings(lr=0.0, max_grad_norm=1e9)
    policy = Policy(folder / "qwen3", still, total_steps=9)
    functions = LoadedFunctions(dr_grpo, loss_function(PPOClip(), still.loss))

    def gradient(part: PackedShard) -> dict[str, torch.Tensor]:
        make_step(policy, part, functions, MAX_NEW_TOKENS)
        return {name: p.grad.full_tensor() for name, p in policy.module.named_parameters()}  # type: ignore[union-attr, operator]

    alone, of_rows = gradient(packed_shard(policy, 0)), gradient(with_rows(policy, 0, 1.0))
    for name, found in gradient(with_rows(policy, 0, SHARE)).items():
        torch.testing.assert_close(found, (1 - SHARE) * alone[name] + SHARE * of_rows[name], rtol=1e-4, atol=1e-7)
    if policy.rank == 0:
        save_file(policy.model._state_dict_adapter.to_hf(of_rows), folder / "rows.found")


def check_changed_share(folder: Path) -> None:
    """Steps that are too small for bfloat16 change no weight that is served in it; others as many as among all weights,
    of which both ranks sample their rows."""
    for lr, dtype in ((1e-9, torch.bfloat16), (1e-9, torch.float32), (LR, torch.bfloat16)):
        settings = TrainerSettings(lr=lr)
        policy = Policy(folder / "qwen3_bf16", settings, total_steps=9)
        functions = LoadedFunctions(dr_grpo, loss_function(PPOClip(), settings.loss))
        dtypes = {name: dtype for name, _ in policy.published.tensors()}

        def whole(policy: Policy = policy, dtype: torch.dtype = dtype) -> torch.Tensor:
            weights = policy.model.hf_state().values()
            return torch.cat([weight.full_tensor().flatten() for weight in weights]).to(dtype)  # type: ignore[attr-defined]

        assert changed_share([], policy.published.sampled_rows({}), policy.device) == {}
        before, rows_before = whole(), policy.published.sampled_rows(dtypes)
        make_step(policy, packed_shard(policy, 0), functions, MAX_NEW_TOKENS)
        found = changed_share(rows_before, policy.published.sampled_rows(dtypes), policy.device)["changed_share"]
        expected = float((whole() != before).float().mean())
        assert (found == 0) == (lr == 1e-9 and dtype == torch.bfloat16), (lr, dtype, found)
        assert abs(found - expected) < 0.25, (lr, dtype, found, expected)


def check_snapshot(policy: Policy, folder: Path) -> None:
    """A snapshot in bfloat16 equals the saved weights, cast and sharded by rows; checksums are of whole tensors."""
    tensors, runs = policy.published.tensors(), policy.published.owned_spans()
    owned: list[list[tuple[str, int, int]]] = [[] for _ in range(policy.world_size)]
    dist.all_gather_object(owned, runs)
    manifest = make_manifest([(name, shape, torch.bfloat16) for name, shape in tensors], owned)
    mine = manifest.shards[policy.rank]
    views = [torch.empty(run.numel * 2, dtype=torch.uint8) for run in mine]
    policy.published.snapshot(policy.published.plan_snapshot(manifest, views))
    sums = torch.from_numpy(ShardChecksums(manifest, policy.rank, views).take())
    dist.all_reduce(sums)
    whole = saved(folder)
    for run, view in zip(mine, views, strict=True):
        spec = manifest.tensors[run.tensor]
        expected = whole[spec.name].to(torch.bfloat16).flatten()[run.start : run.start + run.numel]
        assert torch.equal(view.view(torch.bfloat16), expected), spec.name
    for spec, checksum in zip(manifest.tensors, sums.tolist(), strict=True):
        assert checksum == tensor_checksum(whole[spec.name].to(torch.bfloat16)).item(), spec.name


def check_reference_of_lora(folder: Path, full: Policy) -> None:
    """With LoRA, whatever it has learned, the reference is the model without it, like full training's."""
    loss = LossSettings(kl_coefficient=0.5, kl_estimate="k2", aggregation="token_mean")
    settings = TrainerSettings(lr=0.05, lora=LoraSettings(rank=4), reference=True, loss=loss)
    policy, kls = Policy(folder / "qwen3", settings, total_steps=3), list[float]()
    for step in range(3):
        batches = packed(shard(batch(step), step, policy.rank, policy.world_size, tokens_per_microbatch=50), policy)
        kls.append(policy.update(batches, loss_function(PPOClip(), loss))["kl_reference"])
        full.update(
            theirs := packed(shard(batch(step), step, full.rank, full.world_size, 50), full),
            loss_function(PPOClip(), loss),
        )
        for one, other in zip(batches, theirs, strict=True):
            torch.testing.assert_close(one.columns["reference"], other.columns["reference"], rtol=0, atol=1e-5)
    assert kls[0] < 1e-9 and min(kls[1:]) > 1e-3, kls


def disagree(folder: Path, policy: Policy) -> None:
    """Writes the errors on this rank when ranks have different values, or sums of different names."""
    rank, device = policy.rank, policy.device
    check_agreement(7, device, "equal values were refused")
    sums = {"tokens": torch.ones(()), f"of rank {rank}": torch.ones(())}
    errors = []
    for call in (
        lambda: check_agreement(rank, device, "no agreement"),
        lambda: check_agreement(2**32 - 1 - rank, device, "no agreement on large values"),
        lambda: reduced_metrics(sums, [], counts=True),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    (folder / f"disagree.rank{rank}").write_text(json.dumps(errors))


def refuse(folder: Path, policy: Policy) -> None:
    """Writes the errors on this rank for functions that cannot be trained with, when they are first called."""

    def of_this_rank(group: GroupView) -> torch.Tensor:
        return group.rewards + policy.rank

    def not_a_number(group: GroupView) -> torch.Tensor:
        return group.rewards * math.nan

    def endless(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        loss, sums = supervised(output, batch)
        return loss * math.inf, sums

    def shifted(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        loss, sums = supervised(output, batch)
        return loss + math.nan, sums

    part = packed_shard(policy, 0)
    errors = {}
    for advantage, objective in (
        (of_this_rank, supervised),
        (not_a_number, supervised),
        (dr_grpo, endless),
        (dr_grpo, shifted),
    ):
        try:
            make_step(policy, part, LoadedFunctions(advantage, objective), MAX_NEW_TOKENS)
        except (ValueError, NotFinite) as error:
            errors[(advantage if objective is supervised else objective).__name__] = str(error)
    (folder / f"refuse.rank{policy.rank}").write_text(json.dumps(errors))


def check_filled_old(policy: Policy) -> None:
    """A column ``old`` that a stage has filled is not overwritten, also with several updates."""
    loss = policy.settings.loss
    part = shard(batch(0), 0, policy.rank, policy.world_size, tokens_per_microbatch=50)
    batches = packed(part, policy)
    for each in batches:
        each.columns["old"] = each.behaviour_logprobs.clone()
    metrics = policy.update_batch([batches], loss_function(PPOClip(), loss), epochs=2)
    assert metrics["mismatch_k3_all"] == 0, "old was recomputed"
    assert all(torch.equal(each.columns["old"], each.behaviour_logprobs) for each in batches)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name in CONFIGS:
        round_trip(folder, name, TrainerSettings(), name)
    train(folder, "still", TrainerSettings(lr=0.0, weight_decay=WEIGHT_DECAY))
    settings = TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY)
    for name, kind in (("trained", "qwen3"), ("biased", "qwen2")):
        check_snapshot(train(folder, name, settings, kind), folder / name)
    for aggregation in CLIPPED:
        clipped = replace(settings, loss=LossSettings(advantage="grpo", aggregation=aggregation))
        train(folder, f"clipped_{aggregation}", clipped, objective=PPOClip(ratio_to="behaviour"))
    train_by_hand(folder, "by_hand", settings)
    train_several(folder, "several")
    check_old_and_drift(folder)
    check_token_records(folder)
    train_on_rows(folder, "supervised", 1.0, temperature=0.7)
    train_on_rows(folder, "mixed", SHARE, temperature=1.0)
    check_mixed_gradient(folder)
    check_changed_share(folder)
    loss = LossSettings(kl_coefficient=0.5, kl_estimate="k2")
    anchored = train(folder, "anchored", replace(settings, reference=True, loss=loss))
    check_reference_of_lora(folder, anchored)
    last = train(folder, "recomputed", TrainerSettings(lr=LR, weight_decay=WEIGHT_DECAY, activation_checkpoint="full"))
    disagree(folder, last)
    refuse(folder, last)
    check_filled_old(last)
    last.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

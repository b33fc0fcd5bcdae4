"""The record of the tokens of logged groups, against a plain computation of each sequence: PPO's clip with truncated
importance weights, a sequence mask and a discount for lag."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.algorithms.advantages import dr_grpo  # noqa: E402
from monarch_rl.algorithms.group_view import Advantage, GroupView, PerToken  # noqa: E402
from monarch_rl.algorithms.objectives import TIS, Correction, IcePop, PPOClip, SequenceMask  # noqa: E402
from monarch_rl.buffer.groups import Batch  # noqa: E402
from monarch_rl.buffer.shards import ShardPlan, cut  # noqa: E402
from monarch_rl.episode.episode import Episode, Group  # noqa: E402
from monarch_rl.episode.logged import NOT_LOGGED, LoggedGroups  # noqa: E402
from monarch_rl.episode.serialization import SerializedGroup, serialize_group  # noqa: E402
from monarch_rl.episode.shard import PackedShard, TokenFlag, TokenRecord  # noqa: E402
from monarch_rl.trainer.advantages import advantages_of, group_views  # noqa: E402
from monarch_rl.trainer.batch import MicroBatch, pack_shard  # noqa: E402
from monarch_rl.trainer.finite import finite_only  # noqa: E402
from monarch_rl.trainer.loss_settings import LossSettings  # noqa: E402
from monarch_rl.trainer.objective import LossFunction, Sums, evaluate_loss, loss_function  # noqa: E402
from monarch_rl.trainer.token_logprobs import TokenLogprobs  # noqa: E402
from monarch_rl.trainer.token_records import begin_notes, note_pass, token_records  # noqa: E402
from tests.trainer.batches import batch  # noqa: E402
from tests.trainer.test_branches import random_rollout  # noqa: E402

CPU = torch.device("cpu")
VERSION, DISCOUNT = 3, 0.9
ALL = LoggedGroups(3, 3)
BOUNDED = PPOClip(clip_low=0.2, clip_high=0.28)


def old_of(engine: torch.Tensor) -> torch.Tensor:
    """Log-probs at the start of the step, by the engine's: any function of them will do."""
    return engine + 0.3 * torch.sin(37 * engine)


def new_of(engine: torch.Tensor, number: int) -> torch.Tensor:
    """Log-probs in pass ``number``."""
    return old_of(engine) + 0.4 * torch.sin((91 + number) * engine)


def entropies_of(engine: torch.Tensor, number: int) -> torch.Tensor:
    return engine.abs() + number


def groups_of_a_batch() -> list[Group]:
    """Three groups, whose tokens the versions 1 to 3 sampled."""
    groups = batch(VERSION)
    for group in groups:
        group.attempt = 5
        for place, episode in enumerate(group.episodes):
            (turn,) = episode.turns
            sampled = np.flatnonzero(turn.trainable)
            turn.policy_versions[sampled] = VERSION
            turn.policy_versions[sampled[: len(sampled) // 2]] = 1 + place % 2
    return groups


def shards_of(
    groups: Sequence[Group], ranks: int = 1, minibatches: int = 1, oldest: int | None = None
) -> list[PackedShard]:
    packed = [SerializedGroup.read(serialize_group(group)) for group in groups]
    tokens = np.asarray([sum(group.trainable for group in packed)])
    return cut(Batch(VERSION, packed, oldest, tokens), ShardPlan(ranks, 60, minibatches=minibatches))


def trained(
    shard: PackedShard, objective: LossFunction, logged: LoggedGroups, advantage: Advantage = dr_grpo, epochs: int = 1
) -> tuple[list[TokenRecord], list[MicroBatch]]:
    """The records of a rank's passes, with made-up log-probs in place of a model's."""
    advantages = advantages_of(group_views(shard), advantage)
    minibatches = pack_shard(shard, advantages, "token_mean", 10, CPU)
    begin_notes(shard, minibatches, logged)
    batches = list(chain.from_iterable(minibatches))
    for number in range(epochs):
        for each in batches:
            engine = each.behaviour_logprobs
            each.columns["old"] = old_of(engine)
            new = new_of(engine, number).requires_grad_()
            output = TokenLogprobs(new, entropies_of(engine, number), torch.ones_like(engine))
            finite, kept, left_out = finite_only(output, each)
            evaluate_loss(objective, finite, kept)[0].backward()
            if each.notes is not None:
                note_pass(each, output, kept, left_out.kept)
    return token_records(shard, minibatches, advantages, logged), batches


def check(
    record: TokenRecord,
    episode: Episode,
    weight: float,
    number: int = 0,
    oldest: int = 0,
    correction: Correction | None = None,
    mask: SequenceMask | None = None,
) -> int:
    """Compare a record with a plain computation, token by token. Returns the union of its flags."""
    places = np.flatnonzero(episode.sampled)
    engine = torch.from_numpy(episode.logprobs[places])
    computed = old_of(engine), new_of(engine, number), entropies_of(engine, number)
    old, new, entropies = (values.numpy() for values in computed)
    versions = episode.policy_versions[places]
    ratio = np.exp(old - engine.numpy())
    dropped = mask is not None and not mask.low <= np.exp(np.log(ratio[versions >= oldest]).mean()) <= mask.high
    flags: list[int] = []
    for token, version in enumerate(versions.tolist()):
        if version < oldest or not engine.isfinite().all():
            flags.append(TokenFlag.MASKED)
            assert record.arrays["weights"][token] == 0
            assert version >= oldest or np.isnan(record.arrays["trainer_logprobs"][token])
            continue
        clipped = not 0.8 <= np.exp(new[token] - old[token]) <= 1.28
        importance, truncated = 1.0, False
        if isinstance(correction, TIS):
            importance, truncated = min(ratio[token], correction.cap), ratio[token] > correction.cap
        elif isinstance(correction, IcePop):
            truncated = not correction.low <= ratio[token] <= correction.high
            importance = 0.0 if truncated else ratio[token]
        expected = 0.0 if dropped else weight * importance * DISCOUNT ** (VERSION - version)
        flags.append(clipped + 2 * (np.abs(importance - 1) > 1e-3) + 4 * truncated + 8 * (expected == 0))
        assert record.arrays["weights"][token] == pytest.approx(expected, rel=1e-5)
    trains = versions >= oldest
    for name, values in (("trainer_logprobs", old), ("new_logprobs", new), ("entropies", entropies)):
        np.testing.assert_allclose(record.arrays[name], np.where(trains, values, np.nan), rtol=1e-6)
    assert record.arrays["flags"].tolist() == flags
    assert [name for name, values in record.arrays.items() if values.dtype != np.float32] == ["flags"]
    assert record.arrays["flags"].dtype == np.uint8
    return int(np.bitwise_or.reduce(np.asarray(flags, np.uint8)))


def by_episode(records: Sequence[TokenRecord]) -> dict[tuple[int, int], TokenRecord]:
    found = {(record.group_id, record.place): record for record in records}
    assert len(found) == len(records)
    return found


CORRECTIONS: dict[str, tuple[Correction, ...]] = {
    "none": (),
    "tis": (TIS(cap=1.1),),
    "icepop and sequence mask": (IcePop(low=0.8, high=1.2), SequenceMask(low=0.99, high=1.1)),
}


@pytest.mark.parametrize("corrections", CORRECTIONS.values(), ids=CORRECTIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_values_and_flags_are_those_of_a_plain_computation(corrections: tuple[Correction, ...], ranks: int) -> None:
    """In several micro-batches, mini-batches and epochs; tokens of version 1 are too old; each of two data ranks has
    the records of its own sequences."""
    groups = groups_of_a_batch()
    settings = LossSettings(corrections=corrections, lag_discount=DISCOUNT, aggregation="token_mean")
    shards = shards_of(groups, ranks, minibatches=2, oldest=2)
    records = []
    for shard in shards:
        of_rank, batches = trained(shard, loss_function(BOUNDED, settings), ALL, epochs=2)
        assert len(batches) > 2 or ranks > 1
        assert {(one.group_id, one.place) for one in of_rank} == {
            (group, place) for group, place, _ in chain.from_iterable(shard.places)
        }
        records += of_rank
    found, flags = by_episode(records), 0
    assert len(found) == sum(len(group.episodes) for group in groups)
    for number, group in enumerate(groups):
        weight = 1 / shards[0].minibatches[0 if number < 1 else 1].trainable_tokens
        advantages = group.rewards - group.rewards.mean()
        for place, episode in enumerate(group.episodes):
            record = found[number, place]
            assert (record.step, record.attempt) == (VERSION + 1, 5)
            assert record.advantage == pytest.approx(advantages[place], abs=1e-6)
            np.testing.assert_allclose(record.arrays["advantages"], advantages[place], atol=1e-6)
            correction, mask = (*corrections, None, None)[:2]
            flags |= check(record, episode, weight, 1, 2, correction, mask if isinstance(mask, SequenceMask) else None)
    every = TokenFlag.CLIPPED | TokenFlag.MASKED
    assert flags == (every | TokenFlag.CORRECTED | TokenFlag.TRUNCATED if corrections else every)


def test_only_logged_groups_have_records_and_others_cost_nothing() -> None:
    groups = groups_of_a_batch()
    (shard,) = shards_of(groups)
    objective = loss_function(BOUNDED, LossSettings())
    logged = LoggedGroups(1, 3, seed=4)
    records, batches = trained(shard, objective, logged)
    (group,) = {record.group_id for record in records}
    assert group in logged and len(records) == len(groups[group].episodes)
    for places, each in zip(shard.places, batches, strict=True):
        assert (each.notes is None) == (group not in {number for number, _, _ in places})
    assert any(each.notes is None for each in batches)
    records, batches = trained(shard, objective, NOT_LOGGED)
    assert not records and all(each.notes is None for each in batches)


def test_sequences_that_are_not_finite_are_masked_in_the_record() -> None:
    """Their log-probs stay, where they are known; others of their micro-batch keep their values."""
    groups = groups_of_a_batch()
    turn = groups[1].episodes[2].turns[0]
    spoiled = np.flatnonzero(turn.trainable)[0]
    turn.logprobs[spoiled] = np.nan
    (shard,) = shards_of(groups)
    settings = LossSettings(corrections=(TIS(cap=1.1),), lag_discount=DISCOUNT)
    found = by_episode(trained(shard, loss_function(BOUNDED, settings), ALL)[0])
    for (group, place), record in found.items():
        flags = check(record, groups[group].episodes[place], 1 / shard.trainable_tokens, correction=TIS(cap=1.1))
        assert (flags == TokenFlag.MASKED) == ((group, place) == (1, 2))


def test_a_forked_sequence_has_the_tokens_after_its_fork() -> None:
    """Tokens that branches share are recorded once, in the sequence that trains them."""
    rng = random.Random(5)
    rollouts = [random_rollout(rng)[0] for _ in range(3)]
    episodes = [replace(episode, rollout=number) for number, each in enumerate(rollouts) for episode in each]
    assert sum(episode.fork is not None for episode in episodes) > 1
    (shard,) = shards_of([Group(0, 0, episodes)])
    settings = LossSettings(corrections=(), lag_discount=DISCOUNT)
    found = by_episode(trained(shard, loss_function(BOUNDED, settings), ALL)[0])
    for place, episode in enumerate(episodes):
        check(found[0, place], episode, 1 / shard.trainable_tokens)
        assert len(found[0, place].arrays["flags"]) == shard.lengths[0][place]
    assert sum(len(record.arrays["flags"]) for record in found.values()) == shard.trainable_tokens


def test_advantages_per_token_are_recorded_also_for_masked_tokens() -> None:
    groups = groups_of_a_batch()
    (shard,) = shards_of(groups, oldest=2)

    def numbered(group: GroupView) -> PerToken:
        return PerToken([torch.arange(int(length)).float() for length in group.lengths])

    records, _ = trained(shard, loss_function(BOUNDED, LossSettings()), ALL, numbered)
    for record in records:
        n = len(record.arrays["flags"])
        assert record.arrays["advantages"].tolist() == list(range(n))
        assert record.advantage == pytest.approx((n - 1) / 2)
    assert any(record.arrays["flags"][0] == TokenFlag.MASKED for record in records)


def part_only(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """A recipe's objective that applies another one to every second token."""
    part = slice(None, None, 2)
    fields: Any = {
        name: getattr(batch, name)[part]
        for name in ("weights", "advantages", "behaviour_logprobs", "lags", "sequences")
    }
    columns = type(batch.columns)({name: values[part] for name, values in batch.columns.items()})
    inner = loss_function(BOUNDED, LossSettings())
    return inner(output.each(lambda values: values[part]), replace(batch, columns=columns, **fields))


def plain(output: TokenLogprobs, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """A recipe's objective that notes nothing."""
    loss = -output.logprobs * batch.advantages * batch.weights
    return loss.sum(), {"tokens": torch.ones_like(loss).sum()}


@pytest.mark.parametrize("objective", [plain, part_only])
def test_an_objective_without_notes_of_all_tokens_has_the_weights_of_the_aggregation(objective: LossFunction) -> None:
    (shard,) = shards_of(groups_of_a_batch(), oldest=2)
    records, _ = trained(shard, objective, ALL)
    for record in records:
        masked = record.arrays["flags"] == TokenFlag.MASKED
        assert masked.tolist() == np.isnan(record.arrays["trainer_logprobs"]).tolist()
        assert not record.arrays["flags"][~masked].any()
        np.testing.assert_allclose(record.arrays["weights"][~masked], 1 / shard.minibatches[0].trainable_tokens)

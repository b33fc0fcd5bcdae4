"""The training of a sampled token that several branches share, from the rollout to the gradient."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.algorithms.group_view import GroupView  # noqa: E402
from monarch_rl.algorithms.losses import Aggregation  # noqa: E402
from monarch_rl.algorithms.returns import branch_means  # noqa: E402
from monarch_rl.buffer.groups import Batch  # noqa: E402
from monarch_rl.buffer.shards import ShardPlan, cut  # noqa: E402
from monarch_rl.episode.episode import Episode, Group, Turn  # noqa: E402
from monarch_rl.episode.group_bound import UNBOUNDED  # noqa: E402
from monarch_rl.episode.sampling import Completion  # noqa: E402
from monarch_rl.episode.serialization import SerializedGroup, serialize_group  # noqa: E402
from monarch_rl.rollout.branches import Branches, Line  # noqa: E402
from monarch_rl.rollout.sequences import outcomes_of, sequences  # noqa: E402
from monarch_rl.trainer.advantages import advantages_of, group_views  # noqa: E402
from monarch_rl.trainer.batch import MicroBatch, pack, pack_shard  # noqa: E402
from tests.episode.trees import VOCABULARY  # noqa: E402
from tests.trainer.test_shared_prefix import CPU, GRADIENT_BOUND, computed, model  # noqa: E402


class StubConversation:
    """A conversation's ids, and how many tokens of a turn that ends at a length were sampled."""

    def __init__(self, ids: list[int], turns: dict[int, int], begun: int = 0) -> None:
        self.ids, self.turns, self.begun = ids, turns, begun
        self.numbers = itertools.count(1)
        self.messages: list[Any] = []

    def sampled(self, length: int) -> range:
        return range(self.turns[length])

    def fork(self, length: int | None = None, tokens: int | None = None) -> StubConversation:
        if length is None:
            fork = StubConversation(list(self.ids), dict(self.turns), self.begun)
        else:
            length -= 0 if tokens is None else self.turns[length] - tokens
            fork = StubConversation(
                self.ids[:length], {end: n for end, n in self.turns.items() if end <= length}, tokens or 0
            )
        fork.numbers = self.numbers
        return fork


def sample_turn(line: Any, rng: random.Random) -> None:
    n, begun = rng.randint(1, 4), line.conversation.begun
    context = [] if begun else [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
    ids = np.asarray([rng.randrange(VOCABULARY) for _ in range(n)])
    logprobs = np.asarray([-(97 * next(line.conversation.numbers) % 301) / 100 for _ in range(n)], np.float32)
    turn = Turn.from_completion(context, Completion(ids, logprobs, np.zeros(n, np.int32), "stop"))
    line.conversation.ids += turn.token_ids.tolist()
    line.conversation.turns[len(line.conversation.ids)] = begun + n
    line.conversation.begun = 0
    line.turns.append(line.complete_partial_turn(turn) if line.begun else turn)
    line.finish_reasons.append("stop")
    line.answers.append("")


def random_rollout(rng: random.Random) -> tuple[list[Episode], list[Episode]]:
    """The sequences of a random rollout, and the same sequences without sharing: each with all of its own turns
    trained."""
    root: Any = StubConversation([], {})
    branches = Branches(Line(root, 0.0), UNBOUNDED)
    for _ in range(rng.randint(1, 8)):
        branch = rng.choice(branches.all)
        if branch.turns and rng.random() < 0.5:
            turns = rng.randint(1, branch.turns)
            sampled = branch.lines[""].turn_length(turns - 1)
            tokens = rng.randint(1, sampled - 1) if sampled > 1 and rng.random() < 0.5 else None
            branches.fork(branch, rng.choice([None, turns]) if tokens is None else turns, tokens)
        else:
            sample_turn(branch.lines[""], rng)
            branch.turns += 1
    for leaf in branches.leaves:
        if not leaf.turns:
            sample_turn(leaf.lines[""], rng)
            leaf.turns += 1
    values = [float(rng.randint(0, 4)) for _ in branches.leaves]
    shared = sequences(branches, outcomes_of(values if len(branches.all) > 1 else values[0], branches), False)
    separate = [
        replace(sequence, turns=leaf.lines[""].turns, fork=None)
        for sequence, leaf in zip(shared, branches.leaves, strict=True)
    ]
    return shared, separate


def sampled_tokens(sequence: Episode) -> list[tuple[int, float]]:
    """Each token by its place and its log-prob, which no other token of the rollout has."""
    return [(int(place), float(sequence.logprobs[place])) for place in np.flatnonzero(sequence.trainable)]


def shared_by(rollout: list[Episode]) -> list[np.ndarray]:
    """For each separate sequence, float32[trainable]: how many sequences of the rollout share the token."""
    tokens = [set(sampled_tokens(sequence)) for sequence in rollout]
    return [np.asarray([sum(t in one for one in tokens) for t in sampled_tokens(s)], np.float32) for s in rollout]


def summed(batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for batch in batches:
        if len(batch.targets):
            for name, grad in computed(model("dense"), batch, True, others=False)[1].items():
                total[name] = total[name] + grad if name in total else grad
    return total


def centred(group: GroupView) -> torch.Tensor:
    return group.rewards - group.rewards.mean()


@settings(max_examples=40, deadline=None)
@given(rng=st.randoms(use_true_random=False), ranks=st.integers(1, 2), budget=st.sampled_from([60, 400]))
def test_shared_tokens_have_the_gradient_of_the_mean_advantage_and_count_once(
    rng: random.Random, ranks: int, budget: int
) -> None:
    """However a group is split into micro-batches and ranks: against separate episodes, in which each shared token is
    weighted by one over the number of episodes that share it."""
    rollouts = [random_rollout(rng) for _ in range(rng.randint(1, 3))]
    episodes = [replace(e, rollout=number) for number, (shared, _) in enumerate(rollouts) for e in shared]
    packed = SerializedGroup.read(serialize_group(Group(0, 0, episodes)))
    sampled = [{token for e in separate for token in sampled_tokens(e)} for _, separate in rollouts]
    assert packed.trainable == sum(map(len, sampled))  # the buffer, its lags and token_mean count each once
    shards = cut(
        Batch(0, [packed], None, np.asarray([packed.trainable])), ShardPlan(ranks, max(budget, longest(episodes)))
    )
    aggregation: Aggregation = rng.choice(["constant", "token_mean"])
    advantages = advantages_of(group_views(shards[0]), centred)
    ours = [
        batch
        for shard in shards
        for minibatch in pack_shard(shard, advantages, aggregation, 10, CPU)
        for batch in minibatch
    ]
    assert sum(len(batch.weights) for batch in ours) == packed.trainable

    separate = [sequence for _, of_rollout in rollouts for sequence in of_rollout]
    values = torch.tensor([sequence.reward for sequence in separate])
    weight = 1 / packed.trainable if aggregation == "token_mean" else 1 / (10 * len(separate))
    theirs = pack(separate, values - values.mean(), torch.full((len(separate),), weight), 0, CPU)
    theirs.weights /= torch.from_numpy(np.concatenate([m for _, of_rollout in rollouts for m in shared_by(of_rollout)]))
    check_close(summed(ours), summed([theirs]))


def longest(episodes: list[Episode]) -> int:
    return max(episode.num_tokens for episode in episodes)


def check_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() and theirs
    total = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    for name, expected in theirs.items():
        # Where advantages cancel, only rounding errors remain.
        assert (ours[name] - expected).norm() <= GRADIENT_BOUND * max(expected.norm(), 1e-2 * total) + 1e-5, name


@given(rng=st.randoms(use_true_random=False))
def test_means_are_over_the_branches_that_share_a_turn(rng: random.Random) -> None:
    shared, separate = random_rollout(rng)
    values = torch.tensor([rng.random() for _ in shared])
    means = branch_means(values, [sequence.fork for sequence in shared], [len(s.turns) for s in shared])
    for place, sequence in enumerate(shared):
        ends = np.cumsum([len(turn.token_ids) for turn in sequence.turns])
        for turn in range(0 if sequence.fork is None else sequence.fork.turns, len(sequence.turns)):
            last = int(ends[turn]) - 1, float(sequence.logprobs[ends[turn] - 1])
            sharing = [last in sampled_tokens(other) for other in separate]
            torch.testing.assert_close(means[place][turn], values[torch.tensor(sharing)].mean())


def test_values_per_turn_are_used_unchanged() -> None:
    """An advantage that returns values per turn also sets the values of shared turns."""
    from monarch_rl.algorithms.group_view import PerTurn

    shared, _ = random_rollout(random.Random(3))
    packed = SerializedGroup.read(serialize_group(Group(0, 0, [replace(copy.copy(e), rollout=0) for e in shared])))
    (shard,) = cut(Batch(0, [packed], None, np.asarray([packed.trainable])), ShardPlan(1, 400))

    def numbered(group: GroupView) -> PerTurn:
        return PerTurn([torch.arange(len(turns)).float() for turns in group.turn_lengths])

    ((first, *_),) = advantages_of(group_views(shard), numbered)
    assert first.tolist() == [turn for turn, t in enumerate(shared[0].turns) for _ in range(int(t.trainable.sum()))]

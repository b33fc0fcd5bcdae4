"""What a drawn token that several branches begin with is trained with, from the play to the gradient."""

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


class Opening:
    """Stands for a conversation: its ids, and how many of a turn that ends after so many were drawn."""

    def __init__(self, ids: list[int], turns: dict[int, int], begun: int = 0) -> None:
        self.ids, self.turns, self.begun = ids, turns, begun
        self.numbers = itertools.count(1)
        self.messages: list[Any] = []

    def sampled(self, length: int) -> range:
        return range(self.turns[length])

    def fork(self, length: int | None = None, tokens: int | None = None) -> Opening:
        if length is None:
            fork = Opening(list(self.ids), dict(self.turns), self.begun)
        else:
            length -= 0 if tokens is None else self.turns[length] - tokens
            fork = Opening(self.ids[:length], {end: n for end, n in self.turns.items() if end <= length}, tokens or 0)
        fork.numbers = self.numbers
        return fork


def draw_turn(line: Any, draws: random.Random) -> None:
    n, begun = draws.randint(1, 4), line.conversation.begun
    context = [] if begun else [draws.randrange(VOCABULARY) for _ in range(draws.randint(1, 4))]
    ids = np.asarray([draws.randrange(VOCABULARY) for _ in range(n)])
    logprobs = np.asarray([-(97 * next(line.conversation.numbers) % 301) / 100 for _ in range(n)], np.float32)
    turn = Turn.from_completion(context, Completion(ids, logprobs, np.zeros(n, np.int32), "stop"))
    line.conversation.ids += turn.token_ids.tolist()
    line.conversation.turns[len(line.conversation.ids)] = begun + n
    line.conversation.begun = 0
    line.turns.append(line.complete_partial_turn(turn) if line.begun else turn)
    line.finish_reasons.append("stop")
    line.answers.append("")


def a_play(draws: random.Random) -> tuple[list[Episode], list[Episode]]:
    """The sequences of a random play, and those that it would be without sharing: each with all of its own turns
    trained."""
    root: Any = Opening([], {})
    branches = Branches(Line(root, 0.0), UNBOUNDED)
    for _ in range(draws.randint(1, 8)):
        branch = draws.choice(branches.all)
        if branch.turns and draws.random() < 0.5:
            turns = draws.randint(1, branch.turns)
            drawn = branch.lines[""].turn_length(turns - 1)
            tokens = draws.randint(1, drawn - 1) if drawn > 1 and draws.random() < 0.5 else None
            branches.fork(branch, draws.choice([None, turns]) if tokens is None else turns, tokens)
        else:
            draw_turn(branch.lines[""], draws)
            branch.turns += 1
    for leaf in branches.leaves:
        if not leaf.turns:
            draw_turn(leaf.lines[""], draws)
            leaf.turns += 1
    values = [float(draws.randint(0, 4)) for _ in branches.leaves]
    played = sequences(branches, outcomes_of(values if len(branches.all) > 1 else values[0], branches), False)
    separate = [
        replace(sequence, turns=leaf.lines[""].turns, fork=None)
        for sequence, leaf in zip(played, branches.leaves, strict=True)
    ]
    return played, separate


def drawn_tokens(sequence: Episode) -> list[tuple[int, float]]:
    """Each by its place and its log-prob, which no other token of the play has."""
    return [(int(place), float(sequence.logprobs[place])) for place in np.flatnonzero(sequence.trainable)]


def shared_by(play: list[Episode]) -> list[np.ndarray]:
    """For each separate sequence, float32[trainable]: how many of the play begin with the token."""
    alike = [set(drawn_tokens(sequence)) for sequence in play]
    return [np.asarray([sum(t in one for one in alike) for t in drawn_tokens(s)], np.float32) for s in play]


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
@given(draws=st.randoms(use_true_random=False), ranks=st.integers(1, 2), budget=st.sampled_from([60, 400]))
def test_shared_tokens_have_the_gradient_of_the_mean_advantage_and_count_once(
    draws: random.Random, ranks: int, budget: int
) -> None:
    """However a group is cut into micro-batches and ranks: against separate episodes, each of whose shared tokens
    weighs as one of as many as share it."""
    plays = [a_play(draws) for _ in range(draws.randint(1, 3))]
    episodes = [replace(e, rollout=number) for number, (played, _) in enumerate(plays) for e in played]
    packed = SerializedGroup.read(serialize_group(Group(0, 0, episodes)))
    drawn = [{token for e in separate for token in drawn_tokens(e)} for _, separate in plays]
    assert packed.trainable == sum(map(len, drawn))  # the buffer, its lags and token_mean count each once
    shards = cut(
        Batch(0, [packed], None, np.asarray([packed.trainable])), ShardPlan(ranks, max(budget, longest(episodes)))
    )
    aggregation: Aggregation = draws.choice(["constant", "token_mean"])
    advantages = advantages_of(group_views(shards[0]), centred)
    ours = [
        batch
        for shard in shards
        for minibatch in pack_shard(shard, advantages, aggregation, 10, CPU)
        for batch in minibatch
    ]
    assert sum(len(batch.weights) for batch in ours) == packed.trainable

    separate = [sequence for _, of_play in plays for sequence in of_play]
    values = torch.tensor([sequence.reward for sequence in separate])
    weight = 1 / packed.trainable if aggregation == "token_mean" else 1 / (10 * len(separate))
    theirs = pack(separate, values - values.mean(), torch.full((len(separate),), weight), 0, CPU)
    theirs.weights /= torch.from_numpy(np.concatenate([m for _, of_play in plays for m in shared_by(of_play)]))
    check_close(summed(ours), summed([theirs]))


def longest(episodes: list[Episode]) -> int:
    return max(episode.num_tokens for episode in episodes)


def check_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() and theirs
    total = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    for name, expected in theirs.items():
        # Where advantages cancel, only their rounding is left.
        assert (ours[name] - expected).norm() <= GRADIENT_BOUND * max(expected.norm(), 1e-2 * total) + 1e-5, name


@given(draws=st.randoms(use_true_random=False))
def test_means_are_over_the_branches_that_begin_with_a_turn(draws: random.Random) -> None:
    played, separate = a_play(draws)
    values = torch.tensor([draws.random() for _ in played])
    means = branch_means(values, [sequence.fork for sequence in played], [len(s.turns) for s in played])
    for place, sequence in enumerate(played):
        ends = np.cumsum([len(turn.token_ids) for turn in sequence.turns])
        for turn in range(0 if sequence.fork is None else sequence.fork.turns, len(sequence.turns)):
            last = int(ends[turn]) - 1, float(sequence.logprobs[ends[turn] - 1])
            alike = [last in drawn_tokens(other) for other in separate]
            torch.testing.assert_close(means[place][turn], values[torch.tensor(alike)].mean())


def test_values_of_turns_are_taken_as_they_are() -> None:
    """An advantage that says what each turn is worth says it for shared turns, too."""
    from monarch_rl.algorithms.group_view import PerTurn

    played, _ = a_play(random.Random(3))
    packed = SerializedGroup.read(serialize_group(Group(0, 0, [replace(copy.copy(e), rollout=0) for e in played])))
    (shard,) = cut(Batch(0, [packed], None, np.asarray([packed.trainable])), ShardPlan(1, 400))

    def numbered(group: GroupView) -> PerTurn:
        return PerTurn([torch.arange(len(turns)).float() for turns in group.turn_lengths])

    ((first, *_),) = advantages_of(group_views(shard), numbered)
    assert first.tolist() == [turn for turn, t in enumerate(played[0].turns) for _ in range(int(t.trainable.sum()))]

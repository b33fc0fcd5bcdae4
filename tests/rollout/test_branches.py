"""Seats and branches of an episode: whatever its shape, its sequences are what the engine saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import ContextFull, GroupFull
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.rollout.settings import RolloutSettings, check_rollout
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.task import Outcome, Policy, Task
from tests.rollout.helpers import CHARACTERS

SETTINGS = RolloutSettings(episode_deadline_s=0.2)


@dataclass
class Engine:
    """Generates random ids. The version of a token is the number of the call that sampled it, which identifies its
    origin."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seen: list[list[int]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    asked: list[Sampling] = field(default_factory=list)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        prompt_ids, call = list(prompt_ids), len(self.seen)
        self.seen.append(prompt_ids)
        self.asked.append(sampling)
        n = self.rng.randint(1, sampling.max_new_tokens)
        ids = np.asarray([self.rng.randrange(len(CHARACTERS)) for _ in range(n)])
        logprobs = np.asarray([-self.rng.random() for _ in range(n)], np.float32)
        routes = None
        if sampling.expert_routes_from is not None:
            rows = len(prompt_ids) + n - 1 - sampling.expert_routes_from
            routes = np.full((rows, 1, 1), call, np.uint8)
        reason = "stop" if n < sampling.max_new_tokens else "length"
        self.completions.append(Completion(ids, logprobs, np.full(n, call), reason, expert_routes=routes))
        await asyncio.sleep(self.rng.random())  # virtual seconds: turns end in any order
        return self.completions[call]


def run_episode(
    engine: Any,
    template: ChatTemplate,
    episode: Any,
    sampling: Sampling | None = None,
    limit: int | None = None,
    share: GroupBound | None = None,
) -> list[Episode]:
    runner = EpisodeRunner(engine, template, SETTINGS, None, limit)
    task = Task(lambda cursor: cursor, episode)
    return run_virtual(runner.play(task, 7, "", sampling or Sampling(6), 0, share or UNBOUNDED))


def failure(engine: Any, template: ChatTemplate, episode: Any, share: GroupBound | None = None) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as failed:
        run_episode(engine, template, episode, share=share)
    return failed.value


@pytest.fixture
def template(model: str) -> ChatTemplate:
    return ChatTemplate(model)


# ---- returned values -----------------------------------------------------------------------------------------


def test_each_seat_is_a_sequence_with_its_own_conversation_and_reward(template: ChatTemplate) -> None:
    engine = Engine()

    async def episode(item: Any, policy: Policy) -> dict[str, Any]:
        white, black = policy.seat("white"), policy.seat("black")
        answer = "begin"
        for player in (white, black, white):
            answer = (await player.reply(f"they answered {answer}")).text
        assert policy.seat("white")._line is white._line  # type: ignore[attr-defined]
        return {"white": {"won": 1.0, "fast": 0.5}, "black": Outcome(-1.0, info={"why": "lost"})}

    white, black = run_episode(engine, template, episode)
    assert (white.seat, white.reward, white.parts) == ("white", 1.5, {"won": 1.0, "fast": 0.5})
    assert (black.seat, black.reward, black.info) == ("black", -1.0, {"why": "lost"})
    assert white.fork is None and black.fork is None
    for sequence, calls in ((white, [0, 2]), (black, [1])):
        assert [turn.policy_versions[-1] for turn in sequence.turns] == calls
        last = calls[-1]
        assert sequence.token_ids.tolist() == engine.seen[last] + engine.completions[last].token_ids.tolist()
    assert engine.seen[2][: white.turns[0].token_ids.size] == white.turns[0].token_ids.tolist()


def test_seats_without_a_turn_count_only_if_no_seat_has_one(template: ChatTemplate) -> None:
    """The other player may be an opponent, for which a seat was requested, too."""

    async def lost(item: Any, policy: Policy) -> dict[str, float]:
        policy.seat("white")
        return {"white": -1.0}

    (white,) = run_episode(Engine(), template, lost)
    assert (white.seat, white.turns, white.reward) == ("white", [], -1.0)

    async def played(item: Any, policy: Policy) -> dict[str, float]:
        policy.seat("black")
        await policy.seat("white").reply("x")
        return {"white": 1.0, "black": -1.0}

    assert [(one.seat, one.reward) for one in run_episode(Engine(), template, played)] == [("white", 1.0)]


def test_a_single_reward_applies_to_every_seat_and_a_mapping_without_seats_holds_parts(template: ChatTemplate) -> None:
    async def together(item: Any, policy: Policy) -> float:
        await policy.seat("a").reply("x")
        await policy.seat("b").reply("x")
        policy.seat("c")  # never generated: no sequence
        return 0.5

    assert [(s.seat, s.reward) for s in run_episode(Engine(), template, together)] == [("a", 0.5), ("b", 0.5)]

    async def parts(item: Any, policy: Policy) -> dict[str, float]:
        await policy.reply("x")
        return {"white": 1.0, "black": -1.0}

    (alone,) = run_episode(Engine(), template, parts)
    assert (alone.seat, alone.reward, alone.parts) == ("", 0.0, {"white": 1.0, "black": -1.0})


def test_a_policy_that_replies_besides_its_seats_is_an_unnamed_seat(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        await policy.reply("x")
        await policy.seat("critic").reply("y")
        return {"": 1.0, "critic": 0.0}

    assert [(s.seat, s.reward) for s in run_episode(Engine(), template, episode)] == [("", 1.0), ("critic", 0.0)]


def test_each_branch_has_its_own_value_and_starts_with_the_shared_tokens(template: ChatTemplate) -> None:
    engine = Engine()

    async def episode(item: Any, policy: Policy) -> Any:
        await policy.reply("start")
        branches = [policy.fork() for _ in range(3)]
        await asyncio.gather(*(branch.reply("go on") for branch in branches))
        return [1.0, {"half": 0.5}, Outcome(0.0)]

    first, second, third = run_episode(engine, template, episode)
    assert [first.reward, second.reward, third.reward] == [1.0, 0.5, 0.0]
    assert first.fork is None and second.fork == third.fork == (0, 1)
    assert first.turns[0].trainable.any() and not second.turns[0].trainable.any()
    assert len({tuple(s.turns[0].token_ids) for s in (first, second, third)}) == 1


def test_a_forked_policy_is_a_branch_only_if_it_generates_after_the_fork(template: ChatTemplate) -> None:
    async def both_reply(item: Any, policy: Policy) -> list[float]:
        await policy.reply("start")
        fork = policy.fork()
        await fork.reply("a")
        await policy.reply("b")
        return [0.0, 1.0]

    trunk, fork = run_episode(Engine(), template, both_reply)
    assert (trunk.reward, fork.reward) == (0.0, 1.0)
    assert [turn.policy_versions[-1] for turn in trunk.turns] == [0, 2] and fork.fork is not None

    async def by_policy(item: Any, policy: Policy) -> dict[Policy, float]:
        await policy.reply("start")
        left, right = policy.fork(), policy.fork()
        await left.reply("a")
        twigs = [right.fork(), right.fork()]
        await asyncio.gather(*(twig.reply("b") for twig in twigs))
        return {twigs[1]: 3.0, twigs[0]: 2.0, left: 1.0}

    assert [sequence.reward for sequence in run_episode(Engine(), template, by_policy)] == [1.0, 2.0, 3.0]


def test_a_fork_copies_all_seats(template: ChatTemplate) -> None:
    engine = Engine()

    async def episode(item: Any, policy: Policy) -> Any:
        white = policy.seat("white")
        await white.reply("e4?")
        await policy.seat("black").reply("e5?")
        forks = [white.fork() for _ in range(2)]
        for fork in forks:
            await fork.reply("Nf3?")
        return [{"white": 1.0, "black": -1.0}, {"white": -1.0, "black": 1.0}]

    rollout = run_episode(engine, template, episode)
    assert [(s.seat, s.reward) for s in rollout] == [("white", 1), ("black", -1), ("white", -1), ("black", 1)]
    assert [s.fork and s.fork.sequence for s in rollout] == [None, None, 0, 1]
    assert not rollout[3].trainable.any()  # no tokens sampled after the fork; its value counts in the mean
    assert rollout[3].token_ids.tolist() == rollout[1].token_ids.tolist()


def test_a_policy_can_be_forked_at_an_earlier_turn(template: ChatTemplate) -> None:
    engine = Engine()

    async def episode(item: Any, policy: Policy) -> Any:
        for message in ("a", "b", "c"):
            await policy.reply(message)
        policy.read("left out")
        again = policy.fork(turns=1)
        await again.reply("d")
        for wrong in (0, 4):
            with pytest.raises(ValueError, match="turns must be 1 to "):
                policy.fork(turns=wrong)
        return [0.0, 1.0]

    whole, again = run_episode(engine, template, episode)
    first = whole.turns[0].token_ids.tolist()
    assert again.fork == (0, 1) and [len(s.turns) for s in (whole, again)] == [3, 2]
    assert template.plain(again.token_ids.tolist()) == template.plain(first) + "d" + template.plain(
        engine.completions[3].token_ids.tolist()
    )


def test_a_fork_in_the_middle_of_a_turn_continues_it(template: ChatTemplate) -> None:
    """It is given the turn's message, or nothing; its reply is the whole turn."""
    engine, replies = Engine(random.Random(5)), list[Any]()

    async def episode(item: Any, policy: Policy) -> Any:
        policy.read("a")
        whole = await policy.reply("b", max_new_tokens=6)
        n = policy.turn_lengths[0]
        assert n == len(whole.token_ids) > 3
        forks = [policy.fork(tokens=2), policy.fork(turns=1, tokens=3)]
        twig = forks[1].fork()
        assert [fork.turns for fork in forks] == [0, 0] and forks[1].sampled_tokens == 3
        with pytest.raises(ValueError, match="before that turn"):
            await twig.reply("c")
        with pytest.raises(ValueError, match=f"1 to {n - 1}"):
            policy.fork(tokens=n)
        with pytest.raises(ValueError, match="above 3"):
            await twig.reply(max_new_tokens=3)
        replies.append(whole)
        replies.append(await forks[0].reply("b"))
        replies.append(await twig.reply())
        assert twig.turns == 1 and twig.turn_lengths == [len(replies[2].token_ids)]
        await twig.reply("d")
        return [0.0, 1.0, 2.0]

    rollout = run_episode(engine, template, episode)
    whole, fork, twig = rollout
    assert [s.fork for s in rollout] == [None, (0, 1), (0, 2)] and [s.reward for s in rollout] == [0.0, 1.0, 2.0]
    assert [len(turn.token_ids) for turn in whole.turns] == [4, 1, len(replies[0].token_ids) - 3]
    for sequence, reply, shared in zip(rollout, replies, (0, 2, 3), strict=True):
        ids = reply.token_ids
        assert sequence.token_ids[2 : 2 + len(ids)].tolist() == ids and reply.text == template.plain(ids)
        assert len(reply.logprobs) == len(ids) and ids[:shared] == replies[0].token_ids[:shared]
        assert sequence.trainable[2 : 2 + len(ids)].tolist() == [False] * shared + [True] * (len(ids) - shared)
        assert sequence.logprobs[2 + shared : 2 + len(ids)].tolist() == reply.logprobs[shared:].tolist()
    assert [len(seen) for seen in engine.seen[:3]] == [2, 4, 5] and engine.asked[2].max_new_tokens == 3


@pytest.mark.parametrize("forks", [0, 1])
@pytest.mark.parametrize("returned", [lambda p: 1.0, lambda p: [1.0], lambda p: {p: 1.0}, lambda p: {"won": 1.0}])
def test_the_value_of_a_single_branch_may_be_alone_in_a_list_or_by_policy(
    template: ChatTemplate, returned: Callable[[Policy], Any], forks: int
) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        for _ in range(forks):
            policy = policy.fork()
        await policy.reply("x")
        return returned(policy)

    (rollout,) = run_episode(Engine(), template, episode)
    assert rollout.reward == 1.0 and set(rollout.parts) <= {"won"}


def test_seats_of_one_branch_are_not_mistaken_for_branches(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        white, black = policy.seat("white"), policy.seat("black")
        for player in (white, black):
            await player.reply("x")
        return {white: 1.0, black: -1.0}

    assert "name its seats, as in {'white': 1.0" in failure(Engine(), template, episode).report


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "one value was returned for 2 branches"),
        ({"won": 1.0}, "one value was returned for 2 branches"),
        ([1.0], "1 values were returned for 2 branches"),
        ([1.0, 2.0, 3.0], "3 values were returned for 2 branches"),
        ([1.0, "much"], "could not convert"),
        ([1.0, float("nan")], "not a finite number"),
    ],
)
def test_values_that_do_not_fit_the_branches_are_refused(template: ChatTemplate, returned: Any, message: str) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        await policy.reply("x")
        for fork in (policy.fork(), policy.fork()):
            await fork.reply("y")
        return returned

    assert message in failure(Engine(), template, episode).report


@pytest.mark.parametrize(
    "returned", [{"white": 1.0}, {"white": 1.0, "black": 0.0, "red": 0.0}, {"won": 1.0}, {"white": 1.0, "black": None}]
)
def test_rewards_that_do_not_fit_the_seats_are_refused(template: ChatTemplate, returned: Any) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        await policy.seat("white").reply("x")
        await policy.seat("black").reply("x")
        return returned

    failed = failure(Engine(), template, episode)
    assert failed.reason == "episode returned an unusable value"
    assert "seats are white, black" in failed.report or "is None" in failed.report


# ---- limits, clocks, seeds -----------------------------------------------------------------------------------


def test_a_seat_or_branch_beyond_the_share_is_refused_with_a_message(template: ChatTemplate) -> None:
    refused = list[str]()

    async def branching(item: Any, policy: Policy) -> Any:
        await policy.reply("x")
        branches = list[Policy]()
        try:
            while True:
                branches.append(policy.fork())
        except GroupFull as error:
            refused.append(str(error))
        for branch in branches:
            await branch.reply("y")
        with pytest.raises(GroupFull, match="forks"):
            await policy.reply("z")
        return [0.0] * len(branches)

    assert len(run_episode(Engine(), template, branching, share=GroupBound(4))) == 4
    (message,) = refused
    assert "another branch" in message and "5 sequences, but may have at most 4" in message
    assert "RolloutSettings.max_sequences" in message

    async def sitting(item: Any, policy: Policy) -> Any:
        for name in ("a", "b", "c"):
            await policy.seat(name).reply("x")
        return 0.0

    assert len(run_episode(Engine(), template, sitting, share=GroupBound(3))) == 3
    failed = failure(Engine(), template, sitting, share=GroupBound(2))
    assert failed.reason == "episode raised GroupFull" and "no room for seat 'c'" in failed.report


@given(
    most=st.integers(10, 100),
    sequences=st.integers(1, 12),
    seed=st.integers(0, 999),
    seats=st.integers(1, 3),
    forks=st.integers(0, 4),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_sequences_of_an_episode_stay_within_its_share(
    template: ChatTemplate, most: int, sequences: int, seed: int, seats: int, forks: int
) -> None:
    """All generate at once, a forked policy beside its forks, until there is no room."""

    async def until_full(policy: Policy) -> None:
        while True:
            try:
                await policy.reply("abc")
            except (ContextFull, GroupFull):
                return

    async def episode(item: Any, policy: Policy) -> Any:
        table = [policy.seat(str(seat)) for seat in range(seats)]
        for seat in table:
            await seat.reply("x", max_new_tokens=1)
        branches = [policy]
        try:
            while len(branches) <= forks:
                branches.append(policy.fork())
        except GroupFull:
            pass
        await asyncio.gather(*(until_full(branch.seat(str(seat))) for branch in branches for seat in range(seats)))
        return {branch: 0.0 for branch in branches if branch.branch.is_leaf} if len(branches) > 1 else 0.0  # type: ignore[attr-defined]

    share = GroupBound(sequences, most)
    try:
        rollout = run_episode(Engine(random.Random(seed)), template, episode, share=share)
    except EpisodeFailed as failed:
        assert failed.reason == "episode raised GroupFull" or ("leaves no room" in failed.reason and most < 20)
        return
    assert share.excess(len(rollout), sum(sequence.num_tokens for sequence in rollout)) is None


@given(most=st.integers(20, 150), long=st.integers(1, 3), seed=st.integers(0, 999), seats=st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_prompt_that_did_not_fit_takes_no_room_from_others(
    template: ChatTemplate, most: int, long: int, seed: int, seats: bool
) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        full, other = (policy.seat("a"), policy.seat("b")) if seats else (policy.fork(), policy.fork())
        await full.reply("x", max_new_tokens=1)
        with pytest.raises(ContextFull):
            await full.reply("y" * most * long)
        with suppress(ContextFull):
            while True:
                await other.reply("next")
        return 0.0 if seats else [0.0, 1.0]

    rollout = run_episode(Engine(random.Random(seed)), template, episode, share=GroupBound(None, most))
    tokens = sum(sequence.num_tokens for sequence in rollout)
    assert len(rollout) == 2 and most - len("next") <= tokens <= most  # no other turn has room


def test_a_forked_policy_counts_from_its_first_turn_after_the_fork(template: ChatTemplate) -> None:
    async def tokens(item: Any, policy: Policy) -> Any:
        await policy.reply("x")
        branches = [policy, policy.fork()]
        await asyncio.gather(*(branch.reply("go on", max_new_tokens=6) for branch in branches))
        return [0.0, 1.0]

    for most in range(15, 60):
        share = GroupBound(None, most)
        try:
            rollout = run_episode(Engine(), template, tokens, share=share)
        except EpisodeFailed as failed:
            assert failed.reason == "episode raised GroupFull"
        else:
            assert share.excess(len(rollout), sum(sequence.num_tokens for sequence in rollout)) is None

    async def branches(item: Any, policy: Policy) -> Any:
        await policy.reply("x")
        fork = policy.fork()
        turn = asyncio.ensure_future(policy.reply("y"))
        await asyncio.sleep(0)
        twig = fork.fork()
        with pytest.raises(GroupFull, match="3 sequences.* 2"):
            fork.fork()
        await asyncio.gather(turn, twig.reply("z"))
        return [0.0, 1.0]

    assert len(run_episode(Engine(), template, branches, share=GroupBound(2))) == 2


def test_a_turn_of_the_policy_itself_besides_its_seats_is_one_more_sequence(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        white = policy.seat("white")
        await white.reply("x")
        with pytest.raises(GroupFull, match="own turns"):
            await policy.reply("y")
        await white.reply("z")
        return 1.0

    assert [len(sequence.turns) for sequence in run_episode(Engine(), template, episode, share=GroupBound(1))] == [2]


def test_an_episode_beyond_its_share_fails_alone(template: ChatTemplate) -> None:
    """The engine generates more tokens than requested."""

    class Generous(Engine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            return await super().generate(prompt_ids, replace(sampling, max_new_tokens=90), group)

    async def episode(item: Any, policy: Policy) -> float:
        await policy.reply("x")
        return 1.0

    failed = failure(Generous(), template, episode, share=GroupBound(1, 20))
    assert failed.reason == "episode is larger than its share of a group" and "may have at most 20" in failed.report


def test_an_uncaught_full_context_leaves_each_branch_and_seat_its_reward_so_far(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        for seat, reward in (("white", 0.25), ("black", 0.5)):
            player = policy.seat(seat)
            await player.reply("x")
            player.reward_so_far = reward
        left, right = policy.fork(), policy.fork()
        right.seat("white").reward_so_far = 1.0
        while True:
            await left.seat("white").reply("go on")

    rollout = run_episode(Engine(), template, episode, limit=30)
    assert [(s.seat, s.reward) for s in rollout] == [("white", 0.25), ("black", 0.5), ("white", 1.0), ("black", 0.5)]
    assert [s.finish_reason == "context" for s in rollout] == [True, False, False, False]


@pytest.mark.parametrize("limit", [30, 60])
@pytest.mark.parametrize("tokens", [None, 1])
def test_an_uncaught_full_context_discards_forks_without_turns(
    template: ChatTemplate, limit: int, tokens: int | None
) -> None:
    """Except forks that were given a reward. Without any fork left, the forked policy is a sequence again."""

    async def episode(item: Any, policy: Policy) -> Any:
        while len((await policy.reply("x")).token_ids) < 2:
            pass
        place = (None, None) if tokens is None else (policy.turns, tokens)
        branches = [policy.fork(*place) for _ in range(4)]
        branches[2].reward_so_far = 0.0
        branches[3].fork().reward_so_far = 2.0
        await branches[0].reply()
        while True:
            await branches[0].reply("go on")

    rollout = run_episode(Engine(), template, episode, limit=limit)
    whole = [] if tokens is None else [(0.0, False)]  # the turn in the middle of which there are forks
    assert [(s.reward, s.finish_reason == "context") for s in rollout] == [
        *whole,
        (0.0, True),
        (0.0, False),
        (2.0, False),
    ]
    assert not any(s.trainable.any() for s in rollout[-2:])

    async def without_turns(item: Any, policy: Policy) -> Any:
        await policy.reply("x")
        policy.reward_so_far = 0.5
        policy.fork()
        policy.fork().fork()
        await policy.reply("go on" * limit)

    (alone,) = run_episode(Engine(), template, without_turns, limit=limit)
    assert (alone.reward, alone.finish_reason, len(alone.turns), alone.fork) == (0.5, "context", 1, None)
    assert alone.trainable.any()


def test_a_fork_during_generation_is_refused_and_loses_no_turn(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        turn = asyncio.ensure_future(policy.reply("x"))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="being generated"):
            policy.fork()
        await turn
        return 1.0

    (rollout,) = run_episode(Engine(), template, episode)
    assert rollout.reward == 1.0


def test_the_episode_clock_stops_while_any_branch_generates(template: ChatTemplate) -> None:
    """In virtual time: a branch waits for a turn of another one, which takes longer than the episode's own code may."""

    class Slow(Engine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            await asyncio.sleep(50.0)
            return await super().generate(prompt_ids, sampling, group)

    async def episode(item: Any, policy: Policy) -> Any:
        async def second(branch: Policy) -> None:
            await branch.reply("a")

        async def first(branch: Policy) -> None:
            await branch.reply("b")
            await asyncio.sleep(0.1)

        await policy.reply("x")
        branches = [policy.fork(), policy.fork()]
        await asyncio.gather(first(branches[0]), second(branches[1]))
        await asyncio.sleep(0.1)
        return [1.0, 1.0]

    assert len(run_episode(Slow(), template, episode)) == 2


def test_branches_sample_with_their_own_seeds(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> Any:
        await policy.reply("x")
        await asyncio.gather(*(branch.reply("y") for branch in (policy.fork(), policy.fork())))
        return [0.0, 1.0]

    engine = Engine()
    run_episode(engine, template, episode, sampling=Sampling(6, seed=3))
    seeds = [sampling.seed for sampling in engine.asked]
    assert seeds[0] == 3 and len(set(seeds)) == 3
    again = Engine()
    run_episode(again, template, episode, sampling=Sampling(6, seed=3))
    assert [sampling.seed for sampling in again.asked] == seeds


def test_a_groups_limits_are_shared_among_its_episodes() -> None:
    assert RolloutSettings(group_size=4).bound(100) == GroupBound(64, 6400)
    bound = RolloutSettings(group_size=4, max_sequences=10, max_tokens=1000).bound(100)
    assert bound == GroupBound(10, 1000) and bound.share(4) == GroupBound(2, 250)
    for wrong in (RolloutSettings(group_size=4, max_sequences=3), RolloutSettings(group_size=4, max_tokens=3)):
        with pytest.raises(ValueError, match=r"rollout\.max_(sequences|tokens) 3 .*rollout\.group-size 4"):
            check_rollout(wrong, 4, 1)


# ---- any tree ------------------------------------------------------------------------------------------------


@dataclass
class Course:
    """Runs a random course of turns, seats and forks, including forks in the middle of turns."""

    rng: random.Random
    seats: int
    policies: list[Any] = field(default_factory=list)

    async def episode(self, item: Any, policy: Policy) -> Any:
        self.policies = [policy]
        for _ in range(self.rng.randint(1, 12)):
            one = self.rng.choice(self.policies)
            match self.rng.choice(["reply", "reply", "reply", "read", "fork", "together"]):
                case "reply":
                    await self.reply(one)
                case "read" if not one._line.begun:
                    one.read("read ")
                case "fork":
                    with suppress(GroupFull):
                        self.policies.append(one.fork(*self.place(one)))
                case "together":
                    branches = list({id(p.branch): p for p in self.policies}.values())
                    await asyncio.gather(*map(self.reply, branches))
        leaves = [p for p in self.policies if p.branch.is_leaf]
        values = {p: float(place) for place, p in enumerate(leaves)}
        return values if len(self.policies) > 1 else 0.0

    async def reply(self, policy: Any) -> None:
        with suppress(ContextFull, GroupFull):
            if self.seats > 1 and self.rng.random() < 0.8:
                policy = policy.seat(f"seat {self.rng.randrange(self.seats)}")
            await policy.reply("hear ", temperature=self.rng.choice([None, None, None, 0.0]))

    def place(self, policy: Any) -> tuple[int | None, int | None]:
        """After all turns; with one seat also after an earlier turn or in the middle of one."""
        turns = policy.branch.turns
        if self.seats > 1 or not turns or self.rng.random() < 0.4:
            return None, None
        turn = self.rng.randint(1, turns)
        length = policy.turn_lengths[turn - 1]
        return turn, self.rng.randint(1, length - 1) if length > 1 and self.rng.random() < 0.6 else None


@given(
    rng=st.randoms(use_true_random=False),
    seats=st.integers(1, 3),
    routes=st.booleans(),
    share=st.builds(GroupBound, st.none() | st.integers(1, 8), st.none() | st.integers(10, 200)),
)
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_tree_is_trained_as_the_engine_saw_it_with_each_token_once(
    template: ChatTemplate, rng: random.Random, seats: int, routes: bool, share: GroupBound
) -> None:
    engine, course = Engine(rng), Course(rng, seats)
    sampling = Sampling(6, expert_routes_from=0 if routes else None)
    try:
        rollout = run_episode(engine, template, course.episode, sampling, share=share)
    except EpisodeFailed as failed:
        assert failed.reason in (
            "no turn of the episode can be trained",
            f"prompt leaves no room within {share.max_tokens} tokens",
        )
        return
    if not rollout[0].turns:
        return
    assert share.excess(len(rollout), sum(sequence.num_tokens for sequence in rollout)) is None
    trained = list[tuple[int, int]]()
    for place, sequence in enumerate(rollout):
        ids = sequence.token_ids.tolist()
        if sequence.fork is not None:
            origin = rollout[sequence.fork.sequence]
            shared = sum(len(turn.token_ids) for turn in sequence.turns[: sequence.fork.turns])
            assert sequence.fork.sequence < place and origin.seat == sequence.seat
            assert origin.token_ids[:shared].tolist() == ids[:shared]
            assert not sequence.trainable[:shared].any()
        for place in np.flatnonzero(sequence.trainable).tolist():
            call = int(sequence.policy_versions[place])
            prompt, generated = engine.seen[call], sampled_ids(engine, call)
            # The engine saw exactly the ids before the token, and sampled it there with this log-prob.
            assert place >= len(prompt) and (prompt + generated)[: place + 1] == ids[: place + 1]
            token = place - len(prompt)
            assert sequence.logprobs[place] == engine.completions[call].logprobs[token]
            trained.append((call, token))
        if routes:
            assert sequence.expert_routes is not None and len(sequence.expert_routes) == len(ids) - 1
    sampled = [call for call, sampling in enumerate(engine.asked) if sampling.temperature > 0]
    # Every sampled token once.
    assert sorted(trained) == [(call, token) for call in sampled for token in range(len(sampled_ids(engine, call)))]


def sampled_ids(engine: Engine, call: int) -> list[int]:
    return [int(token) for token in engine.completions[call].token_ids]

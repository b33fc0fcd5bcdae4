"""Which requests wait for another one's prompt, and which tokens enter the prefix cache: without SGLang."""

from __future__ import annotations

from array import array
from itertools import takewhile
from operator import eq
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.generator.cpu import admission
from monarch_rl.generator.cpu.prefix_cache import ANSWER_FROM, PROMPT_FROM, SHORT_PROMPT, WORTH_AN_ENTRY, Publishing

SMALL, LARGE = 600_000, 130_000_000
"""Parameters of models."""


def request(prompt: list[int], salt: str = "0", sampled: list[int] | None = None) -> Any:
    ids = array("q", prompt)
    return SimpleNamespace(origin_input_ids=ids, extra_key=None, cache_salt=salt, output_ids=array("q", sampled or []))


def scheduler(
    waiting: list[Any], parameters: int, chunked: Any = None, shares: bool = True, overlap: bool = False
) -> Any:
    cache = SimpleNamespace(supports_prefix_sharing=lambda: shares)
    return SimpleNamespace(
        enable_overlap=overlap,
        waiting_queue=waiting,
        chunked_req=chunked,
        tree_cache=cache,
        _monarch_rl_parameters=parameters,
    )


def held(scheduler: Any, cached: int = 0) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "_cached", lambda _scheduler, _req: cached)
        return admission._held_back(scheduler)


def test_a_group_waits_for_its_first_request_if_the_prompt_is_worth_a_batch() -> None:
    group = [request(list(range(30))) for _ in range(8)]
    assert held(scheduler(group, LARGE)) == group[1:]
    assert held(scheduler(group, SMALL)) == group[1:]  # 7 * 29 tokens * 0.6 million parameters
    assert held(scheduler(group[:3], SMALL)) == []
    assert held(scheduler(group, LARGE), cached=29) == []
    assert held(scheduler(group, SMALL), cached=20) == []
    assert held(scheduler(group, LARGE, shares=False)) == []
    assert held(scheduler(group, LARGE, overlap=True)) == []


def test_requests_wait_only_for_tokens_that_the_first_one_computes() -> None:
    prompt = list(range(40))
    first, same, forked = request(prompt), request(prompt + [1]), request([*prompt[:20], 99, *prompt[21:]])
    other, later, retracted = request(prompt[::-1]), request(prompt, salt="1"), request(prompt, sampled=[5])
    waiting = [first, other, same, later, forked, retracted]
    assert held(scheduler(waiting, LARGE)) == [same, forked]
    assert held(scheduler(waiting, LARGE), cached=20) == [same]
    assert held(scheduler(waiting[1:], LARGE, chunked=first)) == [same, forked]


@given(
    groups=st.integers(1, 6), size=st.integers(1, 8), template=st.integers(16, 60), own=st.integers(PROMPT_FROM + 1, 60)
)
def test_prompts_behind_one_chat_template_are_each_computed_once(
    groups: int, size: int, template: int, own: int
) -> None:
    """The template, too: whoever would compute tokens that another request computes waits for them."""
    waiting = [request([*range(template), *[100 + group] * own]) for group in range(groups) for _ in range(size)]
    published: list[list[int]] = [[]]
    computed = 0

    def cached(_scheduler: Any, req: Any) -> int:
        prompt = req.origin_input_ids.tolist()
        shared = [sum(1 for _ in takewhile(bool, map(eq, prompt, other))) for other in published]
        return min(max(shared), len(prompt) - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "_cached", cached)
        for _ in range(4):
            behind = set(map(id, admission._held_back(scheduler(waiting, LARGE))))
            begun = [req for req in waiting if id(req) not in behind]
            computed += sum(len(req.origin_input_ids) - cached(None, req) for req in begun)
            published += [req.origin_input_ids.tolist() for req in begun]
            waiting = [req for req in waiting if id(req) in behind]
    assert not waiting
    last_tokens = groups * (size - 1)  # always computed, so that the first token can be sampled
    assert computed == template + groups * own + last_tokens


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=12),
    parameters=st.sampled_from([SMALL, LARGE]),
    cached=st.integers(0, 40),
)
def test_each_waiting_request_waits_for_one_that_runs(prompts: list[list[int]], parameters: int, cached: int) -> None:
    """So every batch makes progress, and the queue keeps its requests and their order."""
    waiting = [request([0] * 16 + prompt) for prompt in prompts]
    behind = held(scheduler(list(waiting), parameters), cached)
    free = [req for req in waiting if not any(req is other for other in behind)]
    assert len(free) + len(behind) == len(waiting)
    assert free or not waiting
    for req in behind:
        assert any(other.origin_input_ids[:16] == req.origin_input_ids[:16] for other in free)

    seen = []

    def original(of: Any, running_batch: Any) -> Any:
        seen.append((list(of.waiting_queue), running_batch))
        of.waiting_queue = of.waiting_queue[1:]
        return SimpleNamespace(batch_to_run="batch")

    of = scheduler(list(waiting), parameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "_cached", lambda _scheduler, _req: cached)
        plan = admission.get_new_batch_prefill(of, original, "running")
    assert plan.batch_to_run == "batch"
    assert seen == [(free, "running")]
    started = {id(req) for req in free[:1]}
    assert list(map(id, of.waiting_queue)) == [id(req) for req in waiting if id(req) not in started]


def test_the_next_batch_follows_immediately() -> None:
    def original(of: Any, _batch: Any) -> None:
        of._prefill_decode_interval_remaining = 2

    of = scheduler([], SMALL)
    admission.arm_interval(of, original, None)
    assert of._prefill_decode_interval_remaining == 2
    of._monarch_rl_follows = True
    admission.arm_interval(of, original, None)
    assert of._prefill_decode_interval_remaining == 0
    admission.arm_interval(of, original, None)
    assert of._prefill_decode_interval_remaining == 2


@pytest.mark.parametrize(
    ("paused", "message", "gathers"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_an_idle_engine_gathers_requests_but_no_commit_waits(
    paused: bool, message: bool, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(admission.time, "sleep", slept.append)
    sleeper = SimpleNamespace(poller=SimpleNamespace(poll=lambda _timeout: [1] if message else []))
    of = SimpleNamespace(idle_sleeper=sleeper, _engine_paused=paused)
    admission.gather_after_idle(of, lambda _of: slept.append(0.0))
    assert slept == [0.0, admission.GATHER_S][: 1 + gathers]
    admission.gather_after_idle(SimpleNamespace(idle_sleeper=None), lambda _of: None)  # ranks other than the first


def read(prompt: list[int], cached: int = 0) -> Any:
    """A request whose prompt has been read."""
    req = request(prompt)
    req.extend_end, req.full_untruncated_fill_ids = len(prompt), req.origin_input_ids
    req.kv = SimpleNamespace(cache_protected_len=cached)
    req.owned_kv_len = lambda: len(prompt)
    return req


def test_a_prompt_is_published_once_and_only_if_it_adds_something() -> None:
    publishing = Publishing()
    short, long = list(range(10)), list(range(SHORT_PROMPT + 1))
    publishing.start_batch()
    assert [publishing.wants_prompt(read(short)) for _ in range(3)] == [True, False, False]
    assert not publishing.wants_prompt(read(short, cached=10 - PROMPT_FROM + 1))
    assert all(publishing.wants_prompt(read(long)) for _ in range(2))
    publishing.start_batch()
    assert publishing.wants_prompt(read(short))


def test_answers_are_published_if_computing_them_costs_more() -> None:
    publishing = Publishing()
    publishing.parameters = SMALL
    tokens = list(range(ANSWER_FROM))
    assert publishing.wants_answer(read(tokens))
    assert not publishing.wants_answer(read(tokens, cached=1))
    publishing.parameters = int(WORTH_AN_ENTRY / 5)
    assert publishing.wants_answer(read(tokens, cached=ANSWER_FROM - 5))
    assert not publishing.wants_answer(read(tokens, cached=ANSWER_FROM - 4))

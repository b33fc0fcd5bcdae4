"""Serialised answers, and the number of messages they take."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode.sampling import Completion, SamplingMasks
from monarch_rl.errors import GenerationError
from monarch_rl.generator.connection import ANSWER_PACE_S, Answer, deserialize_answers, serialize_answers
from monarch_rl.generator.parts import UNFINISHED
from monarch_rl.runtime.persistent_channel import AnswerSender
from monarch_rl.simulate.clock import run_virtual

IDS = st.integers(0, 2**31 - 1)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.integers(0, 5))

    def array(elements: st.SearchStrategy[float], dtype: type) -> np.ndarray:
        return np.asarray(draw(st.lists(elements, min_size=tokens, max_size=tokens)), dtype)

    sampling_masks = expert_routes = None
    if draw(st.booleans()):
        counts = array(st.integers(1, 3), np.int32)
        sampling_masks = SamplingMasks(counts, np.arange(counts.sum(), dtype=np.int32))
    if draw(st.booleans()):
        expert_routes = np.full((tokens, 2, 3), draw(st.integers(0, 255)), np.uint8)
    reason = draw(st.sampled_from(["stop", "length", UNFINISHED]))
    logprobs = array(st.floats(-1e4, 0, width=32), np.float32)
    return Completion(array(IDS, np.int32), logprobs, array(IDS, np.int32), reason, sampling_masks, expert_routes)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), completions() | st.builds(GenerationError, st.text()))))
def test_answers_survive_serialization(answers: list[Answer]) -> None:
    """In their order, errors last."""
    expected = sorted(answers, key=lambda answer: isinstance(answer[2], Exception))
    found = deserialize_answers(serialize_answers(answers))
    assert [answer[:2] for answer in found] == [answer[:2] for answer in expected]
    for (*_, copy), (*_, original) in zip(found, expected, strict=True):
        if isinstance(original, Exception):
            assert isinstance(copy, GenerationError) and str(copy) == str(original)
            continue
        assert isinstance(copy, Completion) and copy.finish_reason == original.finish_reason
        for name in ("token_ids", "logprobs", "policy_versions", "expert_routes"):
            there, here = getattr(copy, name), getattr(original, name)
            assert (there is None) == (here is None)
            if here is not None:
                assert there.dtype == here.dtype
                np.testing.assert_array_equal(there, here)
        assert (copy.sampling_masks is None) == (original.sampling_masks is None)
        if original.sampling_masks is not None and copy.sampling_masks is not None:
            np.testing.assert_array_equal(copy.sampling_masks.counts, original.sampling_masks.counts)
            np.testing.assert_array_equal(copy.sampling_masks.ids, original.sampling_masks.ids)


class Received:
    """A port that notes what is sent, and when."""

    def __init__(self) -> None:
        self.messages: list[tuple[float, list[int]]] = []

    def send(self, obj: tuple[str, bytes], /) -> None:
        answers = [index for index, _, _ in deserialize_answers(obj[1])]
        self.messages.append((asyncio.get_running_loop().time(), answers))


@given(st.lists(st.floats(0, 5 * ANSWER_PACE_S), max_size=30))
def test_no_answer_waits_longer_than_the_pace_and_messages_keep_it(pauses: list[float]) -> None:
    nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "stop")

    async def scenario() -> tuple[list[float], list[tuple[float, list[int]]]]:
        port, added = Received(), list[float]()
        sender = AnswerSender("here", serialize_answers, ANSWER_PACE_S)
        sender.open(port)
        for index, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            added.append(asyncio.get_running_loop().time())
            sender.add((index, 0, nothing))
        await asyncio.sleep(2 * ANSWER_PACE_S)
        return added, port.messages

    added, messages = run_virtual(scenario())
    assert [index for _, indices in messages for index in indices] == list(range(len(pauses)))
    times = [time for time, _ in messages]
    assert all(later - earlier >= ANSWER_PACE_S - 1e-9 for earlier, later in zip(times, times[1:], strict=False))
    assert all(time - added[index] <= ANSWER_PACE_S + 1e-9 for time, indices in messages for index in indices)
    alone = [index for index, pause in enumerate(pauses) if index == 0 or pause > 2 * ANSWER_PACE_S]
    sent = {index: time for time, indices in messages for index in indices}
    assert all(sent[index] == added[index] for index in alone), "an answer after a pause is sent immediately"

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.stop_strings import StopStrings, cut_at_stop
from tests.model.chat_helpers import write_model


@functools.cache
def chat() -> ChatTemplate:
    return ChatTemplate(write_model(Path(tempfile.mkdtemp()), "qwen3"))


def first_end(ids: list[int], stop: list[str]) -> int | None:
    """By definition: the fewest tokens whose text holds a stop string."""
    return next((n for n in range(1, len(ids) + 1) if any(string in chat().decode(ids[:n]) for string in stop)), None)


TEXT = st.text(st.sampled_from("ab\n:é好🙂"), max_size=14)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.one_of(TEXT, st.sampled_from(["<|im_end|>", "<think>", " User:"])), max_size=8),
    stop=st.lists(st.one_of(TEXT.filter(bool), st.sampled_from(["User:", "<|im_end|>", "🙂"])), max_size=3),
    data=st.data(),
)
def test_the_end_is_found_wherever_tokens_arrive(pieces: list[str], stop: list[str], data: st.DataObject) -> None:
    ids = [token for piece in pieces for token in chat()._plain(piece)]
    finder, place = StopStrings(stop, chat().decode), 0
    found = None
    while found is None and place < len(ids):
        size = data.draw(st.integers(1, 5))
        found = finder.feed(ids[place : place + size])
        place += size
    assert found == first_end(ids, stop)
    if found is not None:
        text = cut_at_stop(chat().decode(ids[:found]), stop)
        assert chat().decode(ids).startswith(text)
        assert not any(string in text for string in stop)


def test_text_is_cut_before_the_string_that_begins_first() -> None:
    assert cut_at_stop("one two three", ["three", "two"]) == "one "
    assert cut_at_stop("one two three", ["four"]) == "one two three"


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="every turn would end"):
        StopStrings(["\n", ""], chat().decode)

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_rl.rollout.tokenizer import Tokenizer
from monarch_rl.tasks.task import Message
from tests.rollout.helpers import END, write_tokenizer


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer._tokenizer.decode(ids)


def test_without_a_template_contents_are_joined(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.render([Message("system", "Add. "), Message("user", "1 + 2 =")])
    assert tokenizer.decode(ids) == "Add. 1 + 2 ="
    assert len(ids) == len("Add. 1 + 2 =")
    assert tokenizer.decode(tokenizer.render_reply([Message("user", " next")], ended=True)) == " next"


def test_stop_tokens_end_turns_and_are_not_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    (stop,) = tokenizer.stop_token_ids
    assert text(tokenizer, [stop]) == END
    assert tokenizer.decode([*tokenizer.render([Message("user", "3")]), stop]) == "3"


@pytest.mark.parametrize("ended", [True, False])
def test_turns_join_to_what_the_template_makes_of_the_whole_conversation(tmp_path: Path, ended: bool) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat=True))
    opening, reply = (
        [Message("system", "Add."), Message("user", "1+2")],
        [Message("tool", "wrong"), Message("user", "?")],
    )
    drawn = tokenizer._encode("4" + END * ended)
    ids = tokenizer.render(opening) + drawn + tokenizer.render_reply(reply, ended)
    whole = tokenizer.render([*opening, Message("assistant", "4"), *reply])
    assert ids == whole
    assert text(tokenizer, ids).endswith("<|start|>user\n?<|end|>\n<|start|>assistant\n")

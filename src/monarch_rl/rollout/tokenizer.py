"""Text to ids and back. A prompt is rendered once; what the policy drew is never tokenised again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monarch_rl.tasks.task import Message

PROMPTS_KEPT = 16
"""Rendered prompts that are kept; those of a group are asked for at about the same time."""
_DRAWN = "\x02the turn that the policy drew\x03"
"""Stands for the policy's turn where only the text around it is wanted."""


class Tokenizer:
    """A Hugging Face tokenizer with its chat template, if it has one; else contents are simply joined.

    Args:
        folder: a Hugging Face folder or Hub name.

    Raises:
        OSError: there is no tokenizer of that name.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._rendered: dict[tuple[Message, ...], list[int]] = {}
        """Of the last few :meth:`render`: the episodes of a group open alike."""
        self.stop_token_ids = tuple(sorted({*_end_tokens(folder), *self._own_end_token()}))
        """Ids that end a turn: the tokenizer's end token and those of ``generation_config.json``."""

    def render(self, messages: list[Message]) -> list[int]:
        """The ids that open an episode, up to where the policy's first turn starts."""
        key = tuple(messages)
        ids = self._rendered.pop(key, None)
        if ids is None:
            if self._tokenizer.chat_template:
                ids = self._encode(self._template(messages))
            else:
                ids = self._tokenizer.encode("".join(message.content for message in messages))
        self._rendered[key] = ids  # the last one used comes last
        if len(self._rendered) > PROMPTS_KEPT:
            del self._rendered[next(iter(self._rendered))]
        return list(ids)

    def render_reply(self, messages: list[Message], ended: bool) -> list[int]:
        """The ids between a turn of the policy and its next one.

        Args:
            messages: what the environment says between the two.
            ended: whether the turn before ended with a stop token (then the template's own is left out).
        """
        if not self._tokenizer.chat_template:
            return self._encode("".join(message.content for message in messages))
        text = self._template([Message("user", ""), Message("assistant", _DRAWN), *messages])
        text = text[text.index(_DRAWN) + len(_DRAWN) :]
        if ended:
            stops = (self._tokenizer.decode([stop]) for stop in self.stop_token_ids)
            text = text.removeprefix(next((stop for stop in stops if text.startswith(stop)), ""))
        return self._encode(text)

    def decode(self, token_ids: list[int]) -> str:
        """The text of a turn, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token_texts(self) -> list[str]:
        """The text of each id by itself. Takes a second for 150,000 ids."""
        return self._tokenizer.batch_decode([[index] for index in range(len(self._tokenizer))])

    def show(self, token_ids: list[int]) -> str:
        """The text of ids, with special tokens, to look at."""
        return self._tokenizer.decode(token_ids)

    def _template(self, messages: list[Message]) -> str:
        rows = [{"role": message.role, "content": message.content} for message in messages]
        return self._tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _own_end_token(self) -> tuple[int, ...]:
        return () if self._tokenizer.eos_token_id is None else (self._tokenizer.eos_token_id,)


def _end_tokens(folder: str) -> list[int]:
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return []
    ids = json.loads(path.read_text()).get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]

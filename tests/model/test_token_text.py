"""The text of sampled tokens, and where each of them ends in it."""

from __future__ import annotations

from itertools import accumulate, chain, groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.token_text import TokenText, replace_invalid
from tests.model.chat_helpers import write_model
from tests.rollout.helpers import write_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(write_model(tmp_path_factory.mktemp("bytes"), "qwen3"))


@given(data=st.data(), text=st.text(max_size=12))
def test_tokens_of_a_byte_level_vocabulary_end_at_exact_bytes(
    byte_level: ChatTemplate, data: st.DataObject, text: str
) -> None:
    """Tokens inside characters and special tokens included."""
    end = byte_level.stop_token_ids[0]
    ids = [*byte_level.tokenizer.encode(text, add_special_tokens=False), end]
    decoded, ends = byte_level.decode_with_ends(ids)
    assert decoded == byte_level.decode(ids) == text + byte_level.decode([end])
    assert ends.dtype == np.uint32 and ends[-1] == len(decoded.encode())
    starts = [0, *ends[:-1].tolist()]
    pieces = [decoded.encode()[start:stop] for start, stop in zip(starts, ends.tolist(), strict=True)]
    cut = data.draw(st.integers(0, len(ids)))
    assert b"".join(pieces[:cut]).decode(errors="replace") == byte_level.decode(ids[:cut])


def test_a_token_may_end_inside_a_character(byte_level: ChatTemplate) -> None:
    ids = byte_level.tokenizer.encode("é日", add_special_tokens=False)
    text, ends = byte_level.decode_with_ends(ids)
    assert text == "é日" and ends.tolist() == [1, 2, 3, 4, 5]
    text, ends = byte_level.decode_with_ends(ids[:-1])  # an answer that was cut there
    assert text == byte_level.decode(ids[:-1]) == "é\ufffd" and ends.tolist() == [1, 2, 3, 5]
    text, ends = byte_level.decode_with_ends([*ids[:3], *ids[:2]])
    assert text == "é\ufffdé" and ends.tolist() == [1, 2, 5, 6, 7]
    assert byte_level.decode_with_ends([])[0] == ""


def with_byte_fallback(*last: decoders.Decoder) -> TokenText:
    """A vocabulary as those of Llama 2 and Gemma: bytes, pieces of SentencePiece, and their decoder."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "\u2581b", "\u2581", "<s>", "\u65e5"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<s>"))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(parts)
    return TokenText(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


LLAMA, GEMMA = with_byte_fallback(decoders.Strip(" ", 1, 0)), with_byte_fallback()


PIECES = st.one_of(st.lists(st.integers(0, 260), max_size=4), st.text(max_size=3).map(lambda text: [*text.encode()]))


@given(st.sampled_from([LLAMA, GEMMA]), st.lists(PIECES, max_size=6).map(lambda pieces: [*chain(*pieces)]))
@example(LLAMA, [0x41, 0xE4, 256])
@example(LLAMA, [0x20, 0xFF])
@example(GEMMA, [0x41, 0xE4, 256])
def test_tokens_of_a_vocabulary_with_byte_fallback_end_where_the_decoder_puts_them(
    tokens: TokenText, ids: list[int]
) -> None:
    """A run of tokens of bytes ends where the text of all tokens up to it does; its bytes are of one size: valid, or
    all of them replaced. Only the first one of all may be a stripped space."""
    text, ends = tokens.decode(ids)
    sizes = np.diff(ends.astype(int), prepend=0).tolist()
    for is_byte, run in groupby(range(len(ids)), lambda n: ids[n] < 256):
        places = list(run)
        assert not is_byte or len({sizes[n] for n in places if n or ids[0] != ord(" ") or sizes[0]}) <= 1
        for n in places[-1:] if is_byte else places:
            assert ends[n] == len(tokens.decode(ids[: n + 1])[0].encode())
    assert len(ends) == len(ids) and (not ids or ends[-1] == len(text.encode()))


def test_tokens_of_a_vocabulary_with_byte_fallback_end_where_their_texts_do() -> None:
    ids = [257, 256, *"\u65e5".encode(), 260]
    text, ends = LLAMA.decode(ids)
    assert text == "ba\u65e5\u65e5" and ends.tolist() == [1, 2, 3, 4, 5, 8]
    text, ends = GEMMA.decode(ids)
    assert text == " ba\u65e5\u65e5" and ends.tolist() == [2, 3, 4, 5, 6, 9]


def test_in_another_vocabulary_tokens_end_where_their_texts_do(tmp_path: Path) -> None:
    template = ChatTemplate(write_tokenizer(tmp_path))
    ids = [*template.tokenizer.encode("ab "), template.stop_token_ids[0]]
    text, ends = template.decode_with_ends(ids)
    assert text == template.decode(ids) == "ab <|end|>" and ends.tolist() == [1, 2, 3, 10]


@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=2).map(str.encode)), max_size=8))
def test_offsets_follow_the_replacement_of_invalid_bytes(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    text, ends = replace_invalid(data, np.arange(len(data) + 1))
    assert text == data.decode(errors="replace")
    assert ends[0] == 0 and ends[-1] == len(text.encode()) and (np.diff(ends.astype(int)) >= 0).all()
    for offset, end in enumerate(ends.tolist()):
        before, after = data[:offset].decode(errors="replace"), data[offset:].decode(errors="replace")
        if before + after == text:  # no character and no replaced bytes lie across the offset
            assert end == len(before.encode())


def replaced_one_by_one(data: bytes, ends: list[int]) -> tuple[str, list[int]]:
    """What ``replace_invalid`` computes, in quadratic time."""
    text, moved, start, shift = "", list(ends), 0, 0
    while start < len(data):
        try:
            return text + data[start:].decode(), moved
        except UnicodeDecodeError as error:
            first, last = start + error.start, start + error.end
        text += data[start:first].decode() + "\ufffd"
        shift += 3 - (last - first)
        moved = [end + shift if end >= last else new for end, new in zip(ends, moved, strict=True)]
        start = last
    return text, moved


@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=2).map(str.encode)), max_size=8))
def test_invalid_bytes_are_replaced_as_one_by_one(pieces: list[bytes]) -> None:
    ends = list(accumulate(map(len, pieces)))
    text, moved = replace_invalid(b"".join(pieces), np.asarray(ends, np.int64))
    assert (text, moved.tolist()) == replaced_one_by_one(b"".join(pieces), ends)

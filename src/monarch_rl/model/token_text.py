"""The text of sampled tokens, and where each token ends in it. A token may end inside a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

REPLACED = "\N{REPLACEMENT CHARACTER}"
REPLACED_BYTES = len(REPLACED.encode())
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in the vocabularies of SentencePiece."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for a byte, of a vocabulary with byte fallback (Llama 2, Mistral, Gemma)."""
_NOTED = "monarch_rl_noted"
"""Name of the error handler that notes what it replaces."""


class TokenText:
    """Decodes token ids with the ends of the tokens.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        """Bytes of the ids seen so far."""
        self._fallback: set[int] = set()
        """Those of them that stand for a byte, in a vocabulary with byte fallback."""

    def decode(self, token_ids: Sequence[int]) -> tuple[str, np.ndarray]:
        """The text, special tokens included, and uint32[n]: where each token ends in the text's UTF-8 bytes.

        With a byte-level tokenizer (Qwen, Llama 3, SmolLM2) the ends are exact, also inside a character. Bytes that are
        not UTF-8, as at the end of a cut answer, are replaced as ``bytes.decode(errors="replace")`` does; a token that
        ends among them ends as many bytes into the replacement character. With byte fallback (Llama 2, Gemma) the ends
        are exact, too. With other tokenizers they are those of the tokens' own texts, and may be off where the decoder
        changes these.
        """
        if not len(token_ids):
            return "", np.zeros(0, np.uint32)
        return self._of_bytes(token_ids) if self._byte_level else self._of_texts(token_ids)

    @cached_property
    def _byte_level(self) -> bool:
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        return [one["type"] for one in state.get("decoders", [state]) if one] == ["ByteLevel"]

    def _of_bytes(self, token_ids: Sequence[int]) -> tuple[str, np.ndarray]:
        known = self._bytes
        for token in set(token_ids) - known.keys():
            known[token] = _token_bytes(self._tokenizer.backend_tokenizer.id_to_token(token) or "")
        pieces = [known[token] for token in token_ids]
        return replace_invalid(b"".join(pieces), np.cumsum([len(piece) for piece in pieces]))

    def _of_texts(self, token_ids: Sequence[int]) -> tuple[str, np.ndarray]:
        """The ends by the sizes of the tokens' own texts, which a decoder may change."""
        text: str = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        known, backend = self._bytes, self._tokenizer.backend_tokenizer
        for token in set(token_ids) - known.keys():
            piece = backend.id_to_token(token) or ""
            byte = _BYTE.fullmatch(piece)
            if byte:
                self._fallback.add(token)  # first: another thread may decode, too
            known[token] = bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()
        sizes, stripped = list[int](), False
        for fallback, run in groupby(token_ids, self._fallback.__contains__):
            pieces = [known[token] for token in run]
            # The decoder replaces each byte of a run of such tokens, also the valid ones, if the run is not UTF-8.
            replaced = fallback and not _is_utf8(b"".join(pieces))
            if not sizes:
                stripped = not replaced and pieces[0].startswith(b" ") and not text.startswith(" ")
            sizes += [REPLACED_BYTES] * len(pieces) if replaced else map(len, pieces)
        total = len(text.encode())
        ends = np.clip(np.cumsum(sizes) - stripped, 0, total)
        ends[-1] = total
        return text, ends.astype(np.uint32)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def replace_invalid(data: bytes, ends: np.ndarray) -> tuple[str, np.ndarray]:
    """Decode UTF-8 with replacement characters, and move offsets accordingly.

    Args:
        ends: int[n], ascending offsets in ``data``.

    Returns:
        the text, and uint32[n]: the offsets in the text's UTF-8 bytes, ascending.
    """
    try:
        return data.decode(), ends.astype(np.uint32)
    except UnicodeDecodeError:
        pass
    wrong = list[tuple[int, int]]()

    def replaced(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        wrong.append((error.start, error.end))
        return REPLACED, error.end

    codecs.register_error(_NOTED, replaced)
    text = data.decode(errors=_NOTED)
    lasts = np.array([last for _, last in wrong])
    shifts = np.cumsum([REPLACED_BYTES - (last - first) for first, last in wrong])
    passed = np.searchsorted(lasts, ends, side="right")
    return text, (ends + np.concatenate([[0], shifts])[passed]).astype(np.uint32)


def _token_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary, by the rule of tokenizers: a token with another character, as
    added tokens may have, is text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (GPT-2): printable bytes are themselves, others follow
    from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()

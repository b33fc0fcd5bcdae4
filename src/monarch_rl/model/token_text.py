"""The text of sampled tokens, and where each token ends in it. A token may end inside a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

REPLACED = "\N{REPLACEMENT CHARACTER}"
REPLACED_BYTES = len(REPLACED.encode())


class TokenText:
    """Decodes token ids with the ends of the tokens.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        """Bytes of the ids seen so far, for a byte-level tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> tuple[str, np.ndarray]:
        """The text, special tokens included, and uint32[n]: where each token ends in the text's UTF-8 bytes.

        With a byte-level tokenizer (Qwen, Llama 3, SmolLM2) the ends are exact, also inside a character. Bytes that are
        not UTF-8, as at the end of a cut answer, are replaced as ``bytes.decode(errors="replace")`` does; a token that
        ends among them ends as many bytes into the replacement character. With any other tokenizer a character belongs
        to the token that completes it.
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
        from tokenizers.decoders import DecodeStream

        text: str = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        stream, backend = DecodeStream(skip_special_tokens=False), self._tokenizer.backend_tokenizer
        sizes = [len((stream.step(backend, token) or "").encode()) for token in token_ids]
        total = len(text.encode())
        ends = np.minimum(np.cumsum(sizes), total)
        ends[-1] = total
        return text, ends.astype(np.uint32)


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
    parts, moved, start, shift = list[str](), ends.astype(np.int64), 0, 0
    while start < len(data):
        try:
            parts.append(data[start:].decode())
            break
        except UnicodeDecodeError as error:
            first, last = start + error.start, start + error.end
        parts += [data[start:first].decode(), REPLACED]
        shift += REPLACED_BYTES - (last - first)
        moved[ends >= last] = ends[ends >= last] + shift
        start = last
    return "".join(parts), moved.astype(np.uint32)


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

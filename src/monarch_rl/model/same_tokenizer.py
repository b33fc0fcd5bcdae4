"""Whether two models read the same token ids as the same text: only then may ids of one be handed to the other."""

from __future__ import annotations

from pathlib import Path

from monarch_rl.model.tokens import read_vocabulary

NAMED = 3
"""Tokens that a message names."""


def tokenizer_difference(folder: Path, other: Path) -> str:
    """How the token ids of two model folders differ, in words; "" if every id stands for the same token in both.

    Compared are the vocabularies, with added tokens. Rules by which text becomes tokens may differ: what is exchanged
    are ids. Models may have more embeddings than tokens.

    Raises:
        ValueError: a folder has no ``tokenizer.json``, or one that cannot be read.
    """
    here, there = folder / "tokenizer.json", other / "tokenizer.json"
    if here.is_file() and there.is_file() and here.read_bytes() == there.read_bytes():
        return ""
    tokens, others = read_vocabulary(folder), read_vocabulary(other)
    if tokens == others:
        return ""
    differing = sorted(token for token in tokens.keys() & others.keys() if tokens[token] != others[token])
    missing = sorted(tokens.keys() ^ others.keys(), key=lambda token: (token in others, token))
    parts = [f"{token!r} is {tokens[token]} in {folder} and {others[token]} in {other}" for token in differing[:NAMED]]
    if not parts:
        parts = [f"{token!r} is only in {folder if token in tokens else other}" for token in missing[:NAMED]]
    return f"{len(differing) + len(missing)} tokens differ: {', '.join(parts)}"

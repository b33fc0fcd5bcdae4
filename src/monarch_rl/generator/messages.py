"""Requests and answers between a caller and a replica, and the bytes in which answers travel.

Monarch pickles with cloudpickle, which calls Python for every object; an answer has four arrays and more. So a message
of answers is three arrays over all of them and a list of plain values.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling

Request = tuple[list[int], Sampling]
"""Prompt ids and how to draw after them."""
Answer = tuple[int, "Completion | Exception"]
"""The number of a request in its connection, and its answer, or a part of that (``UNFINISHED``)."""


def pack_answers(answers: Sequence[Answer]) -> bytes:
    """The bytes of :func:`unpack_answers`."""
    rows, errors, drawn = [], [], []
    for index, content in answers:
        if isinstance(content, Exception):
            errors.append((index, content))
            continue
        plain = content.kept_sets is None and content.expert_routes is None
        beside = () if plain else (content.kept_sets, content.expert_routes)
        rows.append((index, len(content.token_ids), content.finish_reason, beside))
        drawn.append(content)
    arrays = []
    if drawn:
        arrays = [
            np.concatenate([each.token_ids for each in drawn], dtype=np.int32, casting="same_kind").tobytes(),
            np.concatenate([each.logprobs for each in drawn], dtype=np.float32, casting="same_kind").tobytes(),
            np.concatenate([each.policy_versions for each in drawn], dtype=np.int32, casting="same_kind").tobytes(),
        ]
    return pickle.dumps((rows, arrays, errors), pickle.HIGHEST_PROTOCOL)


def unpack_answers(message: bytes) -> list[Answer]:
    """Answers in their order, but errors last: an error is the last answer to its request."""
    rows, arrays, errors = pickle.loads(message)
    answers: list[Answer] = []
    if rows:
        ids, logprobs, versions = (
            np.frombuffer(data, dtype).copy() for data, dtype in zip(arrays, ("<i4", "<f4", "<i4"), strict=True)
        )
    first = 0
    for index, tokens, reason, beside in rows:
        part = slice(first, first + tokens)
        first += tokens
        answers.append((index, Completion(ids[part], logprobs[part], versions[part], reason, *beside)))
    return answers + errors

"""Attention of a whole batch in a few calls, against its definition; in the engine, against SGLang's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="it is for machines without an accelerator")

ENTRIES, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 200, 4, 2, 8, 6
MOST_KEYS = 60


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(length, new tokens) of each sequence: decoding, prompts, prompts with cached prefixes, or all of them."""
    lengths = draw(st.lists(st.integers(1, MOST_KEYS), min_size=1, max_size=9))
    kind = draw(st.sampled_from(["decode", "whole", "mixed"]))
    if kind == "decode":
        return [(length, 1) for length in lengths]
    return [(length, length if kind == "whole" else draw(st.integers(1, length))) for length in lengths]


def attended_alone(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, entries: torch.Tensor, scaling: float
) -> torch.Tensor:
    """float64, one head and one row after the other: the last rows of a sequence whose keys are in ``entries``."""
    rows, keys, values = query.double(), keys[entries].double(), values[entries].double()
    first = len(entries) - len(rows)
    out = torch.empty(len(rows), HEADS, VALUE_WIDTH, dtype=torch.float64)
    for row in range(len(rows)):
        seen = first + row + 1
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            weights = (rows[row, head] @ keys[:seen, shared].T * scaling).softmax(-1)
            out[row, head] = weights @ values[:seen, shared]
    return out


@settings(max_examples=60, deadline=None)
@given(batch=batches(), blocks=st.sampled_from([3, 128]), free=st.sampled_from([0, 64, 16_384]), seed=st.integers(0, 9))
def test_sequences_attended_to_together_equal_each_alone(
    batch: list[tuple[int, int]], blocks: int, free: int, seed: int
) -> None:
    """4 heads share 2 KV heads, values are narrower than keys, and cache entries of sequences are apart or shared."""
    from monarch_rl.generator.cpu import attention

    torch.manual_seed(seed)
    lengths, new = ([pair[i] for pair in batch] for i in (0, 1))
    table = torch.stack([torch.randperm(ENTRIES)[:MOST_KEYS] for _ in range(12)]).int()
    requests = torch.randperm(12)[: len(batch)]
    query = torch.randn(sum(new), HEADS, WIDTH)
    keys, values = torch.randn(ENTRIES, KV_HEADS, WIDTH), torch.randn(ENTRIES, KV_HEADS, VALUE_WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PADDING", attention.PADDING._replace(free_pairs=free))
        calls = attention.plan(table, requests, lengths, new, blocks)
    output = torch.full((sum(new), HEADS, VALUE_WIDTH), torch.nan)
    for _layer in range(2):  # the second layer reuses the first one's index tensors
        attention.attend(calls, query, output, keys, values, 0.3)
    for rows, attended, request, length in zip(query.split(new), output.split(new), requests, lengths, strict=True):
        expected = attended_alone(rows, keys, values, table[request, :length], 0.3)
        assert (attended.double() - expected).abs().max() < 2e-6


@settings(max_examples=100, deadline=None)
@given(batch=batches())
def test_padding_stays_within_its_bound(batch: list[tuple[int, int]]) -> None:
    from monarch_rl.generator.cpu.attention import PADDING, _buckets

    lengths, new = ([pair[i] for pair in batch] for i in (0, 1))
    buckets = _buckets(lengths, new)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(batch)))
    for bucket in buckets:
        padded = len(bucket) * max(lengths[i] for i in bucket) * max(new[i] for i in bucket)
        real = sum(lengths[i] * new[i] for i in bucket)
        assert len(bucket) == 1 or padded <= (1 + PADDING.waste) * real + PADDING.free_pairs


def test_another_sglang_is_refused_by_name() -> None:
    from monarch_rl.generator.patch import check_parameters

    def forward(self: object, query: int, key: int) -> None: ...

    check_parameters(forward, "query key")
    with pytest.raises(RuntimeError, match=r"\(query key\).*\(query\)"):
        check_parameters(forward, "query")

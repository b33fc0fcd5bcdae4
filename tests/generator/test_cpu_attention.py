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


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_equal_sequences_are_computed_once(batch: list[tuple[int, int]], data: st.DataObject) -> None:
    """A copy has the tokens, the cached prefix and the new keys and values of another sequence, in other entries."""
    from monarch_rl.generator.cpu import attention

    torch.manual_seed(0)
    kinds = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=12))
    lengths, new = ([batch[kind][i] for kind in kinds] for i in (0, 1))
    # Few ids, so that sequences differ only in their prefix, or in a few of their tokens, or not at all.
    tokens = {kind: torch.randint(2, (batch[kind][1],)) for kind in set(kinds)}
    prefixes = {kind: torch.randint(20, (batch[kind][0] - batch[kind][1],)) for kind in set(kinds)}
    table = torch.arange(20, 20 + 12 * MOST_KEYS).view(12, MOST_KEYS).int()
    requests = torch.randperm(12)[: len(kinds)]
    keys, values = (torch.randn(20 + 12 * MOST_KEYS, KV_HEADS, width) for width in (WIDTH, VALUE_WIDTH))
    queries: dict[tuple[bytes, bytes], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    query = []
    for kind, request in zip(kinds, requests, strict=True):
        length, count = batch[kind]
        table[request, : length - count] = prefixes[kind].int()
        drawn = torch.randn(count, HEADS, WIDTH), torch.randn(count, KV_HEADS, WIDTH), torch.randn(count, KV_HEADS, 6)
        same = (prefixes[kind].numpy().tobytes(), tokens[kind].numpy().tobytes())
        rows, new_keys, new_values = queries.setdefault(same, drawn)
        own = table[request, length - count : length].long()
        keys[own], values[own] = new_keys, new_values
        query.append(rows)
    distinct = attention.find_distinct(table, requests, lengths, new, torch.cat([tokens[kind] for kind in kinds]))
    assert (distinct is None) == (len(queries) == len(kinds))
    if distinct is None:
        return
    assert len(distinct.rows) == sum(len(rows) for rows, _, _ in queries.values())
    output = torch.full((len(distinct.rows), HEADS, VALUE_WIDTH), torch.nan)
    attention.attend(distinct.calls, torch.cat(query)[distinct.rows], output, keys, values, 0.3)
    for rows, attended, request, length in zip(
        query, output[distinct.source].split(new), requests, lengths, strict=True
    ):
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

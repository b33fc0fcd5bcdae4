"""Attention of a whole batch in a few calls, on a machine without an accelerator.

SGLang's ``torch_native`` computes attention sequence by sequence in each layer, and for tokens after a cached prefix it
computes the rows of the prefix again. With a small model that is half of a step. Here sequences are padded to a common
length and computed together, only for the requested rows. Everything that does not depend on the layer, such as the
cache entries of keys and the masks, is computed once per forward pass. Outputs are within 2e-6 of attention computed in
float64 (``tests/generator/test_cpu_attention.py``). Log-probs of the engines in tests are within 5e-6 of
``torch_native``'s, relative to a row's largest logit where that is above 1 (``tests/generator/checked_scheduler.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from monarch_rl.algorithms.packing import Padding, spans_of_similar_size

PADDING = Padding(waste=1.0, free_pairs=16_384)
"""Limits on the padding of a call; within 30 % of the best for each load of ``python benchmarks/padding.py``."""
BLOCK_ROWS = 128
"""Rows of a long sequence with a cached prefix that are computed at once. Larger blocks need larger masks, and compute
more scores that are masked out. 64 to 256 were equally fast."""


@dataclass
class Call:
    """Sequences whose attention is computed together: B sequences, padded to Q rows and S keys."""

    sequences: int
    """B."""
    keys: torch.Tensor
    """int64[B * S]: cache entries of each sequence's keys; padding repeats an arbitrary entry."""
    rows: torch.Tensor | slice
    """Rows of the query: int64[B * Q], where padding repeats the last row; a slice if there is no padding."""
    real: torch.Tensor | None
    """int64: indices of the B * Q rows that are not padding; None if there is no padding."""
    mask: torch.Tensor | None = None
    """float32[B, 1, Q, S]: 0 where a row attends to a key, else -inf; None if every row attends to all keys, or for a
    causal call."""
    causal: bool = False
    """Whether the rows are one whole sequence."""
    shared_mask: torch.Tensor | None = None
    """[B, 1, heads per KV head * Q, S]: the mask repeated for the heads of a KV head; created in the first layer."""

    def mask_for(self, shared: int) -> torch.Tensor | None:
        """The mask of rows that are repeated for the ``shared`` heads of a KV head."""
        if self.shared_mask is None and self.mask is not None:
            self.shared_mask = self.mask.repeat(1, 1, shared, 1)
        return self.shared_mask


def plan(
    table: torch.Tensor, requests: torch.Tensor, lengths: list[int], new: list[int], blocks: int = BLOCK_ROWS
) -> list[Call]:
    """Divide a batch into calls.

    Args:
        table: int[requests, positions]: the cache entry of each position of a request.
        requests: int64[n]: the batch's rows of ``table``.
        lengths: tokens of each of the n sequences, including new ones.
        new: for each sequence, how many of its last tokens are queries; the query concatenates them.
        blocks: rows of a sequence with a prefix that are computed at once.
    """
    starts = [0, *accumulate(new)]
    calls: list[Call] = []
    for members in _buckets(lengths, new):
        first = members[0]
        if len(members) == 1:
            entries = table[requests[first], : lengths[first]].long()
            calls += _alone(entries, new[first], starts[first], blocks)
        else:
            chosen = requests if len(members) == len(lengths) else requests[members]
            counts = [(lengths[i], new[i], starts[i]) for i in members]
            calls.append(_together(table, chosen, *map(list, zip(*counts, strict=True))))
    return calls


def _buckets(lengths: list[int], new: list[int]) -> list[list[int]]:
    """Group sequences by similar size, so that padding stays within its limits."""
    if not lengths:
        return []
    if PADDING.allows(len(lengths) * max(lengths) * max(new), sum(map(mul, lengths, new))):
        return [list(range(len(lengths)))]
    longest_first = sorted(range(len(lengths)), key=lambda i: (lengths[i], new[i]), reverse=True)
    runs = spans_of_similar_size([(new[i], lengths[i]) for i in longest_first], PADDING)
    return [longest_first[run.start : run.stop] for run in runs]


def _alone(entries: torch.Tensor, new: int, start: int, blocks: int) -> list[Call]:
    """Calls for a single sequence: one without a prefix; otherwise blocks of rows, each with the keys up to its end."""
    length = len(entries)
    if new == length:
        return [Call(1, entries, slice(start, start + new), None, causal=True)]
    calls = []
    for first in range(0, new, blocks):
        end = min(first + blocks, new)
        keys = length - new + end
        mask = None if end - first == 1 else _mask(torch.arange(keys - end + first, keys)[None], keys)
        calls.append(Call(1, entries[:keys], slice(start + first, start + end), None, mask))
    return calls


def _together(
    table: torch.Tensor, requests: torch.Tensor, lengths: list[int], new: list[int], starts: list[int]
) -> Call:
    count, rows, keys = len(lengths), max(new), max(lengths)
    entries = table[requests, :keys].flatten().long()
    ends = torch.tensor(lengths)[:, None]
    if rows == 1:
        mask = None if min(lengths) == keys else _mask(ends - 1, keys)
        in_order = starts[-1] - starts[0] == count - 1 and starts == sorted(starts)
        picked = slice(starts[0], starts[0] + count) if in_order else torch.tensor(starts)
        return Call(count, entries, picked, None, mask)
    counts = torch.tensor(new)[:, None]
    steps = torch.arange(rows)[None]
    within = torch.minimum(steps, counts - 1)
    real = None if min(new) == rows else (steps < counts).flatten().nonzero()[:, 0]
    return Call(
        count, entries, (torch.tensor(starts)[:, None] + within).flatten(), real, _mask(ends - counts + within, keys)
    )


@dataclass
class Distinct:
    """The distinct sequences of a batch of prompts, in which some occur repeatedly."""

    rows: torch.Tensor
    """int64[distinct new tokens]: indices of the new tokens of the first sequence of each kind."""
    source: torch.Tensor
    """int64[new tokens]: for each new token of the batch, the index in ``rows`` of the token that it equals."""
    calls: list[Call]
    """Calls of the distinct sequences, whose query has only the tokens of ``rows``."""


def find_distinct(
    table: torch.Tensor, requests: torch.Tensor, lengths: list[int], new: list[int], ids: torch.Tensor
) -> Distinct | None:
    """Find sequences with the same new tokens after the same cached prefix: all their rows are equal in every layer.

    The episodes of a group have the same prompt.

    Args:
        table: see :func:`plan`.
        requests: see :func:`plan`.
        lengths: see :func:`plan`.
        new: see :func:`plan`.
        ids: int64[new tokens] of all sequences.

    Returns:
        None if all sequences are distinct.
    """
    tokens, starts = ids.numpy(), [0, *accumulate(new)]
    firsts: dict[tuple[bytes, bytes], int] = {}
    kinds = []  # for each sequence, the index of the first one that equals it
    for i, (request, length, count, start) in enumerate(zip(requests.tolist(), lengths, new, starts, strict=False)):
        prefix = table[request, : length - count].numpy().tobytes() if length > count else b""
        kinds.append(firsts.setdefault((prefix, tokens[start : start + count].tobytes()), i))
    if len(firsts) == len(kinds):
        return None
    chosen = list(firsts.values())
    counts = [new[i] for i in chosen]
    places = dict(zip(chosen, [0, *accumulate(counts)], strict=False))
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
    source = np.concatenate([np.arange(places[i], places[i] + new[i]) for i in kinds])
    calls = plan(table, requests[chosen], [lengths[i] for i in chosen], counts)
    return Distinct(torch.from_numpy(rows), torch.from_numpy(source), calls)


def _mask(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """float32[B, 1, Q, keys]: the causal mask of rows at int64[B, Q] positions in their sequences."""
    hidden = torch.arange(keys) > positions[..., None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]


def attend(
    calls: list[Call],
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scaling: float | None,
) -> None:
    """Write the attention of ``query`` [tokens, heads, width] into ``output`` [tokens, heads, value width].

    Caches are [entries, KV heads, (value) width]. The heads that share a KV head are treated as further rows.
    """
    for call in calls:
        picked = query[call.rows] if isinstance(call.rows, slice) else query.index_select(0, call.rows)
        keys, values = (
            cache.index_select(0, call.keys).view(call.sequences, -1, *cache.shape[1:]).transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
        attended = _attend(call, picked, keys, values, scaling)
        if isinstance(call.rows, slice):
            output[call.rows] = attended
        elif call.real is None:
            output.index_copy_(0, call.rows, attended)
        else:
            output.index_copy_(0, call.rows[call.real], attended[call.real])


def _attend(
    call: Call, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one call, [B * Q, heads, value width].

    Args:
        call: the call.
        query: [B * Q, heads, width].
        keys: [B, KV heads, S, width].
        values: [B, KV heads, S, value width].
        scaling: factor of the scores.
    """
    count, kv_heads = call.sequences, keys.shape[1]
    shared = query.shape[1] // kv_heads
    if call.causal:
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, is_causal=True, scale=scaling, enable_gqa=shared > 1
        )
        return attended[0].transpose(0, 1)
    rows = len(query) // count
    if rows == 1:
        apart = query.view(count, kv_heads, shared, -1)
    else:
        apart = query.view(count, rows, kv_heads, shared, -1).permute(0, 2, 3, 1, 4)
        apart = apart.reshape(count, kv_heads, shared * rows, -1)
    attended = scaled_dot_product_attention(apart, keys, values, attn_mask=call.mask_for(shared), scale=scaling)
    if rows > 1:
        attended = attended.view(count, kv_heads, shared, rows, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(len(query), query.shape[1], -1)


class BatchedAttention(TorchNativeAttnBackend):
    """Replaces SGLang's ``torch_native`` backend for causal self-attention over a cache of the query's dtype; the rest
    is left to SGLang."""

    _batch: tuple[torch.Tensor, torch.Tensor, list[int], list[int]]
    """Arguments of :func:`plan` in the current forward pass."""
    _calls: list[Call] | None = None
    """Calls of the current forward pass, once they are planned."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Note the sequences of a forward pass."""
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens.tolist()
        decodes = forward_batch.forward_mode.is_decode_or_idle()
        new = [1] * len(lengths) if decodes else forward_batch.extend_seq_lens.tolist()
        self._batch = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, lengths, new
        self._calls = None

    @property
    def calls(self) -> list[Call]:
        """Calls of the current forward pass for all sequences, which are the same in every layer."""
        if self._calls is None:
            self._calls = plan(*self._batch)
        return self._calls

    def distinct(self, ids: torch.Tensor) -> Distinct | None:
        """The distinct sequences of a batch of prompts with new tokens ``ids``, int64[tokens]; None if all are."""
        return find_distinct(*self._batch, ids)

    def _run_sdpa_forward_extend(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._batched(super()._run_sdpa_forward_extend, *args, **options)

    def _run_sdpa_forward_decode(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._batched(super()._run_sdpa_forward_decode, *args, **options, extend=False)

    def _batched(
        self,
        one_by_one: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        extend: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        encoder_lens = args[-1]
        special = (
            encoder_lens is not None
            or options.get("is_cross_attn")
            or options.get("sliding_window_size") is not None
            or (extend and not options["causal"])
            or query.dtype != k_cache.dtype
        )
        if special:
            attended: torch.Tensor = one_by_one(query, output, k_cache, v_cache, *args, **options)
            return attended
        attend(self.calls, query, output, k_cache, v_cache, options.get("scaling"))
        return output

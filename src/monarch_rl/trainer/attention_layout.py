"""Which keys the queries of a row attend to, on CPUs and GPUs.

No torchtitan in it: see :mod:`monarch_rl.trainer.platform`.

A *segment* is what one episode adds to the row: its inputs that no earlier episode has. Its queries attend to the keys
of the prefix that it shares with earlier episodes, wherever they are in the row, and to its own keys. So it has at
least as many keys as queries, and its last query attends to all of them (causal, aligned at the bottom right).

Shapes: L inputs of the row, T keys of all segments, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from monarch_rl.algorithms.packing import Padding, spans_of_similar_size

PADDING = Padding(waste=0.25, free_pairs=4096)
"""For SDPA calls on a CPU: within a fifth of the best value for each load of ``python benchmarks/padding.py``."""


class Segment(NamedTuple):
    """What one episode adds to the row."""

    start: int
    """Place in the row of its first own input; its other own inputs follow."""
    path: np.ndarray
    """int64[k]: places in the row of all inputs of the episode. The last ``own`` of them are the segment's own."""
    own: int
    """Number of its own inputs, at least 1."""


class PaddedCall(NamedTuple):
    """One SDPA call for several segments, each padded at its end to q queries and k keys."""

    queries: np.ndarray
    """int64[S, q]: places in the row. In causal calls, which need as many queries as keys, the queries of the shared
    prefix come before the segment's own; their results are not used."""
    keys: np.ndarray
    """int64[S, k]: places in the row."""
    mask: torch.Tensor | None
    """bool[S, 1, q, k]: which keys a query attends to. None: causal, with as many queries as keys."""


class PaddedCalls(NamedTuple):
    """All SDPA calls of a row. Queries and keys are gathered once for all calls, because each gather has a gradient as
    large as the row."""

    calls: list[PaddedCall]
    queries: torch.Tensor
    """int64: the queries of all calls, concatenated."""
    keys: torch.Tensor
    """int64: the keys of all calls, concatenated."""
    outputs: torch.Tensor
    """int64[L]: the place of the output of each input of the row in the concatenated outputs of all calls."""


class AttentionLayout:
    """Which keys the queries of a row attend to. All layers of a micro-batch share one object.

    Args:
        segments: segments in the order of the row.
        device: device of the tensors.
    """

    # Neither a dataclass nor a tuple: FSDP searches those for tensors, at every layer.

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        self.device = device
        self.number = torch.tensor(next(_numbers))
        """int64, on the CPU: the number by which a compiled model looks up this layout (:func:`layout_of`)."""
        _layouts[int(self.number)] = self
        if device.type == "cuda":
            self.prepare_for_flash()

    def prepare_for_flash(self) -> None:
        """Compute the inputs of flash attention now, so that a compiled block reads them instead of tracing their
        code."""
        _ = self.max_queries, self.max_keys, self.query_ends, self.key_ends, self.keys

    @cached_property
    def max_queries(self) -> int:
        return max(segment.own for segment in self.segments)

    @cached_property
    def max_keys(self) -> int:
        return max(len(segment.path) for segment in self.segments)

    @cached_property
    def query_ends(self) -> torch.Tensor:
        """int32[S + 1]: the start of each segment's queries in the row, and the end of the last (cumulative
        lengths)."""
        return self._ends([segment.own for segment in self.segments])

    @cached_property
    def key_ends(self) -> torch.Tensor:
        """int32[S + 1]: the same for the segments' keys in ``keys``."""
        return self._ends([len(segment.path) for segment in self.segments])

    @cached_property
    def keys(self) -> torch.Tensor | None:
        """int64[T]: places in the row of the keys of all segments, concatenated. None: the row itself."""
        if all(len(segment.path) == segment.own for segment in self.segments):
            return None
        return torch.from_numpy(np.concatenate([segment.path for segment in self.segments])).to(self.device)

    @cached_property
    def padded_calls(self) -> PaddedCalls:
        """The SDPA calls that compute the row on a CPU."""
        calls, outputs, offset = [], np.zeros(sum(segment.own for segment in self.segments), np.int64), 0
        for causal in (True, False):
            chosen = [segment for segment in self.segments if _fits_causal(segment) == causal]
            for together in _of_similar_size(chosen, causal):
                calls.append(_padded_call(together, causal, self.device))
                width = calls[-1].queries.shape[1]
                for index, segment in enumerate(together):
                    first = offset + index * width + (len(segment.path) - segment.own if causal else 0)
                    outputs[segment.start : segment.start + segment.own] = np.arange(first, first + segment.own)
                offset += len(together) * width
        queries = np.concatenate([call.queries.ravel() for call in calls])
        keys = np.concatenate([call.keys.ravel() for call in calls])
        return PaddedCalls(calls, *(torch.from_numpy(places).to(self.device) for places in (queries, keys, outputs)))

    def _ends(self, sizes: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)).to(self.device)


_numbers = count()
_layouts: WeakValueDictionary[int, AttentionLayout] = WeakValueDictionary()
"""Live layouts of this process, by number."""


def layout_of(number: torch.Tensor) -> AttentionLayout:
    """The layout with this number. Raises KeyError if it was freed: keep its micro-batch until the backward pass is
    done."""
    return _layouts[int(number)]


def separate_layout(lengths: Sequence[int], device: torch.device) -> AttentionLayout:
    """The layout of sequences of ``lengths`` inputs, one after the other, that share nothing."""
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    return AttentionLayout(
        [Segment(start, np.arange(start, start + n), n) for start, n in zip(starts, lengths, strict=True) if n], device
    )


def _fits_causal(segment: Segment) -> bool:
    """Whether a causal call that also computes the queries of the shared prefix is cheaper than a masked one: the
    former costs the triangle of all keys, the latter a rectangle of own queries and all keys."""
    return 2 * segment.own >= len(segment.path)


def _of_similar_size(segments: Sequence[Segment], causal: bool) -> list[list[Segment]]:
    """Segments grouped into few calls with little padding."""
    longest_first = sorted(segments, key=lambda segment: -len(segment.path))
    sizes = [(len(segment.path) if causal else segment.own, len(segment.path)) for segment in longest_first]
    return [[longest_first[place] for place in run] for run in spans_of_similar_size(sizes, PADDING)]


def _padded_call(segments: Sequence[Segment], causal: bool, device: torch.device) -> PaddedCall:
    most_keys = max(len(segment.path) for segment in segments)
    most_queries = most_keys if causal else max(segment.own for segment in segments)
    # Padding may be any place of the row: no query whose result is used attends to it.
    keys = np.zeros((len(segments), most_keys), np.int64)
    queries = np.zeros((len(segments), most_queries), np.int64)
    reach = np.zeros((len(segments), most_queries), np.int64)
    for index, segment in enumerate(segments):
        path = segment.path
        own = path if causal else path[len(path) - segment.own :]
        keys[index, : len(path)], queries[index, : len(own)] = path, own
        reach[index, : len(own)] = np.arange(len(path) - len(own), len(path))
    mask = None if causal else torch.from_numpy(np.arange(most_keys) <= reach[:, None, :, None]).to(device)
    return PaddedCall(queries, keys, mask)

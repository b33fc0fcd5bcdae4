"""The drawn tokens of a micro-batch, and which of them have log-probs of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import KeptSets
from monarch_rl.trainer.layout import RowLayout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The N drawn tokens of a micro-batch, episode after episode, and the M that have log-probs of their own."""

    counts: list[int]
    """Drawn tokens of each episode."""
    logprobs: np.ndarray
    """float32[N]: the engine's."""
    versions: np.ndarray
    """int32[N]: that drew them."""
    places: np.ndarray
    """int64[M]: in the row, of the input before each."""
    targets: np.ndarray
    """int64[M]: the tokens."""
    kept_sets: KeptSets | None
    """Of the M, where the sampler cut tokens off."""
    kinds: np.ndarray | None
    """int64[N]: which of the M; None is each once."""
    columns: dict[str, np.ndarray]
    """float32[N] by name. A token that several episodes share has the value of each."""

    @classmethod
    def of(cls, episodes: Sequence[Episode], layout: RowLayout, column_names: Sequence[str] = ()) -> DrawnRows:
        """Raises ValueError if some episodes have kept sets and others do not, or lack a column."""
        _check_columns(episodes, column_names)
        masks = [episode.trainable[1:] for episode in episodes]

        def drawn(values: list[np.ndarray], dtype: type) -> np.ndarray:
            """Of one value for each token but the first of each episode, those of the drawn ones."""
            chosen = [of_episode[mask] for of_episode, mask in zip(values, masks, strict=True)]
            return np.concatenate([*chosen, np.zeros(0, dtype)]).astype(dtype, copy=False)

        places = drawn(layout.paths, np.int64)
        targets = drawn([episode.token_ids[1:] for episode in episodes], np.int64)
        kept_sets = _kept_sets(episodes)
        kinds = None
        if any(layout.shared) and (found := _distinct(places, targets, kept_sets)) is not None:
            first, kinds = found
            places, targets = places[first], targets[first]
            kept_sets = None if kept_sets is None else kept_sets[first]
        return cls(
            [int(mask.sum()) for mask in masks],
            drawn([episode.logprobs[1:] for episode in episodes], np.float32),
            drawn([episode.policy_versions[1:] for episode in episodes], np.int32),
            places,
            targets,
            kept_sets,
            kinds,
            {name: drawn([episode.column(name)[1:] for episode in episodes], np.float32) for name in column_names},
        )


def _check_columns(episodes: Sequence[Episode], names: Sequence[str]) -> None:
    for episode in episodes:
        for turn in episode.turns:
            missing = [name for name in names if name not in turn.columns]
            if missing:
                raise ValueError(f"an episode has columns {sorted(turn.columns)}, but not {missing[0]}, as others have")


def _distinct(
    places: np.ndarray, targets: np.ndarray, kept_sets: KeptSets | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Which of N drawn tokens have log-probs of their own.

    Tokens that several episodes share have one log-prob: the same target at the same place, drawn from the same kept
    set.

    Args:
        places: int64[N], in the row, of the input before each token.
        targets: int64[N], the tokens.
        kept_sets: of the tokens.

    Returns:
        ``(int64[M], int64[N])``: the first token of each kind, ascending, and the kind of each token; None if all
        differ.
    """
    if not len(places):
        return None
    kinds = places * (int(targets.max()) + 1) + targets
    _, inverse, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    if len(counts) == len(kinds):
        return None
    if kept_sets is not None:
        inverse = inverse * len(kinds) + _set_numbers(kept_sets, np.flatnonzero(counts[inverse] > 1))
    _, first, inverse = np.unique(inverse, return_index=True, return_inverse=True)
    by_place = np.argsort(first)
    rank = np.empty_like(by_place)
    rank[by_place] = np.arange(len(by_place))
    return first[by_place], rank[inverse]


def _set_numbers(kept_sets: KeptSets, tokens: np.ndarray) -> np.ndarray:
    """int64[N]: equal for equal sets among ``tokens``; 0 for all other tokens."""
    numbers, known = np.zeros(len(kept_sets.counts), np.int64), dict[bytes, int]()
    ends = np.cumsum(kept_sets.counts)
    for token in tokens.tolist():
        ids = kept_sets.ids[ends[token] - kept_sets.counts[token] : ends[token]]
        numbers[token] = known.setdefault(ids.tobytes(), len(known))
    return numbers


def _kept_sets(episodes: Sequence[Episode]) -> KeptSets | None:
    # A token that is no longer trained keeps its set in the episode, but not here.
    by_episode = [
        None if (kept_sets := episode.kept_sets) is None else kept_sets[episode.trainable] for episode in episodes
    ]
    present = all_or_none(by_episode, "kept sets")
    return KeptSets.join(present) if present else None


def all_or_none(values: Sequence[T | None], what: str) -> list[T]:
    """Those that are there. Raises ValueError if some are and others are not."""
    present = [value for value in values if value is not None]
    if len(present) not in (0, len(values)):
        raise ValueError(f"{len(present)} of {len(values)} episodes have {what}: they cannot be trained together")
    return present

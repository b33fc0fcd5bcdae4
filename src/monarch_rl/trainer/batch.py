"""The tensors of a micro-batch: one row of its episodes without padding, in which shared prefixes occur once.

``algorithms/packing.py`` decides which episodes are in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from monarch_rl.algorithms.functions import Columns
from monarch_rl.algorithms.losses import Aggregation, token_weights
from monarch_rl.episode.episode import Episode
from monarch_rl.episode.prefixes import prefix_tree
from monarch_rl.episode.sampling import SamplingMasks
from monarch_rl.episode.shard import MiniBatch, PackedShard
from monarch_rl.trainer.advantages import BatchAdvantages
from monarch_rl.trainer.attention_layout import AttentionLayout, Segment


@dataclass(slots=True)
class MicroBatch:
    """L input tokens of packed episodes, with N trainable (sampled) tokens as targets.

    An episode of n tokens has n - 1 inputs: its last token is only ever a target. A prefix that episodes of a group
    share is in the row once. A trainable token that two episodes share counts in both, with the advantage and weight of
    each, but its log-prob is computed once: M <= N log-probs are computed.
    """

    token_ids: torch.Tensor
    """int64[1, L]."""
    positions: torch.Tensor
    """int64[1, L]: position in the episode."""
    attention: AttentionLayout
    """Which inputs each input attends to."""
    sampled_after: torch.Tensor
    """int64[M]: row index of the input whose output predicts each target. The last input of a shared prefix occurs once
    for each token that follows it."""
    targets: torch.Tensor
    """int64[M]: the sampled tokens."""
    rows: torch.Tensor | None
    """int64[N]: index into the M computed log-probs for each trainable token. None: identity (N = M)."""
    behaviour_logprobs: torch.Tensor
    """float32[N]: the engine's log-probs."""
    advantages: torch.Tensor
    """float32[N]."""
    weights: torch.Tensor
    """float32[N]: weight of each token in the loss."""
    lags: torch.Tensor
    """int64[N]: policy lag, the version that the update starts from minus the version that sampled the token."""
    sequences: torch.Tensor
    """int64[N], ascending: the episode of each token, as an index into the packed episodes."""
    num_sequences: int
    """Packed episodes, with and without trainable tokens."""
    columns: Columns[torch.Tensor] = field(default_factory=Columns)
    """float32[N] by name: values filled in by stages or the trainer. All micro-batches have the same names."""
    sampling_masks: tuple[torch.Tensor, torch.Tensor] | None = None
    """``(counts int64[M], ids int32[sum of counts])``: the ids that each token was sampled from. None: the whole
    vocabulary."""
    expert_routes: torch.Tensor | None = None
    """uint8 or uint16 [1, L, layers, k]: the experts that the engine used for each input. None: not recorded."""
    padding: int = 0
    """Inputs that belong to no episode: 1 on a rank without episodes."""
    separate_tokens: int = 0
    """Inputs that the episodes would have if they shared no prefixes."""
    supervised: bool = False
    """Whether these are supervised rows, which are trained by cross-entropy whatever the objective is."""
    notes: dict[str, torch.Tensor] | None = None
    """Values of the last pass for the record of the run (``token_records.py``), by name: [N], without gradient. None:
    no sequence belongs to a logged group, and nothing needs to be noted."""

    @property
    def num_tokens(self) -> int:
        """L, the number of inputs that are computed."""
        return self.token_ids.shape[1]


def pack(
    episodes: Sequence[Episode],
    advantages: Sequence[torch.Tensor] | torch.Tensor,
    weights: torch.Tensor,
    version: int,
    device: torch.device,
    groups: Sequence[int] | None = None,
    column_names: Sequence[str] = (),
) -> MicroBatch:
    """Pack episodes into a micro-batch.

    Args:
        advantages: one entry per episode: a scalar, or float32[n] for its n sampled tokens, masked ones included.
        weights: float32[E], weight of every trainable token of each of the E episodes.
        version: version of the policy being updated.
        groups: group number of each episode; episodes of a group share prefixes. None: no episodes share.
        column_names: names of the columns to pack.

    Raises:
        ValueError: only some episodes have sampling masks or expert routes, an episode lacks a column, or expert routes
            or advantages are for another number of tokens.
    """
    _check_routes(episodes)
    layout = layout_rows(episodes, range(len(episodes)) if groups is None else groups)
    rows = SampledRows.of(episodes, layout, column_names)
    # A rank without inputs still takes part in the collectives, with a padding token that has no weight.
    padding = np.zeros(0 if layout.width else 1, np.int64)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    counts, sampling_masks = rows.counts.to(device), rows.sampling_masks
    token_ids = [*layout.own_inputs([episode.token_ids for episode in episodes]), padding]
    positions = [*layout.own_inputs([np.arange(len(path)) for path in layout.paths]), padding]
    routes = [e.expert_routes for e in episodes if e.expert_routes is not None and layout.width]
    return MicroBatch(
        token_ids=on_device(np.concatenate(token_ids).astype(np.int64)).unsqueeze(0),
        positions=on_device(np.concatenate(positions)).unsqueeze(0),
        attention=AttentionLayout(layout.segments() if layout.width else [Segment(0, padding, 1)], device),
        sampled_after=on_device(rows.places),
        targets=on_device(rows.targets),
        rows=None if rows.kinds is None else on_device(rows.kinds),
        behaviour_logprobs=on_device(rows.logprobs),
        advantages=_trainable_only(episodes, rows.counts, advantages).to(device),
        weights=_per_token(weights, counts, device),
        lags=version - on_device(rows.versions).long(),
        sequences=torch.arange(len(episodes), device=device).repeat_interleave(counts),
        num_sequences=len(episodes),
        columns=Columns({name: on_device(values) for name, values in rows.columns.items()}),
        sampling_masks=None
        if sampling_masks is None
        else (on_device(sampling_masks.counts).long(), on_device(sampling_masks.ids)),
        expert_routes=on_device(np.concatenate(layout.own_inputs(routes))).unsqueeze(0) if routes else None,
        padding=len(padding),
        separate_tokens=sum(map(len, layout.paths)),
    )


def _check_routes(episodes: Sequence[Episode]) -> None:
    present = require_all_or_none([episode.expert_routes for episode in episodes], "expert routes")
    for episode, expert_routes in zip(episodes, present, strict=False):  # none, or one for each episode
        if len(expert_routes) != episode.num_tokens - 1:
            raise ValueError(
                f"an episode of {episode.num_tokens} tokens has expert routes for {len(expert_routes)} inputs: it "
                f"needs routes for {episode.num_tokens - 1}"
            )


def _per_token(per_episode: torch.Tensor, counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    if len(per_episode) == 0:
        return torch.zeros(0, device=device)
    return per_episode.to(device).repeat_interleave(counts)


def _trainable_counts(episodes: Sequence[Episode]) -> torch.Tensor:
    """int64[E]: targets of each episode, its trainable tokens except a first one, which nothing predicts."""
    return torch.tensor([np.count_nonzero(episode.trainable[1:]) for episode in episodes], dtype=torch.int64)


def _trainable_only(
    episodes: Sequence[Episode], counts: torch.Tensor, values: Sequence[torch.Tensor] | torch.Tensor
) -> torch.Tensor:
    """float32[N]: advantages, or other values of sampled tokens, restricted to the trainable ones: see :func:`pack`.

    Args:
        counts: int64[E]: trainable tokens of each episode.
    """
    if len(values) != len(episodes):
        raise ValueError(f"{len(episodes)} episodes have values for {len(values)}")
    if not episodes:
        return torch.zeros(0)
    if all(not of_episode.ndim for of_episode in values):
        return torch.stack([*values]).float().repeat_interleave(counts)
    found = []
    for episode, count, of_episode in zip(episodes, counts.tolist(), values, strict=True):
        if of_episode.ndim:
            sampled = torch.from_numpy(episode.sampled)
            if (tokens := int(sampled.sum())) != len(of_episode):
                raise ValueError(f"an episode with {tokens} sampled tokens has advantages for {len(of_episode)} tokens")
            by_token = torch.zeros(len(sampled)).masked_scatter(sampled, of_episode.float())
            found.append(by_token[1:][torch.from_numpy(episode.trainable[1:])])
        else:
            found.append(of_episode.float().expand(count))
    return torch.cat(found)


def pack_shard(
    shard: PackedShard,
    advantages: BatchAdvantages,
    aggregation: Aggregation,
    normaliser_tokens: int,
    device: torch.device,
    columns: Mapping[str, BatchAdvantages] | None = None,
) -> list[list[MicroBatch]]:
    """The micro-batches of one trainer rank, by mini-batch. Token weights are normalised by the totals of the
    mini-batch over all ranks.

    Args:
        advantages: advantages of the whole batch, ``BatchAdvantages[group][episode]``: a scalar or float32[sampled
            tokens]. See :func:`monarch_rl.trainer.advantages.advantages_of`.
        aggregation: how token losses are normalised.
        normaliser_tokens: tokens per episode in the normaliser of the ``constant`` aggregation.
        columns: further columns of the whole batch by name: float32[sampled tokens] of each sequence.
    """

    def packed(minibatch: MiniBatch, places: Sequence[tuple[int, int, int]], episodes: Sequence[Episode]) -> MicroBatch:
        weights = token_weights(
            torch.tensor([episode.num_trainable for episode in episodes]),
            aggregation,
            batch_tokens=minibatch.trainable_tokens,
            batch_episodes=minibatch.episodes,
            normaliser_tokens=normaliser_tokens,
        )

        def of_episodes(values: BatchAdvantages) -> list[torch.Tensor]:
            return [values[group][episode_index] for group, episode_index, _ in places]

        groups = [group for group, _, _ in places]
        batch = pack(episodes, of_episodes(advantages), weights, shard.version, device, groups, shard.column_names)
        if columns:
            counts = _trainable_counts(episodes)
            for name, values in columns.items():
                batch.columns[name] = _trainable_only(episodes, counts, of_episodes(values)).to(device)
        return batch

    microbatches = zip(shard.places, shard.deserialize(), strict=True)
    return [
        [packed(minibatch, places, episodes) for places, episodes in islice(microbatches, minibatch.microbatches)]
        for minibatch in shard.minibatches
    ]


# -- the trainable tokens of a micro-batch, and which of them need log-probs of their own ----------------------------

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The N trainable tokens of a micro-batch, episode after episode, and the M distinct ones among them."""

    counts: torch.Tensor
    """int64[E]: trainable tokens of each of the E episodes."""
    logprobs: np.ndarray
    """float32[N]: the engine's log-probs."""
    versions: np.ndarray
    """int32[N]: the policy versions that sampled them."""
    places: np.ndarray
    """int64[M]: place in the row of the input before each token."""
    targets: np.ndarray
    """int64[M]: the tokens."""
    sampling_masks: SamplingMasks | None
    """Masks of the M tokens. None: all were sampled from the whole vocabulary."""
    kinds: np.ndarray | None
    """int64[N]: which of the M each token is. None: N = M, in the same order."""
    columns: dict[str, np.ndarray]
    """float32[N] by name. A token that several episodes share has one value for each of them."""

    @classmethod
    def of(cls, episodes: Sequence[Episode], layout: RowLayout, column_names: Sequence[str] = ()) -> SampledRows:
        """Raises ValueError if only some episodes have sampling masks, or an episode lacks a column."""
        _check_columns(episodes, column_names)
        mask = np.concatenate([*(episode.trainable[1:] for episode in episodes), np.zeros(0, bool)])

        def trainable(values: list[np.ndarray], dtype: type) -> np.ndarray:
            """The values of the trainable tokens, given for each episode one value per token except the first."""
            return np.concatenate([*values, np.zeros(0, dtype)])[mask].astype(dtype, copy=False)

        places = trainable(layout.paths, np.int64)
        targets = trainable([episode.token_ids[1:] for episode in episodes], np.int64)
        sampling_masks = _sampling_masks(episodes)
        kinds = None
        if any(layout.shared) and (found := _distinct(places, targets, sampling_masks)) is not None:
            first, kinds = found
            places, targets = places[first], targets[first]
            sampling_masks = None if sampling_masks is None else sampling_masks[first]
        return cls(
            _trainable_counts(episodes),
            trainable([episode.logprobs[1:] for episode in episodes], np.float32),
            trainable([episode.policy_versions[1:] for episode in episodes], np.int32),
            places,
            targets,
            sampling_masks,
            kinds,
            {name: trainable([episode.column(name)[1:] for episode in episodes], np.float32) for name in column_names},
        )


def _check_columns(episodes: Sequence[Episode], names: Sequence[str]) -> None:
    for episode in episodes:
        for turn in episode.turns:
            missing = [name for name in names if name not in turn.columns]
            if missing:
                raise ValueError(
                    f"an episode lacks column {missing[0]!r} (it has {sorted(turn.columns)}). Every turn of every "
                    "episode in a batch needs it: check the stage that fills it"
                )


def _distinct(
    places: np.ndarray, targets: np.ndarray, sampling_masks: SamplingMasks | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Which of N trainable tokens are distinct. Tokens share a log-prob if they have the same target at the same place,
    sampled with the same sampling mask.

    Args:
        places: int64[N], place in the row of the input before each token.
        targets: int64[N], the tokens.
        sampling_masks: masks of the N tokens.

    Returns:
        ``(int64[M], int64[N])``: the first token of each kind, ascending, and the kind of each token. None if all N
        differ.
    """
    if not len(places):
        return None
    kinds = places * (int(targets.max()) + 1) + targets
    _, inverse, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    if len(counts) == len(kinds):
        return None
    if sampling_masks is not None:
        inverse = inverse * len(kinds) + _mask_numbers(sampling_masks, np.flatnonzero(counts[inverse] > 1))
    _, first, inverse = np.unique(inverse, return_index=True, return_inverse=True)
    by_place = np.argsort(first)
    rank = np.empty_like(by_place)
    rank[by_place] = np.arange(len(by_place))
    return first[by_place], rank[inverse]


def _mask_numbers(sampling_masks: SamplingMasks, tokens: np.ndarray) -> np.ndarray:
    """int64[N]: a number for each distinct mask among ``tokens``; 0 for all other tokens."""
    numbers, found = np.zeros(len(sampling_masks.counts), np.int64), dict[bytes, int]()
    ends = np.cumsum(sampling_masks.counts)
    for token in tokens.tolist():
        ids = sampling_masks.ids[ends[token] - sampling_masks.counts[token] : ends[token]]
        numbers[token] = found.setdefault(ids.tobytes(), len(found))
    return numbers


def _sampling_masks(episodes: Sequence[Episode]) -> SamplingMasks | None:
    # The episode also has masks of sampled tokens that are not trained.
    by_episode = [
        None if (sampling_masks := episode.sampling_masks) is None else sampling_masks[episode.trainable]
        for episode in episodes
    ]
    present = require_all_or_none(by_episode, "sampling masks")
    return SamplingMasks.join(present) if present else None


def require_all_or_none(values: Sequence[T | None], what: str) -> list[T]:
    """The values that are not None. Raises ValueError if only some are None."""
    present = [value for value in values if value is not None]
    if len(present) not in (0, len(values)):
        raise ValueError(f"only {len(present)} of {len(values)} episodes have {what}: they cannot be trained together")
    return present


# -- the row: where the inputs of each episode are; a shared prefix is there once -------------------------------------


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the inputs of E episodes are in a row."""

    order: list[int]
    """The episodes in the order in which they add their own inputs to the row."""
    shared: list[int]
    """For each episode, how many of its first inputs earlier episodes have already added."""
    paths: list[np.ndarray]
    """For each episode, int64[inputs]: the place of each of its inputs in the row."""
    width: int
    """Number of inputs in the row."""

    def own_inputs(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The values of the row's inputs, in its order, given at least one value per input for each episode."""
        return [values[e][self.shared[e] : len(self.paths[e])] for e in self.order]

    def segments(self) -> list[Segment]:
        """The segment that each episode adds to the row, except episodes whose inputs are all shared."""
        found = []
        for episode in self.order:
            path, shared = self.paths[episode], self.shared[episode]
            if len(path) > shared:
                found.append(Segment(int(path[shared]), path, len(path) - shared))
        return found


def layout_rows(episodes: Sequence[Episode], groups: Sequence[int]) -> RowLayout:
    """Lay out episodes group by group. A prefix that episodes of a group share (:func:`prefix_tree`) is in the row
    once.

    Args:
        groups: group number of each episode.
    """
    members: dict[int, list[int]] = {}
    for episode, group in enumerate(groups):
        members.setdefault(group, []).append(episode)
    order: list[int] = []
    shared, paths, width = [0] * len(episodes), [np.zeros(0, np.int64)] * len(episodes), 0
    for of_group in members.values():
        tree = prefix_tree([episodes[episode] for episode in of_group]) if len(of_group) > 1 else ([0], [0])
        path = np.zeros(0, np.int64)
        for place, prefix in zip(*tree, strict=True):
            episode = of_group[place]
            own = max(episodes[episode].num_tokens - 1 - prefix, 0)
            path = np.concatenate([path[:prefix], np.arange(width, width + own)])
            width += own
            order.append(episode)
            shared[episode], paths[episode] = prefix, path
    return RowLayout(order, shared, paths, width)

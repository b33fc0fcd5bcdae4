"""Episodes as the tensors of a micro-batch: packed one after the other, without padding, what they share once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from monarch_rl.algorithms.functions import Columns
from monarch_rl.algorithms.losses import Aggregation, token_weights
from monarch_rl.episode.episode import NO_VERSION, Episode
from monarch_rl.episode.shard import BatchShard, MiniBatch
from monarch_rl.trainer.advantages import BatchAdvantages
from monarch_rl.trainer.attention_layout import AttentionLayout, Segment
from monarch_rl.trainer.drawn_rows import DrawnRows, all_or_none
from monarch_rl.trainer.layout import lay_out


@dataclass(slots=True)
class MicroBatch:
    """L input tokens of packed episodes, behind which N trainable tokens were drawn.

    An episode of n tokens has n - 1 inputs: its last token is only ever a target. What episodes of a group share lies
    in the row once. Each episode keeps its own N: a token that two of them share counts in both, with the advantage and
    the weight of each, but its log-prob is computed once. M <= N log-probs are computed.
    """

    token_ids: torch.Tensor
    """int64[1, L]."""
    positions: torch.Tensor
    """int64[1, L]: place in the episode."""
    attention: AttentionLayout
    """Which inputs each one attends to."""
    drawn_after: torch.Tensor
    """int64[M]: places in the row of the inputs before the tokens. The last input of a shared prefix is there once for
    each token that followed it."""
    targets: torch.Tensor
    """int64[M]: the tokens."""
    rows: torch.Tensor | None
    """int64[N]: which of the M each drawn token is; None is each once."""
    behaviour_logprobs: torch.Tensor
    """float32[N]: the engine's."""
    advantages: torch.Tensor
    """float32[N]."""
    weights: torch.Tensor
    """float32[N]: what each token counts in the loss."""
    lags: torch.Tensor
    """int64[N]: the version that the update starts from minus the one that drew the token."""
    sequences: torch.Tensor
    """int64[N], ascending: the episode of each token, by its place among those that were packed."""
    num_sequences: int
    """Episodes that were packed, with and without trainable tokens."""
    columns: Columns[torch.Tensor] = field(default_factory=Columns)
    """float32[N] by name: what stages or the trainer have filled in. All micro-batches have the same names."""
    kept_sets: tuple[torch.Tensor, torch.Tensor] | None = None
    """``(counts int64[M], ids int32[sum of counts])``: the ids that each token was drawn from, where the sampler cut
    the others off."""
    expert_routes: torch.Tensor | None = None
    """uint8 or uint16 [1, L, layers, k]: the experts by which the engine read each input, where episodes have them."""
    padding: int = 0
    """Inputs that belong to no episode: 1 on a rank without episodes."""
    separate_tokens: int = 0
    """Inputs that the episodes would have if they shared none."""
    supervised: bool = False
    """Rows of prompt and answer, which are trained by cross-entropy whatever the objective is."""

    @property
    def num_tokens(self) -> int:
        """Inputs that are computed."""
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
        advantages: of each episode: a scalar, or float32[n] of its n drawn tokens, also those that are masked.
        weights: float32[E], of each trainable token of an episode.
        version: of the policy being updated.
        groups: the number of each episode's group: what those of one group share is computed once. None shares
            nothing.
        column_names: columns that all episodes have.

    Raises:
        ValueError: some episodes have kept sets or expert routes and others do not, an episode lacks a column, or
            expert routes or advantages are of another number of tokens.
    """
    _check_routes(episodes)
    layout = lay_out(episodes, range(len(episodes)) if groups is None else groups)
    rows = DrawnRows.of(episodes, layout, column_names)
    # A rank without inputs still takes part in the collectives, with a token that does not count.
    padding = np.zeros(0 if layout.width else 1, np.int64)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    counts, kept_sets = torch.tensor(rows.counts, dtype=torch.int64, device=device), rows.kept_sets
    token_ids = [*layout.own_inputs([episode.token_ids for episode in episodes]), padding]
    positions = [*layout.own_inputs([np.arange(len(path)) for path in layout.paths]), padding]
    routes = [e.expert_routes for e in episodes if e.expert_routes is not None and layout.width]
    return MicroBatch(
        token_ids=on_device(np.concatenate(token_ids).astype(np.int64)).unsqueeze(0),
        positions=on_device(np.concatenate(positions)).unsqueeze(0),
        attention=AttentionLayout(layout.segments() if layout.width else [Segment(0, padding, 1)], device),
        drawn_after=on_device(rows.places),
        targets=on_device(rows.targets),
        rows=None if rows.kinds is None else on_device(rows.kinds),
        behaviour_logprobs=on_device(rows.logprobs),
        advantages=_of_trained(episodes, advantages).to(device),
        weights=_per_token(weights, counts, device),
        lags=version - on_device(rows.versions).long(),
        sequences=torch.arange(len(episodes), device=device).repeat_interleave(counts),
        num_sequences=len(episodes),
        columns=Columns({name: on_device(values) for name, values in rows.columns.items()}),
        kept_sets=None if kept_sets is None else (on_device(kept_sets.counts).long(), on_device(kept_sets.ids)),
        expert_routes=on_device(np.concatenate(layout.own_inputs(routes))).unsqueeze(0) if routes else None,
        padding=len(padding),
        separate_tokens=sum(map(len, layout.paths)),
    )


def _check_routes(episodes: Sequence[Episode]) -> None:
    present = all_or_none([episode.expert_routes for episode in episodes], "expert routes")
    for episode, expert_routes in zip(episodes, present, strict=False):  # none, or one for each episode
        if len(expert_routes) != episode.num_tokens - 1:
            raise ValueError(
                f"an episode of {episode.num_tokens} tokens has expert routes of {len(expert_routes)}: it needs those "
                f"of {episode.num_tokens - 1}"
            )


def _per_token(per_episode: torch.Tensor, counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    if len(per_episode) == 0:
        return torch.zeros(0, device=device)
    return per_episode.to(device).repeat_interleave(counts)


def _of_trained(episodes: Sequence[Episode], advantages: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """float32[N]: advantages, or what else drawn tokens have, of those that are trained: see :func:`pack`."""
    found = [torch.zeros(0)]
    for episode, values in zip(episodes, advantages, strict=True):
        trained = torch.from_numpy(episode.trainable[1:])
        if values.ndim:
            drawn = torch.from_numpy(episode.trainable | (episode.policy_versions != NO_VERSION))
            if int(drawn.sum()) != len(values):
                raise ValueError(f"an episode that drew {int(drawn.sum())} tokens has advantages of {len(values)}")
            by_token = torch.zeros(len(drawn)).masked_scatter(drawn, values.float())
            found.append(by_token[1:][trained])
        else:
            found.append(values.float().expand(int(trained.sum())))
    return torch.cat(found)


def pack_shard(
    shard: BatchShard,
    advantages: BatchAdvantages,
    aggregation: Aggregation,
    max_new_tokens: int,
    device: torch.device,
    columns: Mapping[str, BatchAdvantages] | None = None,
) -> list[list[MicroBatch]]:
    """The micro-batches of one trainer rank, by mini-batch, with the advantages of the whole batch and weights that are
    divided by the totals of their mini-batch.

    Args:
        advantages: of the whole batch: see :func:`monarch_rl.trainer.advantages.advantages_of`.
        aggregation: how per-token losses become one number.
        max_new_tokens: tokens that an episode may draw, the normaliser of the ``constant`` aggregation.
        columns: by name, further ones of the whole batch: float32[tokens that it drew] of each sequence.
    """
    return [
        [
            _pack_microbatch(microbatch, shard, part, advantages, aggregation, max_new_tokens, device, columns or {})
            for microbatch in own
        ]
        for part, own in shard.by_minibatch(shard.microbatches)
    ]


def _pack_microbatch(
    microbatch: Sequence[tuple[int, int, Episode]],
    shard: BatchShard,
    part: MiniBatch,
    advantages: BatchAdvantages,
    aggregation: Aggregation,
    max_new_tokens: int,
    device: torch.device,
    columns: Mapping[str, BatchAdvantages],
) -> MicroBatch:
    episodes = [episode for _, _, episode in microbatch]
    weights = token_weights(
        torch.tensor([episode.num_trainable for episode in episodes]),
        aggregation,
        batch_tokens=part.trainable_tokens,
        batch_episodes=part.episodes,
        max_tokens=max_new_tokens,
    )

    def of_episodes(values: BatchAdvantages) -> list[torch.Tensor]:
        return [values[group][place] for group, place, _ in microbatch]

    groups = [group for group, _, _ in microbatch]
    made = pack(episodes, of_episodes(advantages), weights, shard.version, device, groups, shard.column_names)
    for name, values in columns.items():
        made.columns[name] = _of_trained(episodes, of_episodes(values)).to(device)
    return made

"""Episodes as the tensors of a micro-batch: packed one after the other, without padding, what they share once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monarch_rl.algorithms.advantages import Advantage
from monarch_rl.algorithms.aggregation import Aggregation, token_weights
from monarch_rl.episode.episode import BatchShard, Episode
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
    episodes: torch.Tensor
    """int64[N]: the episode of each token, by its place among those that were packed."""
    kept_sets: tuple[torch.Tensor, torch.Tensor] | None = None
    """``(counts int64[M], ids int32[sum of counts])``: the ids that each token was drawn from, where the sampler cut
    the others off."""
    expert_routes: torch.Tensor | None = None
    """uint8 or uint16 [1, L, layers, k]: the experts by which the engine read each input, where episodes have them."""
    padding: int = 0
    """Inputs that belong to no episode: 1 on a rank without episodes."""
    separate_tokens: int = 0
    """Inputs that the episodes would have if they shared none."""

    @property
    def num_tokens(self) -> int:
        """Inputs that are computed."""
        return self.token_ids.shape[1]


def pack(
    episodes: Sequence[Episode],
    advantages: torch.Tensor,
    weights: torch.Tensor,
    version: int,
    device: torch.device,
    groups: Sequence[int] | None = None,
) -> MicroBatch:
    """Pack episodes into a micro-batch.

    Args:
        advantages: float32[E], of each episode.
        weights: float32[E], of each trainable token of an episode.
        version: of the policy being updated.
        groups: the number of each episode's group: what those of one group share is computed once. None shares
            nothing.

    Raises:
        ValueError: some episodes have kept sets or expert routes and others do not, or expert routes are of another
            number of tokens.
    """
    _check_routes(episodes)
    layout = lay_out(episodes, range(len(episodes)) if groups is None else groups)
    rows = DrawnRows.of(episodes, layout)
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
        advantages=_per_token(advantages, counts, device),
        weights=_per_token(weights, counts, device),
        lags=version - on_device(rows.versions).long(),
        episodes=torch.arange(len(episodes), device=device).repeat_interleave(counts),
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


def pack_shard(
    shard: BatchShard,
    advantages: Sequence[torch.Tensor],
    aggregation: Aggregation,
    max_new_tokens: int,
    device: torch.device,
) -> list[MicroBatch]:
    """The micro-batches of one trainer rank, with the advantages and weights of the whole batch.

    Args:
        advantages: of the whole batch, one float[G] per group: see :func:`advantages_of`.
        aggregation: how per-token losses become one number.
        max_new_tokens: tokens that an episode may draw, the normaliser of the ``constant`` aggregation.
    """
    packed = []
    for microbatch in shard.microbatches:
        episodes = [episode for _, _, episode in microbatch]
        weights = token_weights(
            torch.tensor([episode.num_trainable for episode in episodes]),
            aggregation,
            batch_tokens=shard.trainable_tokens,
            batch_episodes=shard.num_episodes,
            max_tokens=max_new_tokens,
        )
        of_episodes = torch.tensor([float(advantages[group][place]) for group, place, _ in microbatch])
        groups = [group for group, _, _ in microbatch]
        packed.append(pack(episodes, of_episodes, weights, shard.version, device, groups))
    return packed


def advantages_of(rewards: Sequence[np.ndarray], advantage: Advantage) -> list[torch.Tensor]:
    """The advantages of a batch's episodes: one float[G] per group, from one float32[G] of rewards per group.

    Raises:
        ValueError: the function returned another shape for a group; names it and where it is defined.
    """
    by_group = [advantage(torch.from_numpy(of_group)) for of_group in rewards]
    for of_group, values in zip(rewards, by_group, strict=True):
        if tuple(values.shape) != of_group.shape:
            raise ValueError(
                f"the advantage function {_place_of(advantage)} returned shape {list(values.shape)} for a group of "
                f"{len(of_group)} episodes: return one value for each episode"
            )
    return by_group


def _place_of(function: object) -> str:
    """Name, file and line of a function; its text if it is no plain function."""
    code = getattr(function, "__code__", None)
    if code is None:
        return str(function)
    return f"{getattr(function, '__name__', 'function')} ({code.co_filename}:{code.co_firstlineno})"

"""Episodes as the tensors of a micro-batch: packed one after the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from monarch_rl.algorithms.advantages import Advantage
from monarch_rl.algorithms.aggregation import Aggregation, token_weights
from monarch_rl.episode.episode import BatchShard, Episode
from monarch_rl.episode.sampling import KeptSets

T = TypeVar("T")


@dataclass(slots=True)
class MicroBatch:
    """L input tokens of packed episodes, of which N are followed by a trainable token.

    An episode of n tokens gives n - 1 inputs: its last token is only ever a target.
    """

    token_ids: torch.Tensor
    """int64[1, L]."""
    positions: torch.Tensor
    """int64[1, L]: place in the episode; 0 starts the next one."""
    targets: torch.Tensor
    """int64[1, L]: the token after each input."""
    trainable: torch.Tensor
    """bool[L]: True where the target is trainable; N of them."""
    behaviour_logprobs: torch.Tensor
    """float32[N]: the engine's."""
    advantages: torch.Tensor
    """float32[N]."""
    weights: torch.Tensor
    """float32[N]: what each token counts in the loss."""
    lags: torch.Tensor
    """int64[N]: the version that the update starts from minus the one that drew the token."""
    kept_sets: tuple[torch.Tensor, torch.Tensor] | None = None
    """``(counts int64[N], ids int32[sum of counts])``: the ids that each token was drawn from, where the sampler cut
    the others off."""
    expert_routes: torch.Tensor | None = None
    """uint8 or uint16 [1, L, layers, k]: the experts by which the engine read each input, where episodes have them."""
    padding: int = 0
    """Inputs that belong to no episode: 1 on a rank without episodes."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]


def pack(
    episodes: Sequence[Episode], advantages: torch.Tensor, weights: torch.Tensor, version: int, device: torch.device
) -> MicroBatch:
    """Pack episodes into a micro-batch.

    Args:
        advantages: float32[E], of each episode.
        weights: float32[E], of each trainable token of an episode.
        version: of the policy being updated.

    Raises:
        ValueError: some episodes have kept sets or expert routes and others do not, or expert routes are of another
            number of tokens.
    """
    ids, positions, targets, trainable, logprobs, versions = [], [], [], [], [], []
    for episode in episodes:
        tokens, mask = episode.token_ids.astype(np.int64), episode.trainable[1:]
        ids.append(tokens[:-1])
        targets.append(tokens[1:])
        positions.append(np.arange(len(tokens) - 1))
        trainable.append(mask)
        logprobs.append(episode.logprobs[1:][mask])
        versions.append(episode.policy_versions[1:][mask])
    if not ids:  # a rank without episodes still takes part in the collectives, with a token that does not count
        zero = np.zeros(1, np.int64)
        ids, positions, targets, trainable = [zero], [zero], [zero], [np.zeros(1, bool)]
        logprobs, versions = [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
    counts = torch.tensor([len(part) for part in logprobs], device=device)

    def row(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return MicroBatch(
        token_ids=row(ids).unsqueeze(0),
        positions=row(positions).unsqueeze(0),
        targets=row(targets).unsqueeze(0),
        trainable=row(trainable),
        behaviour_logprobs=row(logprobs),
        advantages=_per_token(advantages, counts, device),
        weights=_per_token(weights, counts, device),
        lags=version - row(versions).long(),
        kept_sets=_kept_sets(episodes, device),
        expert_routes=_expert_routes(episodes, device),
        padding=0 if episodes else 1,
    )


def _kept_sets(episodes: Sequence[Episode], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    # A token that is no longer trained keeps its set in the episode, but not here.
    by_episode = [
        None if (kept_sets := episode.kept_sets) is None else kept_sets[episode.trainable] for episode in episodes
    ]
    if not (present := _all_or_none(by_episode, "kept sets")):
        return None
    joined = KeptSets.join(present)
    return torch.from_numpy(joined.counts).long().to(device), torch.from_numpy(joined.ids).to(device)


def _expert_routes(episodes: Sequence[Episode], device: torch.device) -> torch.Tensor | None:
    present = _all_or_none([episode.expert_routes for episode in episodes], "expert routes")
    for episode, expert_routes in zip(episodes, present, strict=False):  # none, or one for each episode
        if len(expert_routes) != episode.num_tokens - 1:
            raise ValueError(
                f"an episode of {episode.num_tokens} tokens has expert routes of {len(expert_routes)}: it needs those "
                f"of {episode.num_tokens - 1}"
            )
    return torch.from_numpy(np.concatenate(present)).unsqueeze(0).to(device) if present else None


def _all_or_none(values: Sequence[T | None], what: str) -> list[T]:
    present = [value for value in values if value is not None]
    if len(present) not in (0, len(values)):
        raise ValueError(f"{len(present)} of {len(values)} episodes have {what}: they cannot be trained together")
    return present


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
        packed.append(pack(episodes, of_episodes, weights, shard.version, device))
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

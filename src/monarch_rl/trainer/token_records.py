"""What the trainer computes of each token of logged groups: noted in every pass, and copied to the host once per step.

    begin_notes     before the update: marks the micro-batches that contain sequences of logged groups
    note_pass       after each forward pass of a marked micro-batch: log-probs, entropies, and the objective's own notes
    token_records   after the update: one TokenRecord per sequence of a logged group

Notes stay on the device until the step has ended, so that no pass waits for a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.serialization import deserialize_episode
from monarch_rl.episode.shard import PackedShard, TokenFlag, TokenRecord, mask_older
from monarch_rl.runtime import device_work
from monarch_rl.trainer.advantages import BatchAdvantages
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.objective import CLIPPED, CORRECTED, OLD, TRUNCATED, WEIGHT
from monarch_rl.trainer.token_logprobs import TokenLogprobs

NEW, ENTROPY = "new", "entropy"
"""Notes that the trainer itself makes: log-probs and entropies of the last pass."""
FLAGS = {CLIPPED: TokenFlag.CLIPPED, CORRECTED: TokenFlag.CORRECTED, TRUNCATED: TokenFlag.TRUNCATED}


def begin_notes(shard: PackedShard, minibatches: Sequence[Sequence[MicroBatch]], logged: LoggedGroups) -> None:
    """Have notes made in the micro-batches of a rank's shard that contain sequences of logged groups."""
    if logged.groups:
        for places, batch in zip(shard.places, chain.from_iterable(minibatches), strict=True):
            if any(shard.group_ids[group][0] in logged for group, _, _ in places):
                batch.notes = {}


def note_pass(batch: MicroBatch, output: TokenLogprobs, trained: MicroBatch, kept: torch.Tensor | None) -> None:
    """Set the notes of a micro-batch to those of the pass just made.

    Args:
        batch: a micro-batch with notes.
        output: log-probs of all its N tokens.
        trained: what the objective was given: the micro-batch without sequences that are not finite, with the
            objective's notes.
        kept: bool[N], which tokens ``trained`` has; None: all.
    """
    made = trained.notes or {}
    # An objective may call another one on a part of the tokens: notes of such a part are not used.
    made = {name: values.detach() for name, values in made.items() if values.shape == trained.weights.shape}
    made.setdefault(WEIGHT, trained.weights)
    if kept is not None:
        made = {name: each.new_zeros(len(kept)).masked_scatter(kept, each) for name, each in made.items()}
    batch.notes = made | {NEW: output.logprobs.detach(), ENTROPY: output.entropies.detach()}


def token_records(
    shard: PackedShard,
    minibatches: Sequence[Sequence[MicroBatch]],
    advantages: BatchAdvantages,
    logged: LoggedGroups,
) -> list[TokenRecord]:
    """The records of this rank's sequences of logged groups, after the update; equal on tensor-parallel ranks.

    Args:
        shard: the rank's shard of the batch.
        minibatches: its micro-batches, in the order of ``shard.places``, as they were trained.
        advantages: advantages of the whole batch.
    """
    batches = list(chain.from_iterable(minibatches))
    noted = [(places, batch) for places, batch in zip(shard.places, batches, strict=True) if batch.notes is not None]
    if not noted:
        return []
    with device_work.operation("a copy of the values of logged tokens"):
        values = torch.cat([_stacked(batch) for _, batch in noted], dim=1).cpu().numpy()
    of_batches = np.split(values, np.cumsum([len(batch.weights) for _, batch in noted])[:-1], axis=1)
    episodes = _episodes(shard, logged)
    records = []
    for (places, _), of_batch in zip(noted, of_batches, strict=True):
        sequences, *computed = of_batch
        for index, (group, place, _) in enumerate(places):
            if (episode := episodes.get((group, place))) is not None:
                mine = np.stack(computed)[:, sequences == index]
                records.append(_record(shard, group, place, episode, mine, advantages[group][place]))
    return records


def _stacked(batch: MicroBatch) -> torch.Tensor:
    """float32[6, N]: sequences, log-probs at the start of the step and in the last pass, entropies, weights and flags
    of a micro-batch. All of these integers are below 2^24, so float32 holds them exactly."""
    notes, flags = batch.notes or {}, torch.zeros_like(batch.weights)
    for name, flag in FLAGS.items():
        if name in notes:
            flags = flags + flag * notes[name].float()
    return torch.stack(
        [batch.sequences.float(), batch.columns[OLD].float(), notes[NEW], notes[ENTROPY], notes[WEIGHT].float(), flags]
    )


def _episodes(shard: PackedShard, logged: LoggedGroups) -> dict[tuple[int, int], Episode]:
    """The rank's episodes of logged groups, by position of the group in the batch and of the episode in the group."""

    def masked(data: memoryview) -> Episode:
        episode = deserialize_episode(data)
        mask_older(episode, shard.oldest)
        return episode

    episodes: Iterator[tuple[int, int, memoryview]] = shard.episodes()
    return {(group, place): masked(data) for group, place, data in episodes if shard.group_ids[group][0] in logged}


def _record(
    shard: PackedShard, group: int, place: int, episode: Episode, computed: np.ndarray, advantage: torch.Tensor
) -> TokenRecord:
    """The record of one sequence of n sampled tokens, k of which are trained.

    Args:
        computed: float32[5, k]: what :func:`_stacked` has of them, without the sequence.
        advantage: a scalar, or float32[n].
    """
    trained = episode.trainable.copy()
    trained[:1] = False  # nothing predicts the first token
    trained = trained[episode.sampled]
    of_tokens = np.full((len(computed), len(trained)), np.nan, np.float32)
    of_tokens[:, trained] = computed
    old, new, entropies, *of_loss = of_tokens
    weights, bits = (np.where(trained, values, np.float32(0)) for values in of_loss)
    flags = bits.astype(np.uint8)
    flags[weights == 0] |= np.uint8(TokenFlag.MASKED)
    advantages = np.broadcast_to(advantage.float().numpy(), len(trained)).astype(np.float32)
    mean = float(advantages.mean()) if len(advantages) else math.nan
    group_id, attempt = shard.group_ids[group]
    return TokenRecord(
        step=shard.version + 1,
        group_id=group_id,
        attempt=attempt,
        place=place,
        advantage=mean if math.isfinite(mean) else None,
        arrays={
            "trainer_logprobs": old,
            "new_logprobs": new,
            "entropies": entropies,
            "advantages": advantages,
            "weights": weights,
            "flags": flags,
        },
    )

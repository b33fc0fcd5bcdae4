"""PPO's critic on the trainer's ranks: a separate model that estimates the return before each sampled token.

It starts from the policy's initial weights, with a head of one output instead of the LM head, is sharded like the
policy, and has its own optimiser. Every method is called by all ranks together, on the thread that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from monarch_rl.algorithms.returns import clipped_value_loss
from monarch_rl.episode.shard import PackedShard
from monarch_rl.errors import NotFinite
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.runtime import device_work
from monarch_rl.trainer.advantages import BatchAdvantages
from monarch_rl.trainer.batch import MicroBatch, pack_shard
from monarch_rl.trainer.model import ShardedModel
from monarch_rl.trainer.objective import RETURNS, VALUE
from monarch_rl.trainer.platform import tensor_float32
from monarch_rl.trainer.settings import TrainerSettings


class Critic:
    """One rank's part of the critic.

    Args:
        folder: the Hugging Face folder that the policy starts from.
        settings: settings of the trainer. The critic is fully trained even if the policy uses LoRA, is not compiled,
            and replays no expert routes.
    """

    def __init__(self, folder: Path, settings: TrainerSettings, dims: ParallelDims, device: torch.device) -> None:
        own = replace(settings, lora=FULL_TRAINING, compile=False, router_replay="off")
        self.settings = settings.critic
        self._trainer, self._device = settings, device
        self._computes_in_half = settings.in_half_on_gpu(device.type == "cuda")
        self.model = ShardedModel(folder, own, dims, device, values=True)
        self._module = self.model.module.train()
        self.optimizers = default_adamw(
            lr=self.settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        ).build(model_parts=[self._module])

    @property
    def updates(self) -> int:
        """Optimiser steps so far."""
        # Resuming from a checkpoint before the first step leaves empty states.
        states = (state for optimizer in self.optimizers for state in optimizer.state.values() if state)
        return int(next(states, {"step": 0})["step"])

    @property
    def warming_up(self) -> bool:
        """Whether the batches that train only the critic are not yet over."""
        return self.updates < self.settings.warmup * self._trainer.updates_per_batch

    def values(self, batch: MicroBatch) -> torch.Tensor:
        """float32[N], with gradient: the values before each sampled token of a micro-batch."""
        self._module.lm_head.positions = batch.sampled_after
        with tensor_float32(self._computes_in_half):
            values: torch.Tensor = self._module(
                batch.token_ids, positions=batch.positions, attention_masks=batch.attention
            )
        return values if batch.rows is None else values[batch.rows]

    @torch.no_grad()
    def with_values(self, shard: PackedShard) -> PackedShard:
        """The batch with the column ``value`` for all its groups. Each rank computes the values of its share of the
        tokens.

        Raises:
            NotFinite: a value is not finite.
        """
        values = torch.zeros(int(sum(of_group.sum() for of_group in shard.lengths)), device=self._device)
        column = _by_group(values, shard.lengths)
        unmasked = replace(shard, oldest=None)  # tokens masked for their lag need values, too
        no_advantages = [[torch.zeros(()) for _ in of_group] for of_group in shard.lengths]
        minibatches = pack_shard(unmasked, no_advantages, "constant", 1, self._device)
        for batch, places in zip(chain(*minibatches), shard.places, strict=True):
            with device_work.operation("a pass for values", batch.token_ids.numel()):
                own = [column[group][place] for group, place, _ in places]
                computed = self.values(batch).split([len(target) for target in own])
                for target, of_sequence in zip(own, computed, strict=True):
                    target.copy_(of_sequence)
        dist.all_reduce(values)  # each value was computed on one rank, and is 0 on the others
        if not values.isfinite().all():
            raise NotFinite(
                "a value of the critic is not finite: an earlier update of it was too large. Lower trainer.critic.lr"
            )
        arrays = [
            [of_sequence.numpy() for of_sequence in of_group] for of_group in _by_group(values.cpu(), shard.lengths)
        ]
        return replace(shard, columns=shard.columns | {VALUE: arrays})

    def update_batch(self, minibatches: Sequence[Sequence[MicroBatch]], epochs: int = 1) -> dict[str, float]:
        """One optimiser step per mini-batch, ``epochs`` times over, like :meth:`Policy.update_batch`.

        Returns:
            Metrics by their full names, equal on all ranks.

        Raises:
            NotFinite: the gradient is not finite; this step and the following ones were not made.
        """
        counts = [float(sum(len(batch.advantages) for batch in microbatches)) for microbatches in minibatches]
        tokens = torch.tensor(counts, device=self._device)
        dist.all_reduce(tokens)
        sums, norms = torch.zeros(2, device=self._device), list[float]()
        for _ in range(epochs):
            for microbatches, count in zip(minibatches, tokens.tolist(), strict=True):
                sums += self._add_gradients(microbatches, max(count, 1.0))
                norms.append(self._step(sum(batch.token_ids.numel() for batch in microbatches)))
        dist.all_reduce(sums)
        loss, clipped = (sums / (epochs * tokens.sum()).clamp(min=1)).tolist()
        return {"critic/loss": loss, "critic/clipped": clipped, "critic/grad_norm": sum(norms) / len(norms)}

    def _add_gradients(self, microbatches: Sequence[MicroBatch], tokens: float) -> torch.Tensor:
        """Forward and backward passes of a mini-batch.

        Args:
            tokens: tokens of the mini-batch on all ranks.

        Returns:
            float32[2]: the sum of the loss over this rank's tokens, and the number of clipped tokens.
        """
        self.optimizers.zero_grad()
        sums = torch.zeros(2, device=self._device)
        for batch in microbatches:
            with device_work.operation("a micro-batch of the critic", batch.token_ids.numel()):
                result = clipped_value_loss(
                    self.values(batch), batch.columns[VALUE], batch.columns[RETURNS], self.settings.clip
                )
                with tensor_float32(self._computes_in_half):
                    (result.loss.sum() / tokens).backward()
                sums += torch.stack([result.loss.detach().sum(), result.clipped.sum().float()])
        return sums

    def _step(self, inputs: int) -> float:
        """Clip the gradient and apply it; returns its norm before clipping."""
        with device_work.operation("an optimiser step of the critic", inputs):
            norm = dist_utils.clip_grad_norm_(
                list(self._module.parameters()),
                self._trainer.max_grad_norm,
                foreach=True,
                ep_enabled=self._trainer.expert_parallel > 1,
            )
            if not torch.isfinite(norm):
                raise NotFinite(
                    f"the norm of the critic's gradient is {float(norm)}, so the critic was not updated: check the "
                    "rewards, or lower trainer.critic.lr"
                )
            self.optimizers.step()
            return float(norm)


def _by_group(values: torch.Tensor, lengths: Sequence[np.ndarray]) -> BatchAdvantages:
    """Views of ``values``, float32[sampled tokens of the batch], for each group and sequence."""
    views = iter(values.split([int(length) for of_group in lengths for length in of_group]))
    return [[next(views) for _ in of_group] for of_group in lengths]

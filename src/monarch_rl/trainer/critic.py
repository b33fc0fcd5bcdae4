"""The critic of PPO on the trainer's ranks: a model of its own that estimates each token's return before it is sampled.

It begins as the policy does, with a head of one number instead of the LM head, is sharded like it, and has an optimiser
of its own. Every method is called by all ranks together, on the thread that computes.
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
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.runtime import device_work
from monarch_rl.trainer.advantages import BatchAdvantages
from monarch_rl.trainer.batch import MicroBatch, pack_shard
from monarch_rl.trainer.model import ShardedModel
from monarch_rl.trainer.objective import RETURNS, VALUE
from monarch_rl.trainer.platform import tensor_float32
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.checksum import NotFinite


class Critic:
    """One rank's part of the critic.

    Args:
        folder: the Hugging Face folder that the policy starts from.
        settings: of the trainer. The critic is trained whole, also where the policy has LoRA; its routers choose
            experts by themselves.
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
        """Made so far."""
        # A checkpoint before the first one leaves empty states.
        states = (state for optimizer in self.optimizers for state in optimizer.state.values() if state)
        return int(next(states, {"step": 0})["step"])

    @property
    def warming_up(self) -> bool:
        """Whether it still learns alone: it has made fewer updates than its first batches give."""
        return self.updates < self.settings.warmup * self._trainer.updates_per_batch

    def values(self, batch: MicroBatch) -> torch.Tensor:
        """float32[N], with gradient: before each drawn token of a micro-batch."""
        self._module.lm_head.positions = batch.sampled_after
        with tensor_float32(self._computes_in_half):
            found: torch.Tensor = self._module(
                batch.token_ids, positions=batch.positions, attention_masks=batch.attention
            )
        return found if batch.rows is None else found[batch.rows]

    @torch.no_grad()
    def with_values(self, packed: PackedShard) -> PackedShard:
        """The same batch with the column ``value`` of all its groups, of whose tokens each rank computes its share.

        Raises:
            NotFinite: a value is not finite.
        """
        values = torch.zeros(int(sum(of_group.sum() for of_group in packed.lengths)), device=self._device)
        column = _by_group(values, packed.lengths)
        shard = replace(packed, oldest=None).unpack()  # what is masked for its lag lies between what is trained
        none = [[torch.zeros(()) for _ in of_group] for of_group in packed.lengths]
        minibatches = pack_shard(shard, none, "constant", 1, self._device)
        for batch, places in zip(chain(*minibatches), shard.microbatches, strict=True):
            with device_work.piece("a pass for values", batch.token_ids.numel()):
                own = [column[group][place] for group, place, _ in places]
                for kept, found in zip(own, self.values(batch).split([len(kept) for kept in own]), strict=True):
                    kept.copy_(found)
        dist.all_reduce(values)  # each is one rank's, and 0 elsewhere
        if not values.isfinite().all():
            raise NotFinite(
                "a value of the critic is not finite: an earlier update of it was too large. Lower trainer.critic.lr"
            )
        arrays = [
            [of_sequence.numpy() for of_sequence in of_group] for of_group in _by_group(values.cpu(), packed.lengths)
        ]
        return replace(packed, columns=packed.columns | {VALUE: arrays})

    def update_batch(self, minibatches: Sequence[Sequence[MicroBatch]], epochs: int = 1) -> dict[str, float]:
        """One optimiser step over each mini-batch in turn, ``epochs`` times over: as :meth:`Policy.update_batch`.

        Returns:
            Metrics by their whole names, equal on all ranks.

        Raises:
            NotFinite: the gradient is not finite; this step and those after it were not made.
        """
        drawn = [float(sum(len(batch.advantages) for batch in microbatches)) for microbatches in minibatches]
        tokens = torch.tensor(drawn, device=self._device)
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
        """Forward and backward passes of a mini-batch of so many tokens on all ranks; float32[2]: the sums over this
        rank's tokens of the loss, and of those that the clip limits."""
        self.optimizers.zero_grad()
        sums = torch.zeros(2, device=self._device)
        for batch in microbatches:
            with device_work.piece("a micro-batch of the critic", batch.token_ids.numel()):
                found = clipped_value_loss(
                    self.values(batch), batch.columns[VALUE], batch.columns[RETURNS], self.settings.clip
                )
                with tensor_float32(self._computes_in_half):
                    (found.loss.sum() / tokens).backward()
                sums += torch.stack([found.loss.detach().sum(), found.limited.sum().float()])
        return sums

    def _step(self, inputs: int) -> float:
        """Clip the gradient and apply it; its norm before."""
        with device_work.piece("an optimizer step of the critic", inputs):
            norm = dist_utils.clip_grad_norm_(
                list(self._module.parameters()),
                self._trainer.max_grad_norm,
                foreach=True,
                ep_enabled=self._trainer.expert_parallel > 1,
            )
            if not torch.isfinite(norm):
                raise NotFinite(
                    f"the norm of the critic's gradient is {float(norm)}, so no update of it was made: look at the "
                    "rewards, or lower trainer.critic.lr"
                )
            self.optimizers.step()
            return float(norm)


def _by_group(values: torch.Tensor, lengths: Sequence[np.ndarray]) -> BatchAdvantages:
    """Views of ``values``, float32[drawn tokens of the batch]."""
    views = iter(values.split([int(length) for of_group in lengths for length in of_group]))
    return [[next(views) for _ in of_group] for of_group in lengths]

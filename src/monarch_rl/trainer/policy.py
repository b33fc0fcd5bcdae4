"""The policy under training on one rank: model, optimiser, schedule, and the update. No Monarch in it.

Every method is called by all ranks of the torch.distributed world together, on one and the same thread.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from monarch_rl.trainer import platform

DEVICE = platform.prepare()

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from monarch_rl.trainer.batch import MicroBatch  # noqa: E402
from monarch_rl.trainer.model import SPMD_BACKEND, ShardedModel, parallelism_config  # noqa: E402
from monarch_rl.trainer.objective import Objective, Sums  # noqa: E402
from monarch_rl.trainer.settings import TrainerSettings  # noqa: E402
from monarch_rl.trainer.shards import local_run  # noqa: E402
from monarch_rl.weights.checksum import tensor_checksum  # noqa: E402
from monarch_rl.weights.manifest import Manifest  # noqa: E402


class Policy:
    """A torchtitan model under FSDP2 with torchtitan's AdamW and schedule.

    Args:
        folder: the Hugging Face folder to start from.
        total_steps: optimiser steps of the whole run, for the schedule.
        temperature: of the sampling distribution that the log-probs are taken of.
        collective_timeout_s: seconds after which a collective of the trainer's world fails.
    """

    def __init__(
        self,
        folder: Path,
        settings: TrainerSettings,
        *,
        total_steps: int,
        temperature: float = 1.0,
        collective_timeout_s: float = 300.0,
    ) -> None:
        self.settings = settings
        self.temperature = temperature
        if DEVICE.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device()) if DEVICE.type == "cuda" else DEVICE
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo", timeout=timedelta(seconds=collective_timeout_s)
            )
        # FSDP's hooks keep state per thread: backward must stay on the thread that called it.
        torch.autograd.set_multithreading_enabled(False)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size != settings.ranks:
            raise ValueError(f"trainer.ranks is {settings.ranks}, but the world has {self.world_size}")
        dims = ParallelDims.from_config(parallelism_config(settings), self.world_size)
        dist_utils.set_spmd_backend(SPMD_BACKEND)
        dims.build_mesh()
        self.model = ShardedModel(folder, settings, dims, self.device)
        self.module = self.model.module.train()
        self.optimizers = default_adamw(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay).build(
            model_parts=[self.module]
        )
        self.schedulers = LRSchedulersContainer.Config(
            warmup_steps=settings.lr_warmup_steps,
            decay_ratio=settings.lr_decay_ratio,
            decay_type=settings.lr_decay_type,
            min_lr_factor=settings.lr_min_factor,
        ).build(optimizers=self.optimizers, training_steps=total_steps)

    def logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs (with gradient) and entropies of the trainable targets: float32[N] each."""
        self.module.lm_head.taken = (batch.trainable, batch.targets[0, batch.trainable], self.temperature)
        return self.module(
            batch.token_ids,
            positions=batch.positions,
            attention_masks=self.module.get_attention_masks(positions=batch.positions),
        )

    def update(self, microbatches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        """One optimiser step over micro-batches; all ranks pass equally many.

        Returns:
            Metrics of the whole batch, equal on all ranks: means over trainable tokens, ``loss``, ``grad_norm``
            (before clipping), ``lr``, ``tokens`` trained, ``padding`` (share of computed positions that were
            padding: only ranks without episodes pad, with one token) and ``imbalance`` (share of rank-time lost
            as ranks with fewer tokens wait for the one with most).

        Raises:
            RuntimeError: the gradient is not finite; nothing was updated.
        """
        self.optimizers.zero_grad()
        totals: Sums = {}
        for batch in microbatches:
            loss, sums = objective(*self.logprobs(batch), batch)
            loss.backward()
            for name, value in {**sums, "loss": loss.detach()}.items():
                totals[name] = totals.get(name, torch.zeros((), device=self.device)) + value
        lr = self.schedulers.schedulers[0].get_last_lr()[0]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # Experts and the rest may lie on different meshes: torchtitan adds up their norms.
        grad_norm = dist_utils.clip_grad_norm_(
            trained, self.settings.max_grad_norm, foreach=True, ep_enabled=self.settings.expert_parallel > 1
        )
        if not torch.isfinite(grad_norm):
            raise RuntimeError(f"the gradient norm is {float(grad_norm)}: no update was made")
        self.optimizers.step()
        self.schedulers.step()
        metrics = self._reduce(totals)
        return metrics | {"grad_norm": float(grad_norm), "lr": float(lr)} | self._waste(microbatches)

    def _reduce(self, totals: Sums) -> dict[str, float]:
        """Sum over ranks, then means over tokens (of their own kind)."""
        names = sorted(totals)
        values = torch.stack([totals[name].to(torch.float32) for name in names])
        dist.all_reduce(values)
        sums = dict(zip(names, values.tolist(), strict=True))
        plain = [name for name in ("loss", "tokens", "masked_nonfinite") if name in sums]
        metrics: dict[str, float] = {name: sums.pop(name) for name in plain}
        if "on_policy_tokens" in sums:
            count = sums.pop("on_policy_tokens")
            metrics["on_policy_share"] = count / max(metrics["tokens"], 1)
            metrics["mismatch_k3_on_policy"] = sums.pop("mismatch_k3_on_policy") / max(count, 1)
        return metrics | {name: value / max(metrics["tokens"], 1) for name, value in sums.items()}

    def _waste(self, microbatches: Sequence[MicroBatch]) -> dict[str, float]:
        most = torch.tensor([float(batch.num_tokens) for batch in microbatches], device=self.device)
        padding = float(sum(batch.padding for batch in microbatches))
        sums = torch.stack([most.sum(), torch.tensor(padding, device=self.device)])
        dist.all_reduce(sums)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        computed = float(sums[0])
        return {
            "padding": float(sums[1]) / computed,
            "imbalance": 1.0 - computed / (float(most.sum()) * self.world_size),
        }

    # -- publishing -----------------------------------------------------------------------------------------

    def owned_runs(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, int, int]]]:
        """All tensors of a version as ``(name, shape)``, and this rank's ``(name, first element, elements)``.

        With adapters a version is the adapters alone, under peft's names.
        """
        runs = [(name, start, local.numel()) for name, (local, start) in self._published.items()]
        return self.model.published_tensors(), runs

    def frozen_checksums(self, dtype: torch.dtype) -> tuple[list[tuple[str, tuple[int, ...]]], list[int]]:
        """The model's own weights under adapters as ``(name, shape)``, and of each, as served in ``dtype``, this rank's
        part of the checksum, signed 64-bit. None without adapters: then all weights are sent and verified."""
        if not self.settings.lora.rank:
            return [], []
        state, tensors = self.model.hf_state(), self.model.hf_tensors()
        sums = dict.fromkeys((name for name, _ in tensors), 0)
        for name, value in state.items():
            local, start = local_run(value)
            first_row = start // (value.numel() // value.shape[0])
            if local.numel():  # small models have fewer rows than there are ranks
                sums[name] = int(tensor_checksum(local.detach().to(dtype), first_row))
        return tensors, list(sums.values())

    @functools.cached_property
    def _published(self) -> dict[str, tuple[torch.Tensor, int]]:
        """:meth:`local_run` of what a version consists of: looked up once, as the storage stays the same."""
        return {name: local_run(value) for name, value in self.model.published_state().items()}

    def snapshot(self, manifest: Manifest, views: Sequence[torch.Tensor]) -> None:
        """Copy this rank's shards, in the served dtype, to where they are sent from.

        Args:
            views: flat uint8, one for each of the manifest's shards of this rank.
        """
        with torch.no_grad():
            for shard, view in zip(manifest.shards[self.rank], views, strict=True):
                spec = manifest.tensors[shard.tensor]
                local = self._published[spec.name][0]
                view.view(spec.dtype).view(local.shape).copy_(local)
        if self.device.type != "cpu":  # others read it, and the next step changes what it is copied from
            torch.accelerator.synchronize(self.device)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder that all ranks see.

        With adapters: merged into the model there, and by themselves in ``<name>_adapter`` beside it.
        """
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self.model.save(folder, self.rank)
        dist.barrier()

    def close(self) -> None:
        """Leave the torch.distributed world."""
        dist.destroy_process_group()

"""The policy under training on one rank: model, optimiser, schedule, and the update. No Monarch in it.

Every method is called by all ranks of the torch.distributed world together, on one and the same thread.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from monarch_rl.trainer import platform

DEVICE = platform.prepare()

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from monarch_rl.algorithms.mismatch import quantile  # noqa: E402
from monarch_rl.model.folder import sparse_layers  # noqa: E402
from monarch_rl.trainer.batch import MicroBatch  # noqa: E402
from monarch_rl.trainer.model import SPMD_BACKEND, ShardedModel, parallelism_config  # noqa: E402
from monarch_rl.trainer.moe import ReplayRouter  # noqa: E402
from monarch_rl.trainer.objective import Objective, Sums  # noqa: E402
from monarch_rl.trainer.settings import RouterReplay, TrainerSettings  # noqa: E402
from monarch_rl.trainer.shards import local_run  # noqa: E402
from monarch_rl.trainer.token_logprobs import Drawn, TokenLogprobs  # noqa: E402
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
        # A layer's modules may be wrapped, for activation checkpointing.
        self._routers = [module for module in self.module.modules() if isinstance(module, ReplayRouter)]
        self._layers = sparse_layers(self.model.hf_config)
        self.optimizers = default_adamw(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay).build(
            model_parts=[self.module]
        )
        self.schedulers = LRSchedulersContainer.Config(
            warmup_steps=settings.lr_warmup_steps,
            decay_ratio=settings.lr_decay_ratio,
            decay_type=settings.lr_decay_type,
            min_lr_factor=settings.lr_min_factor,
        ).build(optimizers=self.optimizers, training_steps=total_steps)

    def logprobs(self, batch: MicroBatch, router_replay: RouterReplay | None = None) -> TokenLogprobs:
        """Log-probs of the trainable targets and what belongs to them.

        Args:
            router_replay: what to do with the engine's expert routes; None takes ``settings.router_replay``.

        Raises:
            ValueError: routes are needed and the batch has none, or of another model.
        """
        self.module.lm_head.drawn = Drawn(
            batch.trainable, batch.targets[0, batch.trainable], self.temperature, batch.kept
        )
        self._set_routes(batch, router_replay or self.settings.router_replay)
        return self.module(
            batch.token_ids,
            positions=batch.positions,
            attention_masks=self.module.get_attention_masks(positions=batch.positions),
        )

    def _set_routes(self, batch: MicroBatch, router_replay: RouterReplay) -> None:
        """For the forward pass and, where activations are computed again, for the backward pass after it."""
        expert_routes = None if router_replay == "off" else batch.expert_routes
        if expert_routes is None and router_replay != "off" and not batch.padding:
            raise ValueError(f"trainer.router-replay {router_replay} needs episodes with routes, these have none")
        if expert_routes is not None and expert_routes.shape[2] != len(self._routers):
            raise ValueError(
                f"routes are of {expert_routes.shape[2]} layers, the model has experts in {len(self._routers)}"
            )
        if expert_routes is not None and expert_routes.shape[3] != self._routers[0].top_k:
            raise ValueError(
                f"routes have {expert_routes.shape[3]} experts a token, the model {self._routers[0].top_k}"
            )
        for layer, router in enumerate(self._routers):
            router.routes_BLK = None if expert_routes is None else expert_routes[:, :, layer]
            router.replay = router_replay == "replay"

    def routes_differ(self) -> torch.Tensor:
        """int64[L, layers that have experts]: of the experts that the engine chose for each token of the batch scored
        last, how many the trainer's routers would not have chosen."""
        return torch.stack([router.differing_BL[0] for router in self._routers], dim=1)

    def _route_sums(self, batch: MicroBatch) -> Sums:
        """Of the forward pass just made."""
        if self.settings.router_replay == "off":
            return {}
        slots = 0 if batch.expert_routes is None else batch.expert_routes[:, :, 0].numel()
        return {
            "routes_differ": self.routes_differ().sum(0).float(),
            "route_slots": torch.tensor(float(slots), device=self.device),
        }

    def update(self, microbatches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        """One optimiser step over micro-batches; all ranks pass equally many.

        Returns:
            Metrics of the whole batch, equal on all ranks: means over trainable tokens, ``loss``, ``grad_norm``
            (before clipping), ``lr``, ``tokens`` trained, ``padding`` (share of computed positions that were
            padding: only ranks without episodes pad, with one token) and ``imbalance`` (share of rank-time lost
            as ranks with fewer tokens wait for the one with most). ``logprob_difference_p50``, ``_p99``, ``_max``:
            quantiles of |trainer - engine| over tokens of the very version, if there are any. With routes,
            ``routes_differ`` (share of the engine's choices of experts that the trainer's router would not make) and
            the same by layer.

        Raises:
            RuntimeError: the gradient is not finite; nothing was updated.
        """
        self.optimizers.zero_grad()
        totals: Sums = {}
        for batch in microbatches:
            loss, sums = objective(self.logprobs(batch), batch)
            sums |= self._route_sums(batch) | {"loss": loss.detach()}
            loss.backward()
            for name, value in sums.items():
                totals[name] = totals[name] + value if name in totals else value
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
        values = torch.cat([totals[name].to(torch.float32).reshape(-1) for name in names])
        dist.all_reduce(values)
        reduced = dict(zip(names, values.cpu().split([totals[name].numel() for name in names]), strict=True))
        parted = self._route_metrics(reduced) | _difference_metrics(reduced)
        sums = {name: float(value) for name, value in reduced.items()}
        plain = [name for name in ("loss", "tokens", "masked_nonfinite") if name in sums]
        metrics: dict[str, float] = {name: sums.pop(name) for name in plain}
        if "on_policy_tokens" in sums:
            count = sums.pop("on_policy_tokens")
            metrics["on_policy_share"] = count / max(metrics["tokens"], 1)
            metrics["mismatch_k3_on_policy"] = sums.pop("mismatch_k3_on_policy") / max(count, 1)
        return metrics | {name: value / max(metrics["tokens"], 1) for name, value in sums.items()} | parted

    def _route_metrics(self, reduced: Sums) -> dict[str, float]:
        """Takes what it is made of out of ``reduced``."""
        if "routes_differ" not in reduced:
            return {}
        slots = max(float(reduced.pop("route_slots")), 1.0)
        shares = (reduced.pop("routes_differ") / slots).tolist()
        by_layer = {f"routes_differ_{layer}": share for layer, share in zip(self._layers, shares, strict=True)}
        return {"routes_differ": sum(shares) / len(shares)} | by_layer

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

        With adapters a version is the adapters alone, under peft's names; with adapters on experts, the weights that
        have some.
        """
        runs = [(name, start, local.numel()) for name, (local, start) in self._published.items()]
        return self.model.published_tensors(), runs

    def frozen_checksums(self, dtype: torch.dtype) -> tuple[list[tuple[str, tuple[int, ...]]], list[int]]:
        """The weights that no version holds as ``(name, shape)``, and of each, as served in ``dtype``, this rank's part
        of the checksum, signed 64-bit: with adapters all of the model's own, or those without any where the others are
        sent merged. None without adapters: then all weights are sent and verified."""
        if not self.settings.lora.rank:
            return [], []
        sent = dict(self.model.published_tensors())
        tensors = [(name, shape) for name, shape in self.model.hf_tensors() if name not in sent]
        sums = dict.fromkeys((name for name, _ in tensors), 0)
        for name, value in self.model.hf_state().items():
            if name in sent:
                continue
            local, start = local_run(value)
            first_row = start // (value.numel() // value.shape[0])
            if local.numel():  # small models have fewer rows than there are ranks
                sums[name] = int(tensor_checksum(local.detach().to(dtype), first_row))
        return tensors, list(sums.values())

    @functools.cached_property
    def _published(self) -> dict[str, tuple[torch.Tensor, int]]:
        """:meth:`local_run` of what a version consists of: looked up once, as the storage stays the same."""
        return {name: local_run(value) for name, value in self.model.published_state().items()}

    def _values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank sends of a version, fp32. All ranks go through it together."""
        if self.model.sends_merged:
            yield from self.model.merged()
        else:
            yield from ((name, local) for name, (local, _) in self._published.items())

    def snapshot(self, manifest: Manifest, views: Sequence[torch.Tensor]) -> None:
        """Copy this rank's shards, in the served dtype, to where they are sent from.

        Args:
            views: flat uint8, one for each of the manifest's shards of this rank.
        """
        specs = [manifest.tensors[shard.tensor] for shard in manifest.shards[self.rank]]
        places = {spec.name: view.view(spec.dtype) for spec, view in zip(specs, views, strict=True)}
        with torch.no_grad():
            for name, local in self._values():
                if name in places:  # small models have fewer rows than there are ranks
                    places[name].view(local.shape).copy_(local)
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


def _difference_metrics(reduced: Sums) -> dict[str, float]:
    """Takes what it is made of out of ``reduced``."""
    if "logprob_difference" not in reduced:
        return {}
    counts = reduced.pop("logprob_difference")
    if not counts.sum():  # no token of the version that is updated
        return {}
    return {f"logprob_difference_{name}": quantile(counts, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))}

"""The policy under training on one rank: model, optimiser, schedule, and the update. No Monarch in it.

Every method is called by all ranks of the torch.distributed world together, on one and the same thread.
"""

from __future__ import annotations

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

from monarch_rl.model.folder import sparse_layers  # noqa: E402
from monarch_rl.runtime import device_work  # noqa: E402
from monarch_rl.runtime.store import join_world  # noqa: E402
from monarch_rl.trainer.batch import MicroBatch  # noqa: E402
from monarch_rl.trainer.compiling import first_rows  # noqa: E402
from monarch_rl.trainer.model import ShardedModel  # noqa: E402
from monarch_rl.trainer.model_config import SPMD_BACKEND, parallelism_config  # noqa: E402
from monarch_rl.trainer.moe import ReplayRouter  # noqa: E402
from monarch_rl.trainer.not_finite import why_not_finite  # noqa: E402
from monarch_rl.trainer.objective import Objective, Sums  # noqa: E402
from monarch_rl.trainer.publishing import PublishedWeights  # noqa: E402
from monarch_rl.trainer.reduction import reduced_metrics, waste_metrics  # noqa: E402
from monarch_rl.trainer.saving import save_model  # noqa: E402
from monarch_rl.trainer.settings import RouterReplay, TrainerSettings  # noqa: E402
from monarch_rl.trainer.token_logprobs import DrawnTokens, TokenLogprobs  # noqa: E402
from monarch_rl.weights.finite import NotFinite  # noqa: E402


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
        # Ranks that compile wait for the slowest one at the next layer.
        self.device = _join_world(timedelta(seconds=collective_timeout_s + settings.compile_limit_s))
        self._computes_in_half = settings.in_half_on_gpu(self.device.type == "cuda")  # LoRA's matrices, too
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size != settings.ranks:
            raise ValueError(f"trainer.ranks is {settings.ranks}, but the world has {self.world_size}")
        dims = ParallelDims.from_config(parallelism_config(settings), self.world_size)
        dist_utils.set_spmd_backend(SPMD_BACKEND)
        dims.build_mesh()
        self.data_rank = self.rank // settings.tp
        """The part of a batch that this rank computes, together with its tensor-parallel neighbours."""
        self._counts = self.rank % settings.tp == 0
        self.model = ShardedModel(folder, settings, dims, self.device)
        self.published = PublishedWeights(self.model, self.device)
        self.module = self.model.module.train()
        # A layer's modules may be wrapped, for activation checkpointing.
        self._routers = [module for module in self.module.modules() if isinstance(module, ReplayRouter)]
        self._sparse_layers = sparse_layers(self.model.hf_config)
        self.optimizers = default_adamw(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay).build(
            model_parts=[self.module]
        )
        self.schedulers = LRSchedulersContainer.Config(
            warmup_steps=settings.lr_warmup_steps,
            decay_ratio=settings.lr_decay_ratio,
            decay_type=settings.lr_decay_type,
            min_lr_factor=settings.lr_min_factor,
        ).build(optimizers=self.optimizers, training_steps=total_steps)

        if settings.compile:
            self._compile()

    def _compile(self) -> None:
        """Compile all blocks, forward and backward, with made-up rows: at the start, not in the first step."""
        replayed = self._routers if self.settings.router_replay != "off" else []
        for row in first_rows(self.settings.tokens_per_microbatch, replayed, self.device):
            self.token_logprobs(row).logprobs.sum().backward()
        self.optimizers.zero_grad()

    def token_logprobs(self, batch: MicroBatch, router_replay: RouterReplay | None = None) -> TokenLogprobs:
        """Log-probs of the trainable targets, and what belongs to them.

        Args:
            router_replay: what to do with the engine's expert routes; None takes ``settings.router_replay``.

        Raises:
            ValueError: expert routes are needed and the batch has none, or has those of another model.
        """
        self.module.lm_head.drawn_tokens = DrawnTokens(
            batch.drawn_after, batch.targets, self.temperature, batch.kept_sets, batch.rows
        )
        self._set_expert_routes(batch, router_replay or self.settings.router_replay)
        with platform.tensor_float32(self._computes_in_half):
            return self.module(batch.token_ids, positions=batch.positions, attention_masks=batch.attention)

    def _set_expert_routes(self, batch: MicroBatch, router_replay: RouterReplay) -> None:
        """For the forward pass and, where activations are computed again, for the backward pass after it."""
        expert_routes = None if router_replay == "off" else batch.expert_routes
        if expert_routes is None and router_replay != "off" and not batch.padding:
            raise ValueError(f"trainer.router-replay {router_replay} needs episodes with expert routes")
        if expert_routes is not None and expert_routes.shape[2] != len(self._routers):
            raise ValueError(
                f"expert routes are of {expert_routes.shape[2]} layers, the model has experts in {len(self._routers)}"
            )
        if expert_routes is not None and expert_routes.shape[3] != self._routers[0].top_k:
            raise ValueError(
                f"expert routes have {expert_routes.shape[3]} experts a token, the model {self._routers[0].top_k}"
            )
        for layer, router in enumerate(self._routers):
            router.routes_BLK = None if expert_routes is None else expert_routes[:, :, layer]
            router.replay = router_replay == "replay"

    def differing_experts(self) -> torch.Tensor:
        """int64[L, layers that have experts]: of the experts that the engine chose for each token of the last forward
        pass, how many the trainer's routers would not have chosen."""
        return torch.stack([router.differing_BL[0] for router in self._routers], dim=1)

    def _expert_route_sums(self, batch: MicroBatch) -> Sums:
        """Of the last forward pass."""
        if self.settings.router_replay == "off":
            return {}
        choices = 0 if batch.expert_routes is None else batch.expert_routes[:, :, 0].numel()
        return {
            "routes_differ": self.differing_experts().sum(0).float(),
            "choices_of_a_layer": torch.tensor(float(choices), device=self.device),
        }

    def update(self, microbatches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        """One optimiser step over micro-batches; all ranks pass equally many.

        Returns:
            Metrics of the whole batch, equal on all ranks: means over trainable tokens, ``loss``, ``grad_norm``
            (before clipping), ``lr``, ``tokens`` trained, ``padding`` (share of computed positions that were
            padding: only ranks without episodes pad, with one token) and ``imbalance`` (share of rank-time lost
            because ranks with fewer tokens wait for the one with most), ``computed_share`` (inputs computed, over those
            that episodes would have if they shared none). ``logprob_difference_p50``, ``_p99``, ``_max``:
            quantiles of |trainer - engine| over tokens of the version that is updated, if there are any. With expert
            routes, ``routes_differ`` (share of the engine's choices of experts that the trainer's router would not
            make) and the same by layer.

        Raises:
            NotFinite: the gradient is not finite; nothing was updated. Says why, if a weight or the loss is the cause.
            ValueError: the objective does not count its tokens.
        """
        self.optimizers.zero_grad()
        totals: Sums = {}
        for batch in microbatches:
            with device_work.piece("a micro-batch", batch.token_ids.numel()):
                sums = self._add_gradient(batch, objective)
            for name, value in sums.items():
                totals[name] = totals[name] + value if name in totals else value
        # It waits for what has been enqueued above.
        with device_work.piece("an optimizer step", sum(batch.token_ids.numel() for batch in microbatches)):
            return self._step(totals) | waste_metrics(microbatches, self.device, self._counts)

    def _add_gradient(self, batch: MicroBatch, objective: Objective) -> Sums:
        """Forward and backward pass of a micro-batch; its sums."""
        loss, sums = objective(self.token_logprobs(batch), batch)
        if "tokens" not in sums:
            raise ValueError("the objective returned no sum named 'tokens', the number of tokens summed over")
        sums |= self._expert_route_sums(batch) | {"loss": loss.detach()}
        with platform.tensor_float32(self._computes_in_half):
            loss.backward()
        return sums

    def _step(self, totals: Sums) -> dict[str, float]:
        """Clip the gradient and apply it; metrics from the sums of the batch."""
        lr = self.schedulers.schedulers[0].get_last_lr()[0]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # Experts and the rest may lie on different meshes: torchtitan adds up their norms.
        grad_norm = dist_utils.clip_grad_norm_(
            trained, self.settings.max_grad_norm, foreach=True, ep_enabled=self.settings.expert_parallel > 1
        )
        if not torch.isfinite(grad_norm):
            cause = why_not_finite(self.model, totals["loss"] if self._counts else torch.zeros(()))
            raise NotFinite(f"the gradient norm is {float(grad_norm)}, so no update was made. {cause}")
        self.optimizers.step()
        self.schedulers.step()
        metrics = reduced_metrics(totals, self._sparse_layers, self._counts)
        return metrics | {"grad_norm": float(grad_norm), "lr": float(lr)}

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder that all ranks see: see :func:`save_model`."""
        save_model(self.model, folder)

    def close(self) -> None:
        """Leave the torch.distributed world."""
        dist.destroy_process_group()


def _join_world(timeout: timedelta) -> torch.device:
    """Join the torch.distributed world that the environment names; returns this rank's device."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE.type == "cuda" else DEVICE
    if not dist.is_initialized():
        join_world("nccl" if device.type == "cuda" else "gloo", timeout)
    # FSDP's hooks keep state per thread: backward must stay on the thread that called it.
    torch.autograd.set_multithreading_enabled(False)
    return device

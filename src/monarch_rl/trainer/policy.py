"""The policy under training on one rank: model, optimiser, schedule, and the update. No Monarch in it.

Every method is called by all ranks of the torch.distributed world together, on one and the same thread.
"""

from __future__ import annotations

import os
import time
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
from torchtitan.models.common.decoder import Decoder  # noqa: E402

from monarch_rl.algorithms.functions import (  # noqa: E402
    differentiates_entropy,
    needed_columns,
    other_token_columns,
)
from monarch_rl.algorithms.losses import mismatch_k3  # noqa: E402
from monarch_rl.model.folder import sparse_layers  # noqa: E402
from monarch_rl.runtime import device_work  # noqa: E402
from monarch_rl.runtime.network import join_world  # noqa: E402
from monarch_rl.runtime.streams import finish_current  # noqa: E402
from monarch_rl.trainer.batch import MicroBatch  # noqa: E402
from monarch_rl.trainer.checkpoint import TrainerCheckpoint  # noqa: E402
from monarch_rl.trainer.compiling import first_rows  # noqa: E402
from monarch_rl.trainer.critic import Critic  # noqa: E402
from monarch_rl.trainer.finite import (  # noqa: E402
    finite_only,  # noqa: E402
    why_not_finite,  # noqa: E402
)
from monarch_rl.trainer.metrics import reduced_metrics, summed, waste_metrics  # noqa: E402
from monarch_rl.trainer.model import ShardedModel  # noqa: E402
from monarch_rl.trainer.model_config import SPMD_BACKEND, parallelism_config  # noqa: E402
from monarch_rl.trainer.moe import ReplayRouter  # noqa: E402
from monarch_rl.trainer.objective import OLD, REFERENCE, Objective, Sums, call, rows_objective  # noqa: E402
from monarch_rl.trainer.platform import make_deterministic  # noqa: E402
from monarch_rl.trainer.publishing import PublishedWeights  # noqa: E402
from monarch_rl.trainer.reference import ReferenceModel  # noqa: E402
from monarch_rl.trainer.saving import save_model  # noqa: E402
from monarch_rl.trainer.settings import RouterReplay, TrainerSettings  # noqa: E402
from monarch_rl.trainer.token_logprobs import SampledTokens, TokenLogprobs  # noqa: E402
from monarch_rl.weights.checksum import NotFinite  # noqa: E402


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
        if settings.deterministic:
            make_deterministic()
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
        self.left_out: dict[int, dict[int, str]] = {}
        """By the ``id`` of a micro-batch of the last update: places of its episodes that were not trained, and why."""
        self.model = ShardedModel(folder, settings, dims, self.device)
        self.published = PublishedWeights(self.model, self.device)
        self.module = self.model.module.train()
        self._reference = None
        if settings.reference:
            self._reference = ReferenceModel(folder, settings, dims, self.device, self.module)
        self.critic = Critic(folder, settings, dims, self.device) if settings.critic.enabled else None
        """Learns beside the policy, from the same batches."""
        self._routers = routers_of(self.module)
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
        self.checkpoint = TrainerCheckpoint(self.model, self.optimizers, self.schedulers, self.device, self.critic)

        if settings.compile:
            self._compile()
        else:  # hooks would be compiled
            for block in self.module.layers.values():
                block.register_forward_hook(_mark_progress)

    def _compile(self) -> None:
        """Compile all blocks with made-up rows, at the start and not in the first step: forward and backward, and the
        passes without gradients that a step has, for each of which they are compiled anew."""
        replayed = self._routers if self.settings.router_replay != "off" else []
        rows = first_rows(self.settings.tokens_per_microbatch, replayed, self.device)
        for row in rows:
            self.token_logprobs(row).logprobs.sum().backward()
        self.optimizers.zero_grad()
        if self._reference and self.settings.lora.rank:  # else it is a model of its own, which is not compiled
            for row in rows:
                self._reference.logprobs(row, self._compute)
        if self.settings.minibatches > 1:
            with torch.no_grad():
                for row in rows:
                    self.token_logprobs(row)

    def token_logprobs(
        self,
        batch: MicroBatch,
        router_replay: RouterReplay | None = None,
        entropy_gradient: bool = False,
        module: Decoder | None = None,
        others: Sequence[str] = (),
    ) -> TokenLogprobs:
        """Log-probs of the trainable targets, and what belongs to them. Those of supervised rows, which no engine has
        drawn, are at temperature 1 and by the trainer's own routes.

        Args:
            router_replay: what to do with the engine's expert routes; None takes ``settings.router_replay``.
            entropy_gradient: the entropies have a gradient.
            module: the model that computes; None is the one that is trained.
            others: columns of the ids of further tokens whose log-probs are asked for.

        Raises:
            ValueError: expert routes are needed and the batch has none, or has those of another model.
        """
        module = module or self.module
        temperature = 1.0 if batch.supervised else self.temperature
        drawn = SampledTokens(
            batch.sampled_after, batch.targets, temperature, batch.sampling_masks, batch.rows, entropy_gradient
        )
        module.lm_head.drawn_tokens = drawn.with_others([batch.columns[name] for name in others]) if others else drawn
        routers = self._routers if module is self.module else routers_of(module)
        as_drawn: RouterReplay = "off" if batch.supervised else router_replay or self.settings.router_replay
        self._set_expert_routes(routers, batch, as_drawn)
        with platform.tensor_float32(self._computes_in_half):
            return module(batch.token_ids, positions=batch.positions, attention_masks=batch.attention)

    def _set_expert_routes(
        self, routers: Sequence[ReplayRouter], batch: MicroBatch, router_replay: RouterReplay
    ) -> None:
        """For the forward pass and, where activations are computed again, for the backward pass after it."""
        expert_routes = None if router_replay == "off" else batch.expert_routes
        if expert_routes is None and router_replay != "off" and not batch.padding:
            raise ValueError(f"trainer.router-replay {router_replay} needs episodes with expert routes")
        if expert_routes is not None and expert_routes.shape[2] != len(routers):
            raise ValueError(
                f"expert routes are of {expert_routes.shape[2]} layers, the model has experts in {len(routers)}"
            )
        if expert_routes is not None and expert_routes.shape[3] != routers[0].top_k:
            raise ValueError(
                f"expert routes have {expert_routes.shape[3]} experts a token, the model {routers[0].top_k}"
            )
        for layer, router in enumerate(routers):
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
        """One optimiser step over micro-batches: :meth:`update_batch` of one mini-batch."""
        return self.update_batch([microbatches], objective)

    def update_batch(
        self,
        minibatches: Sequence[Sequence[MicroBatch]],
        objective: Objective,
        epochs: int = 1,
        learns: bool = True,
        lr_factor: float = 1.0,
    ) -> dict[str, float]:
        """One optimiser step over each mini-batch in turn, ``epochs`` times over; all ranks pass equally many
        micro-batches in each.

        The column ``old`` is filled with log-probs of the policy as it is now: for mini-batches after the first by a
        forward pass before the first step, for the others by their own first pass. Episodes with numbers that are not
        finite are left out, and noted in :attr:`left_out`. If it does not learn (``learns``), everything is computed,
        and no step is made. Micro-batches of supervised rows add their cross-entropy. The schedule's learning rate is
        multiplied by ``lr_factor``.

        Returns:
            Metrics of the whole batch, equal on all ranks: means over trainable tokens, and over epochs, ``loss`` and
            ``grad_norm`` (before clipping; means over steps), ``lr`` (of the last step), ``drift_k3`` (from ``old``),
            ``optimizer_steps`` (made so far), ``tokens`` trained, ``padding`` (share of computed positions that were
            padding: only ranks without episodes pad, with one token) and ``imbalance`` (share of rank-time lost because
            ranks with fewer tokens wait for the one with most), ``computed_share`` (inputs computed, over those that
            episodes would have if they shared none). ``logprob_difference_p50``, ``_p99``, ``_max``: quantiles of
            |trainer - engine| over tokens of the version that is updated, if there are any. With expert routes,
            ``routes_differ`` (share of the engine's choices of experts that the trainer's router would not make) and
            the same by layer. With supervised rows, ``supervised_tokens`` of their answers, and ``supervised_loss``,
            their mean cross-entropy.

        Raises:
            NotFinite: the gradient is not finite; this step and those after it were not made. Says why, if a weight or
                the loss is the cause.
            ValueError: the objective returned what is no loss, does not count its tokens, or returned sums of other
                names on other ranks.
        """
        flat = [batch for microbatches in minibatches for batch in microbatches]
        steps = epochs * len(minibatches)
        read = self._fill_reference(flat) if self._reference and REFERENCE in needed_columns(objective) else {}
        if learns:
            self._fill_old(minibatches[1:])
        totals, norms, lr = Sums(), list[float](), 0.0
        self.left_out = {}
        for _ in range(epochs):
            for microbatches in minibatches:
                lr = lr_factor * self.schedulers.schedulers[0].get_last_lr()[0]
                sums, norm = self._optimise(microbatches, objective, learns, lr_factor)
                norms.append(norm)
                _add(totals, sums)
        with device_work.piece("the metrics of a batch"):
            metrics = reduced_metrics(totals, self._sparse_layers, self._counts)
            waste = waste_metrics(flat, self.device, self._counts)
        counted = ("tokens", "supervised_tokens", "masked_nonfinite", "masked_episodes")
        metrics |= {name: metrics[name] / epochs for name in counted if name in metrics}
        done = {"lr": float(lr), "optimizer_steps": float(self.checkpoint.optimizer_steps)}
        return metrics | {"loss": metrics["loss"] / steps, "grad_norm": sum(norms) / steps} | done | waste | read

    def _fill_old(self, minibatches: Sequence[Sequence[MicroBatch]]) -> None:
        """Of mini-batches that are trained after a step. What a stage has filled stays."""
        for batch in (batch for microbatches in minibatches for batch in microbatches):
            if not batch.supervised and OLD not in batch.columns:
                with device_work.piece("a pass for log-probs", batch.token_ids.numel()), torch.no_grad():
                    batch.columns[OLD] = self.token_logprobs(batch).logprobs

    def _fill_reference(self, microbatches: Sequence[MicroBatch]) -> dict[str, float]:
        """Returns the seconds that it took, of all ranks together. What a stage has filled stays."""
        assert self._reference is not None
        began = time.perf_counter()
        for batch in microbatches:
            if not batch.supervised and REFERENCE not in batch.columns:
                with device_work.piece("a pass for log-probs", batch.token_ids.numel()):
                    batch.columns[REFERENCE] = self._reference.logprobs(batch, self._compute)
        with device_work.piece("the end of the reference's passes"):
            finish_current(self.device)
            return {"reference_device_s": summed(time.perf_counter() - began, self.device)}

    def _compute(self, batch: MicroBatch, module: Decoder) -> TokenLogprobs:
        return self.token_logprobs(batch, module=module)

    def _optimise(
        self, microbatches: Sequence[MicroBatch], objective: Objective, learns: bool, lr_factor: float
    ) -> tuple[Sums, float]:
        """One optimiser step; the sums of this rank's tokens, and the norm of the gradient."""
        self.optimizers.zero_grad()
        totals = Sums()
        for batch in microbatches:
            with device_work.piece("a micro-batch", batch.token_ids.numel()):
                _add(totals, self._add_gradient(batch, objective))
        # It waits for what has been enqueued above.
        with device_work.piece("an optimizer step", sum(batch.token_ids.numel() for batch in microbatches)):
            return totals, self._step(totals, learns, lr_factor)

    def _add_gradient(self, batch: MicroBatch, objective: Objective) -> Sums:
        """Forward and backward pass of a micro-batch; its sums."""
        objective = rows_objective if batch.supervised else objective
        output = self.token_logprobs(
            batch, entropy_gradient=differentiates_entropy(objective), others=other_token_columns(objective)
        )
        routes = {} if batch.supervised else self._expert_route_sums(batch)
        if not batch.supervised:
            batch.columns.setdefault(OLD, output.logprobs.detach())
        output, trained, left_out = finite_only(output, batch)
        if left_out.causes:
            self.left_out[id(batch)] = left_out.causes
        # Names that are refused of an objective are those of rows.
        loss, sums = rows_objective(output, trained) if batch.supervised else call(objective, output, trained)
        if not batch.supervised:
            sums["drift_k3"] = mismatch_k3(output.logprobs, trained.columns[OLD]).sum()
        counts = {"masked_nonfinite": left_out.tokens, "masked_episodes": len(left_out.causes)}
        sums |= {name: torch.tensor(float(count), device=self.device) for name, count in counts.items()}
        sums |= routes | {"loss": loss.detach()}
        with platform.tensor_float32(self._computes_in_half):
            loss.backward()
        return sums

    def _step(self, totals: Sums, learns: bool, lr_factor: float) -> float:
        """Clip the gradient and apply it, if the policy learns; its norm before."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # Experts and the rest may lie on different meshes: torchtitan adds up their norms.
        grad_norm = dist_utils.clip_grad_norm_(
            trained, self.settings.max_grad_norm, foreach=True, ep_enabled=self.settings.expert_parallel > 1
        )
        if not torch.isfinite(grad_norm):
            cause = why_not_finite(self.model, totals["loss"] if self._counts else torch.zeros(()))
            raise NotFinite(f"the gradient norm is {float(grad_norm)}, so no update was made. {cause}")
        if learns:
            for parameters in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                parameters["lr"] *= lr_factor
            self.optimizers.step()
            self.schedulers.step()  # sets the rates anew
        return float(grad_norm)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder that all ranks see: see :func:`save_model`."""
        save_model(self.model, folder)

    def close(self) -> None:
        """Leave the torch.distributed world."""
        dist.destroy_process_group()


def routers_of(module: Decoder) -> list[ReplayRouter]:
    """Layer by layer; a layer's modules may be wrapped, for activation checkpointing."""
    return [part for part in module.modules() if isinstance(part, ReplayRouter)]


def _mark_progress(_block: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
    """A hook of a block: marks behind it, and behind the backward passes of those after it."""
    device_work.mark()
    if device_work.work() is not None and output.requires_grad:
        output.register_hook(lambda _: device_work.mark())


def _add(totals: Sums, sums: Sums) -> None:
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value


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

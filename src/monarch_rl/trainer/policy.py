"""The policy under training on one rank: model, optimiser, schedule, and the update. Does not use Monarch.

Every method is called by all ranks of the torch.distributed world together, always on the same thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
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
from monarch_rl.errors import NotFinite  # noqa: E402
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
from monarch_rl.trainer.lora import without_lora  # noqa: E402
from monarch_rl.trainer.metrics import reduced_metrics, summed, waste_metrics  # noqa: E402
from monarch_rl.trainer.model import ShardedModel  # noqa: E402
from monarch_rl.trainer.model_config import SPMD_BACKEND, parallelism_config  # noqa: E402
from monarch_rl.trainer.moe import ReplayRouter  # noqa: E402
from monarch_rl.trainer.objective import (  # noqa: E402
    LAYER_CHOICES,
    MASKED_EPISODES,
    MASKED_TOKENS,
    OLD,
    REFERENCE,
    ROUTES_DIFFER,
    SUPERVISED_TOKENS,
    LossFunction,
    Sums,
    common_sums,
    evaluate_loss,
    rows_loss,
)
from monarch_rl.trainer.platform import make_deterministic  # noqa: E402
from monarch_rl.trainer.publishing import PublishedWeights  # noqa: E402
from monarch_rl.trainer.saving import save_model  # noqa: E402
from monarch_rl.trainer.settings import RouterReplay, TrainerSettings  # noqa: E402
from monarch_rl.trainer.token_logprobs import SampledTokens, TokenLogprobs  # noqa: E402
from monarch_rl.trainer.token_records import note_pass  # noqa: E402


class Policy:
    """A torchtitan model under FSDP2 with torchtitan's AdamW and schedule.

    Args:
        folder: the Hugging Face folder to start from.
        total_steps: optimiser steps of the whole run, for the schedule.
        temperature: sampling temperature, at which log-probs are computed.
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
        # At each layer ranks wait for the slowest one to compile.
        self.device = _join_world(timedelta(seconds=collective_timeout_s + settings.compile_limit_s))
        self._computes_in_half = settings.in_half_on_gpu(self.device.type == "cuda")  # including LoRA's matrices
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size != settings.ranks:
            raise ValueError(f"trainer.ranks is {settings.ranks}, but the world has {self.world_size}")
        dims = ParallelDims.from_config(parallelism_config(settings), self.world_size)
        dist_utils.set_spmd_backend(SPMD_BACKEND)
        dims.build_mesh()
        self.data_rank = self.rank // settings.tp
        """Index of the share of a batch that this rank and its tensor-parallel neighbours compute."""
        self._counts = self.rank % settings.tp == 0
        self.left_out: dict[int, dict[int, str]] = {}
        """Episodes that the last update did not train: by ``id`` of the micro-batch, the cause by index of the
        episode."""
        self.model = ShardedModel(folder, settings, dims, self.device)
        self.published = PublishedWeights(self.model, self.device)
        self.module = self.model.module.train()
        self._reference: Decoder | None = None
        """The model that training started from: with LoRA, whose base weights are frozen anyway, the trained module,
        to be used without LoRA; otherwise a frozen copy, sharded like it."""
        if settings.reference and settings.lora.rank:
            self._reference = self.module
        elif settings.reference:
            copy = ShardedModel(folder, replace(settings, compile=False), dims, self.device)
            self._reference = copy.module.requires_grad_(False)
        self.critic = Critic(folder, settings, dims, self.device) if settings.critic.enabled else None
        """Trained from the same batches as the policy."""
        self._routers = routers_of(self.module)
        self._sparse_layers = list(self.model.hf_config.sparse_layers)
        self.optimizers = default_adamw(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay).build(
            model_parts=[self.module]
        )
        self.schedulers = self._schedule(settings, total_steps)
        self.checkpoint = TrainerCheckpoint(self.model, self.optimizers, self.schedulers, self.device, self.critic)

        if settings.compile:
            self._compile()
        else:  # with compilation, hooks would be compiled, too
            for block in self.module.layers.values():
                block.register_forward_hook(_mark_progress)

    def _schedule(self, settings: TrainerSettings, total_steps: int) -> LRSchedulersContainer:
        schedulers: LRSchedulersContainer = LRSchedulersContainer.Config(
            warmup_steps=settings.lr_warmup_steps,
            decay_ratio=settings.lr_decay_ratio,
            decay_type=settings.lr_decay_type,
            min_lr_factor=settings.lr_min_factor,
        ).build(optimizers=self.optimizers, training_steps=total_steps)
        return schedulers

    def reschedule(self, settings: TrainerSettings, total_steps: int) -> None:
        """Follow the learning rates of other settings, which differ in nothing else, from the current optimiser step
        on."""
        for parameters in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            parameters["lr"] = parameters["initial_lr"] = settings.lr
        self.settings = settings
        self.schedulers = self._schedule(settings, total_steps)
        self.checkpoint.reschedule(self.schedulers)

    def _compile(self) -> None:
        """Compile all blocks with dummy rows now instead of in the first step: forward and backward passes, and the
        passes without gradients that a step has, which need separate compilations."""
        replayed = self._routers if self.settings.router_replay != "off" else []
        rows = first_rows(self.settings.tokens_per_microbatch, replayed, self.device)
        for row in rows:
            self.token_logprobs(row).logprobs.sum().backward()
        self.optimizers.zero_grad()
        if self._reference is self.module:  # without LoRA it is a separate model, which is not compiled
            for row in rows:
                self._reference_logprobs(row)
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
        """Log-probs, entropies and mask masses of the trainable targets.

        Supervised rows, which no engine has sampled, are computed at temperature 1 and without router replay.

        Args:
            router_replay: how to use the engine's expert routes; None: ``settings.router_replay``.
            entropy_gradient: whether the entropies have a gradient.
            module: the model to use; None: the trained one.
            others: names of columns with ids of further tokens, whose log-probs are also returned.

        Raises:
            ValueError: expert routes are needed, and the batch has none, or those of another model.
        """
        module = module or self.module
        temperature = 1.0 if batch.supervised else self.temperature
        sampled = SampledTokens(
            batch.sampled_after, batch.targets, temperature, batch.sampling_masks, batch.rows, entropy_gradient
        )
        if others:
            sampled = sampled.with_others([batch.columns[name] for name in others])
        module.lm_head.sampled_tokens = sampled
        routers = self._routers if module is self.module else routers_of(module)
        replay: RouterReplay = "off" if batch.supervised else router_replay or self.settings.router_replay
        self._set_expert_routes(routers, batch, replay)
        with platform.tensor_float32(self._computes_in_half):
            return module(batch.token_ids, positions=batch.positions, attention_masks=batch.attention)

    def _set_expert_routes(
        self, routers: Sequence[ReplayRouter], batch: MicroBatch, router_replay: RouterReplay
    ) -> None:
        """Give the routers the batch's expert routes, for the forward pass and for recomputation in the backward
        pass."""
        expert_routes = None if router_replay == "off" else batch.expert_routes
        if expert_routes is None and router_replay != "off" and not batch.padding:
            raise ValueError(f"trainer.router-replay {router_replay} needs episodes with expert routes")
        if expert_routes is not None and expert_routes.shape[2] != len(routers):
            raise ValueError(
                f"the episodes have expert routes for {expert_routes.shape[2]} layers, but the model has experts in "
                f"{len(routers)}: the generator must serve the model that is trained"
            )
        if expert_routes is not None and expert_routes.shape[3] != routers[0].top_k:
            raise ValueError(
                f"the episodes have expert routes with {expert_routes.shape[3]} experts per token, but the model uses "
                f"{routers[0].top_k}: the generator must serve the model that is trained"
            )
        for layer, router in enumerate(routers):
            router.routes_BLK = None if expert_routes is None else expert_routes[:, :, layer]
            router.replay = router_replay == "replay"

    def differing_experts(self) -> torch.Tensor:
        """int64[L, layers with experts]: for each token of the last forward pass, how many of the engine's experts the
        trainer's routers would not have chosen."""
        return torch.stack([router.differing_BL[0] for router in self._routers], dim=1)

    def _expert_route_sums(self, batch: MicroBatch) -> Sums:
        """Sums for the metrics of expert routes, of the last forward pass."""
        if self.settings.router_replay == "off":
            return {}
        choices = 0 if batch.expert_routes is None else batch.expert_routes[:, :, 0].numel()
        return {
            ROUTES_DIFFER: self.differing_experts().sum(0).float(),
            LAYER_CHOICES: torch.tensor(float(choices), device=self.device),
        }

    def update(self, microbatches: Sequence[MicroBatch], objective: LossFunction) -> dict[str, float]:
        """One optimiser step over micro-batches: :meth:`update_batch` of one mini-batch."""
        return self.update_batch([microbatches], objective)

    def update_batch(
        self,
        minibatches: Sequence[Sequence[MicroBatch]],
        objective: LossFunction,
        epochs: int = 1,
        learns: bool = True,
        lr: float | None = None,
    ) -> dict[str, float]:
        """One optimiser step per mini-batch, ``epochs`` times over. In each mini-batch all ranks pass equally many
        micro-batches.

        The column ``old`` is filled with log-probs of the current policy: for the first mini-batch by its own forward
        pass, for the others by an extra forward pass before the first step. Episodes with non-finite values are not
        trained, and are listed in :attr:`left_out`. Micro-batches of supervised rows add their cross-entropy.

        Args:
            learns: if false, compute everything, but make no optimiser step.
            lr: learning rate of supervised steps, which are outside of the schedule and do not advance it; None: the
                schedule's.

        Returns:
            Metrics of the whole batch, equal on all ranks. Unless stated otherwise they are means over trainable tokens
            and epochs, and absent if there are no such tokens.

            - ``loss`` and ``grad_norm`` (before clipping): means over steps. ``lr``: of the last step.
              ``optimizer_steps``: of the schedule, made so far.
            - ``drift_k3``: from ``old``. ``tokens``: number of trained tokens.
            - ``padding``: share of computed positions that are padding; only ranks without episodes pad, with one
              token.
            - ``imbalance``: share of rank-time lost because ranks with fewer tokens wait for the one with most.
            - ``computed_share``: computed inputs / inputs that the episodes would have if they shared no prefixes.
            - ``logprob_difference_p50``, ``_p99``, ``_max``: quantiles of |trainer - engine| over tokens of the version
              that is updated, if there are any.
            - With expert routes: ``routes_differ``, the share of the engine's choices of experts that the trainer's
              router would not make, and the same by layer.
            - With supervised rows: ``supervised_tokens`` in their answers, and ``supervised_loss``, their mean
              cross-entropy.

        Raises:
            NotFinite: the gradient is not finite; this step and the following ones were not made. States the cause if
                it is a weight or the loss.
            ValueError: the objective returned no valid loss, does not count its tokens, or returned sums with other
                names on other ranks.
        """
        flat = [batch for microbatches in minibatches for batch in microbatches]
        steps = epochs * len(minibatches)
        reads_reference = self._reference is not None and REFERENCE in needed_columns(objective)
        read = self._fill_reference(flat) if reads_reference else {}
        if learns:
            self._fill_old(minibatches[1:])
        totals, norms, used_lr = Sums(), list[float](), 0.0
        self.left_out = {}
        for _ in range(epochs):
            for microbatches in minibatches:
                used_lr = self.schedulers.schedulers[0].get_last_lr()[0] if lr is None else lr
                sums, norm = self._optimise(microbatches, objective, learns, lr)
                norms.append(norm)
                _add(totals, sums)
        with device_work.operation("the metrics of a batch"):
            metrics = reduced_metrics(totals, self._sparse_layers, self._counts)
            waste = waste_metrics(flat, self.device, self._counts)
        counted = ("tokens", SUPERVISED_TOKENS, MASKED_TOKENS, MASKED_EPISODES)
        metrics |= {name: metrics[name] / epochs for name in counted if name in metrics}
        done = {"lr": float(used_lr), "optimizer_steps": float(self.checkpoint.optimizer_steps)}
        return metrics | {"loss": metrics["loss"] / steps, "grad_norm": sum(norms) / steps} | done | waste | read

    def _fill_old(self, minibatches: Sequence[Sequence[MicroBatch]]) -> None:
        """Fill ``old`` in mini-batches that are trained after the first step, unless a stage has filled it."""
        for batch in (batch for microbatches in minibatches for batch in microbatches):
            if not batch.supervised and OLD not in batch.columns:
                with device_work.operation("a pass for log-probs", batch.token_ids.numel()), torch.no_grad():
                    batch.columns[OLD] = self.token_logprobs(batch).logprobs

    def _fill_reference(self, microbatches: Sequence[MicroBatch]) -> dict[str, float]:
        """Fill ``reference``, unless a stage has filled it. Returns the seconds that it took, summed over all ranks."""
        began = time.perf_counter()
        for batch in microbatches:
            if not batch.supervised and REFERENCE not in batch.columns:
                with device_work.operation("a pass for log-probs", batch.token_ids.numel()):
                    batch.columns[REFERENCE] = self._reference_logprobs(batch)
        with device_work.operation("the end of the reference's passes"):
            finish_current(self.device)
            return {"reference_device_s": summed(time.perf_counter() - began, self.device)}

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """float32[N], without gradient: log-probs of the trainable tokens under the reference model."""
        assert self._reference is not None
        with torch.no_grad(), without_lora(self._reference):
            return self.token_logprobs(batch, module=self._reference).logprobs

    def _optimise(
        self, microbatches: Sequence[MicroBatch], objective: LossFunction, learns: bool, lr: float | None
    ) -> tuple[Sums, float]:
        """One optimiser step. Returns the sums over this rank's tokens, and the norm of the gradient."""
        self.optimizers.zero_grad()
        totals = Sums()
        for batch in microbatches:
            with device_work.operation("a micro-batch", batch.token_ids.numel()):
                _add(totals, self._add_gradient(batch, objective))
        # The step waits for the GPU operations enqueued above.
        with device_work.operation("an optimiser step", sum(batch.token_ids.numel() for batch in microbatches)):
            return totals, self._step(totals, learns, lr)

    def _add_gradient(self, batch: MicroBatch, objective: LossFunction) -> Sums:
        """Forward and backward pass of a micro-batch. Returns its sums."""
        objective = rows_loss if batch.supervised else objective
        output = self.token_logprobs(
            batch, entropy_gradient=differentiates_entropy(objective), others=other_token_columns(objective)
        )
        routes = {} if batch.supervised else self._expert_route_sums(batch)
        if not batch.supervised:
            batch.columns.setdefault(OLD, output.logprobs.detach())
        if batch.notes is not None:
            batch.notes = {}  # without those of the previous epoch
        computed = output
        output, trained, left_out = finite_only(computed, batch)
        if left_out.causes:
            self.left_out[id(batch)] = left_out.causes
        # Not by evaluate_loss(), which would refuse the names of these sums.
        loss, sums = rows_loss(output, trained) if batch.supervised else evaluate_loss(objective, output, trained)
        if batch.notes is not None:
            note_pass(batch, computed, trained, left_out.kept)
        if not batch.supervised:
            sums |= common_sums(output, trained)
            sums["drift_k3"] = mismatch_k3(output.logprobs, trained.columns[OLD]).sum()
        counts = {MASKED_TOKENS: left_out.tokens, MASKED_EPISODES: len(left_out.causes)}
        sums |= {name: torch.tensor(float(count), device=self.device) for name, count in counts.items()}
        sums |= routes | {"loss": loss.detach()}
        with platform.tensor_float32(self._computes_in_half):
            loss.backward()
        return sums

    def _step(self, totals: Sums, learns: bool, lr: float | None) -> float:
        """Clip the gradient, and apply it if the policy learns. Returns its norm before clipping."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # Experts and other parameters may be on different meshes: torchtitan adds up their norms.
        grad_norm = dist_utils.clip_grad_norm_(
            trained, self.settings.max_grad_norm, foreach=True, ep_enabled=self.settings.expert_parallel > 1
        )
        if not torch.isfinite(grad_norm):
            cause = why_not_finite(self.model, totals["loss"] if self._counts else torch.zeros(()))
            raise NotFinite(f"the gradient norm is {float(grad_norm)}, so no update was made. {cause}")
        if learns and lr is None:
            self.optimizers.step()
            self.schedulers.step()
        elif learns:
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            scheduled = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = lr
            self.optimizers.step()
            for group, of_schedule in zip(groups, scheduled, strict=True):
                group["lr"] = of_schedule
            self.checkpoint.supervised_steps += 1
        return float(grad_norm)

    def save(self, folder: Path, end_tokens: Sequence[int] = ()) -> None:
        """Write the model to a Hugging Face folder that all ranks can access: see :func:`save_model`."""
        save_model(self.model, folder, end_tokens=end_tokens)

    def close(self) -> None:
        """Leave the torch.distributed world."""
        dist.destroy_process_group()


def routers_of(module: Decoder) -> list[ReplayRouter]:
    """The routers, layer by layer."""
    # Searched by type, because activation checkpointing may wrap a layer's modules.
    return [part for part in module.modules() if isinstance(part, ReplayRouter)]


def _mark_progress(_block: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
    """Forward hook of a block: mark progress after its forward pass, and when the backward pass reaches its output."""
    device_work.mark()
    if device_work.work() is not None and output.requires_grad:
        output.register_hook(lambda _: device_work.mark())


def _add(totals: Sums, sums: Sums) -> None:
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value


def _join_world(timeout: timedelta) -> torch.device:
    """Join the torch.distributed world given by the environment; returns this rank's device."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE.type == "cuda" else DEVICE
    if not dist.is_initialized():
        join_world("nccl" if device.type == "cuda" else "gloo", timeout)
    # FSDP's hooks keep state per thread: backward must stay on the thread that called it.
    torch.autograd.set_multithreading_enabled(False)
    return device

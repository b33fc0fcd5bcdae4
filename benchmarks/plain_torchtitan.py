"""Plain torchtitan, the reference of the trainer: its model, optimiser, schedule, clipping and cross-entropy.

One call of :meth:`PlainTorchtitan.step` makes the calls of torchtitan's own ``Trainer.train_step`` in their order,
including logging, on the world of this process. Of ``monarch_rl`` it uses only the model's config with its
attention module. Nothing is shared between episodes.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from monarch_rl.model.config import read_config
from monarch_rl.trainer.attention_layout import AttentionLayout
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.families import FAMILIES
from monarch_rl.trainer.model_config import SPMD_BACKEND, model_config
from monarch_rl.trainer.platform import force_sum_reduction, prepare
from monarch_rl.trainer.settings import TrainerSettings

prepare()

from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common import FusedQKVLinear, Linear  # noqa: E402


class PlainTorchtitan:
    """A model of a Hugging Face folder under torchtitan alone, sharded over the ranks of the current world.

    Args:
        folder: the model.
        settings: settings of the trainer, without loss settings. With ``reference`` a frozen copy of the model runs
            on each micro-batch first.
        total_steps: number of steps of the schedule.
        device: device of this rank.
        fuse_qkv: whether q, k and v are one matrix, as in torchtitan's own recipes. In the trainer they are separate,
            as in Hugging Face.
    """

    def __init__(
        self, folder: Path, settings: TrainerSettings, total_steps: int, device: torch.device, *, fuse_qkv: bool
    ) -> None:
        self._device = device
        self._max_grad_norm = settings.max_grad_norm
        self._dims = ParallelDims.from_config(_parallelism(), torch.distributed.get_world_size())
        self._dims.build_mesh()
        self._model = _load(folder, settings, self._dims, device, fuse_qkv).train()
        self._reference: Any = None
        if settings.reference:
            self._reference = _load(folder, settings, self._dims, device, fuse_qkv).requires_grad_(False)
        self._loss = CrossEntropyLoss(CrossEntropyLoss.Config())
        self._optimizers = default_adamw(
            lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        ).build(model_parts=[self._model])
        self._schedulers = LRSchedulersContainer.Config(
            warmup_steps=settings.lr_warmup_steps,
            decay_ratio=settings.lr_decay_ratio,
            decay_type=settings.lr_decay_type,
            min_lr_factor=settings.lr_min_factor,
        ).build(optimizers=self._optimizers, training_steps=total_steps)

    def step(self, microbatches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionLayout]]) -> float:
        """Make one optimiser step over ``(token ids, positions, labels, attention)``, int64[1, L] each but the last.

        Returns:
            The mean cross-entropy of the labelled tokens of all ranks, before the update.
        """
        self._optimizers.zero_grad()
        valid = torch.zeros((), dtype=torch.int64, device=self._device)
        for _, _, labels, _ in microbatches:
            valid += (labels != IGNORE_INDEX).sum()
        mesh = self._dims.get_mesh("batch") if self._dims.dp_enabled else None
        all_valid = valid if mesh is None else dist_utils.dist_sum_tensor(valid, mesh)
        total = torch.zeros((), device=self._device)
        if self._reference is not None:
            self._run_reference(microbatches, all_valid)
        for token_ids, positions, labels, attention in microbatches:
            logits = self._model(token_ids, positions=positions, attention_masks=attention)
            loss, _ = self._loss(logits, labels, all_valid)
            del logits
            loss.backward()
            total += loss.detach()
        dist_utils.clip_grad_norm_(list(self._model.parameters()), self._max_grad_norm, foreach=True)
        self._optimizers.step()
        self._schedulers.step()
        if mesh is None:
            return float(total)
        # torchtitan reduces these when it logs: the mean loss, the largest one and the tokens seen.
        mean = dist_utils.dist_sum(total, mesh)
        dist_utils.dist_max(total * all_valid / valid, mesh)
        dist_utils.dist_sum(valid, mesh)
        return float(mean)

    @torch.no_grad()
    def _run_reference(
        self, microbatches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionLayout]], valid: torch.Tensor
    ) -> None:
        """Make the same forward pass and cross-entropy with the frozen model."""
        for token_ids, positions, labels, attention in microbatches:
            self._loss(self._reference(token_ids, positions=positions, attention_masks=attention), labels, valid)


def _parallelism() -> ParallelismConfig:
    return ParallelismConfig(spmd_backend=SPMD_BACKEND)


def _load(folder: Path, settings: TrainerSettings, dims: ParallelDims, device: torch.device, fuse_qkv: bool) -> Any:
    """Return the model with its weights, sharded."""
    hf = read_config(folder)
    family = FAMILIES[hf.architecture]
    on_gpu = device.type == "cuda"
    dtype = settings.computes_in(on_gpu)
    config: Any = model_config(
        hf,
        logprob_chunk=settings.logprob_chunk,
        longest=settings.tokens_per_microbatch,
        half_on_gpu=on_gpu and dtype != "float32",
    )
    head = config.lm_head
    config.lm_head = Linear.Config(
        in_features=head.in_features, out_features=head.out_features, param_init=head.param_init
    )
    if fuse_qkv:
        _fuse(config)
    config.update_from_config(config=types.SimpleNamespace(parallelism=_parallelism()))
    with torch.device("meta"):
        module = config.build()
    checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    model: Any = family.parallelize(
        module,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=_parallelism(),
        compile_config=CompileConfig(),
        ac_config=checkpointing[settings.activation_checkpoint],
        dump_folder="",
    )
    force_sum_reduction(model)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states()
    state_dict_adapter: Any = family.state_dict_adapter(config, str(folder))
    state = state_dict_adapter.to_hf(model.state_dict())
    dcp.load(state, storage_reader=state_dict_adapter.get_hf_storage_reader(str(folder)))
    model.load_state_dict(state_dict_adapter.from_hf(state), strict=False)
    return model


def labelled(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionLayout]:
    """A micro-batch of separate episodes for :meth:`PlainTorchtitan.step`: targets that are not trainable are
    ignored."""
    labels = torch.full_like(batch.token_ids, IGNORE_INDEX)
    labels[0, batch.sampled_after] = batch.targets
    return batch.token_ids, batch.positions, labels, batch.attention


def _fuse(config: Any) -> None:
    """Replace q, k and v of every layer by torchtitan's fused projection."""
    for layer in config.layers:
        attention = layer.attention
        heads, kv_heads = attention.n_heads, attention.n_kv_heads
        single = attention.qkv_linear.wq
        attention.qkv_linear = FusedQKVLinear.Config(
            head_dim=attention.head_dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            wqkv=Linear.Config(
                in_features=single.in_features,
                out_features=(heads + 2 * kv_heads) * attention.head_dim,
                param_init=single.param_init,
            ),
        )

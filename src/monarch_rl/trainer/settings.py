"""Settings of the trainer: ranks, optimiser, micro-batches, LoRA, critic and loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from monarch_rl.errors import SettingsError
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import FULL_TRAINING, MLP_TARGETS, LoraSettings
from monarch_rl.model.tensors import expected_tensors, projections
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import TWO, CheckedSettings, Range
from monarch_rl.trainer.loss_settings import NO_CRITIC, CriticSettings, LossSettings

RouterReplay = Literal["off", "compare", "replay"]
COMPILE_LIMIT_S = 1800.0
"""Time for one block of each kind, forward and backward: minutes each on a busy machine without a compile cache."""
Checkpointing = Literal["none", "selective", "full"]
HIGHEST_LR = ((10**8, 1.0), (2 * 10**9, 2e-5), (10**10, 3e-6), (10**15, 1e-6))
"""(parameters below, highest learning rate in published configurations of full training by reinforcement learning).

Below 100M parameters there are none: the tiny models of ``tools/`` train with 3e-4. Most use 1e-6 at every size: TRL's
``GRPOConfig``, verl's ``examples/grpo_trainer`` from Qwen3-0.6B to Qwen3-235B-A22B, and DAPO with Qwen2.5-32B
(``recipe/dapo/run_dapo_qwen2.5_32b.sh`` there). Higher ones: 2e-5 in Open-R1's ``recipes/Qwen2.5-1.5B-Instruct/grpo``,
1.5e-6 to 3e-6 with 7B in its ``recipes/Qwen2.5-Math-7B/grpo``."""
LORA_FACTOR = 10
"""The best rate of LoRA over that of full training: Schulman et al., "LoRA Without Regret"
(https://thinkingmachines.ai/blog/lora/), 2025."""
FAR_ABOVE = 5
"""Factor on these rates above which a rate is reported. A choice: such rates need not fail."""
SCHEDULE = ("lr_warmup_steps", "lr_decay_ratio", "lr_decay_type", "lr_min_factor")
"""Settings that determine the learning rate as a share of ``lr``, with the number of optimiser steps."""


@dataclass(frozen=True)
class TrainerSettings(CheckedSettings, flags="trainer"):
    """The trainer mesh, its optimiser (torchtitan's) and its micro-batches."""

    ranks: Annotated[int, Range(1, 100_000)] = TWO
    """Processes of the trainer mesh. FSDP2 shards the model over all of them. If it is not given: 1 without GPUs on at
    most two cores, where that is faster, otherwise 2; a resumed run keeps its number."""
    expert_parallel: Annotated[int, Range(1, 100_000)] = 1
    """Expert-parallel degree of a mixture-of-experts model: the experts are divided among this many ranks, and each
    token is sent to the ranks of its experts. Must divide `ranks`. 1: every rank gathers all experts of a layer to
    compute it. Larger values take less memory and more communication."""
    router_replay: RouterReplay = "off"
    """Which experts compute a token of a mixture-of-experts model. `off`: those that the trainer's router chooses.
    `replay`: those that the generator used to sample it (Keep Routing), sent with the tokens, one byte per layer
    and expert. `compare`: the router's choice; the generator's experts are sent too, and a metric reports how many
    differ."""
    tp: Annotated[int, Range(1, 64)] = 1
    """Tensor-parallel degree: this many neighbouring ranks of one host compute the same tokens, each with a part of
    every matrix and of the vocabulary. Must divide `ranks`. 1: each rank computes its own tokens. Larger values take
    less memory for activations and logits, and communication in every layer."""
    lr: Annotated[float, Range(0, 1)] = 1e-6
    """AdamW's learning rate. 1e-6 is the default of TRL, verl and slime for full training; tiny models and LoRA train
    with larger rates."""
    betas: NotAFlag[Annotated[tuple[float, float], Range(0, 0.999999)]] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment (torchtitan's default)."""
    weight_decay: Annotated[float, Range(0, 100)] = 0.0
    """AdamW's weight decay."""
    lr_warmup_steps: Annotated[int, Range(0, 10**9)] = 0
    """Optimiser steps of linear learning-rate warm-up."""
    lr_decay_ratio: Annotated[float | None, Range(0, 1)] = None
    """Share of the optimiser steps, at the end of the run, over which the learning rate decays to lr x lr_min_factor.
    None: all steps after warm-up."""
    lr_decay_type: NotAFlag[Literal["linear", "sqrt", "cosine"]] = "linear"
    """Shape of the learning-rate decay."""
    lr_min_factor: Annotated[float, Range(0, 1, "1 keeps the rate constant")] = 1.0
    """Final learning rate as a share of `lr`; 1 keeps it constant."""
    max_grad_norm: Annotated[float, Range(1e-6, 1e12)] = 1.0
    """Gradients of a larger global norm are scaled down to this norm."""
    tokens_per_microbatch: Annotated[int, Range(1, 100_000_000)] = 8192
    """Most tokens in one forward pass of one rank, where prefixes that episodes of a group share count once. Also the
    most tokens of an episode that can be trained. Larger values take more memory."""
    epochs: Annotated[int, Range(1, 1000)] = 1
    """Passes over each batch. 1 is the default of TRL, verl and slime. Each further pass makes one optimiser step (or
    `minibatches` of them) without new rollouts, on tokens that the earlier passes have made more off-policy."""
    minibatches: Annotated[int, Range(1, 1_000_000)] = 1
    """Mini-batches that a batch is divided into, by groups, with one optimiser step each; at most `groups-per-step`.
    More mini-batches make smaller steps, and the later ones train on tokens that the earlier ones have made more
    off-policy. The policy's version counts batches, not optimiser steps."""
    activation_checkpoint: Checkpointing = "none"
    """torchtitan's activation checkpointing: saves memory by recomputing the forward pass, or parts of it
    (`selective`)."""
    compile: bool = False
    """Compile each transformer block with `torch.compile`, as torchtitan does: fewer and larger kernels, but the start
    takes minutes longer. Needs a C++ compiler."""
    deterministic: bool = False
    """Make trainer ranks compute bit-identical results from the same batch on GPUs, so that updates can be replayed
    from the journal; CPUs always do. Steps take longer, and an operation without a deterministic kernel ends the run.
    The slowdown has not been measured, and bit-identity has not been verified on a GPU."""
    logprob_chunk: Annotated[int, Range(1, 100_000_000)] = 1024
    """Tokens whose logits over the whole vocabulary are in memory at a time (fp32): with their gradients they take at
    most 6 x 4 bytes x vocabulary per token."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward passes; master weights are fp32. `auto`: bfloat16 on GPUs, float32 on CPUs."""
    lora: LoraSettings = FULL_TRAINING
    """Low-rank adapters instead of full training."""
    profile_steps: Annotated[tuple[int, int] | None, Range(1, 10**9)] = None
    """First and last step, as in `metrics.jsonl`, of which each rank writes a trace of torch.profiler, to
    `traces/rank0.json.gz`, ... in the run's folder, for Perfetto or chrome://tracing. These steps take
    several times as long. None: no trace."""
    reference: bool = False
    """Keep the model that training starts from on the trainer's devices, and fill the column `reference` with its
    log-probs, which `trainer.loss.kl-coefficient` reads. Takes 4 bytes per parameter, sharded over the ranks, and one
    forward pass per batch; with LoRA only the forward pass."""
    critic: NotAFlag[CriticSettings] = NO_CRITIC
    """The critic, which the advantage `gae` needs: `recipes/ppo.py` has it."""
    loss: LossSettings = LossSettings()
    """Settings that all objectives share."""

    def computes_in(self, on_gpu: bool) -> str:
        """Name of the dtype of forward and backward passes."""
        return self.compute_dtype if self.compute_dtype != "auto" else ("bfloat16" if on_gpu else "float32")

    def in_half_on_gpu(self, on_gpu: bool) -> bool:
        """Whether the model computes in bfloat16 on a GPU: its float32 matrices then hold bfloat16 values, whose
        products are exact in shorter formats (:func:`~monarch_rl.trainer.platform.tensor_float32`)."""
        return on_gpu and self.computes_in(on_gpu) != "float32"

    @property
    def keeps_expert_routes(self) -> bool:
        """Whether generators return expert routes with the tokens."""
        return self.router_replay != "off"

    @property
    def compile_limit_s(self) -> float:
        """Seconds that compilation may add to a rank's start."""
        return COMPILE_LIMIT_S if self.compile else 0.0

    @property
    def updates_per_batch(self) -> int:
        """Optimiser steps per batch."""
        return self.epochs * self.minibatches

    @property
    def data_ranks(self) -> int:
        """Shares that a batch is divided into: tensor-parallel ranks compute the same share."""
        return self.ranks // self.tp

    def contradictions(self) -> Iterator[str]:
        if self.profile_steps is not None and self.profile_steps[1] < self.profile_steps[0]:
            first, last = self.profile_steps
            yield f"trainer.profile-steps {first} {last}: the last step comes before the first; exchange them"
        if self.ranks % self.tp:
            yield f"trainer.tp {self.tp} must divide trainer.ranks, which is {self.ranks}"
        if self.tp > 1 and self.compile:
            yield (
                f"trainer.compile cannot be combined with trainer.tp {self.tp}: every length of rows would be compiled "
                "separately. Leave one of them out"
            )
        if self.tp > 1 and self.lora.rank:
            yield f"trainer.lora is not supported with trainer.tp {self.tp}: leave trainer.tp at 1"
        if self.tp > 1 and self.critic.enabled:
            yield (
                f"trainer.critic.lr: the critic's head has a single row, which cannot be divided among trainer.tp "
                f"{self.tp} ranks: leave trainer.tp at 1"
            )
        if self.ranks % self.expert_parallel:
            yield f"trainer.expert-parallel {self.expert_parallel} must divide trainer.ranks, which is {self.ranks}"


def lr_warnings(settings: TrainerSettings, parameters: int) -> list[str]:
    """A sentence if the learning rate is 0, or far above those that are used for models of this size.

    Args:
        parameters: number of the model's parameters.
    """
    if settings.lr == 0:
        return ["trainer.lr is 0: the weights stay as they are, and nothing is learned"]
    highest = next(lr for below, lr in HIGHEST_LR if parameters < below)
    kind = f"LoRA, {LORA_FACTOR} times that of full training" if settings.lora.rank else "full training"
    highest *= LORA_FACTOR if settings.lora.rank else 1
    if settings.lr <= FAR_ABOVE * highest:
        return []
    return [
        f"trainer.lr {settings.lr:g} is far above the highest rate in published runs of models with about "
        f"{parameters / 1e9:.3g}B parameters, {highest:g} ({kind}); TRL and verl use 1e-06 for full training "
        "(docs/algorithms.md)"
    ]


def lr_share(trainer: Mapping[str, Any], step: int, total_steps: int) -> float:
    """The learning rate of an optimiser step as a share of ``trainer.lr``: torchtitan's schedule
    (``components/optimizer/lr_scheduler.py``), for processes that do not import it.

    Args:
        trainer: settings of the trainer in the form of ``settings.json``.
        step: optimiser steps made before.
        total_steps: optimiser steps of the whole run.
    """
    warmup = min(trainer["lr_warmup_steps"], total_steps)
    ratio, least = trainer["lr_decay_ratio"], trainer["lr_min_factor"]
    decay = total_steps - warmup if ratio is None else min(round(total_steps * ratio), total_steps - warmup)
    if step < warmup:
        return float((step + 1) / warmup)
    progress = (step - (total_steps - decay)) / decay if decay else 0.0
    if progress <= 0:
        return 1.0
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return float(least + (1 - least) * left[trainer["lr_decay_type"]])


def check_hosts(settings: TrainerSettings, per_host: int) -> None:
    """Refuse trainer ranks that fill a host only partly, and tensor-parallel ranks that span two hosts.

    Args:
        per_host: devices per host.

    Raises:
        ValueError: the ranks do not fit; states what would.
    """
    if settings.ranks > per_host and settings.ranks % per_host:
        raise SettingsError(f"trainer.ranks {settings.ranks} must fill whole hosts: a multiple of {per_host}")
    if settings.ranks > per_host and per_host % settings.tp:
        raise SettingsError(f"trainer.tp {settings.tp} must lie on one host: a divisor of its {per_host} devices")


def check_trained(config: ModelConfig, settings: TrainerSettings) -> None:
    """Refuse a model that cannot be trained with these settings, whatever the available memory.

    Raises:
        ValueError: names the setting that does not fit the model.
    """
    check_experts(config, settings)
    check_tensor_parallel(config, settings.tp)
    check_lora(config, settings.lora)


def check_tensor_parallel(config: ModelConfig, tp: int) -> None:
    """Refuse a model that ``tp`` ranks cannot divide equally, or that has experts or latent attention.

    Raises:
        ValueError: names the dimension that is not divisible, or the unsupported layers.
    """
    if tp == 1:
        return
    if config.sparse_layers or config.architecture.latent_attention:
        raise SettingsError(
            f"trainer.tp {tp}: tensor parallelism does not support the experts or the latent attention of this model. "
            "Leave trainer.tp at 1, and divide experts with trainer.expert-parallel"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if (size := getattr(config, name)) % tp:
            raise SettingsError(f"trainer.tp {tp} does not divide the model's {name} {size}: give a divisor")


def check_experts(config: ModelConfig, settings: TrainerSettings) -> None:
    """Refuse settings that do not fit the experts of a model, or a model without experts.

    Raises:
        ValueError: the ranks cannot divide the experts equally, the family or the number of ranks does not allow LoRA,
            or the settings concern experts and the model has none.
    """
    ranks, degree = settings.ranks, settings.expert_parallel
    if not config.sparse_layers:
        if degree > 1:
            raise SettingsError(f"trainer.expert-parallel {degree}: the model has no experts; leave it at 1")
        if settings.router_replay != "off":
            raise SettingsError(
                f"trainer.router-replay {settings.router_replay}: the model has no experts; leave it off"
            )
        return
    experts, lora = config.num_experts, settings.lora
    if lora.rank and config.architecture.lora_unsupported:
        raise SettingsError(f"trainer.lora: {config.architecture.lora_unsupported}")
    if lora.sends_merged(sparse=True) and ranks > experts:
        on_experts = ", ".join(name for name in lora.targets if name in MLP_TARGETS)
        raise SettingsError(
            f"trainer.lora.targets {on_experts} are projections of experts, and trainer.ranks {ranks} is more than the "
            f"{experts} experts: the adapter of one expert cannot be split among ranks. Use at most {experts} ranks, "
            "or only q_proj, k_proj, v_proj, o_proj as targets"
        )
    if experts % degree:
        raise SettingsError(f"trainer.expert-parallel {degree} does not divide the {experts} experts: give a divisor")
    # torchtitan gives each rank whole experts, or rows of some if there are more ranks than experts.
    if ranks <= experts and experts % ranks:
        raise SettingsError(f"trainer.ranks {ranks} does not divide the {experts} experts: give a divisor")
    if ranks > experts:
        for name in ("hidden_size", "moe_intermediate_size"):
            if (size := getattr(config, name)) % (ranks // degree):
                raise SettingsError(
                    f"trainer.ranks {ranks} is more than the {experts} experts, so {ranks // degree} ranks hold rows "
                    f"of the same experts, and do not divide {name} {size} equally. Use fewer ranks"
                )


def check_lora(config: ModelConfig, lora: LoraSettings) -> None:
    """Refuse adapters of a higher rank than the matrices that they are added to can have.

    Raises:
        ValueError: a rank is too high, naming the matrix, or the model has none of the targets.
    """
    if not lora.rank:
        return
    tensors = expected_tensors(config)
    weights = [weight for target in lora.targets for weight in projections(tensors, target)]
    if not weights:
        raise SettingsError(f"trainer.lora.targets {', '.join(lora.targets)}: the model has none of these projections")
    name, shape = min(weights, key=lambda weight: min(weight[1]))
    if lora.rank > min(shape):
        raise SettingsError(
            f"trainer.lora.rank {lora.rank} is more than {name} of shape {list(shape)} can have: give at most "
            f"{min(shape)}, or leave this projection out of trainer.lora.targets"
        )

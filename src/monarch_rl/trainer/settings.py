"""What a user sets about the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from monarch_rl.model.architecture import DEEPSEEK_V3, architecture_of
from monarch_rl.model.folder import num_experts, sparse_layers
from monarch_rl.model.lora import FULL_TRAINING, MLP_TARGETS, LoraSettings
from monarch_rl.model.tensors import expected_tensors, projections
from monarch_rl.settings.ranges import CheckedSettings, Range
from monarch_rl.trainer.loss_settings import NO_CRITIC, CriticSettings, LossSettings

RouterReplay = Literal["off", "compare", "replay"]
COMPILE_LIMIT_S = 1800.0
"""For one block of each kind, forward and backward; on a crowded machine without a cache, minutes each."""
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class TrainerSettings(CheckedSettings, flags="trainer"):
    """The trainer mesh, its optimiser (torchtitan's) and its micro-batches."""

    ranks: Annotated[int, Range(1, 100_000)] = 2
    """Processes of the trainer mesh; FSDP2 shards the model over all of them."""
    expert_parallel: Annotated[int, Range(1, 100_000)] = 1
    """Ranks among which the experts of a mixture-of-experts model are divided, and to which tokens travel: a divisor
    of `ranks`. 1: every rank gathers all experts of a layer to compute it. More: less memory, more messages."""
    router_replay: RouterReplay = "off"
    """Which experts compute a token of a mixture-of-experts model. `off`: those that the trainer's router chooses.
    `replay`: those by which the generator drew it (Keep Routing); they travel with the tokens, a byte for each layer
    and expert. `compare`: the router's choice; the generator's experts travel too, to show how many differ."""
    tp: Annotated[int, Range(1, 64)] = 1
    """Tensor-parallel ranks of the trainer, neighbours on one host, which compute the same tokens, each with a part of
    every matrix and of the vocabulary: a divisor of `ranks`. 1: each rank computes tokens of its own. More: less memory
    for activations and logits, and messages in every layer."""
    lr: Annotated[float, Range(0, 1)] = 1e-6
    """AdamW's learning rate. 1e-6 is the default of TRL, verl and slime for full training; tiny models and LoRA learn
    with larger ones."""
    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.95)
    """AdamW's decay of the first and second moment (torchtitan's default)."""
    weight_decay: Annotated[float, Range(0, 100)] = 0.0
    """AdamW's weight decay."""
    lr_warmup_steps: Annotated[int, Range(0, 10**9)] = 0
    """Steps of linear warm-up."""
    lr_decay_ratio: Annotated[float | None, Range(0, 1)] = None
    """Share of the steps, at the end, over which the rate decays to lr x lr_min_factor; None is all steps after
    warm-up."""
    lr_decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    lr_min_factor: Annotated[float, Range(0, 1, "1 keeps the rate constant")] = 1.0
    """Final rate as a share of lr; 1 keeps it constant."""
    max_grad_norm: Annotated[float, Range(1e-6, 1e12)] = 1.0
    """Gradients are scaled down to this global norm."""
    tokens_per_microbatch: Annotated[int, Range(1, 100_000_000)] = 8192
    """Tokens of one forward pass of one rank, which counts what episodes of a group share once, and the longest episode
    that can be trained. More takes more memory."""
    epochs: Annotated[int, Range(1, 1000)] = 1
    """How often a batch is gone over. 1 is the default of TRL, verl and slime: each further pass is an optimiser step
    (or `minibatches` of them) for no new rollouts, on tokens that are older by what the passes before have changed."""
    minibatches: Annotated[int, Range(1, 1_000_000)] = 1
    """Optimiser steps into which a batch is divided, by groups; not more than `groups-per-step`. More are smaller
    steps, later ones on tokens that the first have made older. A version is a batch trained, whatever this says."""
    activation_checkpoint: Checkpointing = "none"
    """torchtitan's activation checkpointing: less memory for a second forward pass."""
    compile: bool = False
    """`torch.compile` of each transformer block (torchtitan's): fewer and larger kernels, for a start that takes
    minutes longer. It needs a C++ compiler."""
    deterministic: bool = False
    """Have trainer ranks compute the same bits from the same batch on GPUs, so that updates can be made again from the
    journal; on CPUs they do in any case. Steps take longer, and an operation without a deterministic kernel ends the
    run. What it costs has not been measured, nor has equality been examined on a GPU."""
    logprob_chunk: Annotated[int, Range(1, 100_000_000)] = 1024
    """Tokens whose logits over the whole vocabulary exist at one time (fp32): with their gradients they take at most
    six times 4 bytes x vocabulary each."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward; the master weights are fp32. `auto`: bfloat16 on GPUs, float32 on CPUs."""
    lora: LoraSettings = FULL_TRAINING
    """Low-rank adapters instead of full training."""
    reference: bool = False
    """Keep the model that training starts from on the trainer's devices, and fill the column `reference` with its
    log-probs, which `trainer.loss.kl-coefficient` reads. It takes 4 bytes a parameter, shared among the ranks, and a
    forward pass a batch; with LoRA the pass alone."""
    critic: CriticSettings = NO_CRITIC
    """A critic, which the advantage `gae` needs."""
    loss: LossSettings = LossSettings()
    """The policy-gradient loss."""

    def computes_in(self, on_gpu: bool) -> str:
        """The name of the dtype of forward and backward."""
        return self.compute_dtype if self.compute_dtype != "auto" else ("bfloat16" if on_gpu else "float32")

    def in_half_on_gpu(self, on_gpu: bool) -> bool:
        """Whether matrices of float32 hold values of bfloat16, whose products a GPU has exactly in shorter formats."""
        return on_gpu and self.computes_in(on_gpu) != "float32"

    @property
    def keeps_expert_routes(self) -> bool:
        """Whether generators return expert routes, which travel with the tokens."""
        return self.router_replay != "off"

    @property
    def compile_limit_s(self) -> float:
        """Seconds that compiling may add to a rank's start."""
        return COMPILE_LIMIT_S if self.compile else 0.0

    @property
    def updates_per_batch(self) -> int:
        """Optimiser steps that are made of one batch."""
        return self.epochs * self.minibatches

    @property
    def data_ranks(self) -> int:
        """How many parts a batch is cut into: tensor-parallel ranks compute the same one."""
        return self.ranks // self.tp

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks % self.tp:
            raise ValueError(f"trainer.tp {self.tp} must divide trainer.ranks, which is {self.ranks}")
        if self.tp > 1 and self.compile:
            raise ValueError(
                f"trainer.compile would compile rows of every length anew with trainer.tp {self.tp}: use one of them"
            )
        if self.tp > 1 and self.lora.rank:
            raise ValueError(f"trainer.lora cannot be trained with trainer.tp {self.tp}: leave trainer.tp at 1")
        if self.tp > 1 and self.critic.enabled:
            raise ValueError(
                f"trainer.critic.lr: a critic's head has one row, which trainer.tp {self.tp} ranks cannot divide: "
                "leave trainer.tp at 1"
            )
        if self.ranks % self.expert_parallel:
            raise ValueError(
                f"trainer.expert-parallel {self.expert_parallel} must divide trainer.ranks, which is {self.ranks}"
            )


def check_hosts(settings: TrainerSettings, per_host: int) -> None:
    """Refuse trainer ranks that fill some hosts and a part of another, or tensor-parallel ones on two hosts.

    Args:
        per_host: devices.

    Raises:
        ValueError: says what would fit.
    """
    if settings.ranks > per_host and settings.ranks % per_host:
        raise ValueError(f"trainer.ranks {settings.ranks} must fill whole hosts: a multiple of {per_host}")
    if settings.ranks > per_host and per_host % settings.tp:
        raise ValueError(f"trainer.tp {settings.tp} must lie on one host: a divisor of its {per_host} devices")


def check_trained(config: dict[str, Any], settings: TrainerSettings) -> None:
    """Refuse a model that cannot be trained with these settings, whatever memory there is.

    Args:
        config: the model's ``config.json``.

    Raises:
        ValueError: says what does not fit.
    """
    check_experts(config, settings)
    check_tensor_parallel(config, settings.tp)
    check_lora(config, settings.lora)


def check_tensor_parallel(config: dict[str, Any], tp: int) -> None:
    """Refuse a model that tensor-parallel ranks cannot share equally, or that has experts.

    Args:
        config: the model's ``config.json``.

    Raises:
        ValueError: says what does not fit, and which values would.
    """
    if tp == 1:
        return
    if sparse_layers(config) or architecture_of(config) is DEEPSEEK_V3:
        raise ValueError(
            f"trainer.tp {tp}: this model has experts or latent attention, which tensor-parallel ranks do not divide. "
            "Leave trainer.tp at 1, and divide experts by trainer.expert-parallel"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if config[name] % tp:
            raise ValueError(f"trainer.tp {tp} cannot share {name} {config[name]} of the model equally: give a divisor")


def check_experts(config: dict[str, Any], settings: TrainerSettings) -> None:
    """Refuse settings that do not fit the experts of a model, or a model without experts.

    Args:
        config: the model's ``config.json``.

    Raises:
        ValueError: the ranks cannot share the experts, the family or the number of ranks does not allow LoRA, or the
            settings are about experts and the model has none.
    """
    ranks, degree = settings.ranks, settings.expert_parallel
    if not sparse_layers(config):
        if degree > 1:
            raise ValueError(f"trainer.expert-parallel {degree}: the model has no experts; leave it at 1")
        if settings.router_replay != "off":
            raise ValueError(f"trainer.router-replay {settings.router_replay}: the model has no experts; leave it off")
        return
    experts, lora = num_experts(config), settings.lora
    if lora.rank and architecture_of(config).lora_unsupported:
        raise ValueError(f"trainer.lora: {architecture_of(config).lora_unsupported}")
    if lora.sends_merged(sparse=True) and ranks > experts:
        on_experts = ", ".join(name for name in lora.targets if name in MLP_TARGETS)
        raise ValueError(
            f"trainer.lora.targets {on_experts} are projections of experts, and trainer.ranks {ranks} is more than the "
            f"{experts} experts: the adapter of one expert cannot be shared among ranks. Take at most {experts} ranks, "
            "or some of q_proj, k_proj, v_proj, o_proj"
        )
    if experts % degree:
        raise ValueError(f"{experts} experts cannot be shared equally by trainer.expert-parallel {degree}")
    # torchtitan gives each rank whole experts, or, where there are more ranks than experts, rows of some.
    if ranks <= experts and experts % ranks:
        raise ValueError(f"{experts} experts cannot be shared equally by trainer.ranks {ranks}")
    if ranks > experts:
        for name in ("hidden_size", "moe_intermediate_size"):
            if config[name] % (ranks // degree):
                raise ValueError(
                    f"trainer.ranks {ranks} is more than the {experts} experts, so {ranks // degree} ranks hold rows "
                    f"of the same ones; {name} {config[name]} cannot be shared equally by them"
                )


def check_lora(config: dict[str, Any], lora: LoraSettings) -> None:
    """Refuse adapters of a higher rank than the matrices that they are added to.

    Args:
        config: the model's ``config.json``.

    Raises:
        ValueError: names the matrix.
    """
    if not lora.rank:
        return
    tensors = expected_tensors(config)
    weights = [weight for target in lora.targets for weight in projections(tensors, target)]
    if not weights:
        raise ValueError(f"trainer.lora.targets {', '.join(lora.targets)}: the model has none of these projections")
    name, shape = min(weights, key=lambda weight: min(weight[1]))
    if lora.rank > min(shape):
        raise ValueError(
            f"trainer.lora.rank {lora.rank} is more than {name} of shape {list(shape)} can have: give at most "
            f"{min(shape)}, or leave this projection out of trainer.lora.targets"
        )

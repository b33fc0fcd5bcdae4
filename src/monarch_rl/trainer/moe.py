"""Mixture-of-experts layers as torchtitan modules: experts, with LoRA and without, and the router.

Shapes: R tokens routed to this rank's experts (each once per expert), D width, F width of an expert, E experts of this
rank; for one projection, I width in and O width out, r rank of its LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.config_utils import make_moe_config, make_router_config, make_token_dispatcher_config
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init

from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import LoraSettings


class ExactExperts(GroupedExperts):
    """torchtitan's experts, computed in the dtype of their input: the original always computes in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        gate_RF = F.silu(self._project("w1_EFD", x_RD, ends_E))
        return self._project("w2_EDF", gate_RF * self._project("w3_EFD", x_RD, ends_E), ends_E)

    def _project(self, name: str, x_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Multiply each row by the weight ``name`` of its expert."""
        return self._product(x_RI, self._local(name), ends_E)

    def _product(self, x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        weight_EIO = weight_EOI.transpose(-2, -1)
        if torch.compiler.is_compiling() and x_RI.dtype != torch.bfloat16:
            result: torch.Tensor = opaque_grouped_mm(x_RI, weight_EIO, ends_E)
            return result
        return self._grouped_mm(A=x_RI, B_t=weight_EIO, offs=ends_E)

    def _local(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, name)
        return weight.to_local() if isinstance(weight, DTensor) else weight


LOADED_EXPERTS = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)
"""No initialisation: experts' weights are loaded from the model's folder."""


def exact(experts: GroupedExperts.Config) -> ExactExperts.Config:
    """The same experts, computed in the dtype of their input."""
    return ExactExperts.Config(**_given(experts))


def _given(config: Any) -> dict[str, Any]:
    """The init arguments of a config, for a config of a derived class."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.init}


EXPERT_TARGETS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
"""The parameter that stacks all experts' weights, by projection."""
GROUPED_ROW_BYTES = 16
"""``torch._grouped_mm`` needs row sizes that are a multiple of this."""


def lora_parameters(weight: str) -> tuple[str, str]:
    """The names of A and B for a parameter that stacks the experts' weights."""
    stem = weight.partition("_")[0]
    return f"{stem}_lora_a", f"{stem}_lora_b"


class LoraExperts(ExactExperts):
    """Experts with LoRA on some projections: ``W x + alpha / rank * B (A x)``, W frozen.

    A ``[E, r, I]`` and B ``[E, O, r]`` are stacked over experts, and sharded like the weights.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExactExperts.Config):
        rank: int
        alpha: float
        targets: tuple[str, ...]
        """Names of the weights that have LoRA."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._scaling = config.alpha / config.rank
        self._targets = config.targets
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for name in config.targets:
            experts, rows, columns = getattr(self, name).shape
            name_a, name_b = lora_parameters(name)
            self.register_parameter(name_a, nn.Parameter(torch.empty(experts, config.rank, columns)))
            self.register_parameter(name_b, nn.Parameter(torch.empty(experts, rows, config.rank)))

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        sharding = self._sharding_config
        if sharding is not None:
            layouts = sharding.state_shardings
            layouts.update({added: layouts[name] for name in self._targets for added in lora_parameters(name)})
        super().parallelize(parallel_dims)

    def _project(self, name: str, x_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        projected_RO = super()._project(name, x_RI, ends_E)
        if name not in self._targets:
            return projected_RO
        a_ErI, b_EOr = (self._local(parameter) for parameter in lora_parameters(name))
        # Pad the rank with zeros to a size that grouped_mm supports.
        padding = -a_ErI.shape[1] % (GROUPED_ROW_BYTES // a_ErI.element_size())
        a_ErI, b_EOr = F.pad(a_ErI, (0, 0, 0, padding)), F.pad(b_EOr, (0, padding))
        added_RO = self._product(self._product(x_RI, a_ErI, ends_E), b_EOr, ends_E)
        return torch.add(projected_RO, added_RO, alpha=self._scaling)


def expert_lora_config(experts: GroupedExperts.Config, lora: LoraSettings) -> LoraExperts.Config:
    """The same experts with LoRA on the targets of the settings, at least one of which is a projection of experts."""
    targets = tuple(EXPERT_TARGETS[target] for target in lora.targets if target in EXPERT_TARGETS)
    arguments = _given(experts)
    added = [parameter for name in targets for parameter in lora_parameters(name)]
    arguments["param_init"] = {**(experts.param_init or {}), **dict.fromkeys(added, skip_param_init)}
    return LoraExperts.Config(**arguments, rank=lora.rank, alpha=lora.alpha, targets=targets)


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router, which can replay the experts that the engine chose.

    It weights the replayed experts by its own scores, so that the router learns while each token is computed by the
    experts that the engine used to sample it (Keep Routing, DeepSeek-V3.2, arXiv:2512.02556; Rollout Routing Replay,
    arXiv:2510.11370). Shapes: B 1, L tokens, K experts of a token.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.routes_BLK: torch.Tensor | None = None
        """The engine's choices, integers. None: the router chooses. Kept after the forward pass, because the backward
        pass may recompute the layer."""
        self.replay = False
        """Whether to replay the engine's choices, or only to compare them."""
        self.differing_BL = torch.zeros(1, 0, dtype=torch.int64)
        """For each token of the last forward pass, how many of the engine's experts the router would not have
        chosen."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores_BLK, chosen_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.routes_BLK is None:
            self.differing_BL = torch.zeros_like(chosen_BLK[..., 0])
            return scores_BLK, chosen_BLK, scores_BLE
        routes_BLK = self.routes_BLK.long()
        self.differing_BL = (routes_BLK.unsqueeze(-1) != chosen_BLK.unsqueeze(-2)).all(-1).sum(-1)
        if not self.replay:
            return scores_BLK, chosen_BLK, scores_BLE
        scores_BLK = scores_BLE.gather(-1, routes_BLK)
        if self.route_norm:
            scores_BLK = scores_BLK / (scores_BLK.sum(-1, keepdim=True) + 1e-20)
        return scores_BLK * self.route_scale, routes_BLK, scores_BLE


def replaying(router: TokenChoiceTopKRouter.Config) -> ReplayRouter.Config:
    """The same router, which can replay expert routes."""
    return ReplayRouter.Config(**_given(router))


def moe_config(hf: ModelConfig) -> MoE.Config:
    """The experts and the router of one layer of a Qwen3-MoE.

    The router computes as Hugging Face's: softmax over all experts in fp32 (on a CPU in the compute dtype), the k
    largest, divided by their sum with ``norm_topk_prob``. torchtitan's load balancing is off: it changes a bias of the
    router that Hugging Face's model, and so the generator's, does not have.
    """
    dim, experts, top_k = hf.hidden_size, hf.num_experts, hf.num_experts_per_tok
    router = make_router_config(
        dim=dim,
        num_experts=experts,
        gate_param_init={"weight": skip_param_init},
        top_k=top_k,
        score_func="softmax",
        route_norm=hf.norm_topk_prob,
    )
    return make_moe_config(
        num_experts=experts,
        load_balance_coeff=None,
        router=replaying(router),
        routed_experts=RoutedExperts.Config(
            inner_experts=ExactExperts.Config(
                dim=dim,
                hidden_dim=hf.moe_intermediate_size,
                num_experts=experts,
                param_init=LOADED_EXPERTS,
            ),
            # all_to_all among expert-parallel ranks; without expert parallelism, within the rank.
            token_dispatcher=make_token_dispatcher_config(num_experts=experts, top_k=top_k, comm_backend="standard"),
        ),
    )


# -- grouped matrix products in any dtype, for the compiler -----------------------------------------------------------
# torch.compile supports torch._grouped_mm in bfloat16 only, although torch computes it in other dtypes, too.
# Shapes: R rows, E experts, I width in, O width out.


@torch.library.custom_op("monarch_rl::grouped_mm", mutates_args=())
def opaque_grouped_mm(x_RI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its expert's weight: the rows of expert e end before ``ends_E[e]`` (int32)."""
    return torch._grouped_mm(x_RI, weight_EIO, offs=ends_E)


@opaque_grouped_mm.register_fake
def _(x_RI: torch.Tensor, weight_EIO: torch.Tensor, _ends_E: torch.Tensor) -> torch.Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2])


def _keep_for_backward(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("monarch_rl::grouped_mm_backward", mutates_args=())
def _grouped_mm_backward(
    grad_RO: torch.Tensor, x_RI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x_RI = torch._grouped_mm(grad_RO, weight_EIO.transpose(-2, -1), offs=ends_E)
    grad_weight_EIO = torch._grouped_mm(x_RI.transpose(-2, -1), grad_RO, offs=ends_E)
    return grad_x_RI.contiguous(), grad_weight_EIO.contiguous()


@_grouped_mm_backward.register_fake
def _(
    _grad: torch.Tensor, x_RI: torch.Tensor, weight_EIO: torch.Tensor, _ends_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x_RI.new_empty(x_RI.shape), weight_EIO.new_empty(weight_EIO.shape)


def _backward(ctx: Any, grad_RO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x_RI, weight_EIO, ends_E = ctx.saved_tensors
    grad_x_RI, grad_weight_EIO = torch.ops.monarch_rl.grouped_mm_backward(
        grad_RO.contiguous(), x_RI, weight_EIO, ends_E
    )
    return grad_x_RI, grad_weight_EIO, None


opaque_grouped_mm.register_autograd(_backward, setup_context=_keep_for_backward)

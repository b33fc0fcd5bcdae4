"""Mixture-of-experts layers of Qwen3-MoE, in torchtitan's classes.

Shapes: R tokens that reach this rank's experts (each once for every expert that it goes to), D width, F width of an
expert, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.config_utils import make_moe_config, make_router_config, make_token_dispatcher_config
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init

from monarch_rl.model_folder import num_experts


class ExactExperts(GroupedExperts):
    """torchtitan's experts, computed in the dtype of their input: the original always computes in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = (
            (weight.to_local() if isinstance(weight, DTensor) else weight).transpose(-2, -1)
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        gate_RF = F.silu(self._grouped_mm(A=x_RD, B_t=w1, offs=ends))
        up_RF = self._grouped_mm(A=x_RD, B_t=w3, offs=ends)
        return self._grouped_mm(A=gate_RF * up_RF, B_t=w2, offs=ends)


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router, which can be told the experts that the engine has chosen.

    It then takes those, weighted by its own scores of them: so the router learns, and what the engine drew is computed
    by the experts that drew it (Keep Routing, DeepSeek-V3.2, arXiv:2512.02556; Rollout Routing Replay,
    arXiv:2510.11370). Shapes: B 1, L tokens, K experts of a token.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.routes_BLK: torch.Tensor | None = None
        """The engine's choices, integers; None has it choose itself. Stays until it is changed: a backward pass may
        compute the layer again."""
        self.replay = False
        """Whether to take them, or only to compare."""
        self.differing = torch.zeros(())
        """How many of them it would not have chosen in the last forward pass."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores_BLK, chosen_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.routes_BLK is None:
            self.differing = torch.zeros((), device=x_BLD.device)
            return scores_BLK, chosen_BLK, scores_BLE
        routes_BLK = self.routes_BLK.long()
        self.differing = (routes_BLK.unsqueeze(-1) != chosen_BLK.unsqueeze(-2)).all(-1).sum().float()
        if not self.replay:
            return scores_BLK, chosen_BLK, scores_BLE
        scores_BLK = scores_BLE.gather(-1, routes_BLK)
        if self.route_norm:
            scores_BLK = scores_BLK / (scores_BLK.sum(-1, keepdim=True) + 1e-20)
        return scores_BLK * self.route_scale, routes_BLK, scores_BLE


def replaying(router: TokenChoiceTopKRouter.Config) -> ReplayRouter.Config:
    """The same router, which can be told routes."""
    return ReplayRouter.Config(**{field.name: getattr(router, field.name) for field in fields(router)})


def moe_config(hf: dict[str, Any]) -> MoE.Config:
    """The experts and the router of one layer of a Qwen3-MoE.

    The router is Hugging Face's: softmax over all experts in fp32 (on a CPU in the compute dtype), the k largest,
    divided by their sum with ``norm_topk_prob``. torchtitan's own load balancing is off: it moves a bias of the router
    that Hugging Face's model, and so the generator's, has not.
    """
    dim, experts, top_k = hf["hidden_size"], num_experts(hf), hf["num_experts_per_tok"]
    router = make_router_config(
        dim=dim,
        num_experts=experts,
        gate_param_init={"weight": skip_param_init},
        top_k=top_k,
        score_func="softmax",
        route_norm=hf.get("norm_topk_prob", False),
    )
    return make_moe_config(
        num_experts=experts,
        load_balance_coeff=None,
        router=replaying(router),
        routed_experts=RoutedExperts.Config(
            inner_experts=ExactExperts.Config(
                dim=dim,
                hidden_dim=hf["moe_intermediate_size"],
                num_experts=experts,
                param_init={name: skip_param_init for name in ("w1_EFD", "w2_EDF", "w3_EFD")},
            ),
            # all_to_all among expert-parallel ranks; without them, within the rank.
            token_dispatcher=make_token_dispatcher_config(num_experts=experts, top_k=top_k, comm_backend="standard"),
        ),
    )

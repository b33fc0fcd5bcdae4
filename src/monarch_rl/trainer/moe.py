"""Mixture-of-experts layers of Qwen3-MoE, in torchtitan's classes.

Shapes: R tokens that reach this rank's experts (each once for every expert that it goes to), D width, F width of an
expert, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.config_utils import make_moe_config, make_router_config, make_token_dispatcher_config
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
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


def moe_config(hf: dict[str, Any]) -> MoE.Config:
    """The experts and the router of one layer of a Qwen3-MoE.

    The router is Hugging Face's: softmax over all experts in fp32, the k largest, divided by their sum with
    ``norm_topk_prob``. torchtitan's own load balancing is off: it moves a bias of the router that Hugging Face's model,
    and so the generator's, has not.
    """
    dim, experts, top_k = hf["hidden_size"], num_experts(hf), hf["num_experts_per_tok"]
    return make_moe_config(
        num_experts=experts,
        load_balance_coeff=None,
        router=make_router_config(
            dim=dim,
            num_experts=experts,
            gate_param_init={"weight": skip_param_init},
            top_k=top_k,
            score_func="softmax",
            route_norm=hf.get("norm_topk_prob", False),
        ),
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

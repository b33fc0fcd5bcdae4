"""Checksums of the weights under training, each rank's part: two ranks hold the same bits if theirs are equal."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from monarch_rl.trainer.policy import Policy
from monarch_rl.weights.checksum import tensor_checksum


def weights_checksums(policy: Policy) -> np.ndarray:
    """int64[tensors]: of this rank's part of each trained parameter, in the order of the model's parameters, then of
    those of the critic, if there is one."""
    modules = [policy.module] if policy.critic is None else [policy.module, policy.critic.model.module]
    with torch.no_grad():
        trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        return torch.stack([_checksum(parameter) for parameter in trained]).cpu().numpy()


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if not local.numel():  # there are more ranks than rows
        return torch.zeros((), dtype=torch.int64, device=local.device)
    return tensor_checksum(local.reshape(local.shape or (1,)))

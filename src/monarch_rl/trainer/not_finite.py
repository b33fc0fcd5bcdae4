"""Why a gradient is not finite, for the message that ends the run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from monarch_rl.trainer.model import ShardedModel
from monarch_rl.trainer.shards import not_finite_part

LOOK_AT = "look at the objective, the advantages and the rewards"


def why_not_finite(model: ShardedModel, loss: torch.Tensor) -> str:
    """A sentence on the cause of a gradient that is not finite: a weight, the loss, or neither. All ranks call it
    together, and get the same.

    Args:
        loss: scalar, the sum over this rank's micro-batches; 0 on a rank that does not count its tokens.
    """
    said: list[tuple[str | None, float]] = [(None, 0.0)] * dist.get_world_size()
    dist.all_gather_object(said, (_wrong_weight(model), float(loss)))
    weight = next((weight for weight, _ in said if weight), None)
    if weight is not None:
        return f"{weight}: an earlier update was too large. Lower trainer.lr"
    total = sum(loss for _, loss in said)
    if not torch.isfinite(torch.tensor(total)):
        return f"The weights are finite, and the loss is {total}: {LOOK_AT}"
    return f"The weights are finite, and so is the loss ({total:g}), but its derivative is not: {LOOK_AT}"


def _wrong_weight(model: ShardedModel) -> str | None:
    """The first of this rank's weights that holds a value that is not finite, and where."""
    for name, value in (model.hf_state() | model.lora_state()).items():
        problem = not_finite_part(value.detach())
        if problem:
            return f"{name} {problem}"
    return None

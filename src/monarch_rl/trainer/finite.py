"""Non-finite values: episodes that have one are not trained; a gradient that has one ends the run, with the cause."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from monarch_rl.algorithms.functions import Columns
from monarch_rl.algorithms.losses import finite_tokens, whole_sequences
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.model import ShardedModel
from monarch_rl.trainer.shards import not_finite_part
from monarch_rl.trainer.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Episodes of a micro-batch that are excluded from training."""

    tokens: int
    """Trainable tokens of these episodes."""
    causes: dict[int, str]
    """What is not finite, by index of the episode in its micro-batch."""
    kept: torch.Tensor | None = None
    """bool[N]: which of the micro-batch's tokens are trained; None: all."""


NOTHING = LeftOut(0, {})


def finite_only(output: TokenLogprobs, batch: MicroBatch) -> tuple[TokenLogprobs, MicroBatch, LeftOut]:
    """Drop the tokens of episodes that have a non-finite log-prob, column or advantage, which then get no gradient.

    A non-finite value in the layers below would still make the gradient of all tokens NaN (0 x NaN), and end the update
    (``NotFinite``).
    """
    named = {"log-prob of the trainer": output.logprobs.detach(), "log-prob of the engine": batch.behaviour_logprobs}
    named |= {f"column {name!r}": values for name, values in batch.columns.items()}
    # An advantage is NaN if a column was not finite at a token that is not trained, or before the fork of a branch.
    named["advantage"] = batch.advantages
    if finite_tokens(*named.values()).all():
        return output, batch, NOTHING
    keep = whole_sequences(finite_tokens(*named.values()), batch.sequences)
    causes: dict[int, str] = {}
    for what, values in named.items():
        for sequence in batch.sequences[~values.isfinite()].unique().tolist():
            causes.setdefault(sequence, what)
    chosen = replace(
        batch,
        behaviour_logprobs=batch.behaviour_logprobs[keep],
        advantages=batch.advantages[keep],
        weights=batch.weights[keep],
        lags=batch.lags[keep],
        sequences=batch.sequences[keep],
        columns=Columns({name: values[keep] for name, values in batch.columns.items()}),
        notes=None if batch.notes is None else {},
    )
    return output.each(lambda values: values[keep]), chosen, LeftOut(int((~keep).sum()), causes, keep)


# -- the cause of a non-finite gradient, for the message that ends the run --------------------------------------------

LOOK_AT = "check the objective, the advantages and the rewards"


def why_not_finite(model: ShardedModel, loss: torch.Tensor) -> str:
    """A sentence on the cause of a non-finite gradient: a weight, the loss, or neither. All ranks call it together, and
    get the same answer.

    Args:
        loss: scalar, the sum over this rank's micro-batches; 0 on a rank that does not count its tokens.
    """
    gathered: list[tuple[str | None, float]] = [(None, 0.0)] * dist.get_world_size()
    dist.all_gather_object(gathered, (_wrong_weight(model), float(loss)))
    weight = next((weight for weight, _ in gathered if weight), None)
    if weight is not None:
        return f"{weight}: an earlier update was too large. Start a new run with a lower --trainer.lr"
    total = sum(loss for _, loss in gathered)
    if not torch.isfinite(torch.tensor(total)):
        return f"The weights are finite, but the loss is {total}: {LOOK_AT}"
    return f"The weights are finite, and so is the loss ({total:g}), but its derivative is not: {LOOK_AT}"


def _wrong_weight(model: ShardedModel) -> str | None:
    """The first of this rank's weights with a non-finite value, and where the value is; None if there is none."""
    for name, value in (model.hf_state() | model.lora_state()).items():
        problem = not_finite_part(value.detach())
        if problem:
            return f"{name} {problem}"
    return None

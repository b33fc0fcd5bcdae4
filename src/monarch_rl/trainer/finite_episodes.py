"""Episodes with a number that is not finite are not trained, so that one of them costs itself and not the update."""

from __future__ import annotations

from dataclasses import dataclass, replace

from monarch_rl.algorithms.functions import Columns
from monarch_rl.algorithms.losses import finite_tokens, whole_sequences
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Episodes of a micro-batch that are not trained."""

    tokens: int
    causes: dict[int, str]
    """By the place of an episode in its micro-batch: what of it is not finite."""


NOTHING = LeftOut(0, {})


def finite_only(output: TokenLogprobs, batch: MicroBatch) -> tuple[TokenLogprobs, MicroBatch, LeftOut]:
    """The tokens of episodes all of whose log-probs, columns and advantages are finite.

    What was computed for the others has no gradient then. A forward pass that went wrong in the layers below would
    still spoil the gradient of all (0 x NaN), and end the update (``NotFinite``).
    """
    named = {"log-prob of the trainer": output.logprobs.detach(), "log-prob of the engine": batch.behaviour_logprobs}
    named |= {f"column {name!r}": values for name, values in batch.columns.items()}
    # NaN where a column that it reads was not finite: of a token that is not trained, or of what a branch begins with.
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
    )
    return output.each(lambda values: values[keep]), chosen, LeftOut(int((~keep).sum()), causes)

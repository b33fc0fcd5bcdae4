"""The plan that a trainer rank is created from; separate, because the controller does not import the training code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_rl.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from monarch_rl.trainer.functions import TrainingFunctions


@dataclass(frozen=True)
class TrainerPlan:
    """Everything that a trainer rank is created from."""

    model: Path
    """The Hugging Face folder to start from."""
    settings: TrainerSettings
    total_steps: int
    """Optimiser steps of the run, for the learning-rate schedule: batches x updates per batch."""
    temperature: float
    """Sampling temperature, at which log-probs are computed."""
    max_new_tokens: int
    """Most tokens that an episode may generate: the normaliser of the ``constant`` aggregation."""
    functions: TrainingFunctions | None = None
    """Advantage and objective. None: those that ``settings.loss`` names. With a custom objective only the aggregation
    of these settings has an effect, through ``MicroBatch.weights``."""
    journal: Path | None = None
    """Folder in which each rank records its batches; None: no journal."""
    journal_bytes: int = 0
    """Most bytes of the journal of a rank."""
    generation: int = 0
    """How many times the run has been resumed."""

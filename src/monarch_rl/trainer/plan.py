"""What a trainer rank is made from. A module of its own: the controller makes plans and does not import what trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_rl.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from monarch_rl.trainer.functions import TrainingFunctions


@dataclass(frozen=True)
class TrainerPlan:
    """What a trainer rank needs to know beside its settings."""

    model: Path
    """The Hugging Face folder to start from."""
    settings: TrainerSettings
    total_steps: int
    """Optimiser steps of the run, for the learning-rate schedule: several a batch, if there are several updates."""
    temperature: float
    """Of the sampling distribution."""
    max_new_tokens: int
    """Tokens that an episode may draw: the normaliser of the ``constant`` aggregation."""
    functions: TrainingFunctions | None = None
    """Advantage and objective; None are those that ``settings.loss`` names. With an objective of one's own, only the
    aggregation of these settings acts, as ``MicroBatch.weights``."""
    journal: Path | None = None
    """Folder in which each rank keeps its batches; None keeps none."""
    journal_bytes: int = 0
    """That a rank keeps, at most."""
    generation: int = 0
    """How often the run was resumed."""

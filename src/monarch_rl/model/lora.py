"""Settings of low-rank adapters (LoRA, arXiv:2106.09685), and the names of their tensors, which follow peft.

A projection with LoRA computes ``W x + alpha / rank * B (A x)``: the base weight W is frozen, A ``[rank, in]`` and B
``[out, rank]`` are trained. Trainers, generators and files all use the names of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import SEED, CheckedSettings, Range

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)
"""The projections of a decoder layer that can have LoRA, by their Hugging Face names."""
MLP_TARGETS: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
"""The targets that a mixture of experts has in every expert."""


@dataclass(frozen=True)
class LoraSettings(CheckedSettings, flags="trainer.lora"):
    """Low-rank adapters: only they are trained and sent to the generators. With adapters on experts, the weights with
    the adapters merged in are sent instead."""

    rank: Annotated[int, Range(0, 100_000, "0 is full training")] = 0
    """Rank of the adapters; 0 is full training. 1 to 32 were enough for reinforcement learning in `LoRA Without
    Regret` (Schulman et al., Thinking Machines 2025), which recommends about 10 times the learning rate of full
    training (on the tiny model 5 times worked, and 10 times was worse: see recipes/grpo_lora.py)."""
    alpha: Annotated[float, Range(0.001, 1_000_000)] = 32.0
    """Adapters are scaled by alpha / rank. The same paper uses 32 for every rank: the best learning rate then hardly
    depends on the rank."""
    targets: tuple[Target, ...] = TARGETS
    """The projections that get an adapter. The default is all of them, after the same paper: attention alone learns
    less. In a mixture of experts, gate_proj, up_proj and down_proj give each expert its own adapter, and a version then
    holds the weights with adapters merged in, because the engine cannot serve such adapters on a CPU."""
    seed: NotAFlag[Annotated[int, SEED]] = 0
    """Seed of the initial values of A. B starts at zero, so training starts from the unchanged model."""

    def contradictions(self) -> Iterator[str]:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            yield f"trainer.lora.targets must be one or more of {', '.join(TARGETS)}, each once, got {self.targets}"

    @property
    def scaling(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / self.rank

    def sends_merged(self, sparse: bool) -> bool:
        """Whether a version holds the targeted weights with adapters merged in, rather than the adapters alone.

        True with adapters on experts: SGLang 0.5.23 computes these on GPUs only (``FusedMoEWithLoRA``), whatever its
        ``lora_backend`` is; on a CPU its scheduler ends at the first token.

        Args:
            sparse: whether the model has layers with experts.
        """
        return sparse and self.rank > 0 and any(target in MLP_TARGETS for target in self.targets)


FULL_TRAINING = LoraSettings()
"""No LoRA."""


def lora_names(weight: str) -> tuple[str, str]:
    """peft's names of A and B for a weight with this Hugging Face name."""
    module = f"base_model.model.{weight.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def lora_config(lora: LoraSettings, base: str, revision: str | None = None) -> dict[str, Any]:
    """The content of peft's ``adapter_config.json``.

    Args:
        base: folder or Hub name of the base model.
        revision: its revision on the Hub; None for a folder.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }

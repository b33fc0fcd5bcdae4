"""What a version is made of: all weights, a LoRA adapter, or the weights that have LoRA adapters merged into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch_rl.model.folder import sparse_layers
from monarch_rl.model.lora import LoraSettings


@dataclass(frozen=True, slots=True)
class VersionKind:
    """How an engine loads versions of one kind, and verifies the weights that such versions leave out."""

    loader: str
    """Dotted name of the function that SGLang's scheduler runs to load a version from an area."""
    verifier: str
    """Dotted name of the one that it runs to take checksums of what no version holds; it loads nothing."""
    lora_name: str | None = None
    """SGLang's name of the LoRA adapter that each version overwrites, and that requests ask for."""
    rest_verified_first: bool = False
    """A version fills some parameters; none is loaded before the others are known to be the trainer's."""

    @staticmethod
    def of(config: dict[str, Any] | None, lora: LoraSettings) -> VersionKind:
        """The kind of all versions of a run.

        Args:
            config: the model's ``config.json``; None if it is not at hand, then no LoRA adapter is merged.
            lora: the trainer's.
        """
        if not lora.rank:
            return ALL_WEIGHTS
        merged = config is not None and lora.sends_merged(bool(sparse_layers(config)))
        return MERGED_WEIGHTS if merged else LORA_ADAPTER


ALL_WEIGHTS = VersionKind("monarch_rl.generator.load_staged.load", "monarch_rl.generator.load_staged.verify")
LORA_ADAPTER = VersionKind("monarch_rl.generator.load_lora.load", ALL_WEIGHTS.verifier, lora_name="policy")
MERGED_WEIGHTS = VersionKind(
    "monarch_rl.generator.load_staged.load_part",
    "monarch_rl.generator.load_staged.verify_rest",
    rest_verified_first=True,
)
"""SGLang receives merged weights and no LoRA adapter."""
KINDS = (ALL_WEIGHTS, LORA_ADAPTER, MERGED_WEIGHTS)
LOADERS = sorted({name for kind in KINDS for name in (kind.loader, kind.verifier)})
"""All that SGLang's scheduler may be asked to run."""

"""The contents of a version: all weights, a LoRA adapter, or the weights into which LoRA adapters are merged."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import LoraSettings


@dataclass(frozen=True, slots=True)
class VersionKind:
    """How an engine loads versions of one kind, and verifies the weights that such versions do not contain."""

    loader: str
    """Dotted name of the function with which SGLang's scheduler loads a version from an area."""
    verifier: str
    """Dotted name of the function with which it takes checksums of weights that no version contains, loading none."""
    lora_name: str | None = None
    """SGLang's name of the LoRA adapter that each version overwrites and that requests use; None without adapter."""
    rest_verified_first: bool = False
    """Whether a version fills only some parameters, so that the others must be verified before the first version."""

    @staticmethod
    def of(config: ModelConfig | None, lora: LoraSettings) -> VersionKind:
        """The kind of all versions of a run.

        Args:
            config: the model's config; None if it is not available: then no LoRA adapter is merged.
            lora: the trainer's LoRA settings.
        """
        if not lora.rank:
            return ALL_WEIGHTS
        merged = config is not None and lora.sends_merged(bool(config.sparse_layers))
        return MERGED_WEIGHTS if merged else LORA_ADAPTER


ALL_WEIGHTS = VersionKind("monarch_rl.generator.load_staged.load", "monarch_rl.generator.load_staged.verify")
LORA_ADAPTER = VersionKind("monarch_rl.generator.load_lora.load", ALL_WEIGHTS.verifier, lora_name="policy")
MERGED_WEIGHTS = VersionKind(
    "monarch_rl.generator.load_staged.load_part",
    "monarch_rl.generator.load_staged.verify_rest",
    rest_verified_first=True,
)
"""Versions with LoRA adapters merged in: SGLang serves no adapter."""
KINDS = (ALL_WEIGHTS, LORA_ADAPTER, MERGED_WEIGHTS)
LOADERS = sorted({name for kind in KINDS for name in (kind.loader, kind.verifier)})
"""All functions that SGLang's scheduler may be told to run."""

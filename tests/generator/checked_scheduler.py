"""A scheduler that computes every forward twice, as SGLang is shipped and as monarch_rl changes it, and compares them.

Other processes take and give memory meanwhile (:class:`OtherProcesses`), which must make no difference.

The modified scheduler's output is what is served, so the engines of these tests check parity in all that they do:
prompts with and without cached prefixes, sequences that decode, mixtures of experts, LoRA, latent attention, several
ranks.
"""

from __future__ import annotations

import json
import os
from functools import partialmethod
from pathlib import Path
from typing import Any

import psutil
import torch

from monarch_rl.generator.scheduler_process import SchedulerTarget, run_scheduler

PARITY = 5e-6
"""Bound on the difference of a row's log-probs, of all ids, in float32, relative to its largest logit where that is
above 1. A logit of 16 is rounded by up to 9.5e-7, and layers add up. The largest observed in thousands of forwards was
3.5e-6 (DeepSeek-V3 with random weights), 2.3e-6 in other families, 1.4e-6 on a trained model."""
FOLDER = "MONARCH_RL_PARITY_FOLDER"
"""Variable with the folder to which each scheduler writes its comparisons."""


class CheckedTarget(SchedulerTarget):
    """Starts such a scheduler."""

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        if not torch.accelerator.is_available():
            from sglang.srt.model_executor.model_runner import ModelRunner

            ModelRunner._forward_raw = partialmethod(_compare, ModelRunner._forward_raw, Tally())
            psutil.virtual_memory = OtherProcesses().virtual_memory
        run_scheduler(*args, **kwargs)


class OtherProcesses:
    """They take half of the free memory at each look, and give all of it back at the end.

    SGLang would refuse to start: after four looks less than a tenth of the initial memory is left, and ranks see
    different amounts.
    """

    def __init__(self) -> None:
        self._real, self._share = psutil.virtual_memory, 1.0

    def virtual_memory(self) -> Any:
        seen = self._real()
        self._share = self._share / 2 if self._share > 0.01 else 1.0
        return seen._replace(available=int(seen.available * self._share))


class Tally:
    """The forwards of a scheduler by kind, and the largest difference of each, relative like ``PARITY``."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, float]] = {}
        self.plain_layers = False
        """Layers were run by ``cpu/forward.py``."""
        self.path = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"

    def add(self, kind: str, difference: float) -> None:
        """Count a forward. Raises AssertionError, which ends the engine, if it differs by more than ``PARITY``."""
        count, largest = self.found.get(kind, (0, 0.0))
        self.found[kind] = (count + 1, max(largest, difference))
        if count + 1 & count == 0 or difference > largest:
            self.path.write_text(json.dumps({"plain_layers": self.plain_layers, "forwards": self.found}))
        assert difference <= PARITY, f"log-probs of a {kind} batch differ from SGLang's own by {difference:.3g}"


def _compare(self: Any, forward: Any, tally: Tally, batch: Any, *args: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if not len(batch.seq_lens):
        return forward(self, batch, *args)
    ours = type(self.attn_backend)
    self.attn_backend.__class__ = TorchNativeAttnBackend
    plain_output = forward(self, batch, *args).logits_output
    if not hasattr(plain_output, "next_token_logits"):  # of a model with a reward head
        self.attn_backend.__class__ = ours
        output = forward(self, batch, *args)
        rewards, plain = output.logits_output.embeddings, plain_output.embeddings
        tally.add("reward", float((plain - rewards).abs().max() / plain.abs().max().clamp(min=1)))
        return output
    plain = plain_output.next_token_logits.double()
    self.attn_backend.__class__ = ours
    output = forward(self, batch, *args)
    logits = output.logits_output.next_token_logits.double()
    tally.plain_layers = self.model.model.__dict__.get("_monarch_rl_lean", False)
    difference = (plain.log_softmax(-1) - logits.log_softmax(-1)).abs().amax(-1) / plain.abs().amax(-1).clamp(min=1)
    kind = "decode" if batch.forward_mode.is_decode() else "prefix" if batch.extend_prefix_lens.any() else "prompt"
    tally.add(kind, float(difference.max()))
    return output

"""What SGLang advises, in the words of a recipe: its flags are not a recipe's."""

from __future__ import annotations

import logging
import re
from typing import Any

FLAGS = {
    "attention-backend": "attention-backend",
    "context-length": "context-length",
    "dtype": "dtype",
    "enable-deterministic-inference": "deterministic",
    "max-running-requests": "max-running-requests",
    "max-total-tokens": "max-total-tokens",
    "random-seed": "random-seed",
    "tensor-parallel-size": "tp",
    "tp-size": "tp",
}
"""Flags of SGLang, and those of ``generator`` that set the same."""
GPU_FLAGS = FLAGS | {"mem-fraction-static": "memory-fraction"}
SENTENCES = {
    "Use a shorter input or enable --allow-auto-truncate.": (
        "Use shorter prompts, or raise --generator.context-length or --generator.max-total-tokens."
    ),
}
"""Advice that other advice replaces."""
_FLAG = re.compile(r"(?<![\w.-])--(?!generator\.)([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def recipe_flags(text: str, on_gpu: bool | None = None) -> str:
    """``text`` of SGLang with the flags that a recipe has; of others it says that there are none.

    Args:
        on_gpu: the engine has a GPU; None asks torch.
    """
    for sentence, ours in SENTENCES.items():
        text = text.replace(sentence, ours)
    if _FLAG.search(text) is None:
        return text
    if on_gpu is None:
        import torch

        on_gpu = torch.accelerator.is_available()
    known = GPU_FLAGS if on_gpu else FLAGS

    def name(match: re.Match[str]) -> str:
        ours = known.get(match[1])
        return f"--generator.{ours}" if ours is not None else f"SGLang's {match[1]} (a recipe has no flag for it)"

    return _FLAG.sub(name, text)


def rename_in(error: BaseException) -> None:
    """Change the flags that an error of SGLang names."""
    error.args = tuple(recipe_flags(part) if isinstance(part, str) else part for part in error.args)


def rename_in_log() -> None:
    """From now on this process logs what SGLang says with a recipe's flags."""
    make = logging.getLogRecordFactory()

    def renamed(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(name, *args, **kwargs)
        if name.startswith("sglang"):
            record.msg, record.args = recipe_flags(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(renamed)

"""Writes a checkpoint, or the model that a run has saved, as a Hugging Face folder: for transformers, peft or SGLang.

    python tools/export.py runs/grpo-20260101-120000-1 out                       what it wrote last
    python tools/export.py runs/grpo-20260101-120000-1/checkpoints/best out      a certain one
    python tools/export.py RUN out --dtype bfloat16 --file-mib 4096              smaller, in several files with an index
    python tools/export.py RUN out --adapter                                     LoRA alone, for peft

Of a run its newest whole checkpoint is taken, or the model that it has saved if that has later steps. LoRA is merged
into the weights unless it is written alone. The folder appears when it is complete; one of that name is replaced. Takes
the memory of the model in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from monarch_rl.offline.export import export, source_of
from monarch_rl.offline.program import run_program


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a run's folder, a checkpoint, or a model's folder")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--dtype", default="", choices=["", "float32", "bfloat16", "float16"], help="of the weights")
    parser.add_argument("--file-mib", type=float, default=4096, help="MiB that a file of weights may have")
    parser.add_argument("--adapter", action="store_true", help="write LoRA alone")
    own = parser.parse_args()
    with source_of(own.source, trained=own.adapter) as source:
        export(source, own.folder, own.dtype, int(own.file_mib * 2**20), own.adapter)
    print(f"{own.folder}: {'LoRA of ' if own.adapter else ''}{source.checkpoint or source.model}")
    return 0


if __name__ == "__main__":
    run_program(main)

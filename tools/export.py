"""Exports a checkpoint, or the model that a run has saved, as a Hugging Face folder for transformers, peft or SGLang.

    python tools/export.py runs/grpo-20260101-120000 out                       the newest weights of a run
    python tools/export.py runs/grpo-20260101-120000/checkpoints/best out      a specific checkpoint
    python tools/export.py RUN out --dtype bfloat16 --file-mib 4096              smaller, in several files with an index
    python tools/export.py RUN out --adapter                                     only the LoRA adapter, for peft

For a run, its newest complete checkpoint is exported, or the model that it has saved if that has later steps. LoRA is
merged into the weights, unless --adapter is given. The folder is created once it is complete; an existing model
folder of that name is replaced. Needs memory for the model in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from monarch_rl.model.folder import left_out
from monarch_rl.offline.export import export, source_of
from monarch_rl.offline.program import run_program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="run folder, checkpoint, or model folder")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype", default="", choices=["", "float32", "bfloat16", "float16"], help="dtype of the written weights"
    )
    parser.add_argument("--file-mib", type=float, default=4096, help="maximum MiB per weight file")
    parser.add_argument("--adapter", action="store_true", help="write only the LoRA adapter")
    own = parser.parse_args()
    with source_of(own.source, trained=own.adapter) as source:
        export(source, own.folder, own.dtype, int(own.file_mib * 2**20), own.adapter)
    print(f"{own.folder}: {'LoRA of ' if own.adapter else ''}{source.checkpoint or source.model}")
    if not own.adapter and (names := left_out(source.model)):
        print(f"not copied from {source.model}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    run_program(main)

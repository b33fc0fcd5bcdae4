"""What SGLang is started with on a GPU, and what it needs there: compilers, a driver, settings that do no harm."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("monarch_rl")

HARMFUL = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
"""With it SGLang permutes the rows of the experts' projections at the end of every session of loading, those too that a
session has left alone (``quantization/unquant.py``): after the checksums, which cannot see it."""
ON_SHARED_DEVICES = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
"""In the environment of engines whose devices others have, too. SGLang refuses to start an engine of several ranks if
one finds 10 % less free than another (``srt/distributed/bootstrap.py``), and trainer ranks do not take the same on each
device, nor at the same time. What fits is planned beforehand, for the device that has most on it."""
TOOL_S = 60.0
"""Seconds for a compiler to answer a question, on a cold disk too."""
RUNTIME = "libcudart.so"
OLDEST_NVCC = (
    ((0, 0), (12, 0)),  # the first that compiles C++20, as SGLang's kernels are written
    ((10, 0), (12, 8)),
    ((10, 3), (12, 9)),
    ((11, 0), (13, 0)),
    ((12, 0), (12, 8)),
    ((12, 1), (12, 9)),
)
"""By compute capability from which on, the oldest release of nvcc that compiles for it (CUDA's release notes). SGLang
compiles for what ``kernels/jit/utils/arch.py`` makes of capability and nvcc's release, not for torch's."""
_TRUE = ("true", "1", "yes", "y")
"""What SGLang takes for true in the environment (``environ.py``)."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
OLDEST_DRIVERS = {"12": 525, "13": 580}
"""By CUDA's major version, the oldest branch of NVIDIA's driver that runs it (CUDA's release notes, table 2)."""


def gpu_arguments() -> dict[str, object]:
    """SGLang ``ServerArgs`` for an engine on a GPU, which serves half precision."""
    return {
        # What SGLang takes on Hopper. On Blackwell it would take kernels whose weights it unpacks before, and packs
        # after, every commit, expert by expert. No effect on a model without experts.
        "moe_runner_backend": "triton",
        # The products of half-precision values, kept in float32 like the trainer's. Else SGLang rounds logits to
        # bfloat16: by up to 0.06 where they are 16 to 32.
        "enable_fp32_lm_head": True,
    }


def check_dtype(dtype: str) -> None:
    """Refuse to serve float32 on a GPU: ``RMSNorm.forward_cuda`` (``layers/layernorm.py``) calls a kernel that is made
    for half precision only. Raises ValueError."""
    if dtype == "float32":
        raise ValueError(
            "generator.dtype float32 cannot be served on a GPU: SGLang's norms are computed there in half precision "
            "only. Give bfloat16 or auto; trainer.compute-dtype may be float32"
        )


class Machine(NamedTuple):
    """What SGLang compiles for."""

    cuda: str | None
    """The CUDA version that torch is built for; None is a torch for CPUs."""
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None is not known."""

    @classmethod
    def here(cls) -> Machine:
        """This one, by its first GPU."""
        import torch  # here: settings are also read where no torch is needed

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(torch.version.cuda, capability)


def check_environment(environment: Mapping[str, str] | None = None, machine: Machine | None = None) -> None:
    """Refuse a machine with GPUs on which SGLang does not start, or would serve wrong weights.

    SGLang 0.5.23 compiles kernels when it first needs them: rotary embeddings, the KV cache's, norms, activations.
    Looks at this machine: a run's first one before anything is spawned, each one before an engine starts there.

    Args:
        environment: of the engines; None is this process's, with this Python's folder at the head of PATH, as in the
            processes of a host.
        machine: what kernels are compiled for; None looks.

    Raises:
        ValueError: says what is missing or must not be set, and what to do.
    """
    if environment is None:
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": tools}
    if environment.get(HARMFUL, "").lower() in _TRUE:
        raise ValueError(
            f"{HARMFUL} is set: with it SGLang would silently permute the experts' weights at every new version. "
            "Unset it"
        )
    path, compiler = environment.get("PATH"), environment.get("CXX", "c++")
    missing = _missing_toolkit(environment, compiler, machine or Machine.here())
    if shutil.which("ninja", path=path) is None:
        missing.append("ninja (pip install ninja)")
    if shutil.which(compiler, path=path) is None:
        flags = "without flags: SGLang takes it for one word"  # jit/utils/compile/ninja.py quotes it
        missing.append(f"a C++20 compiler (looked for {compiler}; install g++ 11 or newer, or set CXX, {flags})")
    if missing:
        raise ValueError(
            f"SGLang compiles GPU kernels when it starts, and this machine ({socket.gethostname()}) lacks "
            f"{', and '.join(missing)}"
        )


def _missing_toolkit(environment: Mapping[str, str], compiler: str, machine: Machine) -> list[str]:
    """What is missing of CUDA's toolkit. Warns of one of another major version than torch's."""
    home = find_cuda(environment)
    nvcc, missing = home / "bin" / "nvcc", []
    if not nvcc.is_file():
        return [f"nvcc (looked for {nvcc}; set CUDA_HOME to a CUDA toolkit)"]
    release, why = nvcc_release(nvcc)
    oldest = [least for capability, least in OLDEST_NVCC if capability <= (machine.capability or (0, 0))][-1]
    if release is None:
        missing.append(f"an nvcc that says its release ({nvcc}: {why}; set CUDA_HOME to a CUDA toolkit)")
    elif machine.capability is not None and release < oldest:
        gpu, least, found = (".".join(map(str, version)) for version in (machine.capability, oldest, release))
        missing.append(
            f"an nvcc that compiles for its GPU (compute capability {gpu} takes CUDA {least} or newer, and {nvcc} is "
            f"of {found}; set CUDA_HOME to such a toolkit)"
        )
    elif machine.cuda is not None and release[0] != int(machine.cuda.split(".")[0]):
        logger.warning(
            "%s is of CUDA %d.%d, and torch is built for %s: SGLang compiles for the former, whose libcudart.so.%d has "
            "to be found when a kernel is loaded (LD_LIBRARY_PATH), beside torch's own",
            nvcc,
            *release,
            machine.cuda,
            release[0],
        )
    if not _has_runtime(home, compiler, environment):
        missing.append(
            f"CUDA's runtime to link with (looked for {home / 'lib64' / RUNTIME}; the nvcc that pip installs has none: "
            "set CUDA_HOME to a whole CUDA toolkit)"
        )
    return missing


def find_cuda(environment: Mapping[str, str]) -> Path:
    """Where SGLang looks for CUDA's toolkit (``jit/utils/compile/toolchain.py``)."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc", path=environment.get("PATH"))) is not None:
        return Path(found).parent.parent
    return Path(home or "/usr/local/cuda")


def _has_runtime(home: Path, compiler: str, environment: Mapping[str, str]) -> bool:
    """Whether the linker finds CUDA's runtime with what SGLang passes it (``-L{home}/lib64 -lcudart``): there, or where
    it looks by itself, as with a distribution's package."""
    if (home / "lib64" / RUNTIME).exists():
        return True
    found = shutil.which(compiler, path=environment.get("PATH"))
    if found is None:
        return True  # that is missing, and said
    asked = [found, f"-print-file-name={RUNTIME}"]
    try:
        said = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return Path(said.strip()).is_absolute() and Path(said.strip()).exists()  # what is not found is repeated


def nvcc_release(nvcc: Path) -> tuple[tuple[int, int] | None, str]:
    """The release that CUDA's compiler says it is of, as in (13, 0); or None, and what is wrong with it."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    found = re.search(r"release (\d+)\.(\d+)", said)
    return ((int(found[1]), int(found[2])), "") if found else (None, "it names none")


def check_driver(cuda: str | None, available: bool, visible: str | None, driver_file: Path = DRIVER_FILE) -> None:
    """Refuse to run on CPUs only because the driver of a machine's GPUs is too old for this torch.

    Args:
        cuda: the CUDA version that torch is built for; None is a torch for CPUs.
        available: torch can use a GPU.
        visible: CUDA_VISIBLE_DEVICES, by which a user may have hidden all GPUs; None is not set.
        driver_file: which the driver's kernel module writes.

    Raises:
        ValueError: names both versions.
    """
    hidden = visible is not None and visible.strip() in ("", "-1")
    if cuda is None or available or hidden or not driver_file.is_file():
        return
    found = re.search(r"Kernel Module.*?\s(\d+)(\.[.\d]+)", driver_file.read_text())
    if found is None:
        return
    oldest = OLDEST_DRIVERS.get(cuda.split(".")[0])
    if oldest is not None and int(found[1]) < oldest:
        raise ValueError(
            f"this machine's NVIDIA driver is {found[1]}{found[2]}, and torch is built for CUDA {cuda}, which needs "
            f"{oldest} or newer: update the driver, or set CUDA_VISIBLE_DEVICES to nothing to run on CPUs"
        )
    raise ValueError(
        f"this machine has an NVIDIA driver ({found[1]}{found[2]}), but torch (CUDA {cuda}) cannot use a GPU: see what "
        "nvidia-smi says, or set CUDA_VISIBLE_DEVICES to nothing to run on CPUs"
    )

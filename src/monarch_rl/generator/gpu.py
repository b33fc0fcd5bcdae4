"""SGLang's arguments on a GPU, and the checks of its requirements there: compilers, driver, environment."""

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

from monarch_rl.errors import SettingsError

logger = logging.getLogger("monarch_rl")

HARMFUL = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
"""If set, SGLang permutes the rows of all experts' projections at the end of every loading session, even those that the
session did not load (``quantization/unquant.py``). That is after the checksums, which therefore cannot detect it."""
ON_SHARED_DEVICES = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
"""Environment of engines that share devices with trainer ranks. SGLang refuses to start an engine with several ranks if
one finds 10 % less free memory than another (``srt/distributed/bootstrap.py``), and trainer ranks use neither equal
memory on each device nor at the same time. Memory is planned beforehand for the device that holds most."""
TOOL_S = 60.0
"""Seconds within which a compiler must answer a query, even on a cold disk."""
RUNTIME = "libcudart.so"
OLDEST_NVCC = (
    ((0, 0), (12, 0)),  # the first release that compiles C++20, in which SGLang's kernels are written
    ((10, 0), (12, 8)),
    ((10, 3), (12, 9)),
    ((11, 0), (13, 0)),
    ((12, 0), (12, 8)),
    ((12, 1), (12, 9)),
)
"""Oldest release of nvcc that compiles for a compute capability: (lowest capability, release), from CUDA's release
notes. SGLang derives the target from the capability and nvcc's release (``kernels/jit/utils/arch.py``), not from
torch's CUDA version."""
_TRUE = ("true", "1", "yes", "y")
"""Values that SGLang treats as true in the environment (``environ.py``)."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
OLDEST_DRIVERS = {"12": 525, "13": 580}
"""Oldest branch of NVIDIA's driver for each major version of CUDA (CUDA's release notes, table 2)."""


def gpu_arguments() -> dict[str, object]:
    """SGLang ``ServerArgs`` for an engine on a GPU, which serves half precision."""
    return {
        # SGLang's choice on Hopper. On Blackwell it would choose kernels for which it unpacks the weights before every
        # commit and packs them afterwards, expert by expert. No effect on a model without experts.
        "moe_runner_backend": "triton",
        # Products of half-precision values, but with logits in float32 like the trainer's. Otherwise SGLang rounds
        # logits to bfloat16: by up to 0.06 where they are between 16 and 32.
        "enable_fp32_lm_head": True,
    }


def check_dtype(dtype: str) -> None:
    """Raise ValueError for float32, which cannot be served on a GPU."""
    # RMSNorm.forward_cuda (layers/layernorm.py) calls a kernel that exists for half precision only.
    if dtype == "float32":
        raise SettingsError(
            "generator.dtype float32 cannot be served on a GPU: SGLang's norms support only half precision there. Give "
            "bfloat16 or auto; trainer.compute-dtype may be float32"
        )


class Machine(NamedTuple):
    """The target for which SGLang compiles."""

    cuda: str | None
    """The CUDA version that torch is built for; None for a CPU build of torch."""
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None if unknown."""

    @classmethod
    def here(cls) -> Machine:
        """This machine, judged by its first GPU."""
        import torch  # here: settings are also read where no torch is needed

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(torch.version.cuda, capability)


def check_environment(environment: Mapping[str, str] | None = None, machine: Machine | None = None) -> None:
    """Check that SGLang can start on this machine with GPUs, and would serve correct weights.

    SGLang 0.5.23 compiles kernels when it first needs them (rotary embeddings, KV cache, norms, activations). A run
    calls this on its first machine before anything is spawned, and on each machine before an engine starts there.

    Args:
        environment: environment of the engines; None is that of this process, with this Python's folder at the head of
            PATH, as in the processes of a host.
        machine: the target for which kernels are compiled; None detects it.

    Raises:
        ValueError: names what is missing or must not be set, and the remedy.
    """
    if environment is None:
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": tools}
    if environment.get(HARMFUL, "").lower() in _TRUE:
        raise SettingsError(
            f"{HARMFUL} is set, with which SGLang silently permutes the experts' weights at every new version: unset it"
        )
    path, compiler = environment.get("PATH"), environment.get("CXX", "c++")
    missing = _missing_toolkit(environment, compiler, machine or Machine.here())
    if shutil.which("ninja", path=path) is None:
        missing.append("ninja (pip install ninja)")
    if shutil.which(compiler, path=path) is None:
        flags = "without flags: SGLang treats it as one word"  # jit/utils/compile/ninja.py quotes it
        missing.append(f"a C++20 compiler (looked for {compiler}; install g++ 11 or newer, or set CXX, {flags})")
    if missing:
        raise SettingsError(
            f"SGLang compiles GPU kernels when it starts, and this machine ({socket.gethostname()}) lacks "
            f"{', and '.join(missing)}"
        )


def _missing_toolkit(environment: Mapping[str, str], compiler: str, machine: Machine) -> list[str]:
    """Missing components of CUDA's toolkit. Warns if its major version is not that of torch."""
    home = find_cuda(environment)
    nvcc, missing = home / "bin" / "nvcc", []
    if not nvcc.is_file():
        return [f"nvcc (looked for {nvcc}; set CUDA_HOME to a CUDA toolkit)"]
    release, why = nvcc_release(nvcc)
    oldest = [least for capability, least in OLDEST_NVCC if capability <= (machine.capability or (0, 0))][-1]
    if release is None:
        missing.append(f"an nvcc that reports its release ({nvcc}: {why}; set CUDA_HOME to a CUDA toolkit)")
    elif machine.capability is not None and release < oldest:
        gpu, least, found = (".".join(map(str, version)) for version in (machine.capability, oldest, release))
        missing.append(
            f"an nvcc that compiles for its GPU (compute capability {gpu} needs CUDA {least} or newer, but {nvcc} is "
            f"of {found}; set CUDA_HOME to such a toolkit)"
        )
    elif machine.cuda is not None and release[0] != int(machine.cuda.split(".")[0]):
        logger.warning(
            "%s is of CUDA %d.%d, but torch is built for %s: SGLang compiles for the former, whose libcudart.so.%d "
            "must be found when a kernel is loaded (LD_LIBRARY_PATH), besides torch's own",
            nvcc,
            *release,
            machine.cuda,
            release[0],
        )
    if not _has_runtime(home, compiler, environment):
        missing.append(
            f"CUDA's runtime to link with (looked for {home / 'lib64' / RUNTIME}; the nvcc that pip installs has none: "
            "set CUDA_HOME to a complete CUDA toolkit)"
        )
    return missing


def find_cuda(environment: Mapping[str, str]) -> Path:
    """The folder in which SGLang looks for CUDA's toolkit (``jit/utils/compile/toolchain.py``)."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc", path=environment.get("PATH"))) is not None:
        return Path(found).parent.parent
    return Path(home or "/usr/local/cuda")


def _has_runtime(home: Path, compiler: str, environment: Mapping[str, str]) -> bool:
    """Whether the linker finds CUDA's runtime with SGLang's options (``-L{home}/lib64 -lcudart``): in that folder, or
    on its default path, where a distribution's package installs it."""
    if (home / "lib64" / RUNTIME).exists():
        return True
    found = shutil.which(compiler, path=environment.get("PATH"))
    if found is None:
        return True  # cannot be checked; the missing compiler is reported separately
    query = [found, f"-print-file-name={RUNTIME}"]
    try:
        path = subprocess.run(query, env=environment, capture_output=True, text=True, timeout=TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return Path(path.strip()).is_absolute() and Path(path.strip()).exists()  # if not found, the bare name is printed


def nvcc_release(nvcc: Path) -> tuple[tuple[int, int] | None, str]:
    """The release that nvcc reports, such as (13, 0); or None and the reason."""
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    found = re.search(r"release (\d+)\.(\d+)", output)
    return ((int(found[1]), int(found[2])), "") if found else (None, "its output names none")


def check_driver(cuda: str | None, available: bool, visible: str | None, driver_file: Path = DRIVER_FILE) -> None:
    """Raise ValueError on a machine whose GPUs torch cannot use, instead of silently running on CPUs.

    Args:
        cuda: the CUDA version that torch is built for; None for a CPU build of torch.
        available: whether torch can use a GPU.
        visible: CUDA_VISIBLE_DEVICES, with which a user may have hidden all GPUs; None if not set.
        driver_file: file in which the driver's kernel module reports its version.

    Raises:
        ValueError: the driver is too old for this torch, or unusable for another reason; names both versions.
    """
    hidden = visible is not None and visible.strip() in ("", "-1")
    if cuda is None or available or hidden or not driver_file.is_file():
        return
    found = re.search(r"Kernel Module.*?\s(\d+)(\.[.\d]+)", driver_file.read_text())
    if found is None:
        return
    oldest = OLDEST_DRIVERS.get(cuda.split(".")[0])
    if oldest is not None and int(found[1]) < oldest:
        raise SettingsError(
            f"this machine's NVIDIA driver is {found[1]}{found[2]}, but torch is built for CUDA {cuda}, which needs "
            f"{oldest} or newer: update the driver, or set CUDA_VISIBLE_DEVICES to nothing to run on CPUs"
        )
    raise SettingsError(
        f"this machine has an NVIDIA driver ({found[1]}{found[2]}), but torch (CUDA {cuda}) cannot use a GPU: check "
        "nvidia-smi, or set CUDA_VISIBLE_DEVICES to nothing to run on CPUs"
    )

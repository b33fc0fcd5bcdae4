"""The devices of a launch: its hosts, and on each host the devices for ranks: GPUs, or shares of the CPU."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from monarch_rl.errors import TooFewDevices

CPU_RANKS_PER_CORE = 4
"""Maximum ranks per core, under plain python on a CPU. Not a resource limit: it bounds what a typo can start."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a launch, numbered host by host: number d is device ``d % per_host`` of host ``d // per_host``."""

    kind: str
    """``cuda`` or ``cpu``."""
    num_hosts: int
    """Number of machines (torchrun nodes; 1 under plain python)."""
    per_host: int
    """Devices per host. On a CPU, the number of ranks that a host may run."""
    memory: int = 0
    """Bytes of memory of this host's smallest device; 0 if unknown, as on a CPU, whose memory is the host's."""

    @property
    def total(self) -> int:
        """Number of devices of all hosts."""
        return self.num_hosts * self.per_host

    def check(self, ranks_needed: int, what: str = "", otherwise: str = "") -> None:
        """Raise :class:`TooFewDevices` if there are fewer than ``ranks_needed``.

        Args:
            ranks_needed: number of devices needed.
            what: what needs them, for the message.
            otherwise: a sentence with another remedy, for the message.
        """
        if ranks_needed <= self.total:
            return
        hosts = f"{self.num_hosts} host{'s' if self.num_hosts > 1 else ''}"
        unit = {"cuda": "GPUs", "cpu": "CPU ranks"}[self.kind]
        detail = f" ({what})" if what else ""
        raise TooFewDevices(
            f"{ranks_needed} ranks are requested{detail}, but this launch offers {self.total}: "
            f"{hosts} with {self.per_host} {unit} each. {self._advice(ranks_needed)}{otherwise and f' {otherwise}'}"
        )

    def _advice(self, ranks_needed: int) -> str:
        fewer = f"request at most {self.total} ranks"
        if self.kind == "cuda":
            nodes = math.ceil(ranks_needed / self.per_host)
            return f"Use more machines (torchrun --nnodes={nodes} ...) or {fewer}."
        if launched_by_torchrun():
            return f"Use torchrun --nproc-per-node={math.ceil(ranks_needed / self.num_hosts)} ... or {fewer}."
        return f"Use torchrun --nproc-per-node={ranks_needed} ... if that is intended, or {fewer}."


def launched_by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def has_accelerator_driver() -> bool:
    """Whether this machine has a driver for NVIDIA's (also in WSL) or AMD's accelerators. Does not import torch."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def visible_devices() -> list[str]:
    """This machine's usable CUDA devices, as entries of CUDA_VISIBLE_DEVICES; empty without CUDA."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(index) for index in range(count)])[:count]


def smallest_memory() -> int:
    """Bytes of memory of this machine's smallest CUDA device; 0 without CUDA. Allocates nothing on the devices."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0)


def devices() -> Devices:
    """The devices of a launch from this process. Spawns nothing, so settings can be checked before the launch.

    CUDA: the visible devices of this host; all hosts are assumed to have equally many (``launch`` checks that).
    CPU under torchrun: ``--nproc-per-node``. CPU under plain python: :data:`CPU_RANKS_PER_CORE` ranks per core.
    """
    num_hosts = 1
    per_host = CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if launched_by_torchrun():
        per_host = int(os.environ["LOCAL_WORLD_SIZE"])
        num_hosts = int(os.environ["WORLD_SIZE"]) // per_host
    count = len(visible_devices())
    if count:
        return Devices("cuda", num_hosts, count, smallest_memory())
    return Devices("cpu", num_hosts, per_host)

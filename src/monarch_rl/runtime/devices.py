"""What a launch offers: hosts, and on each host the devices that ranks take: GPUs, or shares of the CPU."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

CPU_RANKS_PER_CORE = 4
"""Ranks allowed per core, under plain python on a CPU. Not a resource: it bounds what a typing error can start."""

GPU_CONTEXT = 640 << 20
"""Bytes that a process takes of a GPU before its first tensor: CUDA's context, torch's kernels, cuBLAS's workspace. An
assumption: 0.5 to 0.6 GiB are reported of H100."""
NCCL_COMMUNICATOR = 256 << 20
"""Bytes of the buffers of an NCCL communicator. An assumption, for some ranks of one machine."""
NARROW_COMMUNICATOR = 96 << 20
"""The same of one for weights, which has 8 channels (``weights/broadcast_group.py``). An assumption: 6 MiB for each
channel and direction, of which 4 are NCCL's documented default (``NCCL_BUFFSIZE``)."""


class TooFewDevices(ValueError):
    """The ranks need more devices than the launch has."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a launch, numbered host by host: number d is device ``d % per_host`` of host ``d // per_host``."""

    kind: str
    """``cuda`` or ``cpu``."""
    num_hosts: int
    """Machines (torchrun nodes; 1 under plain python)."""
    per_host: int
    """Devices of each host. On a CPU, the ranks that it may run."""
    memory: int = 0
    """Bytes of the smallest device of this host; 0 is not known, as on a CPU, whose memory is the host's."""

    @property
    def total(self) -> int:
        """Devices of all hosts."""
        return self.num_hosts * self.per_host

    def check(self, ranks_needed: int, what: str = "", otherwise: str = "") -> None:
        """Raise :class:`TooFewDevices` if there are fewer than ``ranks_needed``.

        Args:
            what: who needs them.
            otherwise: a sentence that says what else can be done.
        """
        if ranks_needed <= self.total:
            return
        hosts = f"{self.num_hosts} host{'s' if self.num_hosts > 1 else ''}"
        unit = {"cuda": "GPUs", "cpu": "CPU ranks"}[self.kind]
        detail = f" ({what})" if what else ""
        raise TooFewDevices(
            f"{ranks_needed} ranks are asked for{detail}, but this launch offers {self.total}: "
            f"{hosts} with {self.per_host} {unit} each. {self._advice(ranks_needed)}{otherwise and f' {otherwise}'}"
        )

    def _advice(self, ranks_needed: int) -> str:
        fewer = f"ask for at most {self.total} ranks"
        if self.kind == "cuda":
            nodes = math.ceil(ranks_needed / self.per_host)
            return f"Use more machines (torchrun --nnodes={nodes} ...) or {fewer}."
        if launched_by_torchrun():
            return f"Use torchrun --nproc-per-node={math.ceil(ranks_needed / self.num_hosts)} ... or {fewer}."
        return f"Use torchrun --nproc-per-node={ranks_needed} ... if you mean it, or {fewer}."


def launched_by_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def visible_devices() -> list[str]:
    """This machine's CUDA devices that we may use, as entries for CUDA_VISIBLE_DEVICES; empty without CUDA."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(index) for index in range(count)])[:count]


def smallest_memory() -> int:
    """Bytes of the smallest of this machine's CUDA devices; 0 without CUDA. Allocates nothing on them."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0)


def devices() -> Devices:
    """What a launch from this process would offer. Spawns nothing, so settings can be checked against it at once.

    CUDA: the visible devices of this host, assumed to be as many on all hosts (``launch`` checks that).
    CPU under torchrun: ``--nproc-per-node``. CPU under plain python: :data:`CPU_RANKS_PER_CORE` ranks a core.
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

"""Where a generator rank holds a version that has arrived but is not served yet.

The engine's scheduler is another process: it reads staging in place, through shared memory on a CPU and CUDA IPC
on a GPU, so that a commit is one local copy. Beside the weights stand a few small buffers, shared the same way,
in which the scheduler writes what it did: an exception there would end the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from monarch_rl.weights.manifest import Manifest, TensorSpec

MESSAGE_BYTES = 8192
"""Room for the loader's error message; it names tensors, longer ones are cut."""
STATUS, COPY_NANOSECONDS, CHECKSUM_NANOSECONDS, COPIED_BYTES = range(4)
"""Places in ``Staging.report``."""
NOT_RUN, LOADED, FAILED = range(3)
"""Values of ``report[STATUS]``."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What the loader did with a version in the engine's process."""

    error: str | None
    """Why it could not load, or ``None``."""
    copy_seconds: float
    """From staging to the engine's parameters."""
    checksum_seconds: float
    """Checksums of the engine's parameters."""
    nbytes: int
    """Bytes copied."""


class Staging:
    """A flat uint8 buffer of ``manifest.nbytes`` that another process can map, and the loader's answers."""

    def __init__(self, manifest: Manifest, device: torch.device | str = "cpu") -> None:
        self.manifest = manifest
        device = torch.device(device)
        header = torch.frombuffer(bytearray(encode_specs(manifest.tensors)), dtype=torch.uint8)
        self.buffer = _shared(torch.zeros(manifest.nbytes, dtype=torch.uint8, device=device))
        """uint8[manifest.nbytes]: the tensors, laid out by the manifest."""
        self.checksums = _shared(torch.zeros(len(manifest.tensors), dtype=torch.int64, device=device))
        """int64[tensors], in the manifest's order: written by the loader, of what the engine then held."""
        self.report = _shared(torch.zeros(4, dtype=torch.int64, device=device))
        self.message = _shared(torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device))
        self.header = _shared(header.to(device))

    def view(self, i: int) -> torch.Tensor:
        """Tensor ``i`` of the manifest as a view of the buffer."""
        return self.manifest.tensors[i].view(self.buffer)

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What the loader in the engine's process is given."""
        names = ("buffer", "checksums", "report", "message", "header")
        return [(name, getattr(self, name)) for name in names]

    def reset_report(self) -> None:
        """Forget the loader's last answers, so that none can be taken for a new one."""
        self.report.zero_()
        self.message.zero_()
        self.checksums.zero_()

    def read_report(self) -> LoadReport:
        """The loader's answers. Raises RuntimeError if it has not run since :meth:`reset_report`."""
        values = self.report.tolist()
        if values[STATUS] == NOT_RUN:
            raise RuntimeError("the engine answered, but its loader did not run")
        error = bytes(self.message.cpu().numpy()).rstrip(b"\0").decode(errors="replace")
        return LoadReport(
            error=error if values[STATUS] == FAILED else None,
            copy_seconds=values[COPY_NANOSECONDS] / 1e9,
            checksum_seconds=values[CHECKSUM_NANOSECONDS] / 1e9,
            nbytes=values[COPIED_BYTES],
        )


def encode_specs(specs: tuple[TensorSpec, ...]) -> bytes:
    """JSON of the tensors' names, shapes, dtypes and offsets."""
    rows = [[spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.offset] for spec in specs]
    return json.dumps(rows).encode()


def decode_specs(data: bytes) -> tuple[TensorSpec, ...]:
    """Read :func:`encode_specs`."""
    return tuple(
        TensorSpec(name, tuple(shape), getattr(torch, dtype), offset) for name, shape, dtype, offset in json.loads(data)
    )


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """CUDA memory is shared by its IPC handle as it is."""
    return tensor.share_memory_() if tensor.device.type == "cpu" else tensor

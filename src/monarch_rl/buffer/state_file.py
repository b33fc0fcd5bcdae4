"""The buffer's part of a checkpoint: one file with complete groups as their bytes, and what else the core knows.

    4 bytes "BUF3", 8 bytes length of the header, the header (JSON), then the groups one after the other

The header is :meth:`BufferCore.state` with the number of bytes in place of each complete group.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

FORMAT = b"BUF3"
"""The last character is the version of the format."""
_LENGTH = struct.Struct("<Q")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write what :meth:`BufferCore.state` gave, and have the disk hold it. Raises OSError."""
    groups = [group for *_, group in state["live"] if group is not None]
    live = [(*place, None if group is None else len(group)) for *place, group in state["live"]]
    header = json.dumps(state | {"live": live}, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(FORMAT + _LENGTH.pack(len(header)) + header)
        for group in groups:
            file.write(group)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path) -> dict[str, Any]:
    """The inverse of :func:`write_state`. Raises OSError, and ValueError for another format or missing bytes."""
    with path.open("rb") as file:
        start = file.read(len(FORMAT) + _LENGTH.size)
        if start[: len(FORMAT)] != FORMAT:
            raise ValueError(f"{path} cannot be read: its format is {start[: len(FORMAT)]!r}, not {FORMAT!r}")
        state: dict[str, Any] = json.loads(file.read(_LENGTH.unpack(start[len(FORMAT) :])[0]))
        state["live"] = [(*place, None if nbytes is None else file.read(nbytes)) for *place, nbytes in state["live"]]
    state["attempts"] = {int(group_id): attempt for group_id, attempt in state["attempts"].items()}
    return state

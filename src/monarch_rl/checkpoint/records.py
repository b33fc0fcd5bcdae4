"""Files of records that are there whole or not at all, however the process that wrote them ended.

    8 bytes "MRLJNL01", then the records one after the other. A record is

    4 bytes kind, 8 bytes version, 8 bytes length, 4 bytes CRC-32 of these and of the data, the data

all little-endian. What follows the last whole record, because a write was cut off, is not read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"MRLJNL01"
"""The last two characters are the version of the format."""
_HEAD = struct.Struct("<4sqQ")
_CHECK = struct.Struct("<I")
OVERHEAD = _HEAD.size + _CHECK.size
"""Bytes of a record beside its data."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

    kind: str
    """Four characters."""
    version: int
    """The policy version that it is about."""
    data: bytes


def pack_record(record: Record) -> bytes:
    """The bytes of a record. Raises ValueError if its kind has not four characters."""
    kind = record.kind.encode("ascii")
    if len(kind) != 4:
        raise ValueError(f"the kind of a record has four characters, {record.kind!r} has {len(kind)}")
    head = _HEAD.pack(kind, record.version, len(record.data))
    return head + _CHECK.pack(zlib.crc32(record.data, zlib.crc32(head))) + record.data


def read_records(path: Path) -> Iterator[Record]:
    """The whole records of a file, up to the first one that is not.

    Raises ValueError if the file has another format. One that was cut off within its first bytes has no records.
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if MAGIC.startswith(magic.rstrip(b"\0")):
                return
            raise ValueError(f"{path} has format {magic!r}; this program reads {MAGIC!r}")
        size = path.stat().st_size
        while len(head := file.read(OVERHEAD)) == OVERHEAD:
            kind, version, length = _HEAD.unpack_from(head)
            if file.tell() + length > size:
                return
            data = file.read(length)
            (check,) = _CHECK.unpack_from(head, _HEAD.size)
            if zlib.crc32(data, zlib.crc32(head[: _HEAD.size])) != check:
                return
            yield Record(kind.decode("ascii", "replace"), version, data)

"""The sandbox's filter of system calls: it denies calls whose effects resource limits do not bound.

Shared memory that is identified by name or number is not counted in a process's limits. A namespace created inside the
sandbox would have a /tmp without a size limit. The other calls widen a program's access to the kernel and are not
needed. Each denied call fails with EPERM. Numbers are those of the kernel's tables, ``asm/unistd_64.h`` and
``asm-generic/unistd.h``.
"""

from __future__ import annotations

import platform
import struct

EPERM = 1
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Classic BPF opcodes: ``BPF_LD | BPF_W | BPF_ABS``, ``BPF_JMP | BPF_JEQ | BPF_K``, ``... BPF_JGE ...``,
``BPF_RET``."""
NUMBER_AT, ARCHITECTURE_AT = 0, 4
"""Offsets in ``struct seccomp_data``."""
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000 | EPERM, 0x80000000
X32 = 0x40000000
"""Call numbers from here on belong to another table on x86-64."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""``AUDIT_ARCH_*`` by ``platform.machine()``."""
DENIED = {
    "x86_64": {
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "ptrace": 101,
        "mount": 165,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "setns": 308,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "mount": 40,
        "unshare": 97,
        "ptrace": 117,
        "msgget": 186,
        "semget": 190,
        "shmget": 194,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "setns": 268,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
    },
}
NEWER = {"io_uring_setup": 425, "open_tree": 428, "fsopen": 430, "memfd_secret": 447}
"""Calls with the same number on all architectures."""


def seccomp_filter() -> bytes:
    """The filter in the format that bubblewrap reads. Raises ValueError on an architecture without a table here."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(
            f"the sandbox supports {' and '.join(ARCHITECTURES)} only: it has no table of the system calls of {machine}"
        )
    denied = sorted({*DENIED[machine].values(), *NEWER.values()})
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_AT_LEAST, len(denied) + 1, 0, X32),
        *((JUMP_EQUAL, len(denied) - place, 0, number) for place, number in enumerate(denied)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)

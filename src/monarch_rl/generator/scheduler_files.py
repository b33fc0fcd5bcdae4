"""What SGLang's scheduler leaves in /dev/shm when it is killed: nothing, if it has no name there.

Engines are ended by killing their processes, which runs none of SGLang's own removals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_rl.generator.cpu_patch import check_parameters


def leave_no_files() -> None:
    """Have the scheduler of this process keep no file in /dev/shm. Raises RuntimeError if SGLang is another one."""
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
    from sglang.srt.managers import scheduler

    # ``sglang_loads_*``: load figures for the router of several schedulers, which an engine here does not have.
    check_parameters(scheduler.create_load_snapshot_writer, "port_args dp_size dp_rank publish_interval")
    scheduler.create_load_snapshot_writer = _no_writer
    # ``sgl_shm_mq_*``: 24 MiB through which the ranks of an engine send each other messages.
    check_parameters(MessageQueue.create_from_process_group, "pg max_chunk_bytes max_chunks writer_rank")
    MessageQueue.create_from_process_group = staticmethod(_without_name(MessageQueue.create_from_process_group))


def _no_writer(*_: Any, **__: Any) -> None:
    return None


def _without_name(create: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the name of a queue's memory once all ranks have opened it: it goes with the last of them."""

    def create_without_name(*args: Any, **kwargs: Any) -> Any:
        queue = create(*args, **kwargs)  # returns when all ranks have
        ring = getattr(queue, "buffer", None)
        if ring is not None and ring.is_creator:
            ring.shared_memory.unlink()
            ring.is_creator = False
        return queue

    return create_without_name

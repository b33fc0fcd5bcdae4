"""Monarch's own time-outs and sizes, and the end of its client in this process."""

from __future__ import annotations

import logging

logger = logging.getLogger("monarch_rl")

STATE_DEADLINE_S = 120.0
"""Seconds of silence after which Monarch counts a host, or a process asked for its state, as lost. Its timer also runs
while the whole machine is paused (a virtual machine that moves to another host takes a minute), and is the first thing
that it looks at afterwards. The watch notices a stopped process earlier, and does not count pauses (``watch.py``)."""
ACTOR_START_DEADLINE_S = 600.0
"""Seconds for an actor to start, for a message to be acknowledged. Monarch's own defaults are 30 s; a process takes two
CPU-seconds, for which a machine that gives it 1 % of a core needs 200."""
SPAWN_DEADLINE_S = 60.0
"""Seconds for a host to answer that a process has started. A lost host never does, and the run waits for it. (A process
that introduces itself after more than 30 s is not noticed, whatever is set here.)"""
CLIENT_FLUSH_S = 0.3
"""Seconds for this process's last messages to leave at its exit; Monarch's own choice."""
END_S = 5.0
"""Seconds for the client to shut down; a moment is normal."""


def configure_monarch() -> None:
    """Set Monarch's own time-outs and sizes for this process and those it spawns, before the first actor.

    Monarch knows no starved machine, so its time-outs are longer than what such a machine needs. The deadlines of those
    who wait end a start that hangs (``deadlines.py``).

    If a process is killed while Monarch asks it for its state, its loss is noticed only after ``STATE_DEADLINE_S``;
    otherwise within two seconds.
    """
    from monarch.config import configure

    # A machine that swaps or starts many processes may be silent for long; Monarch's defaults are 30 s for an actor
    # and 60 s for a host. A message that is not acknowledged in time ends the run.
    silence, start = f"{STATE_DEADLINE_S:g}s", f"{ACTOR_START_DEADLINE_S:g}s"
    configure(get_proc_state_max_idle=silence, get_actor_state_max_idle=silence, message_delivery_timeout=start)
    configure(mesh_proc_spawn_max_idle=f"{SPAWN_DEADLINE_S:g}s", actor_spawn_max_idle=start)
    configure(host_spawn_ready_timeout=start, mesh_attach_config_timeout=start, mesh_orphan_timeout=start)
    # The last is that of a message to an actor whose process still starts.
    configure(supervision_watchdog_timeout=start, pending_actor_delivery_timeout=start)
    # RDMABuffer over TCP (weights/rdma.py). Frames of 4 MiB are four times faster than Monarch's default of 64. One
    # connection is as fast as several; with several, reads write to memory even after they timed out.
    configure(rdma_max_chunk_size_mb=4, rdma_tcp_fallback_parallelism=1)


def shut_client_down() -> None:
    """Shut Monarch's client down. Its own exit handler waits for a second and then prints a traceback, also after a run
    that succeeded."""
    from monarch.actor import shutdown_context

    try:
        shutdown_context(host_timeout=CLIENT_FLUSH_S).get(timeout=END_S)
    except Exception as error:  # the run is over: nothing of it depends on this any more
        logger.warning("Monarch's client did not shut down, the process ends without that: %r", error)

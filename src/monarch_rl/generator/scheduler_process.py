"""The first lines of SGLang's scheduler process. Imports nothing heavy: it runs before SGLang is imported there."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

from monarch_rl.generator import error_file
from monarch_rl.generator.error_file import ErrorFile
from monarch_rl.generator.patch import check_parameters
from monarch_rl.runtime.compiler_paths import allow_spaces
from monarch_rl.runtime.process import die_with_parent

ENGINE_PRELOAD = "engine"
"""Name of the fork server's preload for engines and their schedulers: ``sglang_imports.py``."""


class SchedulerTarget:
    """What ``multiprocessing`` calls in the new process instead of SGLang's own function.

    SGLang ties a scheduler's life to its parent's too, but only after some ten seconds of imports. Here the tie
    is made while this object is unpickled, before the arguments, and with them SGLang, are imported.

    Args:
        errors: gets what the scheduler fails with.
    """

    def __init__(self, errors: ErrorFile) -> None:
        self._errors = errors

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_new_process, (os.getpid(), self.run, self._errors.for_scheduler())

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        """What runs in the new process."""
        run_scheduler(*args, **kwargs)


def _in_new_process(parent: int, run: Callable[..., None], errors: Any) -> Callable[..., None]:
    die_with_parent(signal.SIGKILL, parent)
    error_file.use(errors)
    quiet_imports()
    allow_spaces()
    return partial(_run, run)


def _run(run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        run(*args, **kwargs)
    except Exception as error:  # SGLang catches its own: see _exit_on_sigquit
        error_file.record(error)
        raise


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler with all that monarch_rl changes in it, until the engine ends."""
    import torch

    if not torch.accelerator.is_available():
        from monarch_rl.generator.cpu import install

        install.install()
    run_plain_scheduler(*args, **kwargs)


def run_plain_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler with what it must report and refuse, and no more: the yardstick of its speed."""
    import psutil
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.managers.scheduler_components import output_streamer
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator as Outputs
    from tqdm import std

    from monarch_rl.generator import scheduler_pieces, tempered
    from monarch_rl.generator.load_lora import remember_managers
    from monarch_rl.generator.load_staged import continue_if_verified
    from monarch_rl.generator.settings import rename_in_log
    from monarch_rl.runtime.network import serve_own_address_only

    rename_in_log()
    serve_own_address_only()
    leave_no_files()
    remember_managers()
    # SGLang reads it when this module is imported: in a forked process before the engine has said what it is.
    output_streamer.DEFAULT_FORCE_STREAM_INTERVAL = envs.SGLANG_FORCE_STREAM_INTERVAL.get()  # waits: reads a variable
    psutil.Process.send_signal = partialmethod(_exit_on_sigquit, psutil.Process.send_signal)
    std.tqdm.__init__ = partialmethod(_without_bar, std.tqdm.__init__)
    tempered.install()
    scheduler_pieces.install(Scheduler)  # before the next lines: not for results that a pause has read
    Scheduler.pause_generation = partialmethod(pause_generation, Scheduler.pause_generation)
    Scheduler.process_batch_result = partialmethod(process_batch_result, Scheduler.process_batch_result)
    Scheduler.continue_generation = partialmethod(continue_if_verified, Scheduler.continue_generation)
    Outputs.accept = partialmethod(report_versions, Outputs.accept)
    run_scheduler_process(*args, **kwargs)


def report_versions(self: Any, original: Any, *, req: Any) -> None:
    """Replaces SGLang's ``_GenerationStreamAccumulator.accept``, which adds a request to a message.

    SGLang reports the versions that drew a request's tokens only with the last of them.
    """
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    before = len(self.rids)
    original(self, req=req)
    if len(self.rids) > before and self.weight_versions[-1] is None:
        self.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=self.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )


def _exit_on_sigquit(self: Any, original: Any, number: int) -> None:
    """Exit instead of ending the parent by SIGQUIT, silently, which SGLang's scheduler does after an exception: the
    parent notices its end."""
    if number != signal.SIGQUIT:
        original(self, number)
        return
    if (error := sys.exception()) is not None:
        error_file.record(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _without_bar(self: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    """Hide the progress bar under which weights load: it would tear the run's own display."""
    original(self, *args, **kwargs | {"disable": True})


def quiet_imports() -> None:
    """Silence all but errors: SGLang warns of every accelerator that is not there, and Monarch logs from INFO on."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    # multiprocessing's tracker of semaphores warns when an actor's process ends without the interpreter's exit;
    # it is started with these options.
    option = "ignore:resource_tracker:UserWarning"
    if option not in sys.warnoptions:
        sys.warnoptions.append(option)


def few_models() -> None:
    """Have this process and those it starts import few of SGLang's models; see ``sglang_models``."""
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "monarch_rl.generator.sglang_models")


# -- at a commit the overlap scheduler first reads the results of the step that is under way --------------------------
# With an accelerator SGLang launches a step, and handles the results of the step before it meanwhile. Its pause for a
# commit leaves the launched step as it is: new weights would be copied over those that the step reads, and the tokens
# that it draws, which no request has yet, would count as drawn by the new version. Here the pause reads those results
# first. That waits for the step, which has to end anyway, and every token gets the version that drew it.
#
# The event loop expects the results of its last step in a queue and would wait for them after the pause. An entry
# that says that they have been read takes their place. Its batch has no requests: SGLang leaves those of the queued
# batch out of the next step if one more token would end them.
#
# All of this does nothing where the overlap scheduler is off, as on CPUs.

_READ = object()
"""In place of results that have been read."""


def pause_generation(scheduler: Any, original: Callable[..., None], request: Any) -> None:
    """Replaces ``Scheduler.pause_generation``, whose mode ``retract`` reads the results by itself."""
    if request.mode == "in_place":
        for _ in range(len(scheduler.result_queue)):
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
            scheduler.result_queue.append((SimpleNamespace(reqs=[]), _READ))
    original(scheduler, request)


def process_batch_result(scheduler: Any, original: Callable[..., None], batch: Any, result: Any) -> None:
    """Replaces ``Scheduler.process_batch_result``."""
    if result is not _READ:
        original(scheduler, batch, result)


# -- no file of SGLang's scheduler stays in /dev/shm when it is killed: none has a name there -------------------------
# Engines are ended by killing their processes, which runs none of SGLang's own removals.


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

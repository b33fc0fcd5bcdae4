"""Entry point of SGLang's scheduler process, with monarch_rl's changes to the scheduler.

Must not import anything heavy: it runs before SGLang is imported in that process.
"""

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
from monarch_rl.generator.patch import check_parameters, replace_method
from monarch_rl.runtime.compiler_paths import allow_spaces
from monarch_rl.runtime.process import die_with_parent, freeze_heap

ENGINE_PRELOAD = "engine"
"""Name of the fork server's preload for engines and their schedulers: ``sglang_imports.py``."""


class SchedulerTarget:
    """The function that ``multiprocessing`` calls in the new process, in place of SGLang's own.

    SGLang, too, makes a scheduler die with its parent, but only after some ten seconds of imports. Here this is set up
    while the object is unpickled, before the arguments are, and with them SGLang is imported.

    Args:
        errors: receives the error that ends the scheduler.
    """

    def __init__(self, errors: ErrorFile) -> None:
        self._errors = errors

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_new_process, (os.getpid(), self.run, self._errors.for_scheduler())

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        """Run the scheduler, in the new process."""
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
    except Exception as error:  # SGLang catches errors of its scheduler itself: see _exit_on_sigquit
        error_file.record(error)
        raise


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler with all of monarch_rl's changes, until the engine ends."""
    import torch
    from sglang.srt.managers.scheduler import Scheduler

    if not torch.accelerator.is_available():
        from monarch_rl.generator.cpu import install

        install.install()
    Scheduler.run_event_loop = partialmethod(_freeze_heap_first, Scheduler.run_event_loop)
    run_plain_scheduler(*args, **kwargs)


def run_plain_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler with only the changes that correctness needs: the baseline for speed comparisons."""
    import psutil
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.managers.scheduler_components import output_streamer
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator as Outputs
    from sglang.srt.managers.tp_worker import TpModelWorker
    from tqdm import std

    from monarch_rl.generator import scheduler_operations, tempered
    from monarch_rl.generator.load_lora import remember_managers
    from monarch_rl.generator.load_staged import continue_if_verified
    from monarch_rl.generator.settings import rename_in_log
    from monarch_rl.runtime.network import serve_own_address_only

    rename_in_log()
    serve_own_address_only()
    leave_no_files()
    remember_managers()
    # SGLang reads this when the module is imported, which a forked process does before the engine sets the variable.
    output_streamer.DEFAULT_FORCE_STREAM_INTERVAL = envs.SGLANG_FORCE_STREAM_INTERVAL.get()  # waits: reads a variable
    psutil.Process.send_signal = partialmethod(_exit_on_sigquit, psutil.Process.send_signal)
    std.tqdm.__init__ = partialmethod(_without_bar, std.tqdm.__init__)
    replace_method(TpModelWorker, "_init_dllm_algorithm", _diffusion_if_asked_for, "")
    tempered.install()
    scheduler_operations.install(Scheduler)  # first, so that it sees no results that a pause has processed
    Scheduler.pause_generation = partialmethod(pause_generation, Scheduler.pause_generation)
    Scheduler.process_batch_result = partialmethod(process_batch_result, Scheduler.process_batch_result)
    Scheduler.continue_generation = partialmethod(continue_if_verified, Scheduler.continue_generation)
    Outputs.accept = partialmethod(report_versions, Outputs.accept)
    run_scheduler_process(*args, **kwargs)


def _freeze_heap_first(scheduler: Any, original: Callable[[Any], None]) -> None:
    """Replaces ``Scheduler.run_event_loop``: a full collection would visit all modules of the model and of SGLang, and
    no token would be generated meanwhile."""
    freeze_heap()
    original(scheduler)


def report_versions(self: Any, original: Any, *, req: Any) -> None:
    """Replaces SGLang's ``_GenerationStreamAccumulator.accept``, which adds a request to a message.

    Adds the versions that sampled the request's tokens; SGLang itself reports them only with the last token.
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
    """Replaces ``psutil.Process.send_signal``: on SIGQUIT, end this process instead of the parent.

    After an exception SGLang's scheduler silently ends its parent by SIGQUIT. Here the parent notices that the
    scheduler has ended.
    """
    if number != signal.SIGQUIT:
        original(self, number)
        return
    if (error := sys.exception()) is not None:
        error_file.record(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _without_bar(self: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    """Disable the progress bar of weight loading, which would disturb the run's own display."""
    original(self, *args, **kwargs | {"disable": True})


def _diffusion_if_asked_for(worker: Any, original: Callable[[Any], None]) -> None:
    """Replaces ``TpModelWorker._init_dllm_algorithm``: do not import the algorithms of diffusion models for another
    model. They import TorchInductor, which takes a CPU-second."""
    from sglang.srt.runtime_context import get_exec

    worker.dllm_algorithm = None
    if get_exec().dllm.dllm_algorithm is not None:
        original(worker)


def quiet_imports() -> None:
    """Silence everything but errors: SGLang warns about every missing accelerator, and Monarch logs at INFO level."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    # multiprocessing's resource tracker, which is started with these options, would warn whenever an actor's process
    # ends without a regular exit of the interpreter.
    option = "ignore:resource_tracker:UserWarning"
    if option not in sys.warnoptions:
        sys.warnoptions.append(option)


def few_models() -> None:
    """Have this process and its children import only a few of SGLang's models; see ``sglang_models``."""
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "monarch_rl.generator.sglang_models")


# -- pausing the overlap scheduler: process the results of the running step before a commit ---------------------------
# With an accelerator SGLang launches a step, and meanwhile processes the results of the previous step. Its own pause
# ignores the launched step: new weights would overwrite those that the step reads, and the tokens that it samples,
# which no request has yet, would be attributed to the new version. Here the pause processes those results first. It has
# to wait for the step, which must end anyway, and every token is attributed to the version that sampled it.
#
# The event loop expects the results of its last step in a queue, and would wait for them after the pause. So they are
# replaced by a placeholder. Its batch has no requests, because SGLang leaves the requests of the queued batch out of
# the next step if one more token would end them.
#
# Without the overlap scheduler, as on CPUs, none of this has an effect.

_PROCESSED = object()
"""Placeholder for results that have been processed."""


def pause_generation(scheduler: Any, original: Callable[..., None], request: Any) -> None:
    """Replaces ``Scheduler.pause_generation``, which processes the results itself only in mode ``retract``."""
    if request.mode == "in_place":
        for _ in range(len(scheduler.result_queue)):
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
            scheduler.result_queue.append((SimpleNamespace(reqs=[]), _PROCESSED))
    original(scheduler, request)


def process_batch_result(scheduler: Any, original: Callable[..., None], batch: Any, result: Any) -> None:
    """Replaces ``Scheduler.process_batch_result``: skip the placeholder of a pause."""
    if result is not _PROCESSED:
        original(scheduler, batch, result)


# -- leaving no files in /dev/shm: SGLang's own clean-up does not run, because engines are ended by a kill ------------


def leave_no_files() -> None:
    """Have the scheduler of this process leave no named file in /dev/shm.

    Raises RuntimeError if SGLang's version is not the expected one.
    """
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
    from sglang.srt.managers import scheduler

    # ``sglang_loads_*``: load metrics for a router of several schedulers, which engines here do not have.
    check_parameters(scheduler.create_load_snapshot_writer, "port_args dp_size dp_rank publish_interval")
    scheduler.create_load_snapshot_writer = _no_writer
    # ``sgl_shm_mq_*``: 24 MiB through which the ranks of an engine send each other messages.
    check_parameters(MessageQueue.create_from_process_group, "pg max_chunk_bytes max_chunks writer_rank")
    MessageQueue.create_from_process_group = staticmethod(_without_name(MessageQueue.create_from_process_group))


def _no_writer(*_: Any, **__: Any) -> None:
    return None


def _without_name(create: Callable[..., Any]) -> Callable[..., Any]:
    """Unlink a queue's shared memory once all ranks have opened it, so that it is freed with the last of them."""

    def create_without_name(*args: Any, **kwargs: Any) -> Any:
        queue = create(*args, **kwargs)  # returns when all ranks have opened it
        ring = getattr(queue, "buffer", None)
        if ring is not None and ring.is_creator:
            ring.shared_memory.unlink()
            ring.is_creator = False
        return queue

    return create_without_name

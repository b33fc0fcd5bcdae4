"""At a commit, SGLang's overlap scheduler first reads the results of the step that is still under way.

With an accelerator SGLang launches a step, and handles the results of the step before it meanwhile. Its pause for a
commit leaves the launched step as it is: new weights would be copied over those that the step reads, and the tokens
that it draws, which no request has yet, would count as drawn by the new version. Here the pause reads those results
first. That waits for the step, which has to end anyway, and every token gets the version that drew it.

The event loop expects the results of its last step in a queue and would wait for them after the pause. An entry that
says that they have been read takes their place. Its batch has no requests: SGLang leaves those of the queued batch out
of the next step if one more token would end them.

All of this does nothing where the overlap scheduler is off, as on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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

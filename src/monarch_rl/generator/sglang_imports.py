"""Imports of the fork server for engines: SGLang, and the models that it may serve (``sglang_models``)."""

from __future__ import annotations

import sys

from monarch_rl.generator.scheduler_process import few_models, quiet_imports

quiet_imports()
few_models()

import sglang.srt.entrypoints.engine  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.model_executor.model_runner  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401
from sglang.srt.plugins import hook_registry, load_plugins  # noqa: E402


def _replace_in_sglang(original: object, replacement: object, owner: object) -> int:
    """Replaces SGLang's ``_propagate_patch``, which replaces a function of a plugin's choice (``cpu/platform.py``) also
    where it was imported from its module.

    SGLang looks through all modules, which takes 0.02 CPU-seconds a function. Only its own modules and ours import
    these functions, and none imports a method.
    """
    if isinstance(owner, type):
        return 0
    replaced = 0
    for name, module in list(sys.modules.items()):
        if name.startswith(("sglang.", "monarch_rl.")) and module is not owner:
            for imported in [key for key, value in vars(module).items() if value is original]:
                setattr(module, imported, replacement)
                replaced += 1
    return replaced


hook_registry._propagate_patch = _replace_in_sglang
load_plugins()  # SGLang does this in each of its processes, and only once in each

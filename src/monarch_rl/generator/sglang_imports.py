"""Imports of the fork server for engines: SGLang, and the models that it may serve (``sglang_models``)."""

from __future__ import annotations

from monarch_rl.generator.scheduler_process import few_models, quiet_imports

quiet_imports()
few_models()

import sglang.srt.entrypoints.engine  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.model_executor.model_runner  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401
from sglang.srt.plugins import load_plugins  # noqa: E402

# SGLang does this in each of its processes, and only once in each: for every function that a plugin replaces
# (``cpu/platform.py``) it looks through the names of all modules, which takes 0.3 CPU-seconds.
load_plugins()

"""Imports of the fork server for engines: SGLang, and the models that it may serve (``sglang_models``)."""

from __future__ import annotations

from monarch_rl.generator.scheduler_process import few_models, quiet_imports

quiet_imports()
few_models()

import sglang.srt.entrypoints.engine  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401

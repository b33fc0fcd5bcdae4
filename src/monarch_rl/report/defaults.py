"""The default settings of a run, with which a page compares a run's own."""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger("monarch_rl")


@functools.cache
def default_settings() -> dict[str, Any] | None:
    """The defaults of ``RunSettings``, nested like ``settings.json``; None without the libraries of a run. A recipe may
    have other defaults."""
    try:
        # The settings check devices, so they import PyTorch: here, not with the module.
        from monarch_rl.pipeline.settings import RunSettings
        from monarch_rl.settings.ranges import to_plain
    except ImportError as error:
        logger.warning("settings are not compared with the defaults (%s)", error)
        return None
    return to_plain(RunSettings())

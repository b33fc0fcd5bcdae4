"""A module that prevents forking: it starts a thread when it is imported."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()

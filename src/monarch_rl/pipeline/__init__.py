"""Orchestration of a run: settings, start, publishing, recovery, and :class:`Run`, the interface for recipes."""

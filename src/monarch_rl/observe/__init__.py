"""The metrics registry, metrics files and the live console."""

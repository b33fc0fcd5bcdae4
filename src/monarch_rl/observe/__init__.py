"""The registry of metrics, metrics files, the live console."""

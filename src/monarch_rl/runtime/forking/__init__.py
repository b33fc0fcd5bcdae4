"""Processes that are forked with their imports behind them, because a run's start-up is mostly imports."""

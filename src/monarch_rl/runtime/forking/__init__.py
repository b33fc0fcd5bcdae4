"""Forking processes that have their imports done, because most of a run's start-up is imports."""

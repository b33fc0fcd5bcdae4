"""Prediction of a run's speed and policy lag: the same `Run` in virtual time."""

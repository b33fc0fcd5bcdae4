"""What a run would cost: the same `Run` in virtual time."""

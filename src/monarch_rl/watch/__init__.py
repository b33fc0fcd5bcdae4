"""The watch: it polls a run's processes, finds stalls and hung processes, and reports which process blocks the
others."""

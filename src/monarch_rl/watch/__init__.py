"""The watch over a run: it polls its processes, finds one that cannot go on, and says which one holds up the others."""

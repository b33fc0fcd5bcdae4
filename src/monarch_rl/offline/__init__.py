"""Tools that need no run: export, engine-trainer parity, episodes of a task, and replay of a journal."""

"""What the tools do without a run: export, parity of engine and trainer, episodes of a task, replay of a journal."""

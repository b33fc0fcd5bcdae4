"""Training tasks: items, episodes as coroutines, rewards, environments."""

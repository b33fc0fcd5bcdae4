"""What the policy is trained on: items, episodes as coroutines, rewards, environments."""

"""The data contract: turns, episodes and groups, token by token, with the version that sampled each token."""

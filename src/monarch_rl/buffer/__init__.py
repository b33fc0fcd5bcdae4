"""The bounded buffer between workers and trainer ranks: it enforces the maximum policy lag."""

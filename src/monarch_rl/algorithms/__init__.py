"""Pure functions of tensors: what an advantage sees of a group, advantages, losses, corrections, packing."""

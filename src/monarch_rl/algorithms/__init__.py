"""Pure functions of tensors: group views, advantages, losses, corrections, packing."""

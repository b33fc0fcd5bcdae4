"""Training with torchtitan: models, packing, objectives, updates, checkpoints and published weights."""

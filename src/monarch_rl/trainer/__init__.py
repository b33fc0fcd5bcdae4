"""torchtitan: models, packing, objectives, the update, and what a version of the policy consists of."""

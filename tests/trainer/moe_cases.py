"""The models and trainings of the mixture-of-experts tests, by name."""

from __future__ import annotations

MODELS = ("moe", "moe_mixed", "moe_few", "moe_starved", "deepseek")
"""8 experts; some layers dense, tied, probabilities not normalised; 2 experts, fewer than ranks; 6 experts of 8 that
never get a token; latent attention, groups of experts, a biased router, shared experts, the first layer dense."""
TRAININGS = {
    "moe_trained": "moe",
    "moe_starved_trained": "moe_starved",
    "moe_single": "moe",
    "moe_few_trained": "moe_few",
    "deepseek_trained": "deepseek",
}
"""The initial model of each. ``moe_single``: one episode per batch, fewer than there are ranks."""


def layout(ranks: int, expert_parallel: int) -> str:
    return f"{ranks}x{expert_parallel}"


LAYOUTS = {2: (1, 2), 4: (1, 2)}
"""Ranks, and the degrees of expert parallelism tested on them."""

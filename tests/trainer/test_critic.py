"""A critic on the trainer's ranks: it learns to predict the policy's rewards, on however many ranks."""

from __future__ import annotations

import json

import pytest
import torch

from tests.trainer.programs import run_program
from tools.gpu_parts.common import TINY, Bench, make_model

KINDS = ("once", "several updates per batch", "with a LoRA policy", "with experts")
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
Updates = list[dict[str, float]]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Updates]]:
    """Metrics of the critic, by the number of ranks and the kind."""
    folder = tmp_path_factory.mktemp("critic")
    bench = Bench(torch.device("cpu"), folder)
    make_model(bench, TINY, "model")
    make_model(bench, TINY | EXPERTS, "moe")
    for ranks in (1, 2):
        run_program("critic_ranks.py", folder, ranks=ranks)
    return {ranks: json.loads((folder / f"critic.{ranks}").read_text()) for ranks in (1, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_learns_to_predict_rewards(learned: dict[int, list[Updates]], kind: str) -> None:
    updates = learned[2][KINDS.index(kind)]
    assert updates[0]["critic/explained_variance"] <= 1e-6, "its head begins with zeros"
    assert updates[-1]["critic/explained_variance"] > 0.5, updates
    assert updates[-1]["critic/loss"] < 0.5 * updates[0]["critic/loss"], updates
    assert (max(update["critic/clipped"] for update in updates) > 0) == (kind == KINDS[1]), updates


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_critic_learns_the_same_on_one_rank_and_on_two(learned: dict[int, list[Updates]], kind: str) -> None:
    one, two = (learned[ranks][KINDS.index(kind)] for ranks in (1, 2))
    for a, b in zip(one, two, strict=False):  # later ones, on two ranks only, differ by the order of sums
        assert a == pytest.approx(b, rel=1e-2, abs=1e-3)

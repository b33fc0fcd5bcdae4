"""Keep Routing and Keep Sampling Mask in the trainer: its results with the engine's experts and sampling masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.generator.helpers import make_model, weights_in
from tests.trainer.programs import run_program

RANKS, K, TEMPERATURE = 2, 2, 0.7
LOGPROB_BOUND, GRADIENT_BOUND = 1e-5, 2e-5
"""Bounds on the difference of shared and separate computation: in nats, and as a share of the norm of each parameter's
gradient (or of a thousandth of the whole gradient's), fp32."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.core, id="experts-gathered"), pytest.param(2, id="experts-divided")],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the output of keep_ranks.py."""
    folder = tmp_path_factory.mktemp("keep")
    make_model(folder / "model", "moe")
    run_program("keep_ranks.py", folder, str(request.param), ranks=RANKS)
    return folder


def of_ranks(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"{name}.rank{rank}") for rank in range(RANKS)]


def metrics(folder: Path, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [json.loads((folder / f"{name}.rank{r}.json").read_text()) for r in range(RANKS)]
    assert found[0] == found[1], "all ranks have the same metrics"
    return found[0]


def test_log_probs_are_normalised_over_the_sampling_mask(folder: Path) -> None:
    """Softmax over the ids of each mask alone, of the tempered logits, in float64."""
    for found in of_ranks(folder, "off.none"):
        logits = (found["logits"].double() / TEMPERATURE).split(1)
        sets = found["mask_ids"].split(found["mask_counts"].tolist())
        assert len(sets) == len(logits) == len(found["ids"]) > 14
        for place, (row, ids) in enumerate(zip(logits, sets, strict=True)):
            among = row[0, ids].log_softmax(-1)
            (sampled,) = among[ids == found["ids"][place]]
            assert float(found["logprobs"][place]) == pytest.approx(float(sampled), abs=1e-5)
            assert float(found["entropies"][place]) == pytest.approx(float(-(among.exp() * among).sum()), abs=1e-5)
            mass = float(row[0].softmax(-1)[ids].sum())
            assert float(found["mask_mass"][place]) == pytest.approx(mass, abs=1e-6)


@pytest.mark.parametrize("name", ["replay.none", "replay.selective", "replay.full"])
def test_the_engines_experts_compute_each_token(folder: Path, name: str) -> None:
    """Each layer's output equals the output of the routes' experts by the published formula, weighted by the router."""
    model = weights_in(folder / "model")
    for found in of_ranks(folder, name):
        for layer in range(2):
            block, expert_routes = f"model.layers.{layer}.mlp.", found["routes"][:, layer].long()
            x, y = found[f"in.{layer}"].double(), found[f"out.{layer}"].double()
            scores = (x @ model[block + "gate.weight"].double().T).softmax(-1).gather(-1, expert_routes)
            scores = scores / scores.sum(-1, keepdim=True)
            expected = torch.zeros_like(x)
            for slot in range(K):
                for token, expert in enumerate(expert_routes[:, slot].tolist()):
                    gate, up, down = (
                        model[f"{block}experts.{expert}.{part}_proj.weight"].double() for part in ("gate", "up", "down")
                    )
                    expected[token] += scores[token, slot] * (down @ (F.silu(gate @ x[token]) * (up @ x[token])))
            assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


def test_comparing_changes_nothing_and_replaying_does(folder: Path) -> None:
    for own, compared, replayed in zip(
        *(of_ranks(folder, name) for name in ("off.none", "compare.none", "replay.none")), strict=True
    ):
        assert torch.equal(own["logprobs"], compared["logprobs"])
        assert (own["logprobs"] - replayed["logprobs"]).abs().max() > 0.05


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_the_router_learns_though_it_does_not_choose(folder: Path, checkpointing: str) -> None:
    """Its weights of the chosen experts have a gradient; activation checkpointing computes the same one."""
    for found, checkpointed in zip(
        of_ranks(folder, "replay.none"), of_ranks(folder, f"replay.{checkpointing}"), strict=True
    ):
        gates = [name for name in found if name.startswith("grad.") and "router.gate" in name]
        assert len(gates) == 2 and all(found[name].norm() > 1e-3 for name in gates)
        strip = {name.replace("._checkpoint_wrapped_module", ""): value for name, value in checkpointed.items()}
        grads = [name for name in found if name.startswith("grad.")]
        assert all(torch.allclose(found[name], strip[name], rtol=1e-4, atol=1e-5) for name in grads)


def test_the_natural_disagreement_is_counted(folder: Path) -> None:
    """The share of the engine's choices that the router would not make, by layer, over the real tokens of all ranks.

    The batch is each rank's micro-batch, and rank 0's once more."""
    model, chosen = weights_in(folder / "model"), metrics(folder, "compare.none")
    ranks = of_ranks(folder, "compare.none")
    shares = []
    for layer in range(2):
        differing = slots = 0
        for found in [*ranks, ranks[0]]:
            scores = found[f"in.{layer}"] @ model[f"model.layers.{layer}.mlp.gate.weight"].T
            own, expert_routes = scores.topk(K).indices, found["routes"][:, layer].long()
            differing += sum(
                len(set(there) - set(here)) for there, here in zip(expert_routes.tolist(), own.tolist(), strict=True)
            )
            slots += expert_routes.numel()
        shares.append(differing / slots)
        assert chosen[f"routes_differ_{layer}"] == pytest.approx(shares[-1], abs=1e-6)
        assert 0.1 < shares[-1] < 0.9
    assert chosen["routes_differ"] == pytest.approx(sum(shares) / 2, abs=1e-6)
    assert "routes_differ" not in metrics(folder, "off.none")
    assert metrics(folder, "replay.none")["routes_differ"] > 0.1


def test_differences_of_log_probs_are_reported_by_quantile(folder: Path) -> None:
    """The engine's are all -1; a quantile is right within a bin."""
    ranks, reported = of_ranks(folder, "off.none"), metrics(folder, "off.none")
    differences = torch.cat([found["logprobs"] + 1.0 for found in [*ranks, ranks[0]]]).abs()
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        exact = float(differences.quantile(share, interpolation="higher" if share < 1 else "linear"))
        assert exact / 1.34 <= reported[f"logprob_difference_{name}"] <= exact * 1.34


@pytest.mark.parametrize("name", ["off.none", "compare.none", "replay.none", "replay.selective", "replay.full"])
def test_shared_prefixes_are_computed_once_on_all_ranks(folder: Path, name: str) -> None:
    """Log-probs and gradients equal those of separate episodes, however experts and activations are stored."""
    for found in of_ranks(folder, f"shared.{name}"):
        separate = {key.removeprefix("separate."): found[key] for key in found if key.startswith("separate.")}
        assert len(separate) == len(found) / 2 > 10
        assert len(separate["logprobs"]) > 30
        assert (found["shared.logprobs"] - separate.pop("logprobs")).abs().max() < LOGPROB_BOUND
        total = torch.stack([value.norm() for value in separate.values()]).norm()
        for key, expected in separate.items():
            assert (found[f"shared.{key}"] - expected).norm() < GRADIENT_BOUND * max(expected.norm(), 1e-3 * total)

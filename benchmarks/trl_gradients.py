"""Gradients of a first step, ours and TRL's, on one batch: the same prompts, completions, rewards and log-probs.

    python benchmarks/trl_gradients.py
    python benchmarks/trl_gradients.py --save trl_gradients_cpu

For each loss that both have: ours is the trainer's own step (``trainer/step.py``: buffer's shard, advantages, packing
with shared prefixes, torchtitan's model, objective, backward) on one rank; theirs is ``GRPOTrainer.train()`` for a step
in TRL's own environment (trl_gradients_theirs.py), with this batch instead of its own completions. Float32, no clipping
of the gradient. Prints, for each loss, the largest relative difference over the parameters, ``|ours - theirs| /
|theirs|``, and exits with an error if one is above 1e-4. The last line is JSON.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl_environment
from reporting import run_benchmark, short
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer
from trl_sides import ROOT, make_model

from monarch_rl.algorithms.advantages import ADVANTAGES, grpo
from monarch_rl.algorithms.group_view import Advantage
from monarch_rl.algorithms.objectives import CISPO, GSPO, OPSM, SAPO, Objective, PPOClip
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.runtime.network import held_port
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource
from monarch_rl.trainer.batch import pack
from monarch_rl.trainer.functions import LoadedFunctions
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.trainer.objective import loss_function
from monarch_rl.trainer.policy import Policy
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.step import train

BOUND = 1e-4
"""Allowed relative difference of a parameter's gradient."""
TRL_EPS = 1e-4
"""TRL adds it to the standard deviation of a group's rewards; we add 1e-6."""
GROUPS, SIZE, NEW_TOKENS = 8, 8, 8
FAR = {"old": 0.3, "reference": 0.2}
"""Standard deviations in nats between the policy's log-probs and those of the behaviour policy, and of the
reference."""
DEADLINE_S = 1800.0
Tensors = dict[str, torch.Tensor]
UNCORRECTED = LossSettings(corrections=())


@dataclass(frozen=True)
class Loss:
    """A loss with our settings and TRL's."""

    ours: LossSettings
    theirs: dict[str, Any]
    """Of GRPOConfig."""
    columns: tuple[str, ...] = ()
    """Log-probs in the batch: ``old``, ``reference``. Without ``old`` the ratio is 1."""
    advantage: Advantage | None = None
    """Our objective; None is the one that the settings name."""
    objective: Objective = PPOClip()


OLD = ("old",)
DAPO = {"loss_type": "dapo", "scale_rewards": "none", "epsilon": 0.2, "epsilon_high": 0.28}
TOKENS = replace(UNCORRECTED, aggregation="token_mean")
SEQUENCES = replace(UNCORRECTED, aggregation="sequence_mean")
TRL_GRPO = functools.partial(grpo, eps=TRL_EPS)
LOSSES = {
    "dapo": Loss(TOKENS, DAPO),
    "grpo": Loss(SEQUENCES, DAPO | {"loss_type": "grpo", "scale_rewards": "group"}, advantage=TRL_GRPO),
    "dr_grpo": Loss(UNCORRECTED, DAPO | {"loss_type": "dr_grpo"}),
    "dapo, stale": Loss(TOKENS, DAPO, OLD),
    "grpo, stale": Loss(SEQUENCES, DAPO | {"loss_type": "grpo", "scale_rewards": "group"}, OLD, TRL_GRPO),
    "dr_grpo, stale": Loss(UNCORRECTED, DAPO | {"loss_type": "dr_grpo"}, OLD),
    "dapo, dual clip, stale": Loss(TOKENS, DAPO | {"delta": 1.5}, OLD, objective=PPOClip(dual_clip=1.5)),
    "gspo, stale": Loss(
        SEQUENCES,
        {"loss_type": "grpo", "scale_rewards": "none", "importance_sampling_level": "sequence"}
        | {"epsilon": 0.1, "epsilon_high": 0.1},
        OLD,
        objective=GSPO(clip_low=0.1, clip_high=0.1),
    ),
    "cispo, stale": Loss(
        TOKENS,
        {"loss_type": "cispo", "scale_rewards": "none", "epsilon_high": 1.3},
        OLD,
        objective=CISPO(clip_high=0.3),
    ),
    "sapo, stale": Loss(SEQUENCES, {"loss_type": "sapo", "scale_rewards": "none"}, OLD, objective=SAPO()),
    "dapo, opsm, stale": Loss(
        replace(TOKENS, corrections=(OPSM(max_kl=0.05),)), DAPO | {"off_policy_mask_threshold": 0.05}, OLD
    ),
    "dapo, KL k3": Loss(
        replace(TOKENS, kl_coefficient=0.04), DAPO | {"beta": 0.04, "use_bias_correction_kl": False}, ("reference",)
    ),
    "dapo, entropy bonus": Loss(replace(TOKENS, entropy_coefficient=0.01), DAPO | {"entropy_coef": 0.01}),
}
"""Losses that both have. In "stale" losses the policy differs from the behaviour policy, so that clips and masks
act."""


@dataclass
class Sequence:
    """One completion of the batch."""

    prompt: list[int]
    completion: list[int]
    reward: float
    columns: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Gradients of a first step, ours and TRL's (see the top of this file)."""

    only: tuple[str, ...] = ()
    """Names of losses; none is all."""
    save: str = ""
    """Also write what is printed to benchmarks/results/ under this name, such as trl_gradients_cpu."""

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(LOSSES):
            raise ValueError(f"no such losses: {', '.join(sorted(unknown))}; there are {', '.join(LOSSES)}")


def made_up(model: Path) -> list[Sequence]:
    """Return questions of the main job with answers with some wrong or missing letters, and rewards of 0 and 1."""
    rng = np.random.default_rng(0)
    source = TaskSource(TaskSettings("spell_backward", '{"min_word_len": 3, "max_word_len": 5}', "{word} -> "), "train")
    tokenizer = AutoTokenizer.from_pretrained(model)
    letters = np.array(tokenizer.encode("abcdefghijklmnopqrstuvwxyz"))
    found = []
    for index in range(GROUPS):
        item = source.item(index)
        answer = np.array(tokenizer.encode(item.answer))
        for place in range(SIZE):
            sampled = np.where(rng.random(len(answer)) < 0.3, rng.choice(letters, len(answer)), answer)
            completion = sampled[: int(rng.integers(1, len(sampled) + 1))].tolist()
            completion += [tokenizer.eos_token_id] * int(rng.random() < 0.8)
            reward = float(place == 0 or place > 1 and rng.random() < 0.4)  # no group has equal rewards
            found.append(Sequence(tokenizer.encode(item.prompt), completion, reward))
    return found


def episode_of(sequence: Sequence, columns: Iterable[str] = ()) -> Episode:
    """Return the episode that a rollout worker would make."""
    sampled, count = np.asarray(sequence.completion, np.int32), len(sequence.completion)
    logprobs = np.asarray(sequence.columns.get("old", [0.0] * count), np.float32)
    turn = Turn.from_completion(sequence.prompt, Completion(sampled, logprobs, np.zeros(count, np.int32), "stop"))
    for name in columns:
        turn.columns[name] = np.zeros(len(turn.token_ids), np.float32)
        turn.columns[name][turn.trainable] = sequence.columns[name]
    return Episode([turn], sequence.reward, "stop")


def fill_columns(policy: Policy, sequences: list[Sequence]) -> None:
    """Add log-probs that differ from the policy's own, like those of policies with other weights."""
    rng = np.random.default_rng(1)
    for sequence in sequences:
        batch = pack([episode_of(sequence)], torch.zeros(1), torch.zeros(1), 0, policy.device)
        with torch.no_grad():
            own = policy.token_logprobs(batch).logprobs.numpy()
        for name, far in FAR.items():
            sequence.columns[name] = (own + rng.normal(0, far, len(own))).tolist()


def our_step(policy: Policy, sequences: list[Sequence], loss: Loss) -> tuple[dict[str, float], Tensors]:
    """Make the trainer's step on the batch; returns its metrics, and the gradients by Hugging Face's names."""
    policy.settings = replace(policy.settings, loss=loss.ours)
    groups = []
    for index in range(GROUPS):
        group_sequences = sequences[index * SIZE : (index + 1) * SIZE]
        packed = serialize_group(
            Group(index, index, [episode_of(sequence, loss.columns) for sequence in group_sequences])
        )
        groups.append(SerializedGroup.read(packed))
    batch = Batch(0, groups, None, np.asarray([sum(group.trainable for group in groups)]))
    (shard,) = cut(batch, ShardPlan(1, policy.settings.tokens_per_microbatch))
    advantage = loss.advantage or ADVANTAGES[loss.ours.advantage]()
    metrics, *_ = train(policy, shard, LoadedFunctions(advantage, loss_function(loss.objective, loss.ours)), NEW_TOKENS)
    return metrics, gradients(policy)


def gradients(policy: Policy) -> Tensors:
    """Return the gradients of the last step by Hugging Face's names, by temporarily storing them in the weights."""
    parameters = list(policy.module.parameters())
    with torch.no_grad():
        weights_before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
        state = policy.model.hf_state()
        found = {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in state.items()}
        for parameter, weights in zip(parameters, weights_before, strict=True):
            parameter.copy_(weights)
    return found


def ours(model: Path, losses: dict[str, Loss]) -> tuple[list[Sequence], dict[str, tuple[dict[str, float], Tensors]]]:
    """Make the batch, and our step on it with each loss; the learning rate is 0, so that weights do not change."""
    with held_port() as port:
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= world | {"MASTER_PORT": str(port)}
        policy = Policy(model, TrainerSettings(ranks=1, lr=0.0, max_grad_norm=1e12), total_steps=len(losses))
        sequences = made_up(model)
        fill_columns(policy, sequences)
        found = {name: our_step(policy, sequences, loss) for name, loss in losses.items()}
        policy.close()
    return sequences, found


def theirs(python: Path, model: Path, sequences: list[Sequence], losses: dict[str, Loss]) -> dict[str, Tensors]:
    """Return TRL's gradients with each loss, computed in its own process."""
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "folder": scratch,
            "model": str(model),
            "group_size": SIZE,
            "max_new_tokens": NEW_TOKENS,
            "sequences": [asdict(sequence) for sequence in sequences],
            "losses": {name: {"config": loss.theirs, "columns": loss.columns} for name, loss in losses.items()},
        }
        description = Path(scratch) / "job.json"
        description.write_text(json.dumps(job))
        # -P: not this folder's trl.py
        command = [str(python), "-P", str(ROOT / "benchmarks" / "trl_gradients_theirs.py"), str(description)]
        variables = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            variables.pop(name, None)
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=variables)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return {name: load_file(Path(scratch) / f"{number}.safetensors") for number, name in enumerate(losses)}


def compare(ours: Tensors, theirs: Tensors) -> dict[str, Any]:
    """Return the relative differences of the parameter that differs most, and of the whole gradient."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"these parameters have only one gradient: {sorted(ours.keys() ^ theirs.keys())}")
    apart = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours}
    worst = max(apart, key=lambda name: apart[name])
    whole = torch.cat([theirs[name].flatten() for name in ours])
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in ours])
    relative = float(difference.norm() / whole.norm())
    return {"largest": apart[worst], "parameter": worst, "all": relative, "norm": float(whole.norm())}


def table(found: dict[str, dict[str, Any]]) -> str:
    head = ["loss", "gradient's norm", "limited tokens", "difference of all", "of the parameter that differs most", ""]
    lines = [head, ["---"] * len(head)]
    for name, difference in found.items():
        shares = [f"{difference['norm']:.4g}", f"{difference['limited']:.1%}", f"{difference['all']:.1e}"]
        lines.append([name, *shares, f"{difference['largest']:.1e}", difference["parameter"]])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(s: Settings) -> None:
    losses = {name: loss for name, loss in LOSSES.items() if not s.only or name in s.only}
    python, model = trl_environment.ensure(gpu=False), make_model("main", 0, ROOT / ".cache")
    sequences, our_steps = ours(model, losses)
    trl_gradients = theirs(python, model, sequences, losses)
    found = {}
    for name, (metrics, mine) in our_steps.items():
        limited = metrics["clipped"] + (1 - metrics["importance_weight"])
        found[name] = compare(mine, trl_gradients[name]) | {"limited": limited}
    parameters = len(trl_gradients[next(iter(losses))])
    tokens = sum(len(sequence.completion) for sequence in sequences)
    summary = {"benchmark": "trl_gradients", "versions": trl_environment.versions(python), "parameters": parameters}
    summary |= {"sequences": len(sequences), "tokens": tokens, "bound": BOUND, "losses": found}
    shown = f"{table(found)}\n\n{json.dumps(short(summary))}"
    print(shown)
    if s.save:
        (ROOT / "benchmarks" / "results" / f"{s.save}.txt").write_text(
            f"# python benchmarks/trl_gradients.py\n\n{shown}\n"
        )
    if failed := [name for name, difference in found.items() if difference["largest"] > BOUND]:
        sys.exit(f"gradients differ by more than {BOUND:g}: {', '.join(failed)}")


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)

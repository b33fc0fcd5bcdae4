"""Asynchronous GRPO: train a language model by reinforcement learning while it generates.

    python recipes/grpo.py                                     this machine
    torchrun --nproc-per-node=4 recipes/grpo.py                its GPUs, or 4 CPU ranks
    torchrun --nnodes=2 ... recipes/grpo.py                    the same, on two machines

Trainer ranks and generator replicas use different devices, or share them (--colocate). Rollout workers roll out groups
of episodes on the generators and submit them to a buffer; the trainer takes a batch, makes one optimiser step, and the
new weights are transferred to the generators while they decode. No token is trained that is more than
buffer.max-policy-lag versions old.

The flags that matter most: --model, --steps, --groups-per-step, --task.name, --objective, --trainer.lr,
--trainer.ranks, --generator.replicas, --rollout.group-size, --rollout.max-new-tokens, --buffer.max-policy-lag.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch_rl import (
    ReasoningGym,
    RolloutSettings,
    Run,
    RunSettings,
    Task,
    TaskSettings,
    TrainerSettings,
    cli,
    launch,
)

# The task: the prompt is "cat -> ", the answer "tac". The reward is 1 for exactly the word spelled backward, else 0.
TASK = TaskSettings(
    name="spell_backward", config='{"min_word_len": 3, "max_word_len": 5}', template="{word} -> ", pass_mark=1.0
)


@dataclass(frozen=True)
class Settings(RunSettings):
    """Asynchronous GRPO (see the top of this file)."""

    # The tiny model of tools/make_tiny_model.py. The results of these settings are in
    # benchmarks/results/main_job_cpu.txt. A larger model needs a far lower learning rate (TRL and verl use 1e-6).
    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name of the model to train (Qwen3, Qwen3-MoE, Qwen2, Llama, Mistral, DeepSeek-V3)."""
    task: TaskSettings = field(default_factory=lambda: TASK)
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(lr=3e-4, lr_warmup_steps=5))
    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(max_new_tokens=8, concurrent_groups=64))


def task(s: Settings) -> Task:
    return ReasoningGym(s.task)  # or rows and a reward of your own: recipes/own_data.py


async def train(run: Run, s: Settings) -> None:
    # The advantage: how much better an episode is than its group; "grpo" divides by the group's standard deviation,
    # "dr_grpo" does not. The objective: PPO's clip, or `--objective NAME`, with importance weights for tokens sampled
    # by older versions (`--trainer.loss.corrections`). Instead of either you can give a function of your own, of a
    # group or of the log-probs of a micro-batch (docs/algorithms.md).
    await run.start(advantage=s.trainer.loss.advantage, objective=s.objective)
    if run.resumed is None:
        await run.evaluate()
    async for step in run.steps(s.steps):  # rollouts continue throughout
        metrics = await run.update()  # wait for the next batch, make one optimiser step
        await run.publish()  # start to publish the new version; decoding continues
        await run.log(metrics)
        await run.evaluate_after(step)
    await run.save()
    await run.evaluate()


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), task)

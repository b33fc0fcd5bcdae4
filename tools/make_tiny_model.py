"""Make the tiny model of the default recipe: a Qwen3 with about 0.5 M parameters and a character-level tokenizer.

With ``--kind moe`` it is a Qwen3-MoE with about 2 M parameters, of which each token uses as many as the dense model
has. With ``--recipe`` it also has a chat template, and learns from the demonstration conversations of a recipe.

The model starts with random weights. A short supervised run, with the project's own trainer on a task of reasoning-gym,
teaches it the format (an answer, then the end token); its answers are still often wrong, so that there is something
left for reinforcement learning. The result is cached: a second call with the same settings returns at once.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
import tyro
from rich.progress import track

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.model.tools import as_tools
from monarch_rl.runtime.network import held_port
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource
from monarch_rl.trainer.settings import TrainerSettings

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
END, PAD = "<|end|>", "<|pad|>"
CHOSEN = 2
"""Experts per token."""
CHAT_TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role[0] }}: "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
"""Chat template with ``--recipe``: short, because each character is a token."""
Example = tuple[list[int], list[bool]]
"""Token IDs, and which of them are trained."""


@dataclass(frozen=True)
class Settings:
    """Make the tiny model of the default recipe (see the top of this file)."""

    kind: Literal["dense", "moe"] = "dense"
    """`dense` is a Qwen3; `moe` a Qwen3-MoE with 8 experts per layer, 2 of them per token."""
    output: Path | None = None
    """Folder of the model, in Hugging Face's format; None means .cache/tiny-qwen3, or .cache/tiny-qwen3-moe."""
    task: TaskSettings = TaskSettings(
        name="spell_backward", config='{"min_word_len": 3, "max_word_len": 5}', template="{word} -> "
    )
    """The task of the supervised run, which uses questions of the warm-up split, none of them held out."""
    recipe: Path | None = None
    """Recipe to learn from instead of the task: from its `demonstration(index)`, the messages of a conversation, and
    its `TOOLS`. The model then has a chat template."""
    hidden_size: int = 128
    """Width of the model."""
    head_size: int = 32
    """Width of an attention head."""
    layers: int = 3
    """Number of transformer blocks."""
    steps: int = 40
    """Optimizer steps of the supervised run."""
    examples_per_step: int = 128
    """Questions with answers per step."""
    lr: float = 3e-3
    """AdamW's peak learning rate; it decays linearly to 0."""
    ranks: int = 2
    """Trainer processes."""
    seed: int = 0
    """Seed of the random weights."""
    force: bool = False
    """Make the model again even if it exists."""

    @property
    def folder(self) -> Path:
        return self.output or Path(".cache/tiny-qwen3" + ("-moe" if self.kind == "moe" else ""))


def write_random_model(folder: Path, settings: Settings) -> None:
    """Write a random model and its character-level tokenizer as a Hugging Face folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    vocabulary = {token: i for i, token in enumerate([PAD, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    template = CHAT_TEMPLATE if settings.recipe else None
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=template
    ).save_pretrained(folder)
    torch.manual_seed(settings.seed)
    width = 3 * settings.hidden_size
    shape: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": settings.hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": settings.head_size,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": settings.kind == "dense",  # SGLang does not tie those of a Qwen3-MoE
        "eos_token_id": vocabulary[END],
        "pad_token_id": vocabulary[PAD],
        "bos_token_id": None,
        "initializer_range": 0.05,
    }
    if settings.kind == "dense":
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
        return
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": width // CHOSEN,
        "norm_topk_prob": True,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).save_pretrained(folder)


def questions(tokenizer: Any, task: TaskSettings) -> Callable[[int], Example]:
    """By index: a question, its answer and the end token; the question is not trained."""
    source = TaskSource(task, "warm_up")

    def example(index: int) -> Example:
        item = source.item(index)
        if not item.answer:
            raise ValueError(f"task.name: {task.name} has no answers of its own to learn from, only a scorer")
        prompt, answer = tokenizer.encode(item.prompt), [*tokenizer.encode(item.answer), tokenizer.eos_token_id]
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    return example


def conversations(tokenizer: Any, recipe: Path) -> Callable[[int], Example]:
    """By index: a demonstration conversation of the recipe; only the assistant's turns are trained."""
    shown = runpy.run_path(str(recipe))
    schemas = list(as_tools(shown.get("TOOLS", ())).schemas) or None

    def example(index: int) -> Example:
        rows = [{"role": message.role, "content": message.content} for message in shown["demonstration"](index)]
        encoded = tokenizer.apply_chat_template(
            rows, tools=schemas, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], [bool(learned) for learned in encoded["assistant_masks"]]

    return example


def make_examples(folder: Path, settings: Settings) -> list[Episode]:
    """The examples of the supervised run as episodes, in which the tokens to train are trainable."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    recipe = settings.recipe
    example = questions(tokenizer, settings.task) if recipe is None else conversations(tokenizer, recipe)
    examples = []
    for index in range(settings.steps * settings.examples_per_step):
        ids, learned = example(index)
        turn = Turn(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            trainable=np.asarray(learned),
        )
        examples.append(Episode([turn], reward=1.0, finish_reason="stop"))
    return examples


def warm_start(rank: int, folder: Path, target: Path, examples: list[Episode], settings: Settings, port: int) -> None:
    """One trainer rank of the supervised run."""
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    world = settings.ranks
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from monarch_rl.trainer.batch import pack
    from monarch_rl.trainer.objective import supervised
    from monarch_rl.trainer.policy import Policy

    trainer = TrainerSettings(ranks=world, lr=settings.lr, lr_warmup_steps=10, lr_min_factor=0.0)
    policy = Policy(folder, trainer, total_steps=settings.steps)
    metrics: dict[str, float] = {}
    started = time.monotonic()
    for step in track(range(settings.steps), "supervised warm start", disable=rank != 0):
        batch = examples[step * settings.examples_per_step : (step + 1) * settings.examples_per_step]
        tokens = sum(episode.num_trainable for episode in batch)
        mine = batch[rank::world]
        weights = torch.full((len(mine),), 1.0 / tokens)
        metrics = policy.update([pack(mine, torch.ones(len(mine)), weights, 0, policy.device)], supervised)
        if rank == 0 and not sys.stdout.isatty() and (step + 1) % max(settings.steps // 10, 1) == 0:
            left = (time.monotonic() - started) / (step + 1) * (settings.steps - step - 1)
            print(f"supervised step {step + 1}/{settings.steps}, about {left:.0f} s left", flush=True)
    policy.save(target)
    policy.close()
    if rank == 0:
        print(f"cross-entropy of the answers' tokens at the end: {-metrics['logprob']:.3f}")


@contextmanager
def scratch_folder(folder: Path) -> Iterator[str]:
    """A temporary folder next to ``folder``, for the duration of the block. Exits with a message if none can be
    created."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:  # a read-only file system, another user's folder, a full disk
        sys.exit(
            f"the tiny model cannot be made in {folder.parent} ({error.strerror or error}): make that folder writable, "
            "or make the model elsewhere (tools/make_tiny_model.py --output FOLDER) and use it with --model FOLDER"
        )
    with scratch:
        yield scratch.name


def described(settings: Settings) -> str:
    """Everything that determines the model, as JSON."""
    made_with = {k: v for k, v in asdict(settings).items() if k not in ("output", "force", "recipe")}
    if settings.recipe is not None:
        made_with["recipe"] = settings.recipe.read_text()
    return json.dumps(made_with, sort_keys=True)


def main(settings: Settings) -> None:
    folder = settings.folder
    stamp = folder / "made_with.stamp"
    made_with = described(settings)
    if not settings.force and stamp.is_file() and stamp.read_text() == made_with:
        print(f"{folder} exists already")
        return
    started = time.monotonic()
    with scratch_folder(folder) as scratch:
        born, trained = Path(scratch) / "born", Path(scratch) / "trained"
        write_random_model(born, settings)
        examples = make_examples(born, settings)
        with held_port() as port:
            arguments = (born, trained, examples, settings, port)
            multiprocessing.spawn(warm_start, args=arguments, nprocs=settings.ranks)
        (trained / stamp.name).write_text(made_with)
        shutil.rmtree(folder, ignore_errors=True)
        trained.rename(folder)
    print(f"made {folder} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(tyro.cli(Settings, description=__doc__))

"""A character-level tokenizer, a stand-in for the generators, and scores that misbehave."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.tasks.reasoning_gym import Item, ReasoningGym, TaskSettings, extract_answer
from monarch_rl.tasks.task import GroupFull, Outcome, Policy, Task

CHARACTERS = "\n !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_abcdefghijklmnopqrstuvwxyz{|}"
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, chat: bool = False) -> str:
    """A tokenizer with one id a character, in a Hugging Face folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    raw = Tokenizer(models.WordLevel({**vocabulary, "?unknown": len(vocabulary)}, unk_token="?unknown"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, additional_special_tokens=["<|start|>"], clean_up_tokenization_spaces=False
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id]}))
    return str(folder)


class StandInGenerator(Actor):
    """Draws one digit and the stop token. Version and digits are known, so that tests can foretell the episodes."""

    def __init__(self, stop_token: int) -> None:
        self._stop_token = stop_token
        self._version = 0
        self._broken = ""
        self._hold = asyncio.Event()
        self._hold.set()
        self.seen: list[tuple[list[int], Sampling, int]] = []

    @concurrent_endpoint
    async def serve(self, version: int) -> None:
        self._version = version

    @concurrent_endpoint
    async def break_down(self, why: str) -> None:
        self._broken = why

    @concurrent_endpoint
    async def hold(self, held: bool) -> None:
        """While held, calls wait."""
        if held:
            self._hold.clear()
        else:
            self._hold.set()

    @concurrent_endpoint
    async def calls(self) -> list[tuple[list[int], Sampling, int]]:
        return self.seen

    @concurrent_endpoint
    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        if self._broken:
            raise RuntimeError(self._broken)
        self.seen.append((prompt_ids, sampling, group))
        place = len(self.seen)
        first = self._version
        await self._hold.wait()
        await asyncio.sleep(0)
        digit = CHARACTERS.index(str((sampling.seed or place) % 10))
        versions = np.asarray([first, self._version], np.int32)
        return Completion(
            np.asarray([digit, self._stop_token], np.int32), np.full(2, -1.0, np.float32), versions, "stop"
        )


class Handle:
    """What a worker holds of the generators: picklable, with actor handles inside."""

    def __init__(self, actor: StandInGenerator) -> None:
        self._actor = actor

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        return await self._actor.generate.call_one(prompt_ids, sampling, group)


def touchy_score(text: str) -> float:
    """0 raises, 1 hangs, 2 ends its process, 3 ends it in Python's way; other digits are their own score."""
    match extract_answer(text):
        case "0":
            raise KeyError("no such answer")
        case "1":
            time.sleep(600)
        case "2":
            os._exit(9)
        case "3":
            raise SystemExit(1)
    return float(text)


def crashes(text: str) -> float:
    """As a library in C may."""
    return float(ctypes.string_at(0)[0])


def hangs_in_c(text: str) -> float:
    """No handler in Python runs while it does: SIGTERM alone does not end it."""
    ctypes.CDLL(None).sleep(600)
    return 0.0


def prints(text: str) -> float:
    """Through Python, through the file descriptor, and by a program of its own."""
    print(f"python says {text}")
    os.write(2, b"the descriptor says something\n")
    subprocess.run(["echo", "a program says something"], check=True, timeout=60)
    return 1.0


def prints_much(size: int) -> float:
    for _ in range(size // 1000):
        print("x" * 999)
    return 1.0


def raises_much(size: int) -> float:
    raise ValueError("y" * size)


def waits_for(file: str) -> float:
    while not Path(file).exists():
        time.sleep(0.01)
    return 1.0


def hangs_once(folder: str) -> float:
    """Leaves its process id as a file's name and hangs, the first time."""
    if not any(Path(folder).iterdir()):
        (Path(folder) / str(os.getpid())).touch()
        time.sleep(600)
    return 3.0


SUMS = TaskSettings(
    config='{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}',
    template="{expression} =",
    pass_mark=1.0,
    train_size=50,
    held_out_size=20,
)
SUMS_TASK = ReasoningGym(SUMS)


async def _touchy(item: Item, policy: Policy) -> Outcome:
    reply = await policy.reply(item.prompt)
    return await policy.in_scorer(touchy_score, reply.text)


async def _unplayable(item: Item, policy: Policy) -> float:
    Path("/no such tool").read_text()
    raise AssertionError


TOUCHY = SUMS_TASK.played_by(_touchy)
"""Scores with :func:`touchy_score`."""
UNPLAYABLE = SUMS_TASK.played_by(_unplayable)
"""Its episodes need a tool that is not there."""


async def _digit(item: str, policy: Policy) -> dict[str, float]:
    reply = await policy.reply(item)
    reply.reward = policy.in_scorer(answer, float(reply.text) / 10)
    return {"digit": float(reply.text)}


def _places(item: str, outcomes: Sequence[Outcome]) -> list[float]:
    """Of each episode: its place in its group, by the digit that it answered."""
    order = sorted(range(len(outcomes)), key=lambda place: (outcomes[place].answer, place))
    assert all(outcome.parts["digit"] == float(outcome.answer) for outcome in outcomes)
    return [float(order.index(place)) for place in range(len(outcomes))]


async def _uncompared(item: str, outcomes: Sequence[Outcome]) -> list[float]:
    raise KeyError(item)


async def _branching(item: str, policy: Policy) -> list[float]:
    """Each branch is worth their number."""
    await policy.reply(item)
    branches = list[Policy]()
    with suppress(GroupFull):
        while len(branches) < 50:
            branches.append(policy.fork())
    return [float(len(branches))] * len(branches)


def _word(cursor: int) -> str:
    return f"word {cursor} "


WORDS = Task(_word, _digit, {"words": ["held out "] * 4}, "words", group_rewards=_places)
"""Each group has rewards that compare its episodes."""
BRANCHING = Task(_word, _branching, {"words": ["held out "] * 4}, "words")
UNCOMPARED = Task(_word, _digit, name="words", group_rewards=_uncompared)


class Worker(RolloutWorker):
    @concurrent_endpoint
    async def process_id(self) -> int:
        return os.getpid()


def forks(value: float) -> float:
    """Both copies return."""
    return value + (os.fork() == 0)


def recurses(depth: int) -> float:
    return recurses(depth + 1)


def in_many_parts(parts: int) -> dict[str, float]:
    return {f"part {number}": 1.0 for number in range(parts)}


def answer(value: float) -> float:
    return value


def in_parts() -> Outcome:
    """Numbers of NumPy, which JSON does not know."""
    reward: Any = np.float32(0.5)
    return Outcome(reward, {"format": reward / 2, "answer": True})


def own_process_id() -> float:
    return float(os.getpid())


def heavy_modules() -> float:
    """How many of the heavy libraries a scoring process has loaded."""
    import sys

    return float(sum(name in sys.modules for name in ("torch", "transformers", "sglang")))


def not_a_number() -> Any:
    return "much"


def fail_to_start() -> None:
    raise RuntimeError("no data here")


def in_small_steps(begun: str) -> Outcome:
    """A second of waiting, of which a stop of the process loses a twentieth. Writes a line to a file when it begins."""
    with open(begun, "a") as file:
        file.write("begun\n")
    for _ in range(20):
        time.sleep(0.05)
    return Outcome(5.0)

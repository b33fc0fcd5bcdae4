"""A character-level tokenizer, a stand-in for the generators, and tasks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from monarch.actor import Actor

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import GroupFull
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.tasks.reasoning_gym import Item, ReasoningGym, TaskSettings
from monarch_rl.tasks.task import Outcome, Policy, Task
from tests.rollout.scores import answer, touchy_score

CHARACTERS = "\n !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_abcdefghijklmnopqrstuvwxyz{|}"
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, chat: bool = False) -> str:
    """A tokenizer with one id per character, in a Hugging Face folder."""
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
    """Generates one digit and the stop token. Version and digits are predictable for tests."""

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
    """A worker's handle of the generators: picklable, with actor handles inside."""

    def __init__(self, actor: StandInGenerator) -> None:
        self._actor = actor

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        return await self._actor.generate.call_one(prompt_ids, sampling, group)

    async def generate_group(
        self, prompt_ids: list[int], samplings: Sequence[Sampling], group: int
    ) -> list[Completion | Exception]:
        return await asyncio.gather(*(self.generate(prompt_ids, sampling, group) for sampling in samplings))


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


async def _broken(item: Item, policy: Policy) -> float:
    Path("/no such tool").read_text()
    raise AssertionError


TOUCHY = SUMS_TASK.with_episode(_touchy)
"""Scores with :func:`touchy_score`."""
BROKEN = SUMS_TASK.with_episode(_broken)
"""Its episodes need a tool that does not exist."""


async def _digit(item: str, policy: Policy) -> dict[str, float]:
    reply = await policy.reply(item)
    reply.reward = policy.in_scorer(answer, float(reply.text) / 10)
    return {"digit": float(reply.text)}


def _places(item: str, outcomes: Sequence[Outcome]) -> list[float]:
    """The rank of each episode in its group, by its answered digit."""
    order = sorted(range(len(outcomes)), key=lambda place: (outcomes[place].answer, place))
    assert all(outcome.parts["digit"] == float(outcome.answer) for outcome in outcomes)
    return [float(order.index(place)) for place in range(len(outcomes))]


async def _uncompared(item: str, outcomes: Sequence[Outcome]) -> list[float]:
    raise KeyError(item)


async def _branching(item: str, policy: Policy) -> list[float]:
    """The value of each branch is the number of branches."""
    await policy.reply(item)
    branches = list[Policy]()
    with suppress(GroupFull):
        while len(branches) < 50:
            branches.append(policy.fork())
    return [float(len(branches))] * len(branches)


def _word(cursor: int) -> str:
    return f"word {cursor} "


WORDS = Task(_word, _digit, {"words": ["held out "] * 4}, "words", group_rewards=_places)
"""Its group rewards compare the episodes of a group."""
BRANCHING = Task(_word, _branching, {"words": ["held out "] * 4}, "words")
UNCOMPARED = Task(_word, _digit, name="words", group_rewards=_uncompared)


class Worker(RolloutWorker):
    @concurrent_endpoint
    async def process_id(self) -> int:
        return os.getpid()

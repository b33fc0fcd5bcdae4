"""Supervised rows of prompt and answer: choosing the rows of a step, sharing them among ranks, and packing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches
from monarch_rl.episode.episode import NO_VERSION, Episode, Turn
from monarch_rl.episode.shard import MiniBatch, SupervisedShard
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.tasks.orders import ShuffledOrder
from monarch_rl.tasks.questions import prompt_of
from monarch_rl.tasks.rows import Row, read_all
from monarch_rl.tasks.template import DoesNotFit, as_text

if TYPE_CHECKING:
    import torch

    from monarch_rl.trainer.batch import MicroBatch

PROMPT, ANSWER = "prompt", "answer"
"""The columns of a row."""
Tokenise = Callable[[Row], tuple[list[int], list[int]]]
"""The ids of a row's prompt and answer."""


@dataclass(frozen=True)
class SupervisedPlan:
    """The supervised rows of a run, and how a trainer rank uses them."""

    rows: ByValue[Sequence[Row]]
    rows_per_step: int
    share: float = 1.0
    """The rows' share of a step's loss. 1: separate steps on rows alone."""
    lr_factor: float = 1.0
    """Factor on the learning rate of steps on rows alone."""
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template."""
    allow_control_tokens: bool = False
    """As in :class:`~monarch_rl.model.chat.ChatTemplate`."""


class SupervisedRows:
    """The rows of one plan, in a new shuffled order for each epoch.

    The rows of a step depend only on the plan's rows and the cursor, the number of rows trained before.

    Args:
        tokenise: see :data:`Tokenise`.
        tokens_per_microbatch: most tokens of a micro-batch.
        data_ranks: number of shares that a step is divided into.
    """

    def __init__(self, plan: SupervisedPlan, tokenise: Tokenise, tokens_per_microbatch: int, data_ranks: int) -> None:
        self.plan, self._rows = plan, plan.rows.load()
        self._tokenise, self._tokens_per_microbatch, self._data_ranks = tokenise, tokens_per_microbatch, data_ranks
        self._order = ShuffledOrder(range(len(self._rows)), "supervised ")

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, cursor: int, data_rank: int, minibatches: int = 1) -> SupervisedShard:
        """One rank's share of a step's rows, which start at ``cursor``. All ranks have the same number of balanced
        micro-batches: see :func:`plan_microbatches`.

        Raises:
            ValueError: a row has no prompt or answer, or more tokens than a micro-batch; names the row, from 1.
        """
        count = self.plan.rows_per_step
        places = [self._order.place(cursor + number) for number in range(count)]
        rows = [self._tokens(place) for place in places]
        parts: list[MiniBatch] = []
        lengths: list[list[tuple[int, int]]] = []
        own_places: list[list[int]] = []
        token_ids: list[int] = []
        for start, end in pairwise(number * count // minibatches for number in range(minibatches + 1)):
            groups = [SharingGroup([len(prompt) + len(answer)], [0], [0]) for prompt, answer in rows[start:end]]
            own = plan_microbatches(groups, self._tokens_per_microbatch, self._data_ranks)[data_rank]
            parts.append(MiniBatch(len(own), sum(len(answer) for _, answer in rows[start:end]), end - start))
            for microbatch in own:
                own_places.append([places[start + group] for group, _ in microbatch])
                chosen = [rows[start + group] for group, _ in microbatch]
                lengths.append([(len(prompt) + len(answer), len(prompt)) for prompt, answer in chosen])
                token_ids += [token for prompt, answer in chosen for token in (*prompt, *answer)]
        return SupervisedShard(
            share=self.plan.share,
            lr_factor=self.plan.lr_factor,
            minibatches=parts,
            lengths=lengths,
            rows=own_places,
            token_ids=np.asarray(token_ids, np.int32),
        )

    def _tokens(self, place: int) -> tuple[list[int], list[int]]:
        try:
            prompt, answer = self._tokenise(self._rows[place])
        except (KeyError, ValueError) as error:
            raise ValueError(f"supervised row {place + 1} cannot be trained: {error}") from error
        if not prompt:
            raise ValueError(f"supervised row {place + 1} cannot be trained: its prompt has no tokens")
        if (tokens := len(prompt) + len(answer)) > self._tokens_per_microbatch:
            raise ValueError(
                f"supervised row {place + 1} has {tokens} tokens: shorten it or leave it out, or raise "
                f"trainer.tokens-per-microbatch, which is {self._tokens_per_microbatch}"
            )
        return prompt, answer


def load_rows(plan: SupervisedPlan, model: Path, tokens_per_microbatch: int, data_ranks: int) -> SupervisedRows:
    """Load the rows on a trainer rank, to be rendered by the model's chat template. Its imports take seconds.

    Raises:
        ValueError: the rows cannot be read.
    """
    from monarch_rl.model.chat import ChatTemplate
    from monarch_rl.model.conversation import Conversation

    template = ChatTemplate(str(model), plan.chat_options, allow_control_tokens=plan.allow_control_tokens)

    def tokenise(row: Row) -> tuple[list[int], list[int]]:
        return Conversation(template).add(prompt_of(f"{{{PROMPT}}}", row)), template.turn(as_text(row[ANSWER]))

    return SupervisedRows(plan, tokenise, tokens_per_microbatch, data_ranks)


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError if there are no rows, or some have no prompt or answer; says which."""
    if not len(rows):
        raise ValueError("there are no supervised rows to train on")
    if isinstance(rows[0], Mapping) and not {PROMPT, ANSWER} <= rows[0].keys():
        raise ValueError(
            f"supervised rows need the columns {PROMPT} (text, or messages) and {ANSWER} (text), but the first one has "
            f"{', '.join(map(str, rows[0])) or 'none'}: rename its columns"
        )
    for _ in read_all(rows, _check_row, "supervised rows", "cannot be trained"):
        pass


def _check_row(row: Row) -> None:
    prompt_of(f"{{{PROMPT}}}", row)
    try:
        as_text(row.get(ANSWER))
    except DoesNotFit as error:
        raise error.of(ANSWER) from None


def pack_rows(shard: SupervisedShard, device: torch.device) -> list[list[MicroBatch]]:
    """The micro-batches of one trainer rank, by mini-batch. The token weights of a mini-batch add up, over all ranks,
    to the rows' share of the loss."""
    import torch

    from monarch_rl.trainer.batch import pack

    episodes, microbatches = iter(_episodes(shard)), iter(shard.lengths)
    parts: list[list[MicroBatch]] = []
    for count, tokens, _ in shard.minibatches:
        part = []
        for _ in range(count):
            rows = [next(episodes) for _ in next(microbatches)]
            weights = torch.full((len(rows),), shard.share / max(tokens, 1))
            part.append(replace(pack(rows, torch.zeros(len(rows)), weights, 0, device), supervised=True))
        parts.append(part)
    return parts


def _episodes(shard: SupervisedShard) -> list[Episode]:
    """Each row as an episode of one turn, whose answer is trained."""
    found, start = [], 0
    for tokens, prompt in (row for rows in shard.lengths for row in rows):
        ids, versions = shard.token_ids[start : start + tokens], np.full(tokens, NO_VERSION, np.int32)
        turn = Turn(ids, np.zeros(tokens, np.float32), versions, np.arange(tokens) >= prompt)
        found.append(Episode([turn], 0.0, "stop"))
        start += tokens
    return found


def mixed(
    minibatches: Sequence[Sequence[MicroBatch]], shard: SupervisedShard, device: torch.device
) -> list[list[MicroBatch]]:
    """Add its rows to each mini-batch. The loss becomes (1 - share) x the batch's + share x the rows'."""
    for batch in (batch for part in minibatches for batch in part):
        batch.weights = (1 - shard.share) * batch.weights
    rows = pack_rows(shard, device)
    return [[*part, *of_rows] for part, of_rows in zip(minibatches, rows, strict=True)]

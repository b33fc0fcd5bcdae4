"""What an engine says of tokens that it is given: their log-probs, the most likely ones beside them, a reward.

These requests go SGLang's own way (``TokenizerManager.generate_request``), beside those that draw: nothing is drawn for
them, so what ``requests.py`` saves per token is not there to be saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monarch_rl.episode.sampling import GenerationError, TopLogprobs
from monarch_rl.generator.requests import BusyClock
from monarch_rl.generator.settings import recipe_flags
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs

FIRST_TOKEN = 0.0
"""Stands for the log-prob of the first token of all, which nothing precedes."""


class Readings:
    """The requests of one engine for which nothing is drawn.

    Args:
        sglang: the engine.
        clock: counts when the engine is busy with them.
    """

    def __init__(self, sglang: SglangEngine, clock: BusyClock) -> None:
        self._sglang, self._clock = sglang, clock
        self.tokens = self.requests = 0
        """Read and answered since the start."""

    async def logprobs(self, ids: list[int], start: int = 0, temperature: float = 1.0) -> np.ndarray:
        """Log-probs of given tokens, each after those before it.

        Args:
            ids: a sequence.
            start: place in it of the first token that is asked about.
            temperature: above 0; logits are divided by it.

        Returns:
            float32[len(ids) - start], natural log, over the whole vocabulary; 0 for the first token of all (``start``
            0), which nothing precedes.

        Raises GenerationError if the engine refuses the request, EngineStopped if it is gone.
        """
        self._check(ids, start, temperature)
        return _values((await self._read(ids, start, temperature))["input_token_logprobs"], len(ids), start)

    async def top_logprobs(self, ids: list[int], k: int, start: int = 1, temperature: float = 1.0) -> TopLogprobs:
        """The ``k`` most likely tokens at the places of given tokens, from ``start`` (at least 1) on.

        Entry j tells the distribution that ``ids[start + j]`` would be drawn from. Raises as :meth:`logprobs` does.
        """
        self._check(ids, start, temperature)
        if start < 1:
            raise GenerationError(
                "the most likely tokens are asked for from place 0, which nothing precedes: from 1 on"
            )
        if k < 1:
            raise GenerationError(f"the {k} most likely tokens are asked for: give at least 1")
        meta = await self._read(ids, start, temperature, k)
        rows = meta["input_top_logprobs"][1:]
        values = np.array([[value for value, _, _ in row] for row in rows], np.float32)
        indices = np.array([[index for _, index, _ in row] for row in rows], np.int32)
        if values.shape != (len(ids) - start, k):
            raise GenerationError(
                f"SGLang reported {values.shape} top log-probs, of {len(ids) - start} x {k} asked for"
            )
        return TopLogprobs(indices, values, _values(meta["input_token_logprobs"], len(ids), start))

    async def rewards(self, ids: list[int]) -> np.ndarray:
        """How a model with a reward head rates a sequence: float32[labels]. Raises as :meth:`logprobs` does."""
        self._check(ids, 0, 1.0)
        answer = await self._answer(io_structs().EmbeddingReqInput(input_ids=ids), ids)
        rewards = np.array(answer["embedding"], np.float32)
        if not np.isfinite(rewards).all():
            raise GenerationError(f"the reward head returned {rewards.tolist()}")
        return rewards

    def _check(self, ids: list[int], start: int, temperature: float) -> None:
        if not ids or not 0 <= start < len(ids):
            raise GenerationError(f"place {start} is none of the {len(ids)} tokens that are given")
        if not 0 < temperature < float("inf"):
            raise GenerationError(f"log-probs are asked for at temperature {temperature}: it must be above 0")

    async def _read(self, ids: list[int], start: int, temperature: float, k: int = 0) -> dict[str, Any]:
        """SGLang's ``meta_info`` of a request that draws nothing."""
        request = io_structs().GenerateReqInput(
            input_ids=ids,
            sampling_params={"max_new_tokens": 0, "temperature": temperature},
            return_logprob=True,
            logprob_start_len=max(0, start - 1),  # SGLang's first entry is the token that the others follow
            top_logprobs_num=k,
        )
        meta: dict[str, Any] = (await self._answer(request, ids))["meta_info"]
        return meta

    async def _answer(self, request: Any, ids: list[int]) -> dict[str, Any]:
        """Raises GenerationError with SGLang's words if it refuses the request, EngineStopped if it is gone."""
        self._sglang.check()
        self._clock.enter()
        try:
            reading = self._first(request)
            answer: dict[str, Any] = await self._sglang.or_stopped(reading, f"{len(ids)} tokens to be read")
        except ValueError as error:  # SGLang's way to refuse
            raise GenerationError(recipe_flags(str(error))) from error
        finally:
            self._clock.leave()
        self.tokens += len(ids)
        self.requests += 1
        return answer

    async def _first(self, request: Any) -> dict[str, Any]:
        async for answer in self._sglang.manager.generate_request(request, None):
            reason = answer["meta_info"].get("finish_reason")
            if isinstance(reason, dict) and reason.get("type") == "abort":
                raise GenerationError(recipe_flags(f"the engine ended the request with {reason}"))
            return answer  # type: ignore[no-any-return]
        raise GenerationError("SGLang answered nothing")


def _values(rows: list[Any], tokens: int, start: int) -> np.ndarray:
    """float32[tokens - start] from SGLang's rows of log-prob, id and text, of which the first has no log-prob."""
    values = [value for value, *_ in rows]
    values = [FIRST_TOKEN, *values[1:]] if start == 0 else values[1:]
    if len(values) != tokens - start or None in values:
        raise GenerationError(f"SGLang reported log-probs of {len(values)} tokens, {tokens - start} were asked for")
    return np.array(values, np.float32)

"""Requests that read given tokens: their log-probs, the most likely tokens at their positions, or a reward.

These requests use SGLang's own path (``TokenizerManager.generate_request``), alongside requests that generate: they
sample no tokens, so there is no cost per sampled token for ``requests.py`` to save.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monarch_rl.episode.sampling import TopLogprobs
from monarch_rl.errors import GenerationError
from monarch_rl.generator.requests import BusyClock
from monarch_rl.generator.settings import recipe_flags
from monarch_rl.generator.sglang_engine import SglangEngine, io_structs

FIRST_TOKEN = 0.0
"""Placeholder log-prob of a sequence's first token, which nothing precedes."""


class Readings:
    """The requests of one engine that read given tokens and generate none.

    Args:
        sglang: the engine.
        clock: counts the engine's busy time.
    """

    def __init__(self, sglang: SglangEngine, clock: BusyClock) -> None:
        self._sglang, self._clock = sglang, clock
        self.tokens = self.requests = 0
        """Tokens read and requests answered since the start."""

    async def logprobs(self, ids: list[int], start: int = 0, temperature: float = 1.0) -> np.ndarray:
        """Log-probs of given tokens, each conditioned on the tokens before it.

        Args:
            ids: the whole sequence.
            start: position of the first token whose log-prob is returned.
            temperature: above 0; logits are divided by it.

        Returns:
            float32[len(ids) - start], natural log, over the whole vocabulary; 0 for the first token of the sequence
            (``start`` 0), which nothing precedes.

        Raises GenerationError if the engine refuses the request, EngineStopped if the engine is gone.
        """
        self._check(ids, start, temperature)
        return _values((await self._read(ids, start, temperature))["input_token_logprobs"], len(ids), start)

    async def top_logprobs(self, ids: list[int], k: int, start: int = 1, temperature: float = 1.0) -> TopLogprobs:
        """The ``k`` most likely tokens at the positions of given tokens, from ``start`` (at least 1) on.

        Entry j describes the distribution from which ``ids[start + j]`` would be sampled. Raises the same errors as
        :meth:`logprobs`.
        """
        self._check(ids, start, temperature)
        if start < 1:
            raise GenerationError(
                f"top log-probs cannot start at position {start}: nothing precedes position 0, so start at 1 or later"
            )
        if k < 1:
            raise GenerationError(f"top log-probs of {k} tokens were requested: request at least 1")
        meta = await self._read(ids, start, temperature, k)
        rows = meta["input_top_logprobs"][1:]
        values = np.array([[value for value, _, _ in row] for row in rows], np.float32)
        indices = np.array([[index for _, index, _ in row] for row in rows], np.int32)
        if values.shape != (len(ids) - start, k):
            raise GenerationError(
                f"SGLang reported top log-probs of shape {values.shape}, but ({len(ids) - start}, {k}) were requested"
            )
        return TopLogprobs(indices, values, _values(meta["input_token_logprobs"], len(ids), start))

    async def rewards(self, ids: list[int]) -> np.ndarray:
        """Output of a model's reward head for a sequence: float32[labels]. Raises the same errors as
        :meth:`logprobs`."""
        self._check(ids, 0, 1.0)
        answer = await self._answer(io_structs().EmbeddingReqInput(input_ids=ids), ids)
        rewards = np.array(answer["embedding"], np.float32)
        if not np.isfinite(rewards).all():
            raise GenerationError(f"the reward head returned {rewards.tolist()}")
        return rewards

    def _check(self, ids: list[int], start: int, temperature: float) -> None:
        if not ids or not 0 <= start < len(ids):
            raise GenerationError(f"start {start} is not a position of the {len(ids)} given tokens")
        if not 0 < temperature < float("inf"):
            raise GenerationError(
                f"log-probs at temperature {temperature} were requested: it must be above 0 and finite"
            )

    async def _read(self, ids: list[int], start: int, temperature: float, k: int = 0) -> dict[str, Any]:
        """SGLang's ``meta_info`` of a request that generates nothing."""
        request = io_structs().GenerateReqInput(
            input_ids=ids,
            sampling_params={"max_new_tokens": 0, "temperature": temperature},
            return_logprob=True,
            logprob_start_len=max(0, start - 1),  # SGLang's first entry is the token before those with log-probs
            top_logprobs_num=k,
        )
        meta: dict[str, Any] = (await self._answer(request, ids))["meta_info"]
        return meta

    async def _answer(self, request: Any, ids: list[int]) -> dict[str, Any]:
        """Await SGLang's answer.

        Raises GenerationError with SGLang's message if SGLang refuses the request, EngineStopped if the engine is gone.
        """
        self._sglang.check()
        self._clock.enter()
        try:
            reading = self._first(request)
            answer: dict[str, Any] = await self._sglang.or_stopped(reading, f"{len(ids)} tokens to be read")
        except ValueError as error:  # SGLang refuses a request by a ValueError
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
        raise GenerationError("SGLang ended the request without an answer")


def _values(rows: list[Any], tokens: int, start: int) -> np.ndarray:
    """float32[tokens - start]: log-probs from SGLang's rows of (log-prob, id, text); the first row has no log-prob."""
    values = [value for value, *_ in rows]
    values = [FIRST_TOKEN, *values[1:]] if start == 0 else values[1:]
    if len(values) != tokens - start or None in values:
        raise GenerationError(f"SGLang reported log-probs of {len(values)} tokens, but {tokens - start} were requested")
    return np.array(values, np.float32)

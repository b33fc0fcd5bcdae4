"""What ends a turn beside the model's own end token: texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from monarch_rl.episode.sampling import Completion, Sampling


class Stops:
    """Stop strings, for engines that know only tokens.

    The engine ends a turn at a token that holds the whole text. Where it comes in several tokens, the engine goes on,
    and what follows is left out afterwards: a beginning of what was drawn, with the log-probs that it was drawn with.

    Args:
        token_texts: the text of each token id; called once, when the first stop string is used.
        decode: the text of some ids.
    """

    def __init__(self, token_texts: Callable[[], list[str]], decode: Callable[[list[int]], str]) -> None:
        self._token_texts = functools.cache(token_texts)
        self._decode = decode
        self._ids_with = functools.lru_cache(maxsize=64)(self._find)

    def applied(
        self, sampling: Sampling, max_new_tokens: int | None, temperature: float | None, stops: Sequence[str]
    ) -> Sampling:
        """``sampling`` with what one turn asks for; None is as it is. Raises ValueError if that cannot be asked."""
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if temperature is not None and not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must not be negative, got {temperature}")
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        ids = {id for stop in stops for id in self._ids_with(stop)}
        return replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=sampling.temperature if temperature is None else temperature,
            stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *ids})),
        )

    def _find(self, stop: str) -> tuple[int, ...]:
        return tuple(index for index, text in enumerate(self._token_texts()) if stop in text)

    def cut(self, completion: Completion, stops: Sequence[str]) -> Completion:
        """``completion`` up to the token that completes the first stop string; the whole if there is none."""
        ids = completion.token_ids.tolist()
        if not self._holds(ids, stops):
            return completion
        low, high = 1, len(ids)  # the fewest tokens whose text holds one
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(ids[:middle], stops) else (middle + 1, high)
        left_out = len(ids) - low
        routes, kept = completion.expert_routes, completion.kept_sets
        return Completion(
            completion.token_ids[:low],
            completion.logprobs[:low],
            completion.policy_versions[:low],
            "stop",
            None if kept is None else kept[:low],
            routes if routes is None or not left_out else routes[:-left_out],
        )

    def _holds(self, ids: list[int], stops: Sequence[str]) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in stops)

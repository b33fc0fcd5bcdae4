"""What ends a turn beside the model's own end token: texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from monarch_rl.episode.sampling import Completion

MOST_IDS = 1000
"""For a string that more tokens hold, such as a letter, turns are only cut afterwards: ids travel with a request."""


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
        self.token_ids = functools.lru_cache(maxsize=64)(self._find)
        """The ids at which an engine ends a turn for these strings; none for those that very many tokens hold. Raises
        ValueError if one is empty."""

    def _find(self, stops: tuple[str, ...]) -> tuple[int, ...]:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        texts = self._token_texts() if stops else []
        found: set[int] = set()
        for stop in stops:
            ids = [index for index, text in enumerate(texts) if stop in text]
            if len(ids) <= MOST_IDS:
                found.update(ids)
        return tuple(sorted(found))

    def cut(self, completion: Completion, stops: Sequence[str], begun: Sequence[int] = ()) -> Completion:
        """``completion`` up to the token that completes the first stop string; the whole if there is none. What the
        turn had ``begun`` with may hold a part of the string."""
        ids = completion.token_ids.tolist()
        if not self._holds([*begun, *ids], stops):
            return completion
        low, high = 1, len(ids)  # the fewest tokens whose text holds one
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds([*begun, *ids[:middle]], stops) else (middle + 1, high)
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

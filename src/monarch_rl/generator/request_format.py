"""Requests in the form in which SGLang's scheduler takes them, made without what SGLang's own way does for each.

SGLang turns a request into that form in some twenty steps, most of them for features that are not used here. Here it
does so once for each kind of sampling; a later request of the kind is a copy of that one with its own ids, tokens, seed
and length. The checks that depend on a request's length are still SGLang's.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_rl.episode.sampling import GenerationError, Sampling

MAX_KINDS = 64
"""Kinds of sampling that are remembered; a run has two or three."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the requests of one kind of sampling have in common."""

    request: Any
    """SGLang's ``GenerateReqInput``, for its checks."""
    tokenized: Any
    """SGLang's ``TokenizedGenerateReqInput``, to be copied."""


class RequestFormat:
    """Makes requests for the scheduler of one engine.

    Args:
        manager: SGLang's tokenizer manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self.lora: tuple[str, str] | None = None
        """SGLang's name and id of the LoRA adapter that requests ask for, if they do."""

    def tokenized(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int | None, salt: str
    ) -> Any:
        """A request as the scheduler takes it.

        Args:
            request_id: unique among those that are under way.
            prompt_ids: at least one.
            sampling: how to draw; its own seed is not looked at.
            seed: of the draws; None draws freely.
            salt: requests with different ones share no prefix of the cache.

        Raises GenerationError with SGLang's words if it refuses the request.
        """
        try:
            kind = self._kind(prompt_ids, sampling)
            kind.request.sampling_params["max_new_tokens"] = sampling.max_new_tokens
            self._manager._validate_one_request(kind.request, prompt_ids)
            tokenized = copy.copy(kind.tokenized)
            tokenized.sampling_params = params = copy.copy(kind.tokenized.sampling_params)
            params.max_new_tokens, params.sampling_seed = sampling.max_new_tokens, seed
            params.verify(self._manager.model_config.vocab_size)
        except ValueError as error:
            raise GenerationError(str(error)) from error
        tokenized.rid, tokenized.input_ids, tokenized.cache_salt = request_id, array("q", prompt_ids), salt
        tokenized.routed_experts_start_len = sampling.expert_routes_from or 0
        return tokenized

    def send(self, batch: list[Any]) -> None:
        """Send requests to the scheduler in one message."""
        self._manager.auto_create_handle_loop()
        self._manager._dispatch_to_scheduler(self._manager.batch_tokenized_generate_req_type(batch=batch))

    def _kind(self, prompt_ids: Sequence[int], sampling: Sampling) -> _Kind:
        routes = sampling.expert_routes_from is not None
        key = (sampling.temperature, sampling.stop_token_ids, sampling.top_k, sampling.top_p, sampling.min_p, routes)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = self._make_kind(list(prompt_ids), sampling)
        return kind

    def _make_kind(self, prompt_ids: list[int], sampling: Sampling) -> _Kind:
        """Have SGLang make the first request of a kind, as its ``generate_request`` does."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._manager
        request = GenerateReqInput(
            input_ids=prompt_ids,
            sampling_params=sampling_params(sampling),
            return_logprob=True,
            return_sampling_mask=sampling.truncated,
            return_routed_experts=sampling.expert_routes_from is not None,
            lora_path=self.lora[0] if self.lora is not None else None,
        )
        request.normalize_batch_and_arguments()
        manager._set_default_priority(request)
        if self.lora is not None:
            request.lora_id = self.lora[1]
        manager._init_req_state(request)
        try:
            tokenized = manager._create_tokenized_object(request, None, prompt_ids)
        finally:
            del manager.rid_to_state[request.rid]
        tokenized.time_stats = None  # of this request alone; the scheduler makes its own
        return _Kind(request, tokenized)


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's sampling parameters of a request, but for its seed."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        # SGLang switches all stop tokens on or off at once. With them on, the model's own end token stops too.
        "ignore_eos": not sampling.stop_token_ids,
    }
    if sampling.truncated:
        params |= {"top_k": sampling.top_k or -1, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return params

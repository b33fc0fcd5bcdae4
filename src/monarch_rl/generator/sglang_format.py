"""Requests in the form that SGLang's scheduler takes, and its outputs as completions.

SGLang converts a request in some twenty steps, most of them for features that are not used here. Here SGLang converts
only the first request with given sampling settings. Later ones copy it and set their own id, tokens, seed and length.
The checks that depend on a request's length are still SGLang's. Outputs are read directly into arrays, where SGLang
would make lists of tuples.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling, SamplingMasks
from monarch_rl.errors import GenerationError, SamplingMaskMissing
from monarch_rl.generator.parts import UNFINISHED
from monarch_rl.generator.settings import recipe_flags
from monarch_rl.model.config import ModelConfig

# -- requests ---------------------------------------------------------------------------------------------------------

MAX_KINDS = 64
"""Cached kinds of requests (distinct sampling settings); a run has two or three."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The template for requests with the same sampling settings."""

    request: Any
    """SGLang's ``GenerateReqInput``, for SGLang's checks."""
    tokenized: Any
    """SGLang's ``TokenizedGenerateReqInput``, which is copied for each request."""


class RequestFormat:
    """Builds requests for the scheduler of one engine.

    Args:
        manager: SGLang's tokenizer manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self.lora: tuple[str, str] | None = None
        """SGLang's name and id of the LoRA adapter that requests use; None without LoRA."""

    def tokenized(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int | None, salt: str
    ) -> Any:
        """A request in the form that SGLang's scheduler takes.

        Args:
            request_id: unique among the requests in flight.
            prompt_ids: at least one id.
            sampling: sampling settings; their seed is ignored in favour of ``seed``.
            seed: seed of the sampling noise; None samples without a seed.
            salt: requests with different salts share no prefix in the cache.

        Raises GenerationError with SGLang's message if SGLang refuses the request.
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

    def stop_ids(self, sampling: Sampling) -> set[int]:
        """All ids that end a request with the parameters of :func:`sampling_params`."""
        if not sampling.stop_token_ids:
            return set()
        return set(sampling.stop_token_ids) | self._manager.model_config.hf_eos_token_id

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
        """Have SGLang convert the first request of a kind, as its ``generate_request`` does."""
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
        tokenized.time_stats = None  # belongs to this request alone; the scheduler creates its own
        return _Kind(request, tokenized)


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's sampling parameters of a request, without the seed."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        # SGLang can only switch all stop tokens on or off. With them on, the model's own end tokens stop, too.
        "ignore_eos": not sampling.stop_token_ids,
    }
    if sampling.truncated:
        params |= {"top_k": sampling.top_k or -1, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return params


# -- outputs ----------------------------------------------------------------------------------------------------------

MASK_LOST = ("outside its captured sampling support", "Sampling support exceeds")
"""Parts of SGLang's messages when its sampler and the mask that it recorded disagree, or ties made the mask too large.
On a GPU either may happen to any token."""


@dataclass(slots=True)
class SideChannel:
    """Everything but the tokens that SGLang's scheduler reports about one request, message by message.

    It is taken out of the messages because SGLang would encode it as base64 and as lists of Python integers.
    """

    sampling_masks: list[SamplingMasks] = field(default_factory=list)
    """Sampling masks of the tokens in each message."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32: log-probs, within their sampling masks, of the tokens in each message."""
    expert_routes: np.ndarray | None = None
    """int32 [tokens read, all layers, k]; comes with the last message."""
    error: GenerationError | None = None
    """The first error in a message."""


class ExpertRouteFormat:
    """Compact form of a model's expert routes: only layers with experts, in the smallest dtype for an expert's index.

    Raises:
        ValueError: the model has no experts.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.layers = list(config.sparse_layers)
        if not self.layers:
            raise ValueError("expert routes are asked for, but the model has no experts")
        self.experts = config.num_experts
        self.dtype = np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    def read(self, expert_routes: np.ndarray, rows: int) -> np.ndarray:
        """Convert expert routes from SGLang's form, int32 [tokens, all layers, k].

        Raises GenerationError if they do not cover ``rows`` tokens with k distinct experts of this model each: then
        they belong to another sequence, or were not recorded.
        """
        routes = expert_routes[:, self.layers]
        if len(routes) != rows:
            raise GenerationError(f"SGLang reported expert routes of {len(routes)} tokens, but {rows} were requested")
        if routes.size and not 0 <= routes.min() <= routes.max() < self.experts:
            raise GenerationError(
                f"SGLang reported expert indices from {routes.min()} to {routes.max()}, but the model has "
                f"{self.experts} experts"
            )
        ordered = np.sort(routes, -1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise GenerationError(
                "SGLang reported the same expert twice for one token and layer: it did not record all layers"
            )
        return routes.astype(self.dtype)


def take_side_channel(output: Any) -> list[SideChannel]:
    """Remove everything but the tokens from a message of SGLang's scheduler; returns it for each request.

    Errors are stored in :attr:`SideChannel.error`: if they were raised here, SGLang would end this process.
    """
    masks, expert_routes = output.output_token_sampling_mask, output.routed_experts
    output.output_token_sampling_mask = output.routed_experts = None
    sides = [SideChannel() for _ in output.rids]
    for side, mask in zip(sides, masks or [], strict=False):
        if mask is not None:
            try:
                sampling_masks = SamplingMasks(np.asarray(mask.lengths, np.int32), np.asarray(mask.token_ids, np.int32))
                side.sampling_masks.append(sampling_masks)
            except ValueError as error:
                side.error = GenerationError(f"SGLang reported {error}")
            side.logprobs.append(np.asarray(mask.logprobs, np.float32))
    for side, routes in zip(sides, expert_routes or [], strict=False):
        side.expert_routes = None if routes is None else routes.numpy()
    return sides


def read_reason(reason: dict[str, Any] | None, interrupted: bool = False) -> str:
    """Convert SGLang's finish reason; ``UNFINISHED`` if the request is still running or was interrupted.

    Args:
        reason: SGLang's finish reason; None while the request is running.
        interrupted: whether a commit aborted the request on purpose.

    Raises SamplingMaskMissing if a token's sampling mask was not recorded, GenerationError if the request was aborted
    for another reason.
    """
    if reason is None or (reason["type"] == "abort" and interrupted):
        return UNFINISHED
    if reason["type"] in ("stop", "length"):
        return str(reason["type"])
    lost = any(words in str(reason.get("message")) for words in MASK_LOST)
    message = recipe_flags(f"the engine ended the request with {reason}")
    raise (SamplingMaskMissing if lost else GenerationError)(message)


def to_part(output: Any, index: int, side: SideChannel, reason: str = UNFINISHED) -> Completion:
    """The tokens that one request sampled since the last message of SGLang's scheduler; see ``report_versions``.

    Args:
        output: the message.
        index: the request's index in the message.
        side: the rest of what this message reports about the request.
        reason: the result of :func:`read_reason`.

    Raises GenerationError if a token has no log-prob, version or sampling mask.
    """
    tokens = np.array(output.output_ids[index], np.int32)
    # An aborted request may come with a log-prob and no token.
    logprobs = np.array(output.output_token_logprobs_val[index] if len(tokens) else (), np.float32)
    if len(logprobs) != len(tokens):
        raise GenerationError(f"SGLang reported log-probs of {len(logprobs)} tokens, but sampled {len(tokens)}")
    first = output.completion_tokens[index] - len(tokens)
    versions = np.empty(len(tokens), np.int32)
    spans = output.weight_versions[index] if output.weight_versions is not None and len(tokens) else None
    end = 0
    for span in spans or ():  # in order, from the first token of the request
        start, stop = max(0, span.start - first), max(0, span.end - first)
        versions[start:stop] = int(span.version)
        if start == end:
            end = stop
    if end < len(tokens):
        raise GenerationError(f"SGLang reported no version for some of {len(tokens)} tokens: {spans}")
    return _completion(tokens, logprobs, versions, reason, side)


def _completion(
    tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: str, side: SideChannel | None
) -> Completion:
    # With sampling masks, log-probs are those within the masks: the tokens were sampled from that distribution.
    if side is None or not side.sampling_masks:
        return Completion(tokens, logprobs, versions, reason)
    sampling_masks, logprobs = SamplingMasks.join(side.sampling_masks), np.concatenate(side.logprobs)
    _check_sampling_masks(tokens, sampling_masks)
    return Completion(tokens, logprobs, versions, reason, sampling_masks)


def _check_sampling_masks(tokens: Sequence[int] | np.ndarray, sampling_masks: SamplingMasks) -> None:
    if len(sampling_masks.counts) != len(tokens):
        raise GenerationError(
            f"SGLang reported sampling masks of {len(sampling_masks.counts)} tokens, but sampled {len(tokens)}"
        )
    matches = sampling_masks.ids == np.repeat(tokens, sampling_masks.counts)
    if matches.sum() != len(tokens):  # the ids of a mask are distinct, so each mask has one match at most
        raise GenerationError("SGLang reported a sampling mask that does not contain the sampled token")

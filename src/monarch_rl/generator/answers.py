"""What SGLang answers to a request, and to parts of it, as completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from monarch_rl.episode.sampling import Completion, DrawLost, GenerationError, KeptSets
from monarch_rl.generator.parts import UNFINISHED
from monarch_rl.model.folder import num_experts, sparse_layers

LOST_SETS = ("outside its captured sampling support", "Sampling support exceeds")
"""In SGLang's messages where its sampler and its record of the kept set did not agree, or ties made the set too large:
both may happen to any token on a GPU."""


@dataclass(slots=True)
class Beside:
    """What SGLang's scheduler tells of one request beside its tokens, message by message.

    It is taken out of the messages, as SGLang would write it as base64 and as lists of Python's integers.
    """

    kept: list[KeptSets] = field(default_factory=list)
    """Of the tokens of each message."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32: of the tokens of each message among their kept sets."""
    expert_routes: np.ndarray | None = None
    """int32 [tokens read, all layers, k]; comes with the last message."""
    error: GenerationError | None = None
    """What was wrong with the first of them that was."""

    def add(self, later: Beside) -> None:
        """Take in what the next message tells."""
        self.kept += later.kept
        self.logprobs += later.logprobs
        self.expert_routes = later.expert_routes
        self.error = self.error or later.error


class RouteForm:
    """How the routes of a model are kept: only of layers that have experts, in as few bytes as an expert's index needs.

    Args:
        config: the model's ``config.json``.

    Raises:
        ValueError: the model has no experts.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.layers = sparse_layers(config)
        if not self.layers:
            raise ValueError("routes are asked for, but the model has no experts")
        self.experts = num_experts(config)
        self.dtype = np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    def read(self, expert_routes: np.ndarray, rows: int) -> np.ndarray:
        """Routes as SGLang tells them, int32 [tokens, all layers, k].

        Raises GenerationError if they are not of ``rows`` tokens, or not k experts of this model: then they are not
        those of this sequence, or were not recorded.
        """
        kept = expert_routes[:, self.layers]
        if len(kept) != rows:
            raise GenerationError(f"SGLang told routes of {len(kept)} tokens, of {rows} were asked for")
        if kept.size and not 0 <= kept.min() <= kept.max() < self.experts:
            raise GenerationError(
                f"SGLang told routes by experts {kept.min()} to {kept.max()}, the model has {self.experts}"
            )
        ordered = np.sort(kept, -1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise GenerationError("SGLang told a route that has an expert twice: it did not record all layers")
        return kept.astype(self.dtype)


def take_beside(output: Any) -> list[Beside]:
    """Take what is told beside the tokens out of a message of SGLang's scheduler: one for each of its requests.

    What is wrong with one of them is in its ``error``: raised here, SGLang would end this process for it.
    """
    masks, expert_routes = output.output_token_sampling_mask, output.routed_experts
    output.output_token_sampling_mask = output.routed_experts = None
    taken = [Beside() for _ in output.rids]
    for one, mask in zip(taken, masks or [], strict=False):
        if mask is not None:
            try:
                one.kept.append(KeptSets(np.asarray(mask.lengths, np.int32), np.asarray(mask.token_ids, np.int32)))
            except ValueError as error:
                one.error = GenerationError(f"SGLang told {error}")
            one.logprobs.append(np.asarray(mask.logprobs, np.float32))
    for one, routed in zip(taken, expert_routes or [], strict=False):
        one.expert_routes = None if routed is None else routed.numpy()
    return taken


def to_completion(answer: dict[str, Any], interrupted: bool = False, beside: Beside | None = None) -> Completion:
    """Read SGLang's answer to one request, but for its routes.

    Args:
        answer: of SGLang.
        interrupted: it was aborted on purpose: its finish reason is then ``UNFINISHED``, and it may have no tokens.
        beside: what was told beside the tokens.

    Raises DrawLost if a token's kept set was not recorded, GenerationError if the request was aborted otherwise.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason == "abort" and interrupted:
        reason = UNFINISHED
    elif reason not in ("stop", "length"):
        lost = any(part in str(meta["finish_reason"].get("message")) for part in LOST_SETS)
        raise (DrawLost if lost else GenerationError)(f"the engine ended the request with {meta['finish_reason']}")
    entries = meta.get("output_token_logprobs") or []
    # A request that waits in SGLang's queue, for lack of KV cache, is ended with what it had told until then.
    tokens = np.asarray(answer["output_ids"][: len(entries)], np.int32)
    logprobs = np.fromiter((entry[0] for entry in entries), np.float32, len(tokens))
    versions = np.full(len(tokens), -1, np.int32)
    for span in meta.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise GenerationError(f"SGLang gave no version for some of {len(tokens)} tokens: {meta['weight_versions']}")
    return _completion(tokens, logprobs, versions, reason, beside)


def to_part(output: Any, index: int, beside: Beside) -> Completion:
    """Read what one request has drawn since the last message of SGLang's scheduler; see ``tell_versions``.

    Args:
        beside: of this message.
    """
    tokens = np.asarray(output.output_ids[index], np.int32)
    drawn = output.completion_tokens[index]
    versions = np.empty(drawn, np.int32)
    for span in output.weight_versions[index]:
        versions[span.start : span.end] = int(span.version)
    logprobs = np.asarray(output.output_token_logprobs_val[index], np.float32)
    return _completion(tokens, logprobs, versions[drawn - len(tokens) :], UNFINISHED, beside)


def _completion(
    tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: str, beside: Beside | None
) -> Completion:
    """With kept sets, log-probs are those among them: that is how the tokens were drawn."""
    if beside is None or not beside.kept:
        return Completion(tokens, logprobs, versions, reason)
    kept, logprobs = KeptSets.join(beside.kept), np.concatenate(beside.logprobs)
    _check_kept(tokens, kept)
    return Completion(tokens, logprobs, versions, reason, kept)


def _check_kept(tokens: Sequence[int] | np.ndarray, kept: KeptSets) -> None:
    if len(kept.counts) != len(tokens):
        raise GenerationError(f"SGLang told kept sets of {len(kept.counts)} tokens, {len(tokens)} were drawn")
    matches = kept.ids == np.repeat(tokens, kept.counts)
    if matches.sum() != len(tokens):  # ids of a set differ, so each has one match at most
        raise GenerationError("SGLang told kept sets without the token that was drawn from them")

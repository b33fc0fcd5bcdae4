"""What SGLang answers to a request, and to parts of it, as completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from monarch_rl.episode.sampling import Completion, DrawLost, GenerationError, KeptSets
from monarch_rl.generator.flag_names import recipe_flags
from monarch_rl.generator.parts import UNFINISHED
from monarch_rl.model.folder import num_experts, sparse_layers

LOST_SETS = ("outside its captured sampling support", "Sampling support exceeds")
"""In SGLang's messages where its sampler and its record of the kept set did not agree, or ties made the set too large:
both may happen to any token on a GPU."""


@dataclass(slots=True)
class SideChannel:
    """What SGLang's scheduler reports of one request beside its tokens, message by message.

    It is taken out of the messages, because SGLang would write it as base64 and as lists of Python's integers.
    """

    kept_sets: list[KeptSets] = field(default_factory=list)
    """Of the tokens of each message."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32: of the tokens of each message among their kept sets."""
    expert_routes: np.ndarray | None = None
    """int32 [tokens read, all layers, k]; comes with the last message."""
    error: GenerationError | None = None
    """The first error in a message."""


class ExpertRouteFormat:
    """How expert routes of a model are kept: only of layers with experts, in as few bytes as an expert's index needs.

    Args:
        config: the model's ``config.json``.

    Raises:
        ValueError: the model has no experts.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.layers = sparse_layers(config)
        if not self.layers:
            raise ValueError("expert routes are asked for, but the model has no experts")
        self.experts = num_experts(config)
        self.dtype = np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    def read(self, expert_routes: np.ndarray, rows: int) -> np.ndarray:
        """Convert expert routes as SGLang reports them, int32 [tokens, all layers, k].

        Raises GenerationError if they are not of ``rows`` tokens, or not k experts of this model: then they belong to
        another sequence, or were not recorded.
        """
        routes = expert_routes[:, self.layers]
        if len(routes) != rows:
            raise GenerationError(f"SGLang reported expert routes of {len(routes)} tokens, of {rows} were asked for")
        if routes.size and not 0 <= routes.min() <= routes.max() < self.experts:
            raise GenerationError(
                f"SGLang reported routes by experts {routes.min()} to {routes.max()}, the model has {self.experts}"
            )
        ordered = np.sort(routes, -1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise GenerationError("SGLang reported a route that has an expert twice: it did not record all layers")
        return routes.astype(self.dtype)


def take_side_channel(output: Any) -> list[SideChannel]:
    """Take what is reported beside the tokens out of a message of SGLang's scheduler: one for each of its requests.

    An error of one request is in its ``error``: if it was raised here, SGLang would end this process.
    """
    masks, expert_routes = output.output_token_sampling_mask, output.routed_experts
    output.output_token_sampling_mask = output.routed_experts = None
    sides = [SideChannel() for _ in output.rids]
    for side, mask in zip(sides, masks or [], strict=False):
        if mask is not None:
            try:
                kept_sets = KeptSets(np.asarray(mask.lengths, np.int32), np.asarray(mask.token_ids, np.int32))
                side.kept_sets.append(kept_sets)
            except ValueError as error:
                side.error = GenerationError(f"SGLang reported {error}")
            side.logprobs.append(np.asarray(mask.logprobs, np.float32))
    for side, routes in zip(sides, expert_routes or [], strict=False):
        side.expert_routes = None if routes is None else routes.numpy()
    return sides


def read_reason(reason: dict[str, Any] | None, interrupted: bool = False) -> str:
    """Read why SGLang ended a request; ``UNFINISHED`` if it did not.

    Args:
        reason: SGLang's finish reason.
        interrupted: the request was aborted on purpose, and is ``UNFINISHED`` too.

    Raises DrawLost if a token's kept set was not recorded, GenerationError if the request was aborted otherwise.
    """
    if reason is None or (reason["type"] == "abort" and interrupted):
        return UNFINISHED
    if reason["type"] in ("stop", "length"):
        return str(reason["type"])
    lost = any(words in str(reason.get("message")) for words in LOST_SETS)
    said = recipe_flags(f"the engine ended the request with {reason}")
    raise (DrawLost if lost else GenerationError)(said)


def to_part(output: Any, index: int, side: SideChannel, reason: str = UNFINISHED) -> Completion:
    """Read what one request drew since the last message of SGLang's scheduler; see ``report_versions``.

    Args:
        output: the message.
        index: of the request in it.
        side: of this message.
        reason: of :func:`read_reason`.

    Raises GenerationError if a token has no log-prob, version or kept set.
    """
    tokens = np.array(output.output_ids[index], np.int32)
    # An aborted request may come with a log-prob and no token.
    logprobs = np.array(output.output_token_logprobs_val[index] if len(tokens) else (), np.float32)
    if len(logprobs) != len(tokens):
        raise GenerationError(f"SGLang reported log-probs of {len(logprobs)} tokens, {len(tokens)} were drawn")
    count = output.completion_tokens[index]
    first = count - len(tokens)
    versions = np.full(len(tokens), -1, np.int32)
    spans = output.weight_versions[index] if output.weight_versions is not None and len(tokens) else None
    for span in spans or ():
        versions[max(0, span.start - first) : max(0, span.end - first)] = int(span.version)
    if len(tokens) and versions.min() < 0:
        raise GenerationError(f"SGLang gave no version for some of {len(tokens)} tokens: {spans}")
    return _completion(tokens, logprobs, versions, reason, side)


def _completion(
    tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: str, side: SideChannel | None
) -> Completion:
    """With kept sets, log-probs are those among them: that is how the tokens were drawn."""
    if side is None or not side.kept_sets:
        return Completion(tokens, logprobs, versions, reason)
    kept_sets, logprobs = KeptSets.join(side.kept_sets), np.concatenate(side.logprobs)
    _check_kept_sets(tokens, kept_sets)
    return Completion(tokens, logprobs, versions, reason, kept_sets)


def _check_kept_sets(tokens: Sequence[int] | np.ndarray, kept_sets: KeptSets) -> None:
    if len(kept_sets.counts) != len(tokens):
        raise GenerationError(f"SGLang reported kept sets of {len(kept_sets.counts)} tokens, {len(tokens)} were drawn")
    matches = kept_sets.ids == np.repeat(tokens, kept_sets.counts)
    if matches.sum() != len(tokens):  # ids of a set differ, so each has one match at most
        raise GenerationError("SGLang reported kept sets without the token that was drawn from them")

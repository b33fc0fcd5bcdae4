"""What SGLang answers to a request, and to parts of it, as completions."""

from __future__ import annotations

from typing import Any

import numpy as np

from monarch_rl.episode import Completion
from monarch_rl.generator.parts import UNFINISHED


class GenerationError(RuntimeError):
    """A request was refused or aborted; the message is the engine's."""


def to_completion(answer: dict[str, Any], interrupted: bool = False) -> Completion:
    """Read SGLang's answer to one request.

    Args:
        answer: of SGLang.
        interrupted: it was aborted on purpose: its finish reason is then ``UNFINISHED``, and it may have no tokens.

    Raises GenerationError if the request was aborted otherwise.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason == "abort" and interrupted:
        reason = UNFINISHED
    elif reason not in ("stop", "length"):
        raise GenerationError(f"the engine ended the request with {meta['finish_reason']}")
    entries = meta.get("output_token_logprobs") or []
    # A request that waits in SGLang's queue, for lack of KV cache, is ended with what it had told until then.
    tokens = np.asarray(answer["output_ids"][: len(entries)], np.int32)
    logprobs = np.fromiter((entry[0] for entry in entries), np.float32, len(tokens))
    versions = np.full(len(tokens), -1, np.int32)
    for span in meta.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise GenerationError(f"SGLang gave no version for some of {len(tokens)} tokens: {meta['weight_versions']}")
    return Completion(tokens, logprobs, versions, reason)


def to_part(output: Any, index: int) -> Completion:
    """Read what one request has drawn since the last message of SGLang's scheduler; see ``tell_versions``."""
    tokens = np.asarray(output.output_ids[index], np.int32)
    drawn = output.completion_tokens[index]
    versions = np.empty(drawn, np.int32)
    for span in output.weight_versions[index]:
        versions[span.start : span.end] = int(span.version)
    logprobs = np.asarray(output.output_token_logprobs_val[index], np.float32)
    return Completion(tokens, logprobs, versions[drawn - len(tokens) :], UNFINISHED)

"""Preparing ``torch.compile`` of transformer blocks: dynamic row lengths, and dummy rows to compile with.

Ranks compile when they start. Three kinds of row may each trigger one compilation later: a row with a single input, one
of supervised rows among replayed routes, and on a CPU one above certain lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.runtime.compiler_paths import allow_spaces
from monarch_rl.trainer.batch import MicroBatch, pack
from monarch_rl.trainer.moe import ReplayRouter

_LENGTHS = (
    r"L\['x'\]:1",
    r"L\['positions'\]:1",
    # With activation checkpointing a block is called by a wrapper, with unnamed arguments.
    r"L\['args'\]\[0\]:1",
    r"L\['args'\]\[2\]:1",
    r".*\.routes_BLK$:1",
    r".*\.query_ends$:0",
    r".*\.key_ends$:0",
    r".*\.keys$:0",
    r".*\.max_queries$",
    r".*\.max_keys$",
)
"""Dynamo's names of a block's inputs that change from row to row, and their dynamic dimension."""
FIRST_ROW = 64
"""Tokens of the episodes that blocks are compiled with."""
GRAPHS = 64
"""Most graphs to compile, one for each kind of block and range of lengths. On a CPU inductor uses other kernels for
sums of more than 4096 terms, which a norm's gradient has for long rows."""


def prepare_to_compile() -> None:
    """Make later compilations accept rows of any length, and work in folders whose names contain spaces. Otherwise the
    first row would be compiled for its own length, and the second one again."""
    allow_spaces()
    torch.compiler.config.dynamic_sources = ",".join(_LENGTHS)
    torch._dynamo.config.recompile_limit = GRAPHS


def first_rows(longest: int, routers: Sequence[ReplayRouter], device: torch.device) -> list[MicroBatch]:
    """Micro-batches of dummy tokens to compile with: two episodes that share their first half, and the same episodes
    without sharing, where flash attention gathers no keys.

    Args:
        longest: most tokens of an episode that the model accepts.
        routers: routers that replay or compare expert routes; empty if there are none.
    """
    length = min(FIRST_ROW, longest)
    sampled = np.arange(length) >= length // 2
    episodes = []
    for last in (0, 1):
        token_ids = np.where(sampled, last, 0).astype(np.int32)
        turn = Turn(token_ids, np.zeros(length, np.float32), np.where(sampled, 0, -1).astype(np.int32), sampled)
        episodes.append(Episode([turn], 0.0, "stop"))
    if routers:
        by_layer = np.stack([np.arange(router.top_k) for router in routers])
        dtype = np.uint8 if routers[0].num_experts <= 256 else np.uint16  # as generators return them
        for episode in episodes:
            episode.expert_routes = np.tile(by_layer.astype(dtype), (length - 1, 1, 1))
    return [pack(episodes, torch.zeros(2), torch.zeros(2), 0, device, groups) for groups in ([0, 0], [0, 1])]

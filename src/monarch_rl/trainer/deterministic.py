"""A trainer rank whose updates can be made again bit for bit on a GPU. docs/journal.md says what that takes."""

from __future__ import annotations

import os

import torch

from monarch_rl.runtime.network import fix_nccl_order

CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Streams that share a workspace choose other split sums. One of the two values that torch takes beside its switch."""


def make_deterministic() -> None:
    """Have this process compute the same bits from the same tensors; operations that cannot raise RuntimeError.

    It comes before the first handle of cuBLAS and the first communicator of NCCL, which read the environment.
    """
    os.environ.update(CUBLAS_WORKSPACE)
    fix_nccl_order()
    torch.use_deterministic_algorithms(True)
    # Else every torch.empty() is filled, also what is written whole right after.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False

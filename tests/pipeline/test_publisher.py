"""What the recipe waits for must not hide that a version cannot be delivered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.publishing import Publisher, _signed
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import TransferSettings


def publisher() -> Publisher:
    nobody: Any = None
    return Publisher(nobody, nobody, TransferSettings(), Manifest((), 0, ()))


async def fails() -> None:
    raise RuntimeError("generator 1: 2 of 21 tensors differ from the trainer's")


def test_a_failed_delivery_ends_the_wait_for_a_batch_at_once() -> None:
    async def go() -> None:
        waiting = publisher()
        waiting._deliveries.append(asyncio.create_task(fails()))
        batch = asyncio.get_running_loop().create_future()
        with pytest.raises(RuntimeError, match="tensors differ from the trainer's"):
            await asyncio.wait_for(waiting.or_failed(batch), 5)
        assert batch.cancelled()

    asyncio.run(go())


def test_a_delivery_that_arrives_changes_nothing() -> None:
    async def go() -> None:
        waiting = publisher()
        waiting._deliveries.append(asyncio.create_task(asyncio.sleep(0)))
        assert await waiting.or_failed(asyncio.sleep(0.01, "metrics")) == "metrics"
        await waiting.settled()

    asyncio.run(go())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_checksums_of_shards_add_up_as_int64_do(sums: list[int]) -> None:
    total = torch.tensor(sums, dtype=torch.int64).sum()
    assert _signed(sum(sums)) == int(total)

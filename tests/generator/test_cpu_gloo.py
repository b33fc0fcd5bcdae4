"""Process groups of an engine rank share one device of gloo."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests import patience

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="it is for machines without an accelerator")

GROUPS = """
import os, sys, threading
from contextlib import suppress
from datetime import timedelta
import torch, torch.distributed as dist
from monarch_rl.generator.cpu import install
if sys.argv[1] == "shared":
    install.share_gloo_device()
store, found = dist.HashStore(), [[], []]
def reduce_in_groups(rank):
    for number, seconds in enumerate((60, 77, 88)):
        prefixed = dist.PrefixStore(str(number), store)
        group = dist.ProcessGroupGloo(prefixed, rank, 2, timedelta(seconds=seconds))
        tensor = torch.full((3,), 1.0 + rank + number)
        group.allreduce([tensor]).wait()
        found[rank].append((tensor.tolist(), group.options._timeout.total_seconds(), group))
ranks = [threading.Thread(target=reduce_in_groups, args=(rank,)) for rank in range(2)]
for each in ranks: each.start()
for each in ranks: each.join()
names = []
for task in os.listdir("/proc/self/task"):
    with suppress(FileNotFoundError):  # a thread that has just ended
        names.append(open(f"/proc/self/task/{task}/comm").read().strip())
print([[part[:2] for part in of_rank] for of_rank in found], names.count("gloo_tcp_loop"), flush=True)
os._exit(0)
"""
"""Two ranks, one on each thread, which reduce in three groups."""


@pytest.mark.parametrize(("device", "devices"), [("shared", 1), ("own", 6)])
def test_groups_reduce_over_one_device(device: str, devices: int) -> None:
    done = patience.run([sys.executable, "-c", GROUPS, device], env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    of_rank = [([3.0 + 2 * number] * 3, seconds) for number, seconds in enumerate((60.0, 77.0, 88.0))]
    assert done.stdout.strip() == f"{[of_rank, of_rank]} {devices}"

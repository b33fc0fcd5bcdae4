"""Rendezvous of the ranks of a torchrun job after restarts, with agents that count restarts differently."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from monarch_rl.runtime.network import serve_store
from tests.patience import output_of

WAIT_S = 600.0
RANK = """
import json, sys
from types import SimpleNamespace
from monarch_rl.runtime.torchrun import Controller, Follower, Rank
rank = Rank.from_environment()
if rank.rank == 0:
    controller = Controller(rank)
    _, _, nodes = controller.wait_for_ranks(lambda ip: SimpleNamespace(address="host 0"))
    print(json.dumps([node.address for node in nodes]), flush=True)
    if sys.argv[1] == "ends":
        controller.report_success()
else:
    follower = Follower(rank)
    follower.join(lambda ip: SimpleNamespace(address=sys.argv[1], lost=lambda: None))
    print(follower.wait(), flush=True)
"""


def start(store: Any, rank: int, restarts: int, argument: str) -> subprocess.Popen[str]:
    """One of two ranks, each on its own node, whose agent has counted ``restarts`` restarts."""
    variables = {
        "RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": restarts,
    }  # fmt: skip
    environment = {name: str(value) for name, value in variables.items()} | {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", RANK, argument], stdout=subprocess.PIPE, text=True, env=environment)


def test_ranks_meet_again_whatever_earlier_ranks_left_in_the_store(tmp_path: Path) -> None:
    """The controller of the first round is lost. In the second, a new agent counts from 0, and its rank is first."""
    store = serve_store("127.0.0.1", timeout=timedelta(seconds=WAIT_S))
    ranks = []
    try:
        for restarts, end in ((0, "is lost"), (1, "ends")):
            follower = start(store, 1, 0, f"host of round {restarts}")
            controller = start(store, 0, restarts, end)
            ranks += [follower, controller]
            output, _ = output_of(controller)
            assert json.loads(output) == ["host 0", f"host of round {restarts}"]
            assert output_of(follower)[0] == f"{end == 'ends'}\n"
    finally:
        for rank in ranks:
            rank.kill()

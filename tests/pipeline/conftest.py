"""Fixtures of the tests that run trainers and generators together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import ExitStack

import pytest

from monarch_rl.runtime.cluster import Cluster, launch_cluster
from tests.pipeline.system import PRELOADS

MESHES_OF_A_TEST = ("trainer", "buffer")
"""Meshes that end with the test that spawned them; replicas live as long as the test module."""


class SharedCluster:
    """One cluster at a time, because a process can have only one; starting one costs 20 CPU-seconds."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        """Return the open cluster, or start one."""
        if self._cluster is None:
            self._cluster = self._open.enter_context(launch_cluster(PRELOADS))
            assert self._cluster is not None
            asyncio.run(wait_for_preloads(self._cluster))
        return self._cluster

    def close(self) -> None:
        """End the cluster, so that other code can start its own."""
        self._cluster = None
        self._open.close()


async def wait_for_preloads(cluster: Cluster) -> None:
    """Wait until every fork server has done its imports."""
    for preload in PRELOADS:
        await cluster.fork_server.imported(preload.name)


def end_meshes(cluster: Cluster, names: Collection[str] | None = None) -> None:
    """End the meshes with these names, or all of them: idle processes take time from others."""

    async def end() -> None:
        for mesh in [spawned.mesh for spawned in cluster._meshes if names is None or spawned.name in names]:
            await cluster.kill(mesh)

    asyncio.run(end())


SHARED = SharedCluster()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster before tests of another folder run in this process: they may start their own."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        SHARED.close()


@pytest.fixture(scope="session")
def shared_cluster() -> SharedCluster:
    return SHARED


@pytest.fixture(scope="module")
def cluster(shared_cluster: SharedCluster) -> Iterator[Cluster]:
    """The shared cluster, with only the host processes running."""
    cluster = shared_cluster.get()
    yield cluster
    end_meshes(cluster)


@pytest.fixture(autouse=True)
def _ranks_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    cluster = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if cluster is not None:
        end_meshes(cluster, MESHES_OF_A_TEST)

"""What tests of trainers and generators together share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_rl.runtime.cluster import Cluster, launch_cluster
from tests.pipeline.system import PRELOADS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with launch_cluster(PRELOADS) as cluster:
        assert cluster is not None
        yield cluster

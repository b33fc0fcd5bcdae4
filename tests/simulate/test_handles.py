"""Simulated trainers and generators take the arguments of the real endpoints, by the same names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from monarch_rl.generator.actor import Generator
from monarch_rl.simulate.handles import _function
from monarch_rl.simulate.replica import SimulatedReplica
from monarch_rl.simulate.run import SimulatedTrainer
from monarch_rl.trainer.actor import Trainer


def parameters(kind: type, name: str) -> list[str]:
    return [parameter for parameter in inspect.signature(_function(kind, name)).parameters if parameter != "self"]


@pytest.mark.parametrize(("simulated", "real"), [(SimulatedTrainer, Trainer), (SimulatedReplica, Generator)])
def test_simulated_endpoints_match_the_actors(simulated: type, real: type) -> None:
    names = [
        name
        for name, member in vars(simulated).items()
        if inspect.iscoroutinefunction(member) and not name.startswith("_") and hasattr(real, name)
    ]
    assert len(names) >= 6
    found: dict[str, Any] = {name: parameters(simulated, name) for name in names}
    assert found == {name: parameters(real, name) for name in names}

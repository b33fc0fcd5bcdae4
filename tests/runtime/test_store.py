"""Stores that libraries create are replaced by the project's, if torch creates them as expected."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from monarch_rl.runtime import network


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "_create_c10d_store", module._create_c10d_store)  # restored at the end
    return module


def with_more(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool, new: int = 0
) -> str:
    return "torch's"


@pytest.mark.parametrize("made_by", [None, with_more])
def test_stores_of_this_torch_and_of_one_with_another_default_are_replaced(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch, made_by: Callable[..., Any] | None
) -> None:
    if made_by is not None:
        rendezvous._create_c10d_store = made_by
    monkeypatch.setattr(network, "rendezvous_store", lambda *arguments: arguments)
    network.serve_own_address_only()
    wait = timedelta(seconds=5)
    # As torch 2.13 calls it, and by keywords.
    assert rendezvous._create_c10d_store("127.0.0.1", 7, 0, 2, wait, True) == ("127.0.0.1", 7, 0, 2, wait)
    named = rendezvous._create_c10d_store(hostname="a", port=7, rank=0, world_size=2, timeout=wait, use_libuv=False)
    assert named == ("a", 7, 0, 2, wait)


def fewer(address: str, timeout: timedelta) -> str:
    return "torch's"


def renamed(host: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True) -> str:
    return "torch's"


@pytest.mark.parametrize("made_by", [fewer, renamed, None])
def test_a_torch_with_another_signature_keeps_its_own_stores_with_a_warning(
    rendezvous: Any, made_by: Callable[..., Any] | None
) -> None:
    rendezvous._create_c10d_store = made_by
    with pytest.warns(UserWarning, match="addresses"):
        network.serve_own_address_only()
    assert rendezvous._create_c10d_store is made_by


def test_this_torch_passes_positional_arguments() -> None:
    """Six arguments, in the order of our function."""
    source = inspect.getsource(importlib.import_module("torch.distributed.rendezvous"))
    calls = source.split("store = _create_c10d_store(")[1:]
    assert len(calls) == 2 and all(call.split(")")[0].count(",") == 5 for call in calls)

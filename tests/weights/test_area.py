"""Areas between real processes."""

from __future__ import annotations

import base64
import sys

import pytest
import torch

from monarch_rl.weights.area import Area, attach
from tests.patience import run

WRITE = "import base64, sys; from monarch_rl.weights.area import attach; attach(base64.b64decode(sys.argv[1]))[3] = 7"


def test_another_process_reads_and_writes_it() -> None:
    area = Area(100)
    assert area.buffer.tolist() == [0] * 100
    done = run([sys.executable, "-c", WRITE, base64.b64encode(area.handle).decode()])
    assert done.returncode == 0, done.stderr
    assert area.buffer[:5].tolist() == [0, 0, 0, 7, 0]


def test_an_attached_process_keeps_the_area_and_no_other_can_attach() -> None:
    area = Area(16)
    handle, attached = area.handle, attach(area.handle)
    area.buffer.fill_(5)
    del area
    assert torch.equal(attached, torch.full((16,), 5, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        attach(handle)


def test_no_two_areas_have_one_handle() -> None:
    """Even if the second one is created in the place of the first."""
    assert len({Area(16).handle for _ in range(3)}) == 3

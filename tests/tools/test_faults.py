"""The faults of tools/faults.toml can still be planted in the sources, and the tests that must catch them exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.faults import ROOT, Fault, problems, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_each_fault_can_be_planted(fault: Fault) -> None:
    """It fits one place of the sources, which stay importable, and its tests exist."""
    assert not list(problems(fault, ROOT))
    assert fault.caught_by and fault.after != fault.before


def test_each_fault_has_its_own_name() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 30


def test_a_fault_that_no_longer_fits_is_named() -> None:
    """Otherwise it would look like a fault that no test catches."""
    fault = FAULTS[0]
    gone = replace(fault, before="what nobody wrote", caught_by=("buffer/test_core.py::test_gone",))
    text, test = problems(gone, ROOT)
    assert fault.id in text and fault.file in text and "test_gone" in test
    assert fault.id in next(problems(replace(fault, file="src/gone.py"), ROOT))
    assert fault.id in next(problems(replace(fault, after="return return"), ROOT))

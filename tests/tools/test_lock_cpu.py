"""The lock holds what pyproject.toml asks for, and `lock_cpu.check` says so when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import lock_cpu


def check(requirements: list[str], locked: dict[str, str], needs: dict[str, list[str]]) -> list[str]:
    """Check against a made-up environment that holds exactly the lock."""
    return list(lock_cpu.check(requirements, locked, lambda name: needs.get(name, []), lambda name: locked[name]))


def test_the_committed_lock_satisfies_the_declared_requirements() -> None:
    assert list(lock_cpu.check(lock_cpu.declared(), lock_cpu.read_lock(), requires=None, version_of=None)) == []


def test_the_lock_is_complete_and_holds_nothing_else() -> None:
    locked = lock_cpu.read_lock()
    if lock_cpu.importlib.metadata.version("torch") != locked["torch"]:
        pytest.skip("not run in the environment that tools/setup.sh makes")
    assert list(lock_cpu.check(lock_cpu.declared(), locked)) == []


def test_the_lock_holds_no_cuda_package() -> None:
    locked = lock_cpu.read_lock()
    assert locked["torch"].endswith("+cpu")
    assert not [name for name in locked if name.startswith(("nvidia-", "cuda-"))]
    assert not locked.keys() & lock_cpu.EXCLUDED.keys()


def test_each_fault_is_named() -> None:
    locked = {"alpha": "1.0", "beta": "2.0", "stray": "1"}
    needs = {"alpha": ["beta<2", "gamma", "delta; python_version < '3'", "cuda-python"]}
    assert sorted(check(["alpha==1.0"], locked, needs)) == [
        "alpha requires beta<2, but the lock holds beta==2.0",
        "alpha requires gamma, which the lock does not hold",
        "the lock holds stray==1, which nothing needs",
    ]


def test_what_an_extra_needs_is_followed_only_when_the_extra_is_asked_for() -> None:
    needs = {"alpha": ["beta; extra == 'fast'"]}
    assert check(["alpha"], {"alpha": "1"}, needs) == []
    assert check(["alpha[fast]"], {"alpha": "1"}, needs) == [
        "alpha requires beta; extra == 'fast', which the lock does not hold"
    ]
    assert check(["alpha", "alpha[fast]"], {"alpha": "1", "beta": "1"}, needs) == []


def test_names_are_compared_as_the_index_does(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    lock.write_text("# a comment\nTyping_Extensions==4.1\n", encoding="utf-8")
    assert lock_cpu.read_lock(lock) == {"typing-extensions": "4.1"}


@pytest.mark.parametrize("line", ["alpha>=1", "alpha", "beta==1"])
def test_a_line_that_pins_nothing_or_pins_twice_is_refused(tmp_path: Path, line: str) -> None:
    lock = tmp_path / "cpu.lock"
    lock.write_text(f"beta==1\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="cpu.lock:2"):
        lock_cpu.read_lock(lock)

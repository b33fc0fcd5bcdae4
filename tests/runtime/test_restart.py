"""The restart policy, for any sequence of ends and checkpoints. Real restarts are in recipe/test_resume.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monarch.actor import ActorError

from monarch_rl.checkpoint.folders import complete, folder_of, partial_of
from monarch_rl.errors import DeadlineExceeded, EpisodesFail, HostLost, NotFinite, SettingsError
from monarch_rl.runtime.restart import Ending, decide, ending_of, newest_checkpoint

LIMITS = st.integers(0, 5)
CHECKPOINTS = st.none() | st.sampled_from(["step-000001", "step-000002", "step-000003"])


@given(
    ending=st.sampled_from([each for each in Ending if each is not Ending.LOST]),
    checkpoint=CHECKPOINTS,
    previous=CHECKPOINTS,
    restarts=LIMITS,
    limit=st.none() | LIMITS,
)
def test_only_a_loss_is_followed_by_a_restart(
    ending: Ending, checkpoint: str | None, previous: str | None, restarts: int, limit: int | None
) -> None:
    decision = decide(ending, checkpoint=checkpoint, previous=previous, restarts=restarts, limit=limit, cause="a typo")
    assert not decision.restart and decision.reason
    assert ("a typo" in decision.reason) == (ending is Ending.FAILED)


@given(limit=LIMITS, progress=st.lists(st.booleans(), max_size=40), begun=st.booleans())
def test_restarts_without_a_newer_checkpoint_are_bounded(limit: int, progress: list[bool], begun: bool) -> None:
    """``progress``: for each start, whether it makes a checkpoint before it is lost."""
    step, previous, restarts, fruitless = int(begun), None, 0, 0
    for advances in progress:
        step += advances
        checkpoint = f"step-{step:06}" if step else None
        if checkpoint != previous:
            fruitless = 0
        decision = decide(Ending.LOST, checkpoint=checkpoint, previous=previous, restarts=restarts, limit=limit)
        assert decision.restart == (checkpoint is not None and fruitless < limit)
        if not decision.restart:
            assert decision.reason
            return
        fruitless += 1
        assert decision.restarts == fruitless <= limit
        previous, restarts = checkpoint, decision.restarts


@given(checkpoint=CHECKPOINTS, previous=CHECKPOINTS, restarts=LIMITS)
def test_a_checkpoint_is_enough_if_the_launcher_counts_restarts(
    checkpoint: str | None, previous: str | None, restarts: int
) -> None:
    decision = decide(Ending.LOST, checkpoint=checkpoint, previous=previous, restarts=restarts)
    assert decision.restart == (checkpoint is not None)


ERRORS = {
    RuntimeError("a rank ended"): Ending.LOST,
    ConnectionError("closed"): Ending.LOST,
    HostLost("the host ended"): Ending.LOST,
    DeadlineExceeded("waited 3 s for an answer", "an answer", 3.0): Ending.LOST,
    SettingsError("refused"): Ending.FAILED,
    EpisodesFail("all fail"): Ending.FAILED,
    NotFinite("the loss is nan"): Ending.FAILED,
    KeyError("a mistake"): Ending.FAILED,
    ZeroDivisionError("a mistake"): Ending.FAILED,
    KeyboardInterrupt(): Ending.FAILED,
    SystemExit(1): Ending.FAILED,
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("depth", range(3))
def test_an_error_of_the_recipe_is_not_a_loss_wherever_it_was_raised(error: BaseException, depth: int) -> None:
    """``depth``: number of actors that passed the error on."""
    raised = error
    for _ in range(depth if isinstance(error, Exception) else 0):
        raised = ActorError(raised, "raised in an actor")  # type: ignore[arg-type]
    assert ending_of(raised) is ERRORS[error]


def test_the_newest_checkpoint_is_the_newest_complete_one_whatever_latest_links_to(tmp_path: Path) -> None:
    """The process may be killed between a checkpoint's completion and the link."""
    assert newest_checkpoint(tmp_path) is None
    root = tmp_path / "checkpoints"
    partial_of(root, 7).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) is None
    for version in (3, 999_999, 1_000_000):
        folder_of(root, version).mkdir()
        assert newest_checkpoint(tmp_path) == complete(root)[max(complete(root))].name == folder_of(root, version).name
    (root / "latest").symlink_to("step-000003")
    assert newest_checkpoint(tmp_path) == "step-1000000"

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.settings import BufferSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_policy_lag": -1}, "max-policy-lag must"),
        ({"window": -1}, "buffer.window must"),
        ({"max_policy_lag": None, "late": "drop"}, "buffer.late drop"),
        ({"late": "mask", "window": 4}, "buffer.late mask .*buffer.window 4"),
        ({"window": "greedy"}, "buffer.window greedy .*buffer.late"),
        ({"reject_lag": -1}, "buffer.reject-lag must not"),
        ({"reject_lag": 2}, "buffer.reject-lag 2 .*max-policy-lag 2"),
        ({"max_filtered": 0}, "BufferSettings.max_filtered"),
        ({"max_mib": 0}, "BufferSettings.max_mib"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BufferSettings(**settings)


def test_a_window_must_leave_a_batch_of_slots() -> None:
    with pytest.raises(ValueError, match="buffer.window 9 .* 2 x groups-per-step 4 = 8"):
        BufferCore(4, BufferSettings(2, window=9))
    assert BufferCore(4, BufferSettings(2, window=8)).slots == 4
    with pytest.raises(ValueError, match="groups_per_step"):
        BufferCore(0, BufferSettings())


@given(st.integers(0, 9), st.integers(1, 99))
def test_the_default_window_fits_every_depth(lag: int, groups: int) -> None:
    core = BufferCore(groups, BufferSettings(lag))
    assert core.slots is not None and core.window is not None
    assert groups <= core.slots == (lag + 1) * groups - core.window
    assert core.window == max(0, (lag - 1) * groups) // 4


def test_one_setting_chooses_the_depth() -> None:
    assert [BufferCore(4, BufferSettings(lag, window=0)).slots for lag in (0, 1, 7)] == [4, 8, 32]
    stream = BufferCore(4, BufferSettings(None))
    assert (stream.slots, stream.window) == (None, None)
    assert BufferCore(4, BufferSettings(2, late="drop")).slots == 12


def test_replay_is_bounded_by_the_lag() -> None:
    with pytest.raises(ValueError, match=r"buffer.replay 2.*max-policy-lag \+ 1 = 1 "):
        BufferSettings(0, replay=2)
    with pytest.raises(ValueError, match=r"window 3 .* max-policy-lag 2 \+ 1 - replay 2 x groups-per-step 2 = 2"):
        BufferSettings(2, window=3, replay=2).window_for(2)
    assert [BufferSettings(3, replay=replay, window=0).slots_for(4) for replay in (1, 2, 3, 4)] == [16, 8, 6, 4]

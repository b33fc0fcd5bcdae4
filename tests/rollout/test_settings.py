from __future__ import annotations

from typing import Any

import pytest

from monarch_rl.rollout.settings import (
    RolloutSettings,
    check_characters,
    check_lengths,
    check_processes,
    check_prompts,
    check_rollout,
)


@pytest.mark.parametrize("field", ["workers", "group_size", "concurrent_groups", "score_deadline_s"])
def test_settings_out_of_range_are_refused(field: str) -> None:
    settings: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=f"rollout.{field.replace('_', '-')} "):
        RolloutSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 20}, "rollout.keep-sampling-mask"),
        ({"top_p": 0.9}, "rollout.keep-sampling-mask"),
        ({"min_p": 0.1}, "rollout.keep-sampling-mask"),
        ({"top_p": 0.9, "keep_sampling_mask": True}, "rollout.top-k of 2 to 2048"),
        ({"top_k": 1, "keep_sampling_mask": True}, "^rollout.top-k "),
        ({"top_k": 5000, "keep_sampling_mask": True}, "^rollout.top-k "),
        ({"top_p": 0.0}, "^rollout.top-p "),
        ({"min_p": 1.0}, "^rollout.min-p "),
        ({"top_k": 9, "temperature": 0.0, "keep_sampling_mask": True}, "no effect"),
        ({"top_k": 9, "min_p": 0.1, "seed": 3, "keep_sampling_mask": True}, "rollout.seed"),
    ],
)
def test_truncation_that_the_engine_lacks_or_without_a_mask_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (RolloutSettings(group_size=1), "rollout.group-size must be at least 2"),
        (RolloutSettings(temperature=0.0), "rollout.temperature must be at least 0.01"),
        (
            RolloutSettings(group_size=1_000_000),
            "groups-per-step 5 x rollout.group-size 1,000,000 = 5,000,000",
        ),
        (
            RolloutSettings(concurrent_groups=1_000_000),
            "rollout.concurrent-groups 1,000,000 x rollout.group-size 8 = 8,000,000",
        ),
        (RolloutSettings(generate_deadline_s=0.1), "RolloutSettings.generate_deadline_s must be at least 5"),
        (
            RolloutSettings(group_size=3),
            "15 episodes, which 2 data ranks",
        ),
    ],
)
def test_untrainable_rollouts_are_refused(settings: RolloutSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rollout(settings, groups_per_step=5, data_ranks=2)
    check_rollout(RolloutSettings(group_size=4), groups_per_step=5, data_ranks=2)


def test_episodes_without_room_for_a_prompt_are_refused() -> None:
    settings = RolloutSettings(max_new_tokens=30)
    check_lengths(settings, {"trainer.tokens-per-microbatch": 31, "generator.context-length": 40})
    message = "rollout.max-new-tokens 30 .* generator.context-length, which is 30"
    with pytest.raises(ValueError, match=message):
        check_lengths(settings, {"trainer.tokens-per-microbatch": 31, "generator.context-length": 30})


def test_a_prompt_of_too_many_characters_is_refused() -> None:
    check_characters(["a" * 21, "a" * 20], most=20)
    with pytest.raises(ValueError, match=r"21 characters, .* 20, .*task\.template"):
        check_characters(["a" * 21, "a" * 22], most=20)


def test_prompts_without_room_are_refused_or_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    settings = RolloutSettings(max_new_tokens=10)
    check_prompts(settings, {"a": 20}, [10, 10, 11])
    assert not caplog.records
    check_prompts(settings, {"a": 20, "b": 19}, [9, 10, 11])
    assert "2 of 3 prompts" in caplog.text and len(caplog.records) == 1
    with pytest.raises(ValueError, match="max-new-tokens 10 .* 9 tokens, .* c, which is 18"):
        check_prompts(settings, {"a": 20, "c": 18}, [9, 10, 11])


def test_more_processes_than_a_machine_can_start_are_refused() -> None:
    check_processes(RolloutSettings(workers=4, scorer_processes=7), cores=2)
    with pytest.raises(ValueError, match="rollout.workers 4 .*rollout.scorer-processes 8 .* 36 "):
        check_processes(RolloutSettings(workers=4, scorer_processes=8), cores=2)


def test_a_temperature_that_sglang_takes_for_greedy_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout.temperature .* at least 0.01"):
        check_rollout(RolloutSettings(temperature=1e-7), groups_per_step=4, data_ranks=2)


def test_truncation_without_mask_and_top_k_lacks_both_at_once() -> None:
    with pytest.raises(ValueError, match=r"rollout\.keep-sampling-mask(.|\n)*rollout\.top-k of 2"):
        RolloutSettings(top_p=0.9)

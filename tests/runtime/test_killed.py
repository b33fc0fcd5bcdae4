"""The advice after a SIGKILL names the flags of memory, and what the kernel counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monarch_rl.runtime import killed


@pytest.mark.parametrize(
    ("name", "report", "flag"),
    [
        ("trainer", "trainer-0{'gpus': 1/2}> failed\nKilled(sig=9)", "--trainer.tokens-per-microbatch"),
        ("generator 1", "SGLang's process 7 ended unexpectedly, exit code -9", "--generator.max-total-tokens"),
        ("rollout worker 0", "Killed(sig=9)", "--rollout.scorer-processes"),
        ("another", "Killed(sig=9)", ""),
    ],
)
def test_the_advice_names_a_flag_and_the_kills_since_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, report: str, flag: str
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 17\noom_kill 12\nswap_ra 0\n")
    monkeypatch.setattr(killed, "_AT_START", 9)
    advice = killed.advice(name, report, counters)
    assert "kernel" in advice and "since the start: 3" in advice and flag in advice
    assert killed.oom_kills(tmp_path / "none") is None
    assert flag in killed.advice(name, report, tmp_path / "none"), "without the counter, too"


def test_there_is_no_advice_for_other_ends() -> None:
    assert not killed.advice("trainer", "Killed(sig=15)") and not killed.advice("trainer", "exit code 9")


def test_every_flag_of_the_advice_exists() -> None:
    flags = json.loads((Path(__file__).parents[1] / "references" / "flags.json").read_text())["grpo"]
    advice = " ".join(killed.advice(name, "Killed(sig=9)") for name in killed._FLAGS)
    named = re.findall(r"--([\w.-]+)", advice)
    assert named and not set(named) - flags.keys()

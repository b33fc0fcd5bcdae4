"""Trackers: TensorBoard's files read by its own reader, Weights & Biases offline, and trackers that fail or block."""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monarch_rl.errors import SettingsError
from monarch_rl.observe import trackers
from monarch_rl.observe.registry import METRICS
from monarch_rl.observe.trackers import Rows, TrackedRun, Trackers, check_trackers, make_trackers, tag
from tests import patience

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed: pip install 'monarch_rl[wandb]'"
)


class Recording:
    """Notes its calls; raises in the method ``fails``, and waits in the first ``log`` for ``gate``."""

    def __init__(self, fails: str = "", gate: threading.Event | None = None) -> None:
        self.calls, self.rows = list[tuple[Any, ...]](), list[Sequence[Mapping[str, Any]]]()
        self._fails, self._gate = fails, gate

    def _note(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name == self._fails:
            raise RuntimeError("no connection")

    def start(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        self._note("start", settings, run)

    def log(self, step: int, values: Mapping[str, float], rows: Rows) -> None:
        if self._gate is not None:
            self._gate.wait()  # waits: until the test opens it
        self.rows.append(rows())
        self._note("log", step, values)

    def end(self, state: str) -> None:
        self._note("end", state)


RUN = TrackedRun("mine", Path("runs/mine"), 4)


def test_a_tracker_is_told_of_all_steps_in_order() -> None:
    tracker = Recording()
    with Trackers({"own": tracker}, {"steps": 7}, RUN) as tracking:
        tracking.log(5, {"reward/mean": 1}, lambda: [{"reward": 0.5}])
        tracking.log(5, {"held_out/accuracy": 0.5})
    logged = [("log", 5, {"reward/mean": 1.0}), ("log", 5, {"held_out/accuracy": 0.5})]
    assert tracker.calls == [("start", {"steps": 7}, RUN), *logged, ("end", "finished")]
    assert [list(rows) for rows in tracker.rows] == [[{"reward": 0.5}], []]
    failed = Recording()
    with pytest.raises(ValueError, match="the recipe"), Trackers({"own": failed}, {}, RUN):
        raise ValueError("the recipe")
    assert failed.calls[-1] == ("end", "failed")


@pytest.mark.parametrize("method", ["start", "log", "end"])
def test_a_tracker_that_raises_is_reported_once_and_dropped(method: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recording(method), Recording()
    with Trackers({"bad": bad, "good": good}, {}, RUN) as tracking:
        for step in (5, 6, 7):
            tracking.log(step, {"reward/mean": 0.5})
    names = [name for name, *_ in bad.calls]
    assert names == {"start": ["start"], "log": ["start", "log"], "end": ["start", *["log"] * 3, "end"]}[method]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "tracker bad failed (RuntimeError: no connection)" in message and "continues without it" in message
    assert [name for name, *_ in good.calls] == ["start", "log", "log", "log", "end"]


def test_a_tracker_that_blocks_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("monarch_rl.observe.disk_thread.WAITING", 5)
    monkeypatch.setattr(trackers, "END_S", 0.05)
    gate, good = threading.Event(), Recording()
    blocked = Recording(gate=gate)
    with caplog.at_level(logging.WARNING), Trackers({"blocked": blocked}, {}, RUN) as tracking:
        patience.wait_until(lambda: bool(blocked.calls), "the start")
        for step in range(100):
            tracking.log(step, {"reward/mean": 0.5})
        with Trackers({"good": good}, {}, RUN) as others:
            others.log(1, {"reward/mean": 0.5})
            patience.wait_until(lambda: len(good.calls) == 2, "another tracker")
    messages = [record.getMessage() for record in caplog.records]
    assert sum("tracker blocked is slower than the run" in message for message in messages) == 1
    assert sum("given up" in message for message in messages) == 1
    gate.set()
    thread = tracking._threads[0]._disk._thread
    patience.wait_until(lambda: not thread.is_alive(), "the end of its thread")
    assert len(blocked.calls) <= 4, "steps that were given up came later"


def test_trackers_end_next_to_each_other() -> None:
    """Each waits for the other's end, which none would reach if they ended one after the other."""
    ends = threading.Barrier(2)

    class Ending(Recording):
        def end(self, state: str) -> None:
            ends.wait(patience.LIMIT_S)
            super().end(state)

    both = Ending(), Ending()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers, "END_S", patience.LIMIT_S)
        with Trackers(dict(zip("ab", both, strict=True)), {}, RUN):
            pass
    assert [one.calls[-1] for one in both] == [("end", "finished")] * 2


def board(folder: Path) -> EventAccumulator:
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return read


def test_tensorboard_shows_learning_first_and_forgets_steps_that_are_made_again(tmp_path: Path) -> None:
    values = {"advantage/std": 1.0, "buffer/admitted": 8.0, "reward/mean": 0.5, "trainer/own": math.nan}
    for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with Trackers(make_trackers(["tensorboard"]), {}, TrackedRun("a", tmp_path, resumed)) as tracking:
            for step in steps:
                tracking.log(step, values | {"reward/mean": 10.0 * resumed + step})
    read = board(tmp_path)
    rewards = [(event.step, event.value) for event in read.Scalars("1_learning/reward/mean")]
    assert rewards == [(1, 1), (2, 2), (3, 23), (4, 24)]
    tags = sorted(read.Tags()["scalars"])
    assert tags[0] == "1_learning/reward/mean" and len(tags) == len(values)
    sections = sorted({tag(metric.name).split("/")[0] for metric in METRICS})
    assert [section[0] for section in sections] == [str(place + 1) for place in range(len(sections))]
    assert sections[0] == "1_learning" and sections[-1].endswith("checkpoints")


def test_names_that_cannot_be_used_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(["none"])
    check_trackers([])
    assert make_trackers(["none"]) == {} and list(make_trackers(["tensorboard"])) == ["tensorboard"]
    with pytest.raises(SettingsError, match="track tensorbord: .*tensorboard, wandb, none"):
        check_trackers(["tensorbord"])
    with pytest.raises(SettingsError, match="track none tensorboard: give none alone"):
        check_trackers(["none", "tensorboard"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r'package wandb is not installed: pip install "monarch_rl\[wandb\]"'):
        check_trackers(["wandb"])


def records_of(file: Path) -> Iterator[bytes]:
    """The records of a file of W&B: after 7 bytes, LevelDB's log format, blocks of 32 KiB."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no record begins in the last bytes of a block
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@needs_wandb
def test_wandb_offline_has_all_steps_and_a_resumed_run_has_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Read back from the files that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setattr(trackers, "END_S", 600.0)
    folder = tmp_path / "here" / "grpo-1 a"
    folder.mkdir(parents=True)
    rollout = {"group": 3, "episode": 0, "reward": 1.0, "prompt": "2+2", "messages": [{"content": "four"}]}
    for resumed, steps in ((0, (1, 2)), (2, (3,))):
        run = TrackedRun(folder.name, folder, resumed)
        with Trackers(make_trackers(["wandb"]), {"steps": 3}, run) as tracking:
            for step in steps:
                tracking.log(step, {"reward/mean": step / 4}, lambda: [rollout])
            tracking.log(steps[0], {"held_out/accuracy": 0.5})  # late, as of an evaluation next to training
    assert not [record for record in caplog.records if "tracker wandb" in record.getMessage()], caplog.text
    elsewhere = tmp_path / "there" / folder.name
    elsewhere.mkdir(parents=True)
    with Trackers(make_trackers(["wandb"]), {}, TrackedRun(folder.name, elsewhere, 0)):
        pass
    runs, history = list[tuple[str, str, str]](), list[dict[str, str]]()
    for file in sorted(tmp_path.glob("*/*/wandb/offline-run-*/*.wandb")):
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                runs.append((record.run.run_id, record.run.display_name, record.run.project))
            if record.WhichOneof("record_type") == "history":
                history.append({"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
    ids = [(one / "wandb" / "id").read_text() for one in (folder, elsewhere)]
    assert set(runs) == {(one, folder.name, "monarch_rl") for one in ids} and len(set(ids)) == 2
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 2, "the run was not resumed there"
    logged = [(row["step"], row["reward/mean"]) for row in history if "reward/mean" in row]
    assert logged == [("1", "0.25"), ("2", "0.5"), ("3", "0.75")]
    assert [row["step"] for row in history if "held_out/accuracy" in row] == ["1", "3"]
    assert list(folder.glob("wandb/offline-run-*/files/media/table/rollouts*")), "no table of rollouts"

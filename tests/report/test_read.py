"""Reading a run's folder: whole, cut anywhere, damaged, and of an earlier version."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.errors import SettingsError
from monarch_rl.report.page import make_page
from monarch_rl.report.read import RunReader, read_run
from tests.report.synthetic import add_episodes, episode, trained, write_run


def test_everything_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=20))
    assert run.name == "run" and not run.notes
    assert list(run.metrics.steps)[:3] == [0, 1, 2] and len(run.metrics.columns["reward/mean"].values) == 20
    assert {episode["kind"] for episode in run.episodes} == {"train", "dropped", "failed", "held_out"}
    by_place = {(episode["group"], episode["episode"]): episode for episode in run.episodes}
    assert (
        by_place[2, 1]["step"] == 3 and by_place[2, 1]["advantage"] == 0.5 and "entropies" in by_place[2, 1]["trained"]
    )
    assert len(run.spans) == 80 and run.failures[0]["who"] == "rollout worker 1"
    assert run.log.endswith("| step 1\n") and "recipe" in run.recipe and "crc32" not in run.settings


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "whole", steps=5)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_folder_with_a_file_cut_or_overwritten_is_shown(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(path for path in whole.rglob("*") if path.is_file())))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    junk = data.draw(st.binary(max_size=20))
    try:
        path.write_bytes(content[:at] + junk + (content[at + len(junk) :] if junk else b""))
        make_page([read_run(whole)])
    finally:
        path.write_bytes(content)


def test_a_line_that_was_being_written_is_no_damage_but_a_damaged_line_is_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    whole = read_run(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[1]\nnothing\n" + '{"step": 4, "sec')
    run = read_run(folder)
    assert list(run.metrics.steps) == list(whole.metrics.steps)
    assert run.notes == [f"{folder / 'metrics.jsonl'}: 2 damaged lines left out"]


def test_rollouts_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    row = {"step": 3, "group": 1, "episode": 0, "play": 2, "advantage": [1.0, 2.0], "reward": 1.0}
    row |= {"turns": [{"read": "a", "drawn": "b", "reward": None}]}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    [episode] = read_run(tmp_path).episodes
    assert (episode["kind"], episode["rollout"], episode["advantage"], episode["step"]) == ("train", 2, 1.5, 3)
    assert episode["turns"][0]["sampled"] == "b" and episode["messages"] == []


def test_null_is_a_gap_and_a_resumed_run_continues_its_clock(tmp_path: Path) -> None:
    rows = [{"step": 1, "seconds": 5.0, "a": 1}, {"step": 2, "seconds": 1.0, "a": None}, {"step": 3, "seconds": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    metrics = read_run(tmp_path).metrics
    assert list(metrics.seconds) == [5.0, 6.0, 7.0]
    values = metrics.columns["a"].values
    assert values[0] == 1 and math.isnan(values[1]) and len(values) == 2


def test_a_failed_episode_gets_no_step_of_a_trained_one_with_the_same_numbers(tmp_path: Path) -> None:
    add_episodes(
        write_run(tmp_path / "run", steps=2, groups=0),
        [episode(70, 1, ["a"], kind="failed"), episode(70, 1, ["b"])],
        [trained(70, 1, count=1, step=2)],
    )
    failed, other = [row for row in read_run(tmp_path / "run").episodes if row["group"] == 70]
    assert other["step"] == 2 and "trained" in other
    assert failed["kind"] == "failed" and not {"step", "advantage", "trained"} & set(failed)


def test_a_newer_format_and_a_folder_without_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 2, "state": "running"}')
    [note] = read_run(tmp_path).notes
    assert "run.json" in note and "format 2" in note


def test_only_the_newest_episodes_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", groups=2)
    newest = folder / "rollouts" / "episodes-000002.jsonl"
    newest.write_text(json.dumps({"group": 7, "episode": 0}) + "\n")
    run = read_run(folder, episode_bytes=100)
    assert [episode["group"] for episode in run.episodes] == [7] and "left out" in run.notes[0]


@pytest.mark.parametrize("before", [0, 1])
def test_a_piece_that_the_run_deletes_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """It is deleted when its status has been asked for ``before`` times."""
    folder = write_run(tmp_path / "run", groups=2)
    deleted, newest = (folder / f"rollouts/episodes-00000{number}.jsonl" for number in (2, 3))
    for group, path in enumerate((deleted, newest), start=7):
        path.write_text(json.dumps({"group": group, "episode": 0}) + "\n")
    stat, asked = Path.stat, 0

    def deleting(path: Path, **options: Any) -> Any:
        nonlocal asked
        if path == deleted:
            if asked == before:
                path.unlink()
            asked += 1
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", deleting)
    groups = {episode["group"] for episode in read_run(folder).episodes}
    assert asked > before and {0, 1, 8} <= groups and 7 not in groups


def test_only_new_lines_are_read_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=20)
    reader = RunReader(folder)
    reader.read()
    for name in ("metrics.jsonl", "rollouts/episodes-000001.jsonl", "timeline/spans-000001.jsonl"):
        with (folder / name).open("r+b") as file:
            file.write(b"?")  # which nobody notices who does not read the first line
    add_episodes(folder, [episode(70, 0, ["a"])], [trained(70, 0, count=1, step=9)])
    run = reader.read()
    assert not run.notes and len(run.metrics.steps) == 23 and len(run.spans) == 80
    assert (run.episodes[-1]["group"], run.episodes[-1]["step"]) == (70, 9) and run.episodes[0]["group"] == 0
    assert len(read_run(folder).notes) == 3


def test_what_is_beyond_the_limit_or_deleted_is_forgotten(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, groups=0)
    log = folder / "rollouts/episodes-000001.jsonl"
    log.write_text("")
    (folder / "rollouts/tokens-000002.jsonl").write_text("")
    add_episodes(folder, [episode(0, 0, ["a"])])
    tokens = folder / "rollouts/tokens-000001.jsonl"
    tokens.write_text(json.dumps(trained(0, 0, count=1)) + "\n")
    limit = 2 * log.stat().st_size + 10
    reader = RunReader(folder, episode_bytes=limit)
    assert reader.read().episodes[0]["step"] == 1
    tokens.unlink()
    assert not {"step", "advantage", "trained"} & set(reader.read().episodes[0])
    for group in (1, 2, 3):
        add_episodes(folder, [episode(group, 0, ["a"])])
        assert repr(reader.read()) == repr(read_run(folder, limit))
    assert [row["group"] for row in reader.read().episodes] == [2, 3]


LOGS = ("metrics", "failures", "rollouts/episodes", "rollouts/tokens", "timeline/spans")


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_run_read_again_is_as_read_for_the_first_time(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever was appended, truncated at a resume, or deleted meanwhile."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("rollouts", "timeline"):
        (folder / name).mkdir()
    (folder / "settings.json").write_text("{}")
    (folder / "rollouts/episodes-000001.jsonl").touch()
    reader = RunReader(folder, episode_bytes=600)
    rest: dict[Path, str] = {}  # of a line of which only the beginning is written
    for number in range(data.draw(st.integers(3, 12))):
        log = folder / data.draw(st.sampled_from(LOGS))
        files = sorted(log.parent.glob(f"{log.name}*.jsonl"))
        path = files[-1] if files else folder / f"{log}{'-000001' if log.parent != folder else ''}.jsonl"
        match data.draw(st.sampled_from(["append", "append", "append", "truncate", "next", "delete"])):
            case "truncate" if files:
                lines = path.read_bytes().splitlines(keepends=True)
                path.write_bytes(b"".join(lines[: data.draw(st.integers(0, max(0, len(lines) - 1)))]))
                rest[path] = ""
            case "delete" if files:
                files[0].unlink()
                rest[files[0]] = ""
                continue
            case "next" if log.parent != folder:
                path = log.with_name(f"{log.name}-{number + 2:06}.jsonl")
        row = {"loss": 1 / (number + 1), "group": number % 3, "lane": "a", "from": number, "to": number}
        row["text"] = "x" * data.draw(st.sampled_from([0, 50, 300]))
        if log.name != "episodes":
            row |= {"step": number, "seconds": number}
        text = rest.get(path, "") + f"{json.dumps(row)}\n"
        written = data.draw(st.sampled_from([len(text), len(text) - 1, len(text) // 2]))
        with path.open("a") as file:
            file.write(text[:written])
        rest[path] = text[written:]
        if data.draw(st.booleans()):
            assert repr(reader.read()) == repr(read_run(folder, episode_bytes=600))
    assert repr(reader.read()) == repr(read_run(folder, episode_bytes=600))

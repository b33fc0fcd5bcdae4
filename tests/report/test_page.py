"""The page of a run, and its library."""

import base64
import hashlib
import json
import random
import re
import resource
import sys
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.errors import SettingsError
from monarch_rl.report.page import MOST_GROUPS, make_page, write_page
from monarch_rl.report.read import read_run
from tests.patience import run
from tests.report.synthetic import episode, write_run
from tests.report.test_convert import monarch_rl

LIBRARY = {  # uPlot 1.6.32, as npm has it
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def data_of(page: str) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'id="data">([^<]*)<', page)
    assert found is not None
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def test_the_library_is_the_published_one() -> None:
    static = files("monarch_rl.report") / "static"
    assert {name: hashlib.sha256((static / name).read_bytes()).hexdigest() for name in LIBRARY} == LIBRARY


def test_no_code_of_the_page_sets_html() -> None:
    code = [path for path in (files("monarch_rl.report") / "static").iterdir() if path.name.endswith(".js")]
    own = "".join(path.read_text() for path in code if path.name not in LIBRARY)
    assert "textContent" in own
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", own)


def test_held_out_sets_do_not_share_groups_even_where_episodes_failed(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run", steps=5))
    (row,) = [one for one in record.episodes if one["kind"] == "held_out"]
    failed = {name: value for name, value in row.items() if name != "version"} | {"kind": "failed"}
    record.episodes = [one | {"held_out": name} for name in ("easy", "hard") for one in (row, failed, row, failed)]
    groups = data_of(make_page([record]).html)["runs"][0]["groups"]
    found = [(group["set"], group["kinds"], group["episodes"]) for group in groups]
    assert sorted(found) == [(name, [kind], 2) for name in ("easy", "hard") for kind in ("failed", "held_out")]


def test_the_page_of_very_many_groups_is_bounded_and_says_so(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run", steps=5))
    (row,) = [one for one in record.episodes if one["kind"] == "held_out"]
    more = [row | {"group": -10 - n, "prompt": f"{n} ".rjust(300, "x")} for n in range(20_000)]
    record.episodes = [*more, *record.episodes]
    page = make_page([record])
    run = data_of(page.html)["runs"][0]
    assert len(page.html) < 2_000_000 and len(run["groups"]) == MOST_GROUPS
    assert run["groups"][0]["group"] == record.episodes[-1]["group"], "the newest are left out"
    assert any("newest 5,000 of 20," in note for note in run["notes"])


def test_lanes_share_the_time_in_which_the_run_existed(tmp_path: Path) -> None:
    """Not the hour before its resume."""
    record = read_run(write_run(tmp_path / "run", steps=5))
    record.spans = [
        {"lane": lane, "kind": "work", "what": "update", "from": begin, "to": begin + seconds}
        for begin in (0.0, 3700.0)
        for lane, seconds in (("a", 100.0), ("b", 50.0))
    ]
    lanes = data_of(make_page([record]).html)["runs"][0]["lanes"]
    assert [(lane["lane"], lane["shares"]["work"]) for lane in lanes] == [("a", 1.0), ("b", 0.5)]


def test_no_tag_of_a_run_is_in_the_page(tmp_path: Path) -> None:
    hostile = "</title></script><!--<script>alert(1)</script>\u2028"
    folder = write_run(tmp_path / "run", steps=5)
    (folder / "console.log").write_text(hostile)
    (folder / "recipe.py").write_text(hostile)
    record = read_run(folder)
    record.name = hostile
    page = make_page([record]).html
    assert "alert(1)" not in re.sub(r"<title>.*?</title>", "", page) and page.count("</title>") == 1
    assert page.count("<script") == 3 + page.count("<script src") and "\u2028" not in re.sub(
        "<title>.*?</title>", "", page
    )


def test_the_room_imports_no_pytorch() -> None:
    code = "import sys, monarch_rl.report.view, monarch_rl.cli; sys.exit('torch' in sys.modules)"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_settings_that_are_not_the_recipes_defaults_are_told_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5, lr=1e-3)
    state = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(state | {"changed": {"trainer.lr": [1e-6, 1e-3], "steps": 3}}))
    run = data_of(make_page([read_run(folder)]).html)["runs"][0]
    assert run["differs"] == [["trainer.lr", 1e-3, 1e-6]]
    assert run["settings"] == [["steps", 5], ["rollout.group-size", 2]]


def test_the_command_names_its_file_and_a_folder_that_is_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    done = monarch_rl("report", folder)
    assert done.returncode == 0 and str(folder / "report.html") in done.stdout, done.stderr
    page = (folder / "report.html").read_text()
    assert len(page) < 2_000_000 and "default-src 'none'" in page
    done = monarch_rl("report", folder, tmp_path / "none")
    assert done.returncode == 2 and str(tmp_path / "none") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("single", [False, True])
def test_older_rollouts_are_beside_the_page_or_in_it(tmp_path: Path, single: bool) -> None:
    record = read_run(write_run(tmp_path / "run", steps=5, groups=80))
    page = make_page([record], single=single)
    assert len(page.pieces) == (0 if single else 2)
    write_page(make_page([record]), tmp_path / "page.html")
    write_page(page, tmp_path / "page.html")
    beside = tmp_path / "page"
    assert len(list(beside.iterdir())) == len(page.pieces), "pieces of an earlier page are removed"
    for number, text in page.pieces.items():
        assert re.fullmatch(rf'__piece\({number}, "[A-Za-z0-9+/=]+"\);\n', text)


@pytest.mark.parametrize(("nbytes", "inside", "pieces"), [(1_000, 32, 2), (1_000_000, 32, 12), (2_000_000, 1, 40)])
def test_large_groups_fill_more_pieces_and_are_not_tried_in_the_page(
    tmp_path: Path, nbytes: int, inside: int, pieces: int
) -> None:
    record = read_run(write_run(tmp_path / "run", steps=5, groups=80))
    record.episodes = [row | {"bytes": nbytes} for row in record.episodes if row["kind"] == "train"]
    page = make_page([record])
    assert (len(data_of(page.html)["inside"]), len(page.pieces)) == (inside, pieces)


def test_only_pieces_of_an_earlier_page_are_removed(tmp_path: Path) -> None:
    output = tmp_path / "site.html"
    for groups in (80, 5):
        write_page(make_page([read_run(write_run(tmp_path / f"run{groups}", steps=5, groups=groups))]), output)
        assert (tmp_path / "site/001.js").exists() == (groups == 80)
        (tmp_path / "site/404.js").write_text("console.log('mine')")
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["404.js"]
    assert not list(tmp_path.glob(".site*"))
    with pytest.raises(SettingsError, match="site does not end in .html"):
        write_page(make_page([read_run(tmp_path / "run5")]), tmp_path / "site")


def test_a_page_that_cannot_be_written_leaves_the_earlier_one_as_it_was(tmp_path: Path) -> None:
    earlier, later = (
        make_page([read_run(write_run(tmp_path / f"run{groups}", steps=5, groups=groups))]) for groups in (80, 120)
    )
    output = tmp_path / "out" / "site.html"
    output.parent.mkdir()
    write_page(earlier, output)
    before = {path: path.read_bytes() for path in output.parent.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    longest = max(map(len, later.pieces.values()))
    assert longest < len(later.html) - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, limits[1]))  # as if the disk became full within the page
    try:
        with pytest.raises(SettingsError, match=r"site\.html cannot be written \(File too large\)"):
            write_page(later, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in output.parent.rglob("*") if path.is_file()} == before


def test_an_output_below_a_file_is_named(tmp_path: Path) -> None:
    page = make_page([read_run(write_run(tmp_path / "run", steps=5))])
    for output in (tmp_path / "run/run.json/page.html", tmp_path / "none/page.html"):
        with pytest.raises(SettingsError, match=rf"{re.escape(str(output))} cannot be written"):
            write_page(page, output)


@pytest.mark.parametrize(
    ("sizes", "inside"),
    [
        ([10, 700_000, 10, 10], [0, 2, 3]),
        ([10, 700_000, 1_200_000], [2]),
        ([10, 10, 1_500_000], [0, 1]),
    ],
)
def test_a_group_that_does_not_fit_is_skipped_and_the_newest_fits_while_the_page_is_small(
    tmp_path: Path, sizes: list[int], inside: list[int]
) -> None:
    noise = random.Random(0)
    record = read_run(write_run(tmp_path / "run", steps=5, groups=0))
    record.episodes = [
        episode(group, 0, ["a"]) | {"item": base64.b64encode(noise.randbytes(size)).decode()}
        for group, size in enumerate(sizes)
    ]
    page = make_page([record])
    data = data_of(page.html)
    in_page = [group["group"] for group in data["runs"][0]["groups"] if group["piece"] == 0]
    assert sorted(in_page) == inside and len(data["inside"]) == len(inside)
    assert len(page.html) < 2_000_000 and len(page.pieces) == 1

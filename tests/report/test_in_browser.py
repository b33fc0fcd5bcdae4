"""The page in a real browser."""

import asyncio
import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.episode import Episode, Fork, Group, Turn
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.sampling import Completion
from monarch_rl.report.page import make_page, write_page
from monarch_rl.report.read import read_run
from monarch_rl.rollout.record import EpisodeRecord
from monarch_rl.rollout.sequences import untrained
from tests.report.browser import Browser, chromium, needs_chromium
from tests.report.synthetic import add_episodes, encoded, episode, trained, write_run
from tests.report.test_view import serving
from tests.rollout.test_transcripts import Ids

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def shown(browser: Browser, folders: list[Path], state: str = "") -> None:
    """Make the page of runs and open it."""
    output = folders[0] / "report.html"
    write_page(make_page([read_run(folder) for folder in folders]), output)
    assert output.stat().st_size < 2_000_000
    browser.open(output, state)


def check(browser: Browser) -> None:
    """No error, no request that leaves the page's folder, and no visible chart without pixels."""
    assert not browser.errors
    assert browser.requests and all(address.startswith("file://") for address in browser.requests)
    assert not browser.charts_without_pixels()


def test_two_runs_are_drawn_together_and_keys_choose_the_screen(browser: Browser, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=30, seed=1, lr=2e-6, state="running")]
    shown(browser, folders)
    check(browser)
    assert browser.run("document.querySelectorAll('canvas').length") == 9
    assert "--trainer.lr" in browser.run("document.querySelector('table').textContent")
    browser.run("document.querySelectorAll('details').forEach(group => (group.open = true))")
    browser.wait_for("document.querySelectorAll('canvas').length > 12")
    check(browser)
    for x in ("episodes", "tokens", "hours"):
        browser.run(f"[...document.querySelectorAll('.bar button')].find(b => b.textContent === '{x}').click()")
        check(browser)
    browser.press(str(browser.run("document.querySelectorAll('nav button').length")))
    assert "grpo.py" in browser.run("document.querySelector('main').textContent")
    check(browser)


@pytest.mark.slow
def test_a_run_of_100000_steps_is_ready_at_once(browser: Browser, tmp_path: Path) -> None:
    """After loading, nothing depends on the number of steps: no series has more than 2,000 points."""
    shown(browser, [write_run(tmp_path / "run", steps=100_000, evaluate_every=1_000)])
    check(browser)
    longest = browser.run("Math.max(...plots.map(plot => plot.data[0].length))")
    assert 1_000 < longest <= 2_000


def test_a_folder_without_rollouts_metrics_or_log(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"state": "runn')
    shown(browser, [tmp_path])
    check(browser)
    assert "run.json is damaged" in browser.run("document.body.textContent")


def test_rollouts_are_listed_filtered_and_shown_by_token(browser: Browser, tmp_path: Path) -> None:
    shown(browser, [write_run(tmp_path / "run", groups=40)], "#screen=rollouts")
    browser.wait_for("document.querySelector('.answer')")
    assert browser.run("document.querySelectorAll('tr.row').length") == 43
    for kind, text in (("failed", "KeyError: 'x'"), ("dropped", "too old"), ("held_out", "held"), ("train", "one two")):
        browser.run(f"setState({{kind: '{kind}', group: ''}}); show()")
        browser.wait_for(f"document.getElementById('detail').textContent.includes({text!r})")
    for color in browser.run("[...document.querySelectorAll('#detail option')].map(option => option.value)"):
        browser.run(f"setState({{color: '{color}'}}); show()")
        browser.wait_for("document.querySelector('.tokens span')")
    assert color == "mask"
    first = browser.run("STATE.group")
    browser.press("j")
    assert browser.run("STATE.group") != first
    browser.press("k")
    assert browser.run("STATE.group") == first
    browser.press("/")
    assert browser.run("document.activeElement.id") == "filter"
    browser.run("setState({step: '1-2'}); show()")  # in a piece beside the page
    browser.wait_for("document.querySelector('.tokens span')")
    assert browser.run("visible.length") == 2 and any(
        address.endswith("/report/001.js") for address in browser.requests
    )
    check(browser)


def test_the_trainers_values_of_a_branch_belong_to_its_own_tokens(browser: Browser, tmp_path: Path) -> None:
    """The turns that it shares with an earlier sequence are trained there."""
    shared, own = (episode(0, 1, texts)["turns"][0] for texts in (["a", "b", "c"], ["x", "y"]))
    shared["token_versions"] = encoded(np.full(3, -1), "<i4")
    row = {"turns": [shared, own], "step": 4, "trained": trained(0, 1, 2)}
    shown(browser, [write_run(tmp_path / "run")])
    columns = browser.run(f"tokensOf({json.dumps(row)}).columns")
    assert columns["version"] == [None, None, None, 0, 0] and columns["lag"] == [None, None, None, 3, 3]
    assert columns["weight"] == [None, None, None, 0.0, 1.0]
    assert columns["ratio"][:3] == [None] * 3 and all(ratio > 0 for ratio in columns["ratio"][3:])


def game(rollout: int) -> list[Episode]:
    """An episode with two seats, of which the first has a branch after its first turn."""

    def turn(context: list[int], ids: list[int]) -> Turn:
        n = len(ids)
        return Turn.from_completion(context, Completion(np.asarray(ids), np.zeros(n), np.zeros(n, int), "stop"))

    first, branch = turn([1, 2], [7, 7]), Fork(0, 1)
    return [
        Episode([first, turn([3], [8])], 1.0, "stop", seat="white", rollout=rollout),
        Episode([turn([1], [5])], -1.0, "stop", seat="black", rollout=rollout),
        Episode([untrained(first, False), turn([4], [9])], 0.5, "stop", seat="white", rollout=rollout, fork=branch),
    ]


def test_seats_and_branches_of_an_episode_are_tabs_and_the_turns_that_they_share_are_marked(
    browser: Browser, tmp_path: Path
) -> None:
    """With lines as a worker records them."""
    template: Any = Ids()
    record = EpisodeRecord("rollout worker 0", template, LoggedGroups(1, 1))
    asyncio.run(record.add_group(Group(0, 0, [*game(0), *game(1)], task="game"), {"n": 0}))
    folder = write_run(tmp_path / "run", groups=0)
    add_episodes(folder, [json.loads(line) for line in record.take().lines])
    shown(browser, [folder], "#screen=rollouts&kind=train")
    browser.wait_for("document.querySelector('[role=tab]')")
    tabs = "[...document.querySelectorAll('[role=tab]')]"
    names = ["1 white: 1", "2 black: -1", "3 white, branch of 1: 0.5"]
    assert browser.run(f"{tabs}.map(tab => tab.textContent)") == names
    cards = "[...document.querySelectorAll('.answer b')].map(rewards => rewards.textContent)"
    assert browser.run(cards) == ["1 | -1 | 0.5"] * 2
    chosen = f"{tabs}.findIndex(tab => tab.getAttribute('aria-selected') === 'true')"
    assert browser.run(chosen) == 0 and not browser.run("document.querySelector('.shared')")
    beginning = browser.run("document.querySelector('.tokens').textContent")
    browser.press("l")
    assert browser.run(chosen) == 1
    browser.run(f"{tabs}[1].focus()")
    browser.press("ArrowRight")
    assert browser.run(chosen) == 2 and browser.run(f"document.activeElement === {tabs}[2]")
    assert browser.run("document.querySelector('.shared summary').textContent") == "1 turn shared with sequence 1"
    assert browser.run("document.querySelector('.shared .tokens').textContent") == beginning
    own = browser.run("[...document.querySelectorAll('.tokens')].map(box => !box.closest('.shared'))")
    assert own == [False, True]
    browser.run("document.querySelectorAll('.answer')[1].click()")  # another episode begins with its first sequence
    assert browser.run(chosen) == 0
    check(browser)


def test_the_diagnosis_comes_first(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 31):
            row = {"reward/mean": 0.0, "reward/equal_groups_share": 1.0, "reward/all_wrong_share": 1.0}
            file.write(json.dumps({"step": step, "seconds": float(step), **row}) + "\n")
    shown(browser, [folder])
    panel = "document.querySelector('main').firstChild"
    assert browser.run(f"{panel}.querySelectorAll('.problem').length") == 1
    assert "100% of the groups" in browser.run(f"{panel}.textContent")
    check(browser)


def test_a_missing_piece_is_a_sentence(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", groups=40)
    shown(browser, [folder], "#screen=run")
    (folder / "report/001.js").unlink()
    browser.run("setState({screen: 'rollouts', step: '1'}); show()")
    browser.wait_for(
        "document.getElementById('detail')?.textContent.includes('001.js beside the page, which is missing')"
    )


def test_groups_of_one_piece_are_loaded_at_once_by_one_request(browser: Browser, tmp_path: Path) -> None:
    shown(browser, [write_run(tmp_path / "run", groups=40)], "#screen=run")
    browser.run(
        "Promise.all(DATA.runs[0].groups.filter(group => group.piece === 1).map(rowsOf))"
        ".then(all => { globalThis.sizes = all.map(rows => rows.length); }), null"
    )
    browser.wait_for("globalThis.sizes")
    assert browser.run("sizes") == [2] * 11
    assert sum(address.endswith("/report/001.js") for address in browser.requests) == 1
    check(browser)


def test_a_piece_that_was_cut_is_a_sentence(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", groups=40)
    shown(browser, [folder], "#screen=run")
    piece = folder / "report/001.js"
    piece.write_text(piece.read_text()[:100])
    browser.run("setState({screen: 'rollouts', step: '1'}); show()")
    browser.wait_for(
        "document.getElementById('detail')?.textContent.includes('001.js beside the page, which is missing')"
    )


def test_what_a_model_wrote_stays_text(browser: Browser, tmp_path: Path) -> None:
    """Tags, right-to-left text, 100,000 tokens, and tokens that end inside a character."""
    folder = write_run(tmp_path / "run", groups=0)
    tags = "</script><script>globalThis.owned = 1</script><img src=x onerror='globalThis.owned = 1'><!--\u2028"
    euro = "€".encode()
    smile, hebrew = "😀".encode(), "\u202e\u05e9\u05dc\u05d5\u05dd"
    hostile = [tags.encode(), hebrew.encode(), euro[:2], euro[2:], smile[:1], smile[1:], b"end"]
    rows = [episode(5, 0, hostile), episode(5, 1, ["w "] * 100_000, reward=0.0)]
    for name in ("task", "worker", "finish_reason", "seat"):
        rows[0][name] = tags
    rows[0] |= {"item": {tags: tags}, "info": {tags: tags}, "parts": {tags: 1.0}}
    rows[0]["messages"].append({"role": tags, "content": [{"text": tags}], "tool_calls": tags})
    add_episodes(folder, rows, [trained(5, 0, len(hostile)), trained(5, 1, 100_000)])
    shown(browser, [folder], "#screen=rollouts&group=0.3")
    browser.wait_for("document.querySelectorAll('.tokens span').length === 7")
    texts = browser.run("[...document.querySelectorAll('.tokens span')].map(span => span.textContent)")
    assert texts == [tags, hebrew, "▫", "€", "▫", "😀", "end"]
    browser.run("document.querySelectorAll('.answer')[1].click()")
    browser.wait_for("document.querySelector('#detail').textContent.includes('100,000 sampled tokens')")
    browser.run("{ const box = document.querySelector('.tokens'); box.scrollTop = box.scrollHeight; }")
    browser.wait_for("document.querySelectorAll('.tokens span').length > 2000")
    assert browser.run("globalThis.owned === undefined && document.querySelectorAll('img').length === 0")
    check(browser)


def test_time_shows_lanes_lags_losses_and_faults(browser: Browser, tmp_path: Path) -> None:
    shown(browser, [write_run(tmp_path / "run")], "#screen=time")
    check(browser)
    assert browser.run("document.querySelectorAll('canvas').length") == 3
    text = browser.run("document.querySelector('main').textContent")
    assert all(each in text for each in ("waits for", "dropped/late", "rollout worker 1", "Tokens by lag"))
    assert re.search(r"trainer rank 0\d+\.\d %buffer \d+\.\d %", text)
    box = browser.run("(({x, y}) => [x, y])(document.querySelector('.lanes').getBoundingClientRect())")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 300, y=box[1] + 40)
    browser.wait_for("/trainer rank 0: (update|waits: batch)/.test(document.querySelector('.tip')?.textContent)")


def test_time_shows_what_the_simulator_predicts_or_why_it_does_not(browser: Browser, tmp_path: Path) -> None:
    folder, prediction = write_run(tmp_path / "run", steps=5, groups=0), tmp_path / "run/prediction.json"
    case: dict[str, Any] = {"change": "none", "trainer_ranks": 1, "replicas": 1, "max_policy_lag": None, "step_s": 2.0}
    case |= {"trainer_idle_share": 0.5, "generator_idle_share": 0.25, "lag_mean": 1.5}
    cases = [case, case | {"change": "one replica more", "replicas": 2, "step_s": 1.6}]
    for found, sentence in (
        (None, "report RUN --predict"),
        ({"made": 1_000.0, "problem": "it is too short"}, "cannot be simulated: it is too short."),
        ({"made": 1_000.0, "step_s": 2.5, "cases": cases}, "A prediction of"),
    ):
        if found is not None:
            prediction.write_text(json.dumps(found))
        shown(browser, [folder], "#screen=time")
        assert sentence in browser.run("document.querySelector('main').textContent")
    rows = browser.run(
        "[...document.querySelectorAll('tr')].filter(row => row.textContent.includes('×'))"
        ".map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert rows == [
        ["none", "1", "1", "none", "2", "1,800", "× 1.00", "50.0 %", "25.0 %", "1.5"],
        ["one replica more", "1", "2", "none", "1.6", "2,250", "× 1.25", "50.0 %", "25.0 %", "1.5"],
    ]
    check(browser)


def test_from_the_list_to_all_screens_of_a_live_run(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", steps=4, groups=40, state="running")
    with serving(tmp_path / "runs") as server:
        # Timers of 10 s are kept, for the test to call.
        script = browser.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="globalThis.timers = []; const set = setInterval; globalThis.setInterval = (f, ms, ...rest) => "
            "ms === 10000 ? timers.push(f) : set(f, ms, ...rest);",
        )
        browser.call("Page.navigate", url="about:blank")
        browser.requests.clear()
        browser.errors.clear()
        browser.call("Page.navigate", url=server.url)
        browser.wait_for("document.querySelectorAll('td a').length === 1")
        write_run(tmp_path / "runs" / "b", steps=3)
        browser.leave("setTimeout(timers[0])")
        browser.wait_for("document.querySelectorAll('td a').length === 2")
        browser.leave(
            "document.querySelectorAll('input').forEach(box => box.click()); document.querySelector('button').click()"
        )
        browser.wait_for("typeof ready === 'number' && DATA.runs.length === 2")
        browser.leave("location.assign('.')")
        browser.wait_for("document.querySelectorAll('td a').length === 2")
        browser.leave("document.querySelector('a[href$=\"=a\"]').click()")
        browser.wait_for("typeof ready === 'number' && DATA.runs.length === 1")
        for key in "1234":
            browser.press(key)
            assert not browser.charts_without_pixels()
        browser.run("setState({screen: 'rollouts', step: '1-2'}); show()")  # in a piece
        browser.wait_for("document.querySelector('.tokens span')")
        browser.press("1")
        latest = "Math.max(...plots.flatMap(plot => [...plot.data[0]]))"
        assert browser.run(latest) == 4 and browser.run("timers.length") == 1
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "seconds": 5.0, "reward/mean": 0.5}\n')
        browser.leave("setTimeout(timers[0])")
        browser.wait_for(f"typeof ready === 'number' && {latest} === 5")
        run = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(run | {"state": "finished"}))
        browser.leave("setTimeout(timers[0])")
        browser.wait_for("typeof ready === 'number' && DATA.runs[0].state.state === 'finished' && timers.length === 0")
        assert not browser.errors
        assert all(address.startswith(server.url) for address in browser.requests), browser.requests
        assert any("/pieces/" in address for address in browser.requests)
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)


@pytest.fixture
def media(browser: Browser) -> Iterator[Callable[..., None]]:
    """Emulates a medium, and a preference of colours, until the test ends."""

    def emulate(media: str = "", scheme: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", media=media, features=features)

    yield emulate
    emulate()
    browser.call("Emulation.clearDeviceMetricsOverride")


def colors(browser: Browser) -> list[str]:
    """Of the page's background, of a card, and of text."""
    found: list[str] = browser.run(
        "[getComputedStyle(document.body), getComputedStyle(document.querySelector('header'))]"
        ".flatMap(style => [style.backgroundColor, style.color])"
    )
    return found


def test_the_page_is_readable_in_dark_and_light(browser: Browser, tmp_path: Path, media: Callable[..., None]) -> None:
    """As the system prefers, which may change, or as the button says."""
    folder, found = write_run(tmp_path / "run", groups=3), dict[str, list[str]]()
    media(scheme="light")
    shown(browser, [folder], "#kind=train")
    for scheme in ("light", "dark"):
        media(scheme=scheme)
        browser.wait_for(f"document.documentElement.classList.contains('dark') === {str(scheme == 'dark').lower()}")
        found[scheme] = colors(browser)
        for key, loaded in (("1", ".uplot"), ("2", ".tokens span"), ("3", ".lanes"), ("4", "table")):
            browser.press(key)
            browser.wait_for(f"document.querySelector('{loaded}')")
            assert not browser.unreadable(), (scheme, key)
            assert not browser.charts_without_pixels()
    assert all(light != dark for light, dark in zip(found["light"], found["dark"], strict=True))
    toggle = "document.querySelector('header button[title=\"dark or light\"]').click()"
    for expected in ("light", "dark"):
        browser.run(toggle)
        assert colors(browser) == found[expected] and f"theme={expected}" in browser.run("location.hash")
    check(browser)


def test_a_printed_page_is_light_and_whole(browser: Browser, tmp_path: Path, media: Callable[..., None]) -> None:
    folder = write_run(tmp_path / "run", groups=40)
    rows = [episode(50, 0, ["word "] * 3_000), episode(50, 1, ["line\n"] * 100, reward=0.0)]
    add_episodes(folder, rows, [trained(50, 0, 3_000), trained(50, 1, 100)])
    (folder / "console.log").write_text("a line\n" * 300)
    media(scheme="dark")
    shown(browser, [folder], "#screen=rollouts&kind=train")
    browser.wait_for("document.querySelectorAll('.tokens span').length === 2000")
    browser.run("addEventListener('beforeprint', () => globalThis.printed = printing)")
    assert base64.b64decode(browser.call("Page.printToPDF")["data"]).startswith(b"%PDF-")
    assert browser.run("printed && !printing")
    for key in "2134":
        browser.press(key)
        browser.wait_for("document.querySelector('.tokens, .uplot, table')")
        # As the browser lays it out then, on a page of A4.
        browser.call("Emulation.setDeviceMetricsOverride", width=720, height=1000, deviceScaleFactor=1, mobile=False)
        media(media="print", scheme="dark")
        browser.run("dispatchEvent(new Event('beforeprint'))")
        assert colors(browser)[:2] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
        assert not browser.cut() and not browser.unreadable(), key
        controls = "[...document.querySelectorAll('nav, select, input, button')].some(each => each.checkVisibility())"
        assert not browser.run(controls)
        chosen = (
            "[...document.querySelectorAll('.printed')].filter(each => each.checkVisibility()).map(e => e.textContent)"
        )
        assert browser.run(chosen) == {"1": ["step"], "2": ["version"]}.get(key, [])
        if key == "2":
            assert browser.run("document.querySelectorAll('.tokens span').length") == 3_000
        media(scheme="dark")
        browser.call("Emulation.clearDeviceMetricsOverride")
        browser.run("dispatchEvent(new Event('afterprint'))")
        assert browser.run("document.documentElement.classList.contains('dark')")
    check(browser)


@pytest.mark.parametrize("written", [1, 40])
def test_a_run_that_was_killed_in_the_middle_of_a_line(browser: Browser, tmp_path: Path, written: int) -> None:
    """The lines before it are shown, and nothing is said of it."""
    folder = write_run(tmp_path / "run", steps=5, groups=2, state="running")
    (piece,) = (folder / "rollouts").glob("episodes-*.jsonl")
    for path, line in (
        (folder / "metrics.jsonl", json.dumps({"step": 6, "seconds": 6.0, "reward/mean": 0.5})),
        (piece, json.dumps(episode(77, 0, ["never"]))),
    ):
        with path.open("a") as file:
            file.write(line[:written])
    shown(browser, [folder])
    assert browser.run("Math.max(...plots.flatMap(plot => [...plot.data[0]]))") == 5
    assert not browser.run("document.querySelector('.note')")
    check(browser)
    browser.press("2")
    browser.wait_for("document.querySelector('.answer')")
    assert browser.run("document.querySelectorAll('tr.row').length") == 2 + 3
    assert "77" not in browser.run("DATA.runs[0].groups.map(group => String(group.group)).join(' ')")
    check(browser)

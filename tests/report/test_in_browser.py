"""The page in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_rl.report.page import make_page, write_page
from monarch_rl.report.read import read_run
from tests.report.browser import Browser, chromium, needs_chromium
from tests.report.synthetic import write_run

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

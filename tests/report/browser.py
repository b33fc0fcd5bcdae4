"""A headless Chromium, driven by the DevTools protocol through a pipe.

The pipe needs no port and no library: messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.patience import exit_code, item_of, join, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)")


class Browser:
    """One tab. ``requests`` and ``errors`` collect the addresses that pages asked for and what their consoles and
    scripts reported."""

    def __init__(self, to: int, answers: Queue[dict[str, Any]]) -> None:
        self._to, self._answers = to, answers
        self._calls = 0
        self._session = ""
        self._loaded = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = item_of(self._answers, f"an answer of Chromium to {method}")
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded += 1
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(values["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(values["args"]))
            case "Log.entryAdded" if values["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Fails if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, page: Path | str, state: str = "") -> None:
        """Open a report and wait until it is shown. Forgets earlier requests and errors."""
        self.call("Page.navigate", url="about:blank")  # else an address that differs in its # alone loads nothing
        self.requests.clear()
        self.errors.clear()
        self.call("Page.navigate", url=(page.as_uri() if isinstance(page, Path) else page) + state)
        wait_until(
            lambda: self.errors or self.run("typeof ready === 'number'"), lambda: f"{page} to be ready: {self.errors}"
        )

    def leave(self, expression: str) -> None:
        """Run JavaScript that leaves the page, and wait until the next one has loaded."""
        before = self._loaded
        self.run(expression)
        while self._loaded == before:  # without calls: a page that is being replaced may not answer them
            self._note(item_of(self._answers, f"a page after {expression}"))

    def press(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        wait_until(lambda: self.run(f"Boolean({expression})"), lambda: f"{expression}; errors: {self.errors}")

    def screenshot(self) -> str:
        """A picture of what is visible: PNG in base64."""
        picture: str = self.call("Page.captureScreenshot", format="png")["data"]
        return picture

    def charts_without_pixels(self) -> list[str]:
        """Titles of visible charts whose canvas is empty or has a single colour."""
        titles: list[str] = self.run(
            """[...document.querySelectorAll("canvas")].filter(canvas => canvas.checkVisibility()).filter(canvas => {
              if (!canvas.width || !canvas.height) return true;
              const {width, height} = canvas;
              const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
              copy.drawImage(canvas, 0, 0);
              const pixels = new Uint32Array(copy.getImageData(0, 0, width, height).data.buffer);
              return pixels.every(pixel => pixel === pixels[0]);
            }).map(canvas => canvas.closest(".card")?.querySelector("h3")?.textContent ?? canvas.className)"""
        )
        return titles

    def unreadable(self) -> list[str]:
        """Visible texts, and canvases with labels, whose contrast with what is behind them is less than 4.5 (WCAG AA),
        with the contrast."""
        texts: list[str] = self.run(
            """(() => {
              const rgba = color => {
                const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
                return [r, g, b, a];
              };
              const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
              const behind = element => element === null ? [255, 255, 255]
                : over(rgba(getComputedStyle(element).backgroundColor), behind(element.parentElement));
              const luminance = color => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
                const value = color[i] / 255;
                return sum + weight * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
              }, 0);
              const contrast = (a, b) => {
                const [low, high] = [luminance(a), luminance(b)].sort((a, b) => a - b);
                return (high + 0.05) / (low + 0.05);
              };
              const found = [];
              for (const element of document.querySelectorAll("body *")) {
                const texts = [...element.childNodes].filter(node => node.nodeType === 3);
                const text = texts.map(node => node.data).join("");
                const hidden = /^(SCRIPT|STYLE|NOSCRIPT|OPTION)$/.test(element.tagName) || !element.checkVisibility();
                if (hidden || !text.trim()) continue;
                const background = behind(element), color = over(rgba(getComputedStyle(element).color), background);
                const is = contrast(color, background);
                if (is < 4.5) found.push(`${text.slice(0, 40)}: ${is.toFixed(2)}`);
              }
              for (const canvas of document.querySelectorAll(".uplot canvas, canvas.lanes")) {
                if (!canvas.checkVisibility()) continue;
                const width = 40 * devicePixelRatio, background = behind(canvas); // labels are at the left
                const copy = new OffscreenCanvas(width, canvas.height).getContext("2d");
                copy.drawImage(canvas, 0, 0);
                const pixels = copy.getImageData(0, 0, width, canvas.height).data;
                let most = 0;
                for (let i = 0; i < pixels.length; i += 4) {
                  const pixel = [pixels[i], pixels[i + 1], pixels[i + 2], pixels[i + 3] / 255];
                  if (pixel[3]) most = Math.max(most, contrast(over(pixel, background), background));
                }
                if (most < 4.5) found.push(`labels of a canvas: ${most.toFixed(2)}`);
              }
              return found;
            })()"""
        )
        return texts

    def cut(self) -> list[str]:
        """Visible elements whose content is cut off by a scrolled box or by the window."""
        elements: list[str] = self.run(
            """[...document.querySelectorAll("body *")].filter(element => element.checkVisibility()).filter(element => {
              const style = getComputedStyle(element), box = element.getBoundingClientRect();
              return (style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1)
                || (style.overflowY !== "visible" && element.scrollHeight > element.clientHeight + 1)
                || box.right > document.documentElement.clientWidth + 1;
            }).map(element => `${element.tagName} ${element.className}`)"""
        )
        return elements


@contextmanager
def chromium(profile: Path, *, width: int = 1300, height: int = 900) -> Iterator[Browser]:
    """Start Chromium, and end it after the block.

    Args:
        profile: empty folder for its files.
        width, height: of the window, in pixels.
    """
    assert CHROMIUM is not None
    to_read, to = os.pipe()
    from_, from_write = os.pipe()
    # The browser expects the pipe at descriptors 3 and 4; the shell puts it there.
    redirects = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    flags = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
        "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
    ]  # fmt: skip
    with (profile / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", redirects, "bash", CHROMIUM, *flags],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(to_read)
    os.close(from_write)
    answers: Queue[dict[str, Any]] = Queue()
    reader = threading.Thread(target=_read, args=(from_, answers), daemon=True)
    reader.start()
    try:
        browser = Browser(to, answers)
        yield browser
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with its renderers
        exit_code(process, "the end of Chromium")
        os.close(to)
        join(reader)


def _read(descriptor: int, answers: Queue[dict[str, Any]]) -> None:
    rest = b""
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in messages:
                answers.put(json.loads(message))

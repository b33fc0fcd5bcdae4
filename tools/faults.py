"""Tests the tests: injects small faults into the sources, one at a time, and shows which test catches each.

    python tools/faults.py [--only ID ...] [--clean] [--root CHECKOUT] [--out FILE]

``faults.toml`` in this folder lists the faults: what each breaks, the edit, and the tests that should fail. Each edit
is made in a copy of the checkout, where these tests then run, the cheapest tier first, until one fails. A failure
counts only if the sources can still be imported. A fault whose text is no longer in the sources is an error: update it.

    --clean   run each test that caught a fault again without the fault: it must pass
    --root    use another checkout, such as an older commit, with its own tests
    --out     also write the output to this file
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults.toml")
REPORT = "MONARCH_RL_FAULTS_REPORT"
"""Variable with the file to which pytest, with this module as a plugin, writes the outcome of each test."""
TIERS = ("quick", "core", "rest")
"""./tools/test always runs the first two."""
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")
"""Exceptions that show that the edit broke the sources instead of making a fault."""
LATE = ("TimeoutError", "TimeoutExpired")
"""Exceptions of tests that may only have failed because the machine was busy."""
LIMIT_S = 3600.0
"""Seconds for the tests of one fault; only ends a hang."""


@dataclass(frozen=True)
class Fault:
    """One entry of the list."""

    id: str
    what: str
    """What the fault breaks, in a sentence."""
    file: str
    before: str
    after: str
    caught_by: tuple[str, ...]
    """``folder/test_file.py::test_function``, in tests/; with ``[case]`` if the other cases are slow and irrelevant."""

    def put_into(self, text: str) -> str:
        """The source text with the fault. Raises ValueError unless it contains ``before`` exactly once, or
        SyntaxError."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.file} must contain this once, but contains it {count} times: {self.before!r}")
        changed = text.replace(self.before, self.after)
        compile(changed, self.file, "exec")
        return changed


def read_faults() -> list[Fault]:
    rows = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    return [Fault(**row | {"caught_by": tuple(row["caught_by"])}) for row in rows]


def problems(fault: Fault, root: Path) -> Iterator[str]:
    """Reasons why a fault cannot be tested with the sources and tests in ``root``."""
    try:
        fault.put_into((root / fault.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        yield f"{fault.id}: {error}"
    for test in fault.caught_by:
        file, _, name = test.partition("[")[0].partition("::")
        if name not in functions_of(root / "tests" / file):
            yield f"{fault.id}: tests/{test} does not exist"


def functions_of(file: Path) -> set[str]:
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


# -- the plugin, in pytest's process ----------------------------------------------------------------------------------


def pytest_sessionstart() -> None:
    """Make hypothesis stop at the first failing example: shrinking it would take most of the time."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("faults", settings.default, phases=phases)
    settings.load_profile("faults")


def tier_of(item: Any) -> str:
    if not any(item.get_closest_marker(name) for name in ("heavy", "slow")):
        return "quick"
    return "core" if item.get_closest_marker("core") else "rest"


@pytest.hookimpl(trylast=True)  # tests/plugin.py sets markers
def pytest_collection_modifyitems(items: list[Any]) -> None:
    items.sort(key=lambda item: (TIERS.index(tier_of(item)), item.get_closest_marker("slow") is not None))


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Record each test that finished or failed, including failures in set-up, because fixtures run programs."""
    if call.when == "teardown" or (call.when == "setup" and call.excinfo is None):
        return
    kind, message = ("", "") if call.excinfo is None else (call.excinfo.type.__name__, str(call.excinfo.value))
    row = {"test": item.nodeid, "tier": tier_of(item), "when": call.when, "error": kind, "message": message}
    with Path(os.environ[REPORT]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


# -- the runner -------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of a checkout.

    Args:
        root: the checkout, of which tracked files and untracked files that are not ignored are copied.
        folder: an empty folder for the copy.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._plugins, self.path, self._report = folder / "plugins", folder / "copy", folder / "report"
        self._plugins.mkdir()
        shutil.copy(__file__, self._plugins / "faults_plugin.py")
        for name in _git(root, "ls-files", "-co", "--exclude-standard").splitlines():
            if (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)

    def write(self, file: str, text: str) -> None:
        """Replace a source file, and remove its bytecode: for a text of the same length, written in the same second,
        the old bytecode would stay valid."""
        (self.path / file).write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(self.path / file))).unlink(missing_ok=True)

    def run(self, tests: tuple[str, ...]) -> tuple[list[dict[str, str]], str]:
        """Run tests until the first one fails; returns the outcome of each, and the end of pytest's output."""
        self._report.write_text("")
        places = os.pathsep.join(map(str, (self.path / "src", self._plugins)))
        environment = os.environ | {"PYTHONPATH": places, REPORT: str(self._report)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "faults_plugin", "-p", "no:cacheprovider", *tests]
        with subprocess.Popen(
            command,
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                output = f"the tests did not end within {LIMIT_S:g} s"
        rows = [json.loads(line) for line in self._report.read_text(encoding="utf-8").splitlines()]
        return (rows if process.returncode in (0, 1) else []), output[-3000:]


def try_fault(fault: Fault, copy: Copy, clean: bool) -> tuple[dict[str, str] | None, str]:
    """The first test that fails with the fault, or None and the reason."""
    whole = (copy.path / fault.file).read_text(encoding="utf-8")
    copy.write(fault.file, fault.put_into(whole))
    rows, output = copy.run(tuple(f"tests/{test}" for test in fault.caught_by))
    copy.write(fault.file, whole)
    failed = [row for row in rows if row["error"]]
    if not failed:
        return None, f"{len(rows)} tests passed" if rows else output
    caught = failed[0]
    # A set-up raises AssertionError if a program that it runs failed; any other exception is due to the machine.
    unprepared = caught["when"] == "setup" and caught["error"] != "AssertionError"
    late = caught["error"] in LATE or caught["message"].startswith("Timeout (")  # pytest-timeout's
    if unprepared or late or caught["error"] in BROKEN:
        return None, f"{caught['test']}: {caught['error']}: {caught['message']}"
    if clean:
        again, output = copy.run((caught["test"],))
        if [row["error"] for row in again] != [""]:
            return None, f"{caught['test']} fails without the fault, too: {output}"
    return caught, ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID")
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    faults = [fault for fault in read_faults() if given.only is None or fault.id in given.only]
    if unknown := set(given.only or ()) - {fault.id for fault in faults}:
        parser.error(f"unknown fault: {', '.join(sorted(unknown))} is not in {FAULTS.name}")
    commit = _git(given.root, "rev-parse", "--short", "HEAD").strip()
    lines: list[str] = []

    def write_line(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if given.out is not None:
            given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    write_line(f"# python tools/faults.py{' --clean' * given.clean}")
    write_line(f"# commit {commit}{', changed' if _git(given.root, 'status', '--porcelain', 'src', 'tests') else ''}")
    write_line("| fault | what it breaks | caught by | tier | CPU-seconds |")
    write_line("|---|---|---|---|---|")
    tiers: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(given.root, Path(folder))
        for fault in faults:
            before = _cpu_s()
            if wrong := list(problems(fault, given.root)):
                caught, why = None, "; ".join(wrong)
            else:
                caught, why = try_fault(fault, copy, given.clean)
            tiers += [caught["tier"]] if caught is not None else []
            by, tier = ("NOTHING", "-") if caught is None else (caught["test"].removeprefix("tests/"), caught["tier"])
            write_line(f"| {fault.id} | {fault.what} | `{by}` | {tier} | {_cpu_s() - before:.0f} |")
            if caught is not None:
                message = " ".join(caught["message"].split())[:200]
                print(f"{fault.id}: {caught['error']}: {message}", file=sys.stderr, flush=True)
            if why:
                print(f"{fault.id} is not caught: {why}", file=sys.stderr, flush=True)
    write_line(f"{len(tiers)} of {len(faults)} caught, {len(tiers) - tiers.count('rest')} in the default tier")
    return 0 if len(tiers) == len(faults) else 1


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


def _cpu_s() -> float:
    """CPU-seconds of all child processes that have ended, including their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())

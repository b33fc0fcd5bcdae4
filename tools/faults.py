"""Puts small faults into the sources, one after the other, and shows which test catches each: the tests' own test.

    python tools/faults.py [--only ID ...] [--clean] [--root CHECKOUT] [--out FILE]

``faults.toml`` beside this file lists them: what each breaks, the edit, and the tests that should fail. Each is made in
a copy of the checkout, where these tests then run, the cheapest tier first, until one fails. Failing counts only where
the sources could still be imported. A fault whose text is gone from the sources is an error: write it anew.

    --clean   run each test that has caught a fault once more without it: it must pass
    --root    another checkout, an older commit's say; its tests are those that run
    --out     also write what is printed to this file
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
"""Variable with the file in which pytest, with this module as a plugin, writes what became of each test."""
TIERS = ("quick", "core", "rest")
"""The first two are what ./tools/test always runs."""
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")
"""Exceptions that say that the edit is no fault but nonsense."""
LATE = ("TimeoutError", "TimeoutExpired")
"""Exceptions by which a test gives up where the machine may merely be too busy."""
LIMIT_S = 3600.0
"""For the tests of one fault: it merely ends a hang."""


@dataclass(frozen=True)
class Fault:
    """One row of the list."""

    id: str
    what: str
    """What it breaks, in a sentence."""
    file: str
    before: str
    after: str
    caught_by: tuple[str, ...]
    """``folder/test_file.py::test_function``, in tests/; with ``[case]`` where other cases take long in vain."""

    def put_into(self, text: str) -> str:
        """The sources with the fault. Raises ValueError unless ``before`` is there exactly once, or SyntaxError."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.file} has {count} times, not once: {self.before!r}")
        changed = text.replace(self.before, self.after)
        compile(changed, self.file, "exec")
        return changed


def read_faults() -> list[Fault]:
    rows = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    return [Fault(**row | {"caught_by": tuple(row["caught_by"])}) for row in rows]


def problems(fault: Fault, root: Path) -> Iterator[str]:
    """Why a fault cannot be tried with the sources and tests in ``root``."""
    try:
        fault.put_into((root / fault.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        yield f"{fault.id}: {error}"
    for test in fault.caught_by:
        file, _, name = test.partition("[")[0].partition("::")
        if name not in functions_of(root / "tests" / file):
            yield f"{fault.id}: there is no tests/{test}"


def functions_of(file: Path) -> set[str]:
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


# -- the plugin, in pytest's process ---------------------------------------------------------------------------------


def pytest_sessionstart() -> None:
    """Have hypothesis stop at the first example that fails: finding the simplest one is most of what it would cost."""
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
    """Note each test that ran to its end, or what ended it: set-up included, because fixtures run programs."""
    if call.when == "teardown" or (call.when == "setup" and call.excinfo is None):
        return
    kind, message = ("", "") if call.excinfo is None else (call.excinfo.type.__name__, str(call.excinfo.value))
    row = {"test": item.nodeid, "tier": tier_of(item), "when": call.when, "error": kind, "message": message}
    with Path(os.environ[REPORT]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


# -- the runner ------------------------------------------------------------------------------------------------------


class Copy:
    """A checkout's files in a folder of their own.

    Args:
        root: the checkout: what git tracks and what it would.
        folder: empty.
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
        """Replace a source. Its bytecode goes: that of a text as long, written in the same second, would stay valid."""
        (self.path / file).write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(self.path / file))).unlink(missing_ok=True)

    def run(self, tests: tuple[str, ...]) -> tuple[list[dict[str, str]], str]:
        """Run tests until the first one fails: what became of each, and pytest's last lines."""
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
                output = f"not done after {LIMIT_S:g} s"
        rows = [json.loads(line) for line in self._report.read_text(encoding="utf-8").splitlines()]
        return (rows if process.returncode in (0, 1) else []), output[-3000:]


def try_fault(fault: Fault, copy: Copy, clean: bool) -> tuple[dict[str, str] | None, str]:
    """The first test that fails with the fault, or None and why there is none."""
    whole = (copy.path / fault.file).read_text(encoding="utf-8")
    copy.write(fault.file, fault.put_into(whole))
    rows, output = copy.run(tuple(f"tests/{test}" for test in fault.caught_by))
    copy.write(fault.file, whole)
    failed = [row for row in rows if row["error"]]
    if not failed:
        return None, f"{len(rows)} tests passed" if rows else output
    caught = failed[0]
    # A set-up fails by assertion where a program did; whatever else it raises, the machine is to blame.
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
        parser.error(f"there is no fault {', '.join(sorted(unknown))} in {FAULTS.name}")
    commit = _git(given.root, "rev-parse", "--short", "HEAD").strip()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if given.out is not None:
            given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    say(f"# python tools/faults.py{' --clean' * given.clean}")
    say(f"# commit {commit}{', changed' if _git(given.root, 'status', '--porcelain', 'src', 'tests') else ''}")
    say("| fault | what it breaks | caught by | tier | CPU-seconds |")
    say("|---|---|---|---|---|")
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
            say(f"| {fault.id} | {fault.what} | `{by}` | {tier} | {_cpu_s() - before:.0f} |")
            if caught is not None:
                message = " ".join(caught["message"].split())[:200]
                print(f"{fault.id}: {caught['error']}: {message}", file=sys.stderr, flush=True)
            if why:
                print(f"{fault.id} is not caught: {why}", file=sys.stderr, flush=True)
    say(f"{len(tiers)} of {len(faults)} caught, {len(tiers) - tiers.count('rest')} in the default tier")
    return 0 if len(tiers) == len(faults) else 1


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


def _cpu_s() -> float:
    """Of the processes that have been started here, and that they have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())

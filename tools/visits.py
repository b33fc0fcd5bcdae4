#!/usr/bin/env python3
"""Counts the files of ``src/monarch_rl`` that a reader visits, and revisits, when following a call by hand.

    python tools/visits.py                              launch(settings) of the main recipe, until the first process
    python tools/visits.py --tree ../base --list        ... of another tree, with every file in order
    python tools/visits.py --tree . --tree ../base      both, one line each
    python tools/visits.py --batch                      one batch in the trainer's step, on one rank

The reader begins at the first line of the call, and reads each function once, when it is first called; a function that
has been read is stepped over. One file is open at a time: a call of an unread function turns to its file, and the
return turns back to the caller's.

files         distinct files that were open
climb-backs   times that the reader turned to a file that was open before, by a call or by a return

Functions of other packages are stepped over, but not what they call here. Not counted are imports (and all that a
module's top level runs), and functions without source, such as the ``__init__`` of a dataclass. Only the thread that
makes the call is followed. The path depends on the settings: the recipe runs with the model of ``tests/references`` on
one machine, and ends where it would start its first process.

The other tree is run by this interpreter and need not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src") / "monarch_rl"
RECIPE = Path("recipes") / "grpo.py"
MODEL = Path("tests") / "references" / "model-dense"
STARTS_PROCESS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec")
"""Audit events of Python that a new process causes."""
LIMIT_S = 600.0
"""Deadline in seconds of a recipe that is followed; it ends after a few."""


class Reader:
    """Follows the first call of ``function`` in ``file``, from its call to its return. Use :meth:`follow`.

    Args:
        tree: the tree with the package.
        file: file of the function, in the package.
        function: its name.
    """

    def __init__(self, tree: Path, file: str, function: str) -> None:
        self.turns: list[str] = []
        """The open file after each turn, relative to the package."""
        self._package = f"{(tree / PACKAGE).resolve()}{os.sep}"
        self._begin = file, function
        self._read = set[CodeType]()
        self._frames: list[tuple[FrameType, str]] = []
        """The functions that are being read, outermost first, with their files."""
        self._stepped_over: FrameType | None = None
        """The module whose top level runs."""

    def follow(self) -> None:
        """Begin to wait for the function, in this thread."""
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._called(frame)
        elif event == "return":
            self._returned(frame)

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        if self._stepped_over is not None or (code.co_name == "<module>" and self._frames):
            self._stepped_over = self._stepped_over or frame
            return
        if code in self._read or not code.co_filename.startswith(self._package):
            return
        file = code.co_filename.removeprefix(self._package)
        if not self._frames and (file, code.co_name) != self._begin:
            return
        self._read.add(code)
        self._frames.append((frame, file))
        self._turn_to(file)

    def _returned(self, frame: FrameType) -> None:
        if frame is self._stepped_over:
            self._stepped_over = None
        if not self._frames or frame is not self._frames[-1][0]:
            return
        self._frames.pop()
        if self._frames:
            self._turn_to(self._frames[-1][1])
        else:
            sys.setprofile(None)

    def _turn_to(self, file: str) -> None:
        if self.turns[-1:] != [file]:
            self.turns.append(file)


def follow_launch(tree: Path, output: str) -> None:
    """Run the main recipe in this process, which ends where the recipe would start its first process; prints the
    turns."""
    reader = Reader(tree, "pipeline/run.py", "launch")

    def end(event: str, _: tuple[Any, ...]) -> None:
        if event in STARTS_PROCESS and reader.turns:
            sys.setprofile(None)
            report(reader.turns)
            os._exit(0)

    sys.addaudithook(end)
    sys.argv = [str(tree / RECIPE), f"--model={ROOT / MODEL}", f"--output={output}"]
    reader.follow()
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise RuntimeError("launch(settings) has started no process")


def follow_batch(tree: Path) -> None:
    """Train one batch of the tree's tests on one rank, after another one; prints the turns."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    from monarch_rl.runtime.network import free_port
    from monarch_rl.trainer import step
    from monarch_rl.trainer.functions import TrainingFunctions
    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.settings import TrainerSettings
    from tests.trainer import batches
    from tests.trainer.ranks import packed_shard

    os.environ["MASTER_PORT"] = str(free_port())
    batches.VOCABULARY = 90  # the model of the references has few more
    settings = TrainerSettings(ranks=1)
    policy = Policy(ROOT / MODEL, settings, total_steps=2)
    functions = TrainingFunctions.of_settings(settings.loss).load()
    # Work of only the first batch, such as compiling, is not part of the path.
    step.train(policy, packed_shard(policy, 0), functions, batches.MAX_NEW_TOKENS)
    reader = Reader(tree, "trainer/step.py", "train")
    second = packed_shard(policy, 1)
    reader.follow()
    step.train(policy, second, functions, batches.MAX_NEW_TOKENS)
    report(reader.turns)


def report(turns: list[str]) -> None:
    """Print the turns for the process that asked."""
    print(f"\n{json.dumps(turns)}", flush=True)


def turns_in(tree: Path, what: str) -> list[str]:
    """The turns of the reader in ``tree``, found in another process. Raises RuntimeError if that failed."""
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [sys.executable, __file__, "--follow", what, output, "--tree", str(tree)],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            timeout=LIMIT_S,
            text=True,
            capture_output=True,
        )
    if done.returncode:
        raise RuntimeError(f"{what} failed in {tree}, exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    turns: list[str] = json.loads(done.stdout.splitlines()[-1])
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", help="tree with the package; may be given several times")
    parser.add_argument("--batch", action="store_true", help="follow one batch in the trainer's step, not launch()")
    parser.add_argument("--list", action="store_true", help="print each file, in the order of the first visits")
    parser.add_argument("--follow", nargs=2, help=argparse.SUPPRESS)  # in the process that is followed
    given = parser.parse_args()
    trees = [tree.resolve() for tree in given.tree or [ROOT]]
    if given.follow:
        what, output = given.follow
        return follow_launch(trees[0], output) if what == "launch" else follow_batch(trees[0])
    for tree in trees:
        turns = turns_in(tree, "batch" if given.batch else "launch")
        files = list(dict.fromkeys(turns))
        print(f"{tree}: {len(files)} files, {len(turns) - len(files)} climb-backs")
        for file in files if given.list else ():
            print(f"    {file}  {turns.count(file)}")


if __name__ == "__main__":
    main()

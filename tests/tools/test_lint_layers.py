"""The lint that finds imports against the floors, and circles: what it must find, and that this project has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "tools" / "lint_layers.py")]
TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "

BAD = {
    "a circle in a room": (
        {"buffer/a.py": "from monarch_rl.buffer.b import x", "buffer/b.py": "import monarch_rl.buffer.a"},
        "buffer/a.py:1: is in a circle: monarch_rl/buffer/a.py -> monarch_rl/buffer/b.py -> monarch_rl/buffer/a.py",
    ),
    "a circle through three files": (
        {
            "buffer/a.py": "from monarch_rl.buffer import b",
            "buffer/b.py": "from . import c",
            "buffer/c.py": "import os\nfrom .a import x",
        },
        "buffer/a.py:1: is in a circle: "
        "monarch_rl/buffer/a.py -> monarch_rl/buffer/b.py -> monarch_rl/buffer/c.py -> monarch_rl/buffer/a.py",
    ),
    "a circle closed inside a function": (
        {
            "weights/a.py": "from monarch_rl.weights.b import x",
            "weights/b.py": "def f():\n    from monarch_rl.weights.a import y",
        },
        "is in a circle: monarch_rl/weights/a.py -> monarch_rl/weights/b.py -> monarch_rl/weights/a.py",
    ),
    "a circle of types alone": (
        {
            "weights/a.py": "from monarch_rl.weights.b import x",
            "weights/b.py": TYPE_CHECKING + "from monarch_rl.weights.a import y",
        },
        "is in a circle: monarch_rl/weights/a.py -> monarch_rl/weights/b.py -> monarch_rl/weights/a.py",
    ),
    "an import upward": (
        {"buffer/core.py": "import os\nimport monarch_rl.trainer.actor", "trainer/actor.py": ""},
        "buffer/core.py:2: imports monarch_rl/trainer/actor.py: `trainer` is on a floor above `buffer`",
    ),
    "a type from above": (
        {"episode/a.py": TYPE_CHECKING + "from monarch_rl.buffer.b import T", "buffer/b.py": ""},
        "episode/a.py:3: imports monarch_rl/buffer/b.py: `buffer` is on a floor above `episode`",
    ),
    "an import inside a function": (
        {"episode/a.py": "def f():\n    from monarch_rl.pipeline.b import T", "pipeline/b.py": ""},
        "episode/a.py:2: imports monarch_rl/pipeline/b.py: `pipeline` is on a floor above `episode`",
    ),
    "a recipe": (
        {"simulate/run.py": "from recipes.grpo import train"},
        "simulate/run.py:1: imports recipes/grpo.py: `recipes` is on a floor above `simulate`",
    ),
    "a neighbour": (
        {"rollout/a.py": "from monarch_rl.buffer.b import T", "buffer/b.py": ""},
        "rollout/a.py:1: imports monarch_rl/buffer/b.py: `buffer` is on the same floor as `rollout`",
    ),
    "a neighbour the other way": (
        {"buffer/b.py": "import monarch_rl.rollout", "rollout/__init__.py": ""},
        "buffer/b.py:1: imports monarch_rl/rollout/__init__.py: `rollout` is on the same floor as `buffer`",
    ),
    "a neighbour on the lowest floor": (
        {"observe/a.py": "from monarch_rl.runtime import b", "runtime/b.py": ""},
        "observe/a.py:1: imports monarch_rl/runtime/b.py: `runtime` is on the same floor as `observe`",
    ),
    "the package itself, upward": (
        {"__init__.py": "import monarch_rl.buffer.core", "buffer/core.py": ""},
        "monarch_rl/__init__.py:1: imports monarch_rl/buffer/core.py: `buffer` is on a floor above",
    ),
    "a room that is not on the list": (
        {"attic/a.py": "import monarch_rl.buffer.core", "attic/b.py": "", "buffer/core.py": ""},
        "monarch_rl/attic/a.py: its room `attic` is on no floor",
    ),
    "a file in no room": ({"helpers.py": ""}, "monarch_rl/helpers.py: is in no room"),
}

GOOD = {
    "downward": {
        "pipeline/a.py": "from monarch_rl.trainer.b import x\nimport monarch_rl.episode.c",
        "trainer/b.py": "from monarch_rl.episode.c import y",
        "episode/c.py": "import torch, json",
    },
    "in a room": {"buffer/a.py": "from monarch_rl.buffer.b import x\nfrom .b import y", "buffer/b.py": ""},
    "the package itself": {"__init__.py": "import monarch_rl.runtime", "runtime/__init__.py": "", "observe/a.py": ""},
    "another package of a like name": {"episode/a.py": "from monarch_rl_tools.pipeline import x"},
}


def lint(folder: Path, files: dict[str, str]) -> tuple[int, list[str]]:
    """The exit status of the lint of a package of these files, and the lines that it prints."""
    for name, text in files.items():
        path = folder / "monarch_rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([*COMMAND, str(folder / "monarch_rl")], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(("files", "said"), BAD.values(), ids=BAD.keys())
def test_each_kind_is_found_once_with_both_names(files: dict[str, str], said: str, tmp_path: Path) -> None:
    status, (finding, last) = lint(tmp_path, files)
    assert said in finding
    assert (status, last) == (1, "1 imports against the floors in monarch_rl")


@pytest.mark.parametrize("files", GOOD.values(), ids=GOOD.keys())
def test_what_goes_down_is_left_alone(files: dict[str, str], tmp_path: Path) -> None:
    assert lint(tmp_path, files) == (0, ["0 imports against the floors in monarch_rl"])


def test_the_project_has_none() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout

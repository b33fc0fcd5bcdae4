"""References that a refactoring must not change (``tools/references.py``), and a run of version 0.1."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from monarch_rl.checkpoint.folders import complete
from tests import patience
from tests.recipe.running import RECIPE, ROOT, RUN_S, finished
from tests.runtime.launched import Start
from tools.references import ARGUMENTS, MODELS, RECIPES, REFERENCES, described, differences, flags_in, trained


def reference(name: str) -> dict[str, object]:
    values: dict[str, object] = json.loads((REFERENCES / f"{name}.json").read_text())
    return values


def test_flags_and_their_defaults() -> None:
    assert differences(reference("flags"), flags_in(ROOT)) == []


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("kind", RECIPES)
def test_weights_metrics_and_files(tmp_path: Path, kind: str) -> None:
    """Weights are compared only on the same kind of processor with the same torch."""
    assert differences(reference(kind), described(trained(ROOT, kind, tmp_path))) == []


@pytest.mark.slow
@pytest.mark.core
def test_a_run_of_version_0_1_is_resumed_and_exported_and_its_replay_refused(start: Start, tmp_path: Path) -> None:
    """Its plan is a pickle that names modules of that version."""
    folder, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(REFERENCES / "run", folder, symlinks=True)
    done = patience.run([sys.executable, "tools/export.py", str(folder), str(out)], seconds=RUN_S, cwd=ROOT)
    assert done.returncode == 0 and (out / "model.safetensors").is_file(), done.stderr
    done = patience.run([sys.executable, "tools/replay.py", str(folder)], seconds=RUN_S, cwd=ROOT)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    assert "plan-0.pickle" in done.stderr and "monarch_rl 0.1" in done.stderr
    arguments = [*ARGUMENTS, f"--model={REFERENCES / MODELS['dense']}", f"--resume={folder}", "--steps=6"]
    refused = patience.run([sys.executable, str(RECIPE), *arguments], seconds=RUN_S, cwd=ROOT)
    assert refused.returncode != 0 and "--trainer.loss.max-tokens" in refused.stderr, refused.stderr
    run = start([sys.executable, str(RECIPE), *arguments, "--trainer.loss.max-tokens=1024"])
    finished(run)
    assert max(complete(folder / "checkpoints")) == 6, run.output()

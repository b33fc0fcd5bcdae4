#!/usr/bin/env python3
"""References of what a refactoring must not change: weights after five steps, metric names, a run's files and keys,
flags.

    python tools/references.py --output tests/references            write the references of this tree
    python tools/references.py --tree ../base --output /tmp/base    ... of another tree, such as a worktree of a commit
    python tools/references.py --check tests/references             print the differences of this tree

A dense model, a mixture of experts, LoRA and a policy with a critic are trained for five steps at lag 0 with a fixed
seed, so weights are identical bit for bit on the same kind of processor with the same torch. Otherwise the tool reports
that it does not compare their checksums.

The other tree is run by this interpreter and need not be installed. The models are in ``tests/references``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parents[1]
REFERENCES = ROOT / "tests" / "references"
RECIPES = {"dense": "grpo", "moe": "grpo_moe", "lora": "grpo_lora", "critic": "ppo"}
MODELS = {"dense": "model-dense", "moe": "model-moe", "lora": "model-dense", "critic": "model-dense"}
ARGUMENTS = (
    *("--steps=5", "--buffer.max-policy-lag=0", "--rollout.seed=0", "--generator.replicas=1", "--rollout.workers=1"),
    "--generator.max-running-requests=1",  # sums differ with the size of the engine's batch
    *("--groups-per-step=4", "--held-out=8", "--rollout.max-new-tokens=8", "--rollout.logged-groups=2"),
    *("--trainer.ranks=2", "--trainer.lr=1e-3", "--trainer.lr-warmup-steps=0", "--task.pass-mark=0"),
    *("--checkpoint.every-steps=3", "--checkpoint.restarts=0", "--journal.mib=8"),
)
RUN_S = 900.0
"""Deadline in seconds of a run of five steps, which takes about 15 s on two idle cores."""


@dataclass(frozen=True)
class Settings:
    """Write or check references (see the top of this file)."""

    tree: Path = ROOT
    """Tree whose sources and recipes are run."""
    output: Path | None = None
    """Folder to write the references to: one file per kind and one for flags."""
    check: Path | None = None
    """Folder with references to compare with."""
    kinds: tuple[str, ...] = tuple(RECIPES)
    """Kinds to run, of `dense`, `moe`, `lora` and `critic`; if empty, only flags are compared."""
    keep: Path | None = None
    """Folder for the runs; None removes them."""


def environment(tree: Path) -> dict[str, str]:
    """The environment of a process that imports from ``tree``."""
    return os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def trained(tree: Path, kind: str, output: Path) -> Path:
    """Run ``kind`` with the sources of ``tree``; returns the run folder. Raises RuntimeError if the run failed."""
    command = [sys.executable, str(tree / "recipes" / f"{RECIPES[kind]}.py"), f"--model={REFERENCES / MODELS[kind]}"]
    command += [f"--output={output / kind}", *ARGUMENTS]
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment(tree),
        timeout=RUN_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{RECIPES[kind]} ended with exit code {done.returncode}:\n{done.stdout}")
    (run,) = (output / kind).iterdir()
    return run


def processor() -> str:
    """The processor's instruction set and torch's version, which determine the bits of a matrix product."""
    import torch

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def described(run: Path) -> dict[str, Any]:
    """The reference of a run: processor, checksums of the saved weights, metric names, files and their keys."""
    saved = sorted(run.glob("model*/*.safetensors"))
    weights = {path.relative_to(run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in saved}
    files: dict[str, list[str]] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        name = re.sub(r"tfevents.*", "tfevents", re.sub(r"\d{6}", "N", name))
        files[name] = sorted({*files.get(name, ()), *keys_of(path)})
    return {"processor": processor(), "weights": weights, "metrics": files.pop("metrics.jsonl"), "files": files}


def keys_of(path: Path) -> set[str]:
    """The keys in a file of JSON objects, nested ones as ``outer.inner``; empty for other files."""
    if path.suffix not in (".json", ".jsonl") or path.name.startswith("tokenizer"):
        return set()
    rows = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return {name for row in rows for name in names_of(json.loads(row))}


VALUES = ("positions", "packages", "item", "info", "parts", "counters", "base_weights", "git", "hosts[]")
"""Objects whose keys are values, such as file paths, or depend on the machine."""


def names_of(value: Any, above: str = "") -> set[str]:
    """The keys of an object, including nested ones. Keys that are file paths or package names count as values."""
    if isinstance(value, list):
        return {name for item in value for name in names_of(item, f"{above}[]")}
    if not isinstance(value, dict) or above in VALUES:
        return {above} if above else set()
    prefix = f"{above}." if above else ""
    return {name for key, item in value.items() for name in names_of(item, prefix + key)} or {above}


def flags_of(value: Any, above: str = "") -> dict[str, str]:
    """Each flag of a recipe's settings and its default."""
    found: dict[str, str] = {}
    hints = typing.get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        inner, name = getattr(value, field.name), above + field.name.replace("_", "-")
        if tyro.conf.Suppress in typing.get_args(hints[field.name]):
            continue
        if field.name == "name" and hasattr(value, "of_name"):  # the flag is the family's: --objective
            name = above.removesuffix(".")
        found |= flags_of(inner, f"{name}.") if dataclasses.is_dataclass(inner) else {name: str(inner)}
    return found


def all_flags() -> dict[str, dict[str, str]]:
    """The flags of each recipe that can be imported here, with their defaults."""
    names = sorted(path.stem for path in Path("recipes").glob("*.py"))
    return {name: flags_of(importlib.import_module(f"recipes.{name}").Settings()) for name in names}


def flags_in(tree: Path) -> dict[str, dict[str, str]]:
    """The flags of the recipes of ``tree``, read in another process."""
    path = f"import sys; sys.path[:0] = [{str(tree / 'recipes')!r}, {str(Path(__file__).parent)!r}]; "
    program = f"{path}import json, references; print(json.dumps(references.all_flags()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, env=environment(tree), timeout=RUN_S, text=True, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(f"the recipes of {tree} cannot be imported:\n{done.stderr}")
    flags: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return flags


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """A line for each difference of two references; weights from different kinds of processors are not compared."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        if isinstance(before, list) and isinstance(now, list):
            gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
            return [f"{place}: gone {name}" for name in gone] + [f"{place}: new {name}" for name in new]
        return [] if before == now else [f"{place}: {before} -> {now}"]
    skipped = {"processor"} | ({"weights"} if before.get("processor") != now.get("processor") else set())
    lines = []
    for key in sorted((before.keys() | now.keys()) - skipped):
        where = f"{place} {key}".strip()
        if key not in now or key not in before:
            lines.append(f"{where}: {'gone' if key not in now else 'new'}")
        else:
            lines += differences(before[key], now[key], where)
    return lines


def main(settings: Settings) -> int:
    from monarch_rl.runtime.scratch import temporary_directory

    if settings.output is None and settings.check is None:
        sys.exit("error: give --output FOLDER to write references, or --check FOLDER to compare with references")
    tree = settings.tree.resolve()
    found: dict[str, Any] = {"flags": flags_in(tree)}
    with temporary_directory() as scratch:
        for kind in settings.kinds:
            found[kind] = described(trained(tree, kind, settings.keep or scratch))
    changed = []
    for name, reference in found.items():
        if settings.output is not None:
            settings.output.mkdir(parents=True, exist_ok=True)
            (settings.output / f"{name}.json").write_text(json.dumps(reference, indent=1, sort_keys=True) + "\n")
        if settings.check is not None:
            before = json.loads((settings.check / f"{name}.json").read_text())
            if before.get("processor") != reference.get("processor"):
                print(f"{name}: weights are not compared, because the references are from {before['processor']}")
            changed += differences(before, reference, name)
    print("\n".join(changed) if changed else "nothing differs" if settings.check else "written")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))

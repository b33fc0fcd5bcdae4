"""The public names: all that recipes need, light to import, documented, and visible to type checkers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import monarch_rl

ROOT = Path(__file__).parents[2]
PUBLIC = """
BufferSettings BySeat CISPO CheckpointSettings CriticSettings DPPO DecoupledPPO Distillation DropGroup Environment
EvaluationSettings FrozenModel FrozenSettings GSPO GeneratorSettings GroupView IcePop JournalSettings LoraSettings
LossSettings MathReward Message MicroBatch Mixture OPSM Objective OpenEnv Outcome PPOClip PerToken PerTurn Policy
PolicyGradient Questions Range ReasoningGym RecoverySettings RemoteJudge Reply RolloutSettings Run RunSettings SAPO
Sandbox SeatBaselines SequenceMask Stage TIS Task TaskSettings TextArena TokenLogprobs ToolCall TrainerSettings
TransferSettings Verifiers assistant cli data_set dr_grpo entropy_gradient gae grpo jsonl launch max_rl needs of_batch
other_tokens overlong_penalty parquet reference reinforce_pp resampled rloo run_tools supervised system teacher tool
user
""".split()  # noqa: SIM905
"""Removing a name, or changing its meaning, needs a line in CHANGELOG.md."""
HEAVY = ["torch", "monarch", "sglang", "transformers", "numpy"]


def test_these_names_are_public_and_documented() -> None:
    assert sorted(PUBLIC) == monarch_rl.__all__
    assert not [name for name in PUBLIC if not getattr(monarch_rl, name).__doc__]
    assert set(PUBLIC) <= set(dir(monarch_rl))


def test_the_api_page_lists_the_public_names() -> None:
    page = (ROOT / "docs/api.md").read_text().partition("## Errors")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(PUBLIC)


def test_type_checkers_see_each_name_where_it_is_defined() -> None:
    package = ast.parse((ROOT / "src/monarch_rl/__init__.py").read_text())
    (block,) = [node for node in package.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == monarch_rl._MODULE_OF
    assert all(getattr(monarch_rl, name).__module__ == seen[name] for name in PUBLIC)


def test_the_package_alone_imports_nothing_heavy() -> None:
    program = f"import sys, monarch_rl; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="'NoSuchName'.*docs/api.md"):
        monarch_rl.NoSuchName  # noqa: B018
    with pytest.raises(ImportError, match="NoSuchName"):
        exec("from monarch_rl import NoSuchName")


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*.py")))
def test_recipes_import_only_from_the_package(recipe: str) -> None:
    imported = [
        node.module
        for node in ast.walk(ast.parse((ROOT / "recipes" / recipe).read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    assert "monarch_rl" in imported
    assert not [module for module in imported if module and module.startswith("monarch_rl.")]

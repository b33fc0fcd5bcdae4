"""The public names: all that recipes need, light to import, documented, and visible to type checkers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
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
    page = (ROOT / "docs/api.md").read_text().partition("## What your functions receive")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(PUBLIC)


def test_the_api_page_names_fields_that_exist() -> None:
    from monarch_rl.episode.episode import Episode, Group
    from monarch_rl.tasks.reasoning_gym import Item

    section = (
        (ROOT / "docs/api.md").read_text().partition("## What your functions receive")[2].partition("## Errors")[0]
    )
    rows = re.findall(r"^\| (?:`(\w+)`|([a-z][^|]*?)) \| (.+) \|$", section, re.MULTILINE)[1:]
    others = {"item of `ReasoningGym`": Item, "group of a stage": Group, "its episodes": Episode}
    assert len(rows) == 11
    for public, other, cell in rows:
        kind = getattr(monarch_rl, public) if public else others[other]
        named = set(re.findall(r"`(\w+)`", cell.partition(" (")[0] if kind is Item else cell))
        source = ast.parse(Path(sys.modules[kind.__module__].__file__ or "").read_text())
        (body,) = [node for node in ast.walk(source) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
        attributes = {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute)}
        assert named - set(dir(kind)) - set(getattr(kind, "__annotations__", ())) - attributes == set(), kind


def test_the_flags_of_the_page_for_users_of_trl_exist() -> None:
    page = (ROOT / "docs/from_trl.md").read_text()
    flags = json.loads((ROOT / "tests/references/flags.json").read_text())["grpo"]
    named = set(re.findall(r"--([a-z][\w.-]*)", page))
    assert len(named) > 25
    assert named - set(flags) == set()


@pytest.mark.parametrize("page", ["api.md", "from_trl.md"])
def test_the_programs_of_these_pages_run(page: str) -> None:
    """Runs each indented block but for the loop of a recipe, which the tests of recipes cover."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    (block,) = [textwrap.dedent(block) for block in blocks if "launch(" not in block]

    def does_not_apply(completions: list[str], **_: object) -> list[None]:
        return [None]

    right = lambda prompts, completions, word, **_: [float(completions == word == prompts)]  # noqa: E731
    names: dict[str, object] = {"REWARD_FUNCS": [right, does_not_apply]}
    exec(block, names)
    if page == "from_trl.md":
        assert names["reward"]({"prompt": "a", "word": "a"}, "a") == {"<lambda>": 1.0}  # type: ignore[operator]


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

"""SGLang's advice names the flags of a recipe."""

from __future__ import annotations

import logging
import re

import pytest

from monarch_rl.errors import GenerationError
from monarch_rl.generator.settings import GPU_FLAGS, recipe_flags, rename_in, rename_in_log
from monarch_rl.generator.sglang_format import read_reason
from monarch_rl.pipeline.settings import RunSettings
from tests.recipe.flags import flags

MEMORY = "Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.1"
LONG = "Input length (9 tokens) exceeds the maximum allowed length (5 tokens). Use a shorter input or enable"
"""As in SGLang's pool_configurator.py and managers/utils.py."""


def test_every_flag_is_one_of_a_recipe_and_of_sglang() -> None:
    import sglang.srt.server_args as server_args

    of_recipe = {flag for flag, _, _ in flags(RunSettings())}
    assert {f"generator.{ours}" for ours in GPU_FLAGS.values()} <= of_recipe
    parser = __import__("argparse").ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    of_sglang = {option for action in parser._actions for option in action.option_strings}
    assert {f"--{theirs}" for theirs in GPU_FLAGS} <= of_sglang


@pytest.mark.parametrize("on_gpu", [True, False])
def test_advised_flags_exist(on_gpu: bool) -> None:
    of_recipe = {flag for flag, _, _ in flags(RunSettings())}
    for text in (MEMORY, f"{LONG} --allow-auto-truncate.", "1. lower --max-running-requests 2. set --cuda-graph-bs"):
        renamed = recipe_flags(text, on_gpu)
        assert set(re.findall(r"--([a-z][a-z.-]*[a-z])", renamed)) <= of_recipe, renamed
        assert recipe_flags(renamed, on_gpu) == renamed
    assert ("--generator.memory-fraction" in recipe_flags(MEMORY, on_gpu)) == on_gpu


def test_flags_are_renamed_in_errors_answers_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError(MEMORY.replace("mem-fraction-static", "max-total-tokens"), 3)
    rename_in(error)
    assert "--generator.max-total-tokens" in str(error) and error.args[1] == 3
    with pytest.raises(GenerationError, match=r"--generator\.context-length .*--generator\.max-total-tokens"):
        read_reason({"type": "abort", "message": f"{LONG} --allow-auto-truncate."})
    before = logging.getLogRecordFactory()
    try:
        rename_in_log()
        logging.getLogger("sglang.srt.managers.scheduler").error("lower %s", "--context-length")
        logging.getLogger("other").error("lower %s", "--context-length")
    finally:
        logging.setLogRecordFactory(before)
    messages = [record.getMessage() for record in caplog.records]
    assert [text.rpartition("] ")[2] for text in messages] == [  # Monarch puts an actor's name before it
        "lower --generator.context-length",
        "lower --context-length",
    ]

"""The messages that a user most often has to act upon, word for word, in one file: ``messages.txt``.

All other tests recognise a refusal by its flag or culprit, so that a sentence can be improved by rewriting this file
and reading its difference:

    WRITE_GOLDEN=1 ./tools/test tests/golden
"""

from __future__ import annotations

import asyncio
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.model.folder import find_folder
from monarch_rl.pipeline import resume
from monarch_rl.pipeline.memory import check_gpu_memory
from monarch_rl.pipeline.run_folder import recipe_name
from monarch_rl.pipeline.settings import RunSettings, check
from monarch_rl.rollout.settings import RolloutSettings, check_rollout
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import lose, within
from monarch_rl.runtime.devices import Devices
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.rows import jsonl
from monarch_rl.trainer.settings import LossSettings, TrainerSettings, check_experts
from tests.pipeline.test_memory_plan import gpus, sides
from tests.pipeline.test_resume import finished_step
from tests.watch import test_stall as stall
from tools.memory import MODELS

FILE = Path(__file__).with_name("messages.txt")
REWRITE = "WRITE_GOLDEN=1 ./tools/test tests/golden"
WIDTH = 116
ONE_GPU, NO_EXPERTS = Devices("cuda", 1, 1), MODELS["Qwen3-0.6B"]


def wrong_row(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n[1]\n')
    Questions(jsonl(folder / "rows.jsonl"), lambda row, answer: 0.0).check()


def wrong_template(_: Path) -> None:
    Questions([{"question": "1 + 1", "answer": "2"}], lambda row, answer: 0.0, template="{prompt}").check()


def waits(is_lost: bool) -> None:
    async def answer() -> None:
        wait_registry.name_loop("rollout worker 2")
        if is_lost:
            asyncio.get_running_loop().call_later(7, lose, "generator 1", "its process 100 was killed by signal 9")
        what = "generator 1 to answer a request of group 327"
        await within(20.0, asyncio.Event().wait(), what, on="generator 1", flag="patience")

    run_virtual(answer())


def resumed(changed: RunSettings, folder: Path) -> None:
    run = finished_step(RunSettings(output=folder))
    resume.resolve_resume(replace(changed, output=folder, resume=str(run)))


REFUSED: dict[str, Callable[[Path], object]] = {
    "a lag below 0": lambda _: BufferSettings(max_policy_lag=-1),
    "sampling without the trainer's mask": lambda _: RolloutSettings(top_k=20, top_p=0.9),
    "expert routes without experts": lambda _: check_experts(NO_EXPERTS, TrainerSettings(router_replay="replay")),
    "an objective without a gradient": lambda _: LossSettings(kl_coefficient=0.1, kl_estimate="k1"),
    "episodes that ranks cannot share": lambda _: check_rollout(RolloutSettings(group_size=8), 4, 3),
    "too few devices": lambda _: check(RunSettings(), ONE_GPU),
    "a missing model": lambda folder: find_folder(str(folder / "none")),
    "too little memory": lambda _: check_gpu_memory(MODELS["Qwen3-8B"], sides(4), gpus(80, hosts=4)),
    "an invalid row": wrong_row,
    "a missing column": wrong_template,
    "a deadline": lambda _: waits(is_lost=False),
    "a lost process": lambda _: waits(is_lost=True),
    "a resume that would break the bound": lambda folder: resumed(RunSettings(groups_per_step=8), folder),
    "a resume of a missing run": lambda folder: resume.resolve_resume(RunSettings(resume=str(folder / "none"))),
}


def message(refused: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises((ValueError, TimeoutError)) as caught:
        refused(folder)
    return str(caught.value)


def stalled() -> str:
    """A stopped generator, as the trainer sees it."""
    stopped = stall.process("generator 1", status="stopped", silent_s=17.0, not_running_s=16.0)
    return stall.sentence(stall.picture(stall.CONTROLLER, stall.RANK_0, stall.BUFFER, stall.WORKER_2, stopped))


def without_the_run(text: str, folder: Path) -> str:
    """The text without values that differ from run to run, in lines of a readable width."""
    text = text.replace(str(folder), "FOLDER").replace(f"process {os.getpid()}", "process PID")
    text = text.replace(f"FOLDER/{recipe_name()}-", "FOLDER/recipe-")
    text = re.sub(r"since \d\d:\d\d:\d\d", "since HH:MM:SS", text)
    text = re.sub(r"reached \(.*?\)\. Give", "reached (REASON). Give", text)  # the message of huggingface_hub
    lines = (textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return textwrap.indent("\n".join(lines), "    ")


def test_messages_equal_the_file(tmp_path: Path) -> None:
    messages = {}
    for number, (name, refused) in enumerate(REFUSED.items()):
        (folder := tmp_path / str(number)).mkdir()
        messages[name] = without_the_run(message(refused, folder), folder)
    messages["a stall"] = without_the_run(stalled(), tmp_path)
    text = "\n".join(f"{name}:\n{sentence}\n" for name, sentence in messages.items())
    if os.environ.get("WRITE_GOLDEN"):
        FILE.write_text(text)
    assert text == FILE.read_text(), f"if the new texts are better, write them: {REWRITE}"

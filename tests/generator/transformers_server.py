"""A process that computes with transformers, for all tests of a session: its imports take longer than its answers.

A process of its own, because SGLang patches transformers in the process of the tests. It answers one line of JSON,
``[module in this folder, folders, questions]``, with one: ``[answer, null]`` or ``[null, traceback]``.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ANSWER_S = 300.0
"""Limit of an answer: it takes some 2 s, and 8 for the first one."""


class TransformersServer:
    """The tests' end. The process starts at the first question, and ends with this object."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._reader = ThreadPoolExecutor(1)

    def ask(self, module: str, folders: list[Path], asked: list[list[list[int]]]) -> list[Any]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)
            atexit.register(self._process.kill)
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None and answers is not None
        from tests.patience import result_of  # not above: the process that answers runs this file as a script

        questions.write(json.dumps([module, list(map(str, folders)), asked]) + "\n")
        questions.flush()
        line = result_of(self._reader.submit(answers.readline), "transformers", ANSWER_S)
        assert line, "the process that computes with transformers has ended"
        answer, error = json.loads(line)
        assert error is None, error
        found: list[Any] = answer
        return found


def answer(module: str, folders: list[str], asked: list[list[list[int]]]) -> list[Any]:
    spec = importlib.util.spec_from_file_location(module, Path(__file__).with_name(f"{module}.py"))
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    found: list[Any] = program.answer(folders, asked)
    return found


def main() -> None:
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output must not mix with answers
    for line in sys.stdin:
        try:
            with torch.no_grad():
                found: list[Any] = [answer(*json.loads(line)), None]
        except Exception:
            found = [None, traceback.format_exc()]
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.chat_helpers import TEMPLATES, write_model
from tools import chat_templates

LOSES = "{{ messages[-1]['content'] }}"


def test_each_template_gets_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(TEMPLATES / f"{name}.jinja") for name in ("qwen3", "llama3", "smollm2")]
    folder = write_model(tmp_path, "folded")
    assert chat_templates.main([*files, folder]) == 0
    _, _, qwen3, llama3, smollm2, folded = capsys.readouterr().out.splitlines()
    assert qwen3 == "| qwen3 | yes | yes | yes | <think> </think> | '<|im_end|>' |"
    assert llama3 == "| llama3 | yes | yes | yes |  | '<|eot_id|>' |"
    assert smollm2 == "| smollm2 | yes | yes | yes |  | '<|im_end|>' |"
    refused = "no: the chat template refuses a conversation with roles user, assistant, tool: roles are"
    assert f"| yes | yes | {refused}" in folded


def test_a_template_that_cannot_hold_a_conversation_sets_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loses.jinja").write_text(LOSES)
    assert chat_templates.main([str(tmp_path / "loses.jinja")]) == 1
    assert "| loses | no: the chat template loses turns before the last one" in capsys.readouterr().out

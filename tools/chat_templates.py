"""Reports what chat templates support: multi-turn conversations, roles, thoughts, and how a turn ends.

    python tools/chat_templates.py MODEL_FOLDER_OR_TEMPLATE.jinja ...

A run makes the same check of its model's template at start. The exit code is 1 if a template does not support
conversations.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from monarch_rl.errors import ChatError
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.chat_shape import Row, Shape, find_shape

SPECIAL = re.compile(r"<[|｜][^<>{}'\" ]+[|｜]>|<(?:start|end)_of_turn>|<turn\|>|</?s>|\[/?[A-Z_]+\]")
"""Pattern of special tokens in a template without a tokenizer."""


def shape_of(path: Path) -> Shape:
    """The shape of the template of a model folder, or of a template file. Raises ChatError, OSError."""
    if path.is_dir():
        return ChatTemplate(str(path)).shape()
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    source = path.read_text()

    def render(rows: Sequence[Row], prompt: bool) -> str:
        try:
            texts, _ = render_jinja_template(
                [list(rows)], chat_template=source, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ChatError(str(error)) from error
        text: str = texts[0]
        return text

    special = sorted({*SPECIAL.findall(source), "</s>"})
    return find_shape(render, source, [], special)


def line(path: Path) -> tuple[bool, str]:
    """Whether the template supports conversations, and its row of the table."""
    name = path.stem if path.is_file() else path.name
    try:
        shape = shape_of(path)
    except ChatError as error:
        return False, f"| {name} | no: {error} | | | | |"
    system, tool = ("no: " + shape.refusals[role] if role in shape.refusals else "yes" for role in ("system", "tool"))
    thoughts = " ".join(shape.thinking) if shape.thinking else ""
    calls = " after calls" if shape.calls_first else ""
    return True, f"| {name} | yes | {system} | {tool}{calls} | {thoughts} | {shape.end!r} |"


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    rows = [line(Path(argument)) for argument in arguments]
    print("| template | conversation | system | tool | thoughts | end of a turn |\n|---|---|---|---|---|---|")
    print("\n".join(row for _, row in rows))
    return 0 if all(grows for grows, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

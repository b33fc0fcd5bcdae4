"""Prompts made from a template and the fields of an item."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

MAX_WIDTH = 10_000
"""Characters to which a template may pad a field: one of more is a typing error, and takes memory for every prompt."""


def fill(template: str, fields: Mapping[str, Any], name: str, of: str) -> str:
    """The prompt of an item.

    Args:
        fields: of the item.
        name: of the template in messages, for example ``"task.template"``.
        of: whose fields they are, for messages.

    Raises ValueError if the template does not fit.
    """
    try:
        return template.format(**fields)
    except (LookupError, ValueError, AttributeError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{name} {template!r} does not fit {of} ({error!r}); its fields are {', '.join(sorted(map(str, fields)))}"
        ) from error


def check_template(template: str, name: str) -> None:
    """Refuse a template without fields, or with fields of a width that no prompt has. Raises ValueError."""
    fields = [(field, form or "") for _, field, form, _ in _fields_of(template, name) if field]
    if not fields:
        raise ValueError(
            f"{name} {template!r} has no field, so that all prompts would be the same: give one with {{question}}"
        )
    for field, form in fields:
        if "{" in form or any(float(width) > MAX_WIDTH for width in re.findall(r"\d+", form)):
            raise ValueError(
                f"{name} {template!r} gives {field} the width {form!r}: give a number of at most {MAX_WIDTH:,}"
            )


def _fields_of(template: str, name: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{name} {template!r} is no template ({error}): {{{{ stands for a brace") from error

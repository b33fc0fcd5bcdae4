"""Prompts from a template and the fields of an item."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from typing import Any

MAX_WIDTH = 10_000
"""Maximum width to which a template may pad a field; more is a typing error, and would take memory for every prompt."""


def fill(template: str, fields: Mapping[str, Any], name: str, of: str) -> str:
    """The prompt of an item.

    Args:
        fields: fields of the item.
        name: name of the template in messages, for example ``"task.template"``.
        of: description of the item in messages.

    Raises ValueError if the template does not fit, or would insert a list, a mapping or bytes in Python notation.
    """
    try:
        # str.format takes a fraction of the formatter's time, and a run makes the prompts of all rows.
        return _TextFormatter(name, of).vformat(template, (), fields) if _nested(fields) else template.format(**fields)
    except _NoText:
        raise
    except (LookupError, ValueError, AttributeError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{name} {template!r} does not fit {of} ({error!r}); its fields are {', '.join(sorted(map(str, fields)))}"
        ) from error


def _nested(fields: Mapping[str, Any]) -> bool:
    return any(not isinstance(value, str) and isinstance(value, Collection) for value in fields.values())


class _NoText(ValueError):
    """A field would be inserted in Python notation."""


class _TextFormatter(string.Formatter):
    """Refuses lists, mappings and bytes, unless the template requests Python notation (``!r``)."""

    def __init__(self, name: str, of: str) -> None:
        self._name, self._of, self._field = name, of, ""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Records the name of the next field."""
        self._field = field_name
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Raises _NoText."""
        if isinstance(value, Collection) and not isinstance(value, str):
            field, kind = self._field, type(value).__name__
            raise _NoText(
                f"{self._name} inserts {field} of {self._of} into the prompt, which is a {kind}, not text: "
                f"{value!r:.80}. Select the text in it, such as {{{field}[0][content]}} for messages, write "
                f"{{{field}!r}} if the model should read it in Python notation, or give it to the policy in your own "
                "episode (docs/tasks.md)"
            )
        return str(super().format_field(value, format_spec))


def check_template(template: str, name: str) -> None:
    """Refuse a template without fields, or with an excessive field width. Raises ValueError."""
    fields = [(field, form or "") for _, field, form, _ in _fields_of(template, name) if field]
    if not fields:
        raise ValueError(
            f"{name} {template!r} has no field, so all prompts would be the same: add a field, such as {{question}}"
        )
    for field, form in fields:
        if "{" in form or any(float(width) > MAX_WIDTH for width in re.findall(r"\d+", form)):
            raise ValueError(
                f"{name} {template!r} gives {field} the width {form!r}: use a number of at most {MAX_WIDTH:,}"
            )


def _fields_of(template: str, name: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"{name} {template!r} is not a valid template ({error}): write {{{{ and }}}} for literal braces"
        ) from error

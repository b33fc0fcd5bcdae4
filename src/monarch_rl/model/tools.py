"""The tools that a policy may call: functions or JSON schemas, and the check of a call against them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from monarch_rl.errors import ChatError

Schema: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = "ToolSet | Sequence[Callable[..., Any] | Schema]"
"""Functions with type hints and a Google-style docstring, or JSON schemas in the form of OpenAI's API."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True, eq=False)
class ToolSet:
    """A set of tools, made by :func:`as_tools`. Two sets are equal if their schemas are."""

    schemas: tuple[dict[str, Any], ...]
    """For each tool ``{"type": "function", "function": {"name", "description", "parameters"}}``, the form that chat
    templates render."""
    functions: Mapping[str, Callable[..., Any]]
    """Functions by tool name; a tool that is given as a schema has none."""

    @cached_property
    def parameters(self) -> dict[str, Schema]:
        """The JSON schema of each tool's arguments, by tool name."""
        return {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in self.schemas}

    @cached_property
    def key(self) -> str:
        """A string that is the same for equal sets."""
        return json.dumps(self.schemas)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolSet) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def problem(self, name: str, arguments: Any) -> str:
        """Why a call cannot be executed, worded for the model; "" if it can."""
        if name not in self.parameters:
            return f"There is no tool {name!r}. The tools are: {', '.join(self.parameters)}."
        if not isinstance(arguments, dict):
            return f"The arguments of {name} are not a JSON object."
        problem = _mismatch(arguments, {"type": "object", **self.parameters[name]}, closed=True)
        return f"The call of {name} does not match its schema: {problem}." if problem else ""


def as_tools(tools: Tools) -> ToolSet:
    """Convert functions and schemas to a tool set.

    Raises:
        ChatError: a function lacks type hints or a docstring that describes its arguments, a schema has no name, or two
            tools have the same name.
    """
    if isinstance(tools, ToolSet):
        return tools
    schemas, functions = [], {}
    for tool in tools:
        if isinstance(tool, Mapping):
            schemas.append(_checked(tool))
        elif callable(tool):
            schemas.append(_schema(tool))
            functions[schemas[-1]["function"]["name"]] = tool
        else:
            raise ChatError(
                f"{tool!r:.80} is not a tool: give a function, or a JSON schema in the form of OpenAI's API"
            )
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ChatError(f"two tools have the same name: {', '.join(names)}")
    return ToolSet(tuple(schemas), functions)


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", str(function))
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers' own errors here have no common base class
        raise ChatError(
            f"the tool {name}{_signature(function)} cannot be described to the model: {error}. It needs a type hint "
            'for every argument, and a docstring that describes the tool and, under "Args:", each argument'
        ) from error
    return schema


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):  # a function written in C
        return "(...)"


def _checked(schema: Schema) -> dict[str, Any]:
    function = schema.get("function", schema)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{dict(schema)!r:.120} is not a tool: its function has no name")
    return {"type": "function", "function": dict(function)}


def _mismatch(value: Any, schema: Any, path: str = "", closed: bool = False) -> str:
    """How a value differs from its JSON schema, as part of a sentence; "" if it matches.

    Checks only the keywords that are generated from a function's signature, and ignores others.
    """
    if not isinstance(schema, Mapping):
        return ""
    where = path or "the arguments"
    if options := schema.get("anyOf"):
        mismatches = [_mismatch(value, option, path) for option in options]
        return mismatches[0] if all(mismatches) else ""
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type") or []
    if value is None and schema.get("nullable"):
        return ""
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{where} must be {' or '.join(kinds)}, not {value!r:.60}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {value!r:.60}"
    if isinstance(value, list):
        mismatches = [_mismatch(item, schema.get("items"), f"{where}[{index}]") for index, item in enumerate(value)]
        return next(filter(None, mismatches), "")
    return _object_mismatch(value, schema, path, closed) if isinstance(value, dict) else ""


def _object_mismatch(value: dict[str, Any], schema: Schema, path: str, closed: bool) -> str:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            return f"{path + '.' if path else ''}{name} is missing"
    more = schema.get("additionalProperties", not closed)
    for name, item in value.items():
        if name not in properties and more is False:
            return f"there is no argument {name!r}; it takes {', '.join(properties) or 'none'}"
        if mismatch := _mismatch(item, properties.get(name, more), f"{path + '.' if path else ''}{name}"):
            return mismatch
    return ""


def _is(value: Any, kind: str) -> bool:
    if kind not in _TYPES:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))

"""The tools that a policy may call: functions or JSON schemas, and whether a call fits."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from monarch_rl.model.messages import ChatError

Schema: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = "ToolSet | Sequence[Callable[..., Any] | Schema]"
"""Functions with type hints and a docstring in Google's style, or JSON schemas as OpenAI's API takes them."""
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
    """Some tools. Two sets are equal if their schemas are.

    Made by :func:`as_tools`.
    """

    schemas: tuple[dict[str, Any], ...]
    """``{"type": "function", "function": {"name", "description", "parameters"}}`` of each, as templates write them."""
    functions: Mapping[str, Callable[..., Any]]
    """By name; a tool that is given as a schema has none."""

    @cached_property
    def parameters(self) -> dict[str, Schema]:
        """The JSON schema of each tool's arguments, by its name."""
        return {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in self.schemas}

    @cached_property
    def key(self) -> str:
        """The same for sets that are equal."""
        return json.dumps(self.schemas)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolSet) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def problem(self, name: str, arguments: Any) -> str:
        """Why a call cannot be carried out, in words for the model; "" if it can be."""
        if name not in self.parameters:
            return f"There is no tool {name!r}. The tools are: {', '.join(self.parameters)}."
        if not isinstance(arguments, dict):
            return f"The arguments of {name} are not a JSON object."
        problem = _misfit(arguments, {"type": "object", **self.parameters[name]}, closed=True)
        return f"The call of {name} does not fit: {problem}." if problem else ""


def as_tools(tools: Tools) -> ToolSet:
    """The tools, with their schemas.

    Raises:
        ChatError: a function lacks type hints or a docstring that says what its arguments are, or a schema has no name.
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
            raise ChatError(f"{tool!r:.80} is no tool: give a function, or a JSON schema as OpenAI's API takes it")
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ChatError(f"two tools have the same name: {', '.join(names)}")
    return ToolSet(tuple(schemas), functions)


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", str(function))
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # the library's own kinds have no base of their own
        raise ChatError(
            f"the tool {name}{_signature(function)} cannot be described to the model: {error}. It needs a type hint "
            'for every argument, and a docstring that says what it does and, under "Args:", what each argument is'
        ) from error
    return schema


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):  # of a function in C
        return "(...)"


def _checked(schema: Schema) -> dict[str, Any]:
    function = schema.get("function", schema)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{dict(schema)!r:.120} is no tool: its function has no name")
    return {"type": "function", "function": dict(function)}


def _misfit(value: Any, schema: Any, path: str = "", closed: bool = False) -> str:
    """Where a value does not fit its JSON schema, as half a sentence; "" if it does. Knows the keywords that are made
    of a function's signature; others are not looked at."""
    if not isinstance(schema, Mapping):
        return ""
    where = path or "the arguments"
    if options := schema.get("anyOf"):
        misfits = [_misfit(value, option, path) for option in options]
        return misfits[0] if all(misfits) else ""
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type") or []
    if value is None and schema.get("nullable"):
        return ""
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{where} must be {' or '.join(kinds)}, not {value!r:.60}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {value!r:.60}"
    if isinstance(value, list):
        misfits = [_misfit(item, schema.get("items"), f"{where}[{index}]") for index, item in enumerate(value)]
        return next(filter(None, misfits), "")
    return _object_misfit(value, schema, path, closed) if isinstance(value, dict) else ""


def _object_misfit(value: dict[str, Any], schema: Schema, path: str, closed: bool) -> str:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            return f"{path + '.' if path else ''}{name} is missing"
    more = schema.get("additionalProperties", not closed)
    for name, item in value.items():
        if name not in properties and more is False:
            return f"there is no argument {name!r}; it takes {', '.join(properties) or 'none'}"
        if misfit := _misfit(item, properties.get(name, more), f"{path + '.' if path else ''}{name}"):
            return misfit
    return ""


def _is(value: Any, kind: str) -> bool:
    if kind not in _TYPES:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))

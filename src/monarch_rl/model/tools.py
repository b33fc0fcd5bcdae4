"""The tools that a policy may call: functions or JSON schemas."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from monarch_rl.errors import ChatError
from monarch_rl.values import plain

Schema: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = "ToolSet | Sequence[Callable[..., Any] | Schema]"
"""Functions with type hints and a Google-style docstring, or JSON schemas in the form of OpenAI's API."""


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
        return json.dumps(self.schemas, ensure_ascii=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolSet) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def problem(self, name: str, arguments: Any) -> str:
        """Why a call cannot be executed, worded for the model; "" if it can."""
        from monarch_rl.model.json_schema import mismatch

        if name not in self.parameters:
            return f"There is no tool {name!r}. The tools are: {', '.join(self.parameters)}."
        if not isinstance(arguments, dict):
            return f"The arguments of {name} are not a JSON object."
        problem = mismatch(arguments, self.parameters[name])
        return f"The call of {name} does not match its schema: {problem}." if problem else ""


def as_tools(tools: Tools) -> ToolSet:
    """Convert functions and schemas to a tool set.

    Raises:
        ChatError: a function lacks type hints or a docstring that describes its arguments, a schema is invalid or has
            no name, or two tools have the same name.
    """
    from monarch_rl.model.json_schema import fault

    if isinstance(tools, ToolSet):
        return tools
    if callable(tools) or isinstance(tools, Mapping):
        raise ChatError(f"{tools!r:.80} is one tool: give a list of tools")
    schemas, functions = [], {}
    for tool in tools:
        if isinstance(tool, Mapping):
            schemas.append(_json(_checked(tool)))
        elif callable(tool):
            schemas.append(_json(_schema(tool)))
            functions[schemas[-1]["function"]["name"]] = tool
        else:
            raise ChatError(
                f"{tool!r:.80} is not a tool: give a function, or a JSON schema in the form of OpenAI's API"
            )
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ChatError(f"two tools have the same name: {', '.join(names)}")
    tool_set = ToolSet(tuple(schemas), functions)
    for name, parameters in tool_set.parameters.items():
        if found := fault(parameters):
            raise ChatError(f"the schema of the tool {name} is not JSON Schema, at {found}")
    return tool_set


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function: dict[str, Any] = plain(schema["function"])
    except ValueError as error:
        raise ChatError(f"the schema of the tool {schema['function']['name']!a} is not JSON: {error}") from error
    return {"type": "function", "function": function}


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


def _checked(schema: Schema) -> Schema:
    function = schema.get("function", schema)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{dict(schema)!r:.120} is not a tool: its function has no name")
    if (kind := schema.get("type") or "function") != "function":
        raise ChatError(f"the tool {function['name']!a} has the type {kind!r:.40}: only functions are supported")
    # Anthropic's and MCP's names of the parameters: calls would not be checked, and few templates read them.
    if other := next((key for key in ("input_schema", "inputSchema") if function.get(key) is not None), ""):
        raise ChatError(f"the tool {function['name']!a} has {other}: name it parameters, as in OpenAI's API")
    return {"function": {key: value for key, value in function.items() if key != "type"}}

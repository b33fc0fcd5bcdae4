"""JSON Schema of tools' arguments, by the ``jsonschema`` package: how a call differs from it, in words for a model.

Draft 2020-12, with three differences. ``nullable`` of OpenAPI, which transformers writes for ``None``, is known. Types
that JSON does not have, such as ``float`` in the schemas of some data sets, accept any value. ``1.0`` is no integer,
because a Python function with an ``int`` parameter would receive a float.

Importing jsonschema takes a tenth of a second, so this module is imported where it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
MAX_DEPTH = 32
"""Levels of lists and objects in a call's arguments. jsonschema recurses, up to 15 frames a level; where Python's limit
of 1,000 frames ends that within rpds, its table of references, a Rust panic ends the process."""
Check = Callable[[Any, Any, Any, Mapping[str, Any]], Iterator[ValidationError]]
"""A keyword's check: of (validator, the keyword's value, value, schema)."""


def fault(parameters: Mapping[str, Any]) -> str:
    """What is wrong with the schema of a tool's arguments, and where; "" if nothing is."""
    errors = _META_VALIDATOR.iter_errors(parameters)
    error = next((each for each in errors if not _is_unknown_type(each)), None)
    if error is not None:
        return f"{error.json_path}: {error.message:.200}"
    return next(_unusable(parameters, parameters), "")


def _unusable(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """References that lead nowhere and patterns that do not compile, which the meta-schema does not find."""
    if isinstance(schema, list):
        for part in schema:
            yield from _unusable(part, root)
    if not isinstance(schema, dict):
        return
    if isinstance(reference := schema.get("$ref"), str):
        try:
            target = _resolved(reference, root)
            if _leads_back(target, root, (reference,)):
                yield f"$ref {reference!r} leads back to itself"
        except Unresolvable as error:
            yield f"$ref {reference!r} leads nowhere: {error}"
    patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    named = schema.get("patternProperties")
    for pattern in [*patterns, *(named if isinstance(named, dict) else ())]:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"the pattern {pattern!r} does not compile: {error}"
    for keyword, part in schema.items():
        if keyword not in ("default", "examples", "enum", "const"):  # these hold values, not schemas
            yield from _unusable(part, root)


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    return Registry().resolver_with_root(DRAFT202012.create_resource(root)).lookup(reference).contents


def _leads_back(schema: Any, root: Mapping[str, Any], trail: tuple[str, ...]) -> bool:
    """Whether a check of one value by `schema` comes back to a reference of `trail`, and so never ends."""
    if not isinstance(schema, dict):
        return False
    parts = [schema[keyword] for keyword in ("not", "if", "then", "else") if keyword in schema]
    for keyword in ("allOf", "anyOf", "oneOf"):
        parts += schema.get(keyword, ())
    reference = schema.get("$ref")
    if reference in trail:
        return True
    if isinstance(reference, str) and _leads_back(_resolved(reference, root), root, (*trail, reference)):
        return True
    return any(_leads_back(part, root, trail) for part in parts)


def mismatch(arguments: dict[str, Any], parameters: Mapping[str, Any]) -> str:
    """How a call's arguments differ from their schema, as part of a sentence; "" if they match.

    Arguments that the schema does not name are a mismatch, unless its ``additionalProperties`` allows them.
    """
    if _is_deeper(arguments, MAX_DEPTH):
        return f"the arguments are nested more than {MAX_DEPTH} levels deep"
    try:
        error = next(_validator(json.dumps(parameters)).iter_errors(arguments), None)
    except (RecursionError, OverflowError) as limit:  # the latter by an integer of 400 digits that the model wrote
        return f"the arguments cannot be checked: {limit}"
    if error is None:
        return ""
    while error.validator == "anyOf" and error.context:  # say what is wrong with the first option
        error = error.context[0]
    return _in_words(error)


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(part, depth - 1) for part in parts)


def _in_words(error: ValidationError) -> str:
    path = error.json_path.removeprefix("$").removeprefix(".")
    where, prefix = path or "the arguments", f"{path}." if path else ""
    value, expected = error.instance, error.validator_value
    match error.validator:
        case "type":
            kinds = [expected] if isinstance(expected, str) else expected
            return f"{where} must be {' or '.join(kinds)}, not {value!r:.60}"
        case "enum":
            return f"{where} must be one of {', '.join(map(repr, expected))}, not {value!r:.60}"
        case "required":
            return f"{prefix}{next(name for name in expected if name not in value)} is missing"
        case "additionalProperties" if "patternProperties" not in error.schema:
            names = error.schema.get("properties", {})
            unknown = next(name for name in value if name not in names)
            return f"there is no argument {prefix + unknown!r}; it takes {', '.join(names) or 'none'}"
    return f"{where}: {error.message:.200}"


@lru_cache(maxsize=1024)  # as many as a task may have sets of tools for its items
def _validator(parameters: str) -> Validator:
    # The order is that in which mismatches are reported. An empty registry fetches no reference from the network.
    defaults: dict[str, Any] = {"type": "object", "required": [], "additionalProperties": False}
    validator: Validator = _ToolValidator(defaults | json.loads(parameters), registry=Registry())
    return validator


def _is_unknown_type(error: ValidationError) -> bool:
    names = [error.instance] if isinstance(error.instance, str) else error.instance
    is_type = error.validator == "anyOf" and bool(error.path) and error.path[-1] == "type"
    return is_type and isinstance(names, list) and all(isinstance(name, str) for name in names)


def _unless_null(check: Check) -> Check:
    def checked(validator: Any, expected: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
        if not (value is None and schema.get("nullable")):
            yield from check(validator, expected, value, schema)

    return checked


def _type(validator: Any, expected: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    if TYPES.issuperset([expected] if isinstance(expected, str) else expected):
        yield from Draft202012Validator.VALIDATORS["type"](validator, expected, value, schema) or ()


def _is_integer(checker: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_META_VALIDATOR = Draft202012Validator(Draft202012Validator.META_SCHEMA)
_ToolValidator = extend(
    Draft202012Validator,
    {
        "type": _unless_null(_type),
        **{
            keyword: _unless_null(Draft202012Validator.VALIDATORS[keyword])
            for keyword in ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
        },
    },
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)

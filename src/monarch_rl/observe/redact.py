"""Removes what looks like a key, a token or a password from what a run records about itself.

A safeguard against an accident, a key in a command line or a recipe, and not against intent: a key of an unknown form
under an unsuspicious name stays. Imports only the standard library, because the console's relay loads this file alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"
SHORTEST = 8
"""Minimum length in characters of a value that is looked for in texts."""

_KNOWN = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<= :// ) [^\s/:@'"]* : [^\s/@'"]+ (?= @ )  # name and password in a URL
    | (?<= [Bb]earer\  ) (?= [^\s"'0-9]{0,200} [0-9] ) [A-Za-z0-9_.~+/=-]{16,}
    | (?<! [A-Za-z0-9] ) (?:
        sk-[A-Za-z0-9_-]{0,40}? (?= [A-Za-z_]{0,40}[0-9] ) [A-Za-z0-9_]{16,} [A-Za-z0-9_-]*  # OpenAI, Anthropic, ...
      | hf_[A-Za-z0-9]{20,}
      | gh[oprsu]_[A-Za-z0-9]{30,} | github_pat_[A-Za-z0-9_]{30,} | glpat-[A-Za-z0-9_-]{20,}
      | (?: AKIA | ASIA ) [A-Z0-9]{16} (?! [A-Za-z0-9] )
      | AIza[A-Za-z0-9_-]{35}
      | xox[abeprs]-[A-Za-z0-9-]{10,}
      | wandb_v1_[A-Za-z0-9_]{20,}
      | eyJ[A-Za-z0-9_-]{8,1000} \. eyJ[A-Za-z0-9_-]{8,1000} \. [A-Za-z0-9_-]+  # a JSON web token
    )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Keys that are recognised by their form."""
_BEGINNINGS = re.compile(
    r"-----BEGIN |://|earer |sk-|hf_|gh[oprsu]_|github_pat_|glpat-|AKIA|ASIA|AIza|xox|wandb_v1_|eyJ"
)
"""What :data:`_KNOWN` begins with: few lines of output have it, and only those are worth the search."""
_NAME = re.compile(
    r"(?:^|[^A-Za-z0-9]|(?<=[a-z0-9])(?=[A-Z]))"
    r"(?i:(?:api|access|auth|private|secret)?(?:key|token|secret)|[a-z]{0,40}passw(?:or)?d|passphrase)$"
)
"""Names whose values may be keys. The plural does not count: ``max_new_tokens`` is a number of them."""
_CERTAIN = re.compile(
    r"(?i)(?:api[_-]?key|(?:access|private|secret)[_-]?key|(?:access|auth|bearer)[_-]?token|secret|passw(?:or)?d"
    r"|passphrase)$"
)
"""Names of which every text is one; others (``eos_token``, ``sort_key``) may have values without any secret."""
_KEYS = re.compile(r"(?i)_(?:keys|pat|pass|credentials?)$")
"""Names of further variables of the environment, of which no other mapping has any."""
_PLAIN = re.compile(r"[A-Za-z]?[a-z]*(?:[ _-][a-z]+)*|[0-9]{1,9}")
"""Words, and numbers that may be a setting."""
_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_.+=-]{16,}")
_ASSIGNED = re.compile(
    r"""(?<![A-Za-z0-9_.-])(?P<name>[A-Za-z0-9_.-]{1,100})(?P<sign>["']?\s*[:=]\s*)"""
    r"""(?:(?P<quote>["'])(?P<text>[^"'\s]+)(?P=quote)|(?P<bare>[A-Za-z0-9_+=-]{16,})(?![A-Za-z0-9_.(\[]))"""
)
"""An assignment, keyword argument, entry of a mapping, or environment variable in a text."""
_WORDS = ("key", "token", "secret", "passw", "passphrase")
"""What the names of :data:`_NAME` contain: as :data:`_BEGINNINGS`."""
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEY_LINE = re.compile(
    r"\s*(?:[A-Za-z0-9+/=]{0,76}|(?:Proc-Type|DEK-Info): [\w,-]+|-----END [A-Z ]*PRIVATE KEY-----)\s*"
)
"""The first line of a private key, and the others."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A string in a line of JSON."""
_PLACEHOLDERS = ("{", "$", "<", "%")


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """A text without what looks like a key: a known form, or the value assigned to a name such as ``api_key``; and
    without ``secrets``."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    if _BEGINNINGS.search(text):
        text = _KNOWN.sub(REDACTED, text)
    lower = text.lower()
    return _ASSIGNED.sub(_assignment, text) if any(word in lower for word in _WORDS) else text


def redact_line(line: str, secrets: Iterable[str], in_key: bool) -> tuple[str, bool]:
    """Redact one of successive lines, among which a private key may be.

    Args:
        in_key: whether the line before belongs to a private key that may continue.

    Returns:
        The line, and ``in_key`` for the next one.
    """
    if in_key and _KEY_LINE.fullmatch(line):
        return REDACTED, "-----END " not in line
    at = line.rfind("-----BEGIN ")
    begins = at >= 0 and _KEY_BEGINS.match(line, at) is not None and "-----END " not in line[at:]
    return redact(line, secrets), begins


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Lines of the values of variables whose names tell that they are keys, longest first. Short ones, which may be in
    any text, are left out."""
    values = [value for name, value in environment.items() if _is_secret(name, value) or _may_be_key(name, value)]
    found = {line for value in values for line in value.splitlines() if len(line) >= SHORTEST}
    return sorted(found, key=len, reverse=True)


def mask(line: str, secrets: Iterable[str]) -> str:
    """A line of JSON with asterisks in place of ``secrets``: as many as their UTF-8 has bytes, so that offsets stay.
    Only strings change: a number, or an escape such as the n of a line's end, may look like a part of a secret."""
    forms = {form for secret in secrets for form in (secret, _escaped(secret))}  # a string may hold JSON
    found = sorted((form for form in forms if _escaped(form) in line), key=len, reverse=True)
    return _STRING.sub(lambda string: _masked(string[0], found), line) if found else line


def redact_command(arguments: Iterable[str]) -> list[str]:
    """A command line without what looks like a key, and without any value of a flag such as ``--judge.token``."""
    redacted, hidden = list[str](), False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        names_key = flag.startswith("-") and _NAME.search(flag) is not None
        if hidden and not argument.startswith("--"):
            redacted.append(REDACTED)
        elif names_key and equals and value:
            redacted.append(f"{flag}={REDACTED}")
        else:
            redacted.append(redact(argument))
        hidden = names_key and not equals
    return redacted


def redact_values(values: Any, name: str = "") -> Any:
    """A JSON value whose texts have nothing that looks like a key.

    Args:
        name: key of the mapping that the value is from.
    """
    if isinstance(values, Mapping):
        return {key: redact_values(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value, name) for value in values]
    if not isinstance(values, str):
        return values
    return REDACTED if _is_secret(name, values) else redact(values)


def _masked(string: str, secrets: list[str]) -> str:
    text = json.loads(string)
    for secret in secrets:
        text = text.replace(secret, "*" * len(secret.encode(errors="replace")))
    return json.dumps(text)


def _escaped(text: str) -> str:
    """As in a string of JSON."""
    return json.dumps(text)[1:-1]


def _assignment(found: re.Match[str]) -> str:
    value = found["text"] or found["bare"]
    # Without quotes it may be the name of a variable, but for what no programmer would type.
    secret = _is_secret(found["name"], value) if found["quote"] else _names_key(found["name"]) and _is_random(value)
    quote = found["quote"] or ""
    return f"{found['name']}{found['sign']}{quote}{REDACTED}{quote}" if secret else found[0]


def _is_secret(name: str, value: str) -> bool:
    if not _names_key(name) or not value or value == REDACTED or value.startswith(_PLACEHOLDERS):
        return False
    return _CERTAIN.search(name) is not None or _is_random(value)


def _may_be_key(name: str, value: str) -> bool:
    """Whether a variable of the environment may hold a key: by its name, if the value is no path and no words."""
    named = _names_key(name) or _KEYS.search(name) is not None
    return named and not value.startswith(("/", "~", ".")) and _PLAIN.fullmatch(value) is None


def _names_key(name: str) -> bool:
    return _NAME.search(name) is not None


def _is_random(value: str) -> bool:
    return _RANDOM.fullmatch(value) is not None

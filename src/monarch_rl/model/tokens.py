"""Checks of a model folder's tokenizer that need no transformers, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarch_rl.errors import SettingsError
from monarch_rl.model.config import ModelConfig, read_object
from monarch_rl.model.folder import CHAT_TEMPLATES

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
"""A tokenizer's settings, and files in which versions of transformers before 5 wrote parts of them."""
UNKNOWN_LENGTH = 1024
"""Assumed upper bound on the characters of a token, if the vocabulary is unknown."""


class FolderTokenizer:
    """The tokenizer of a model's folder, checked.

    Raises:
        ValueError: the tokenizer cannot be read, or has ids for which the model has no embedding; names the file and
            the token.
    """

    def __init__(self, config: ModelConfig) -> None:
        folder, vocabulary = config.folder, config.vocab_size
        self._tokenizer = _load(folder / "tokenizer.json")
        settings = _object(folder / SETTINGS)
        added = settings.get("added_tokens_decoder") or {}
        if not isinstance(added, dict):
            raise SettingsError(
                f"{folder / SETTINGS} has added_tokens_decoder {str(added)[:60]!r}, which must be an object: copy or "
                "download it again"
            )
        tokens = {str(entry): int(key) for key, entry in added.items() if key.isdecimal() and len(key) < 20}
        own = {} if self._tokenizer is None else self._tokenizer.get_vocab(with_added_tokens=True)
        tokens |= own
        self.longest_token = max(map(len, tokens), default=0) if self._tokenizer is not None else UNKNOWN_LENGTH
        """Upper bound on the characters of a token."""
        token, highest = max(tokens.items(), key=lambda item: item[1], default=("", -1))
        if highest >= vocabulary:
            count = sum(index >= vocabulary for index in tokens.values())
            raise SettingsError(
                f"the tokenizer in {folder} has {count} ids for which the model has no embedding, up to {highest} "
                f"({token!r}): config.json says vocab_size {vocabulary}. It belongs to another model, or tokens were "
                "added to it without embeddings"
            )
        check_templates(folder)
        named = _named_tokens(settings, added)
        if "added_tokens_decoder" not in settings:  # otherwise transformers does not read these files
            named |= _named_tokens(_object(folder / SPECIAL), {}, SPECIAL)
            named |= dict.fromkeys(_object(folder / ADDED), ADDED)
        lacking = [token for token in named if token not in own]
        if own and lacking and max(own.values()) + len(lacking) >= vocabulary:
            raise SettingsError(
                f"{folder / named[lacking[0]]} names {lacking[0]!r}, which tokenizer.json lacks: transformers would "
                "give it the next id, for which the model has no embedding. Name a token of tokenizer.json"
            )
        for file in END_FILES:
            _check_end_tokens(folder / file, vocabulary)

    def count(self, texts: Sequence[str]) -> list[int] | None:
        """The number of tokens of each text, without those that a chat template adds; None without
        ``tokenizer.json``."""
        if self._tokenizer is None:
            return None
        return [len(self._tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def read_vocabulary(folder: Path) -> dict[str, int]:
    """The id of every token of a model folder. Raises ValueError if ``tokenizer.json`` is missing or unreadable."""
    tokenizer = _load(folder / "tokenizer.json")
    if tokenizer is None:
        raise SettingsError(f"{folder} has no tokenizer.json: save its tokenizer with transformers, which writes one")
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary


def _load(path: Path) -> Any:
    """The tokenizer in ``tokenizer.json``; None if the file is missing: transformers then builds it from others."""
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise SettingsError(f"{path} is not a tokenizer ({error}): copy or download it again") from error
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise SettingsError(f"{path} has no tokens: copy or download it again")
    # A file that was saved during training with them may state both; transformers turns them off for each call.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _named_tokens(settings: dict[str, Any], added: dict[str, Any], file: str = SETTINGS) -> dict[str, str]:
    """The tokens that a file with a tokenizer's settings names, and the file."""
    named = [*added.values(), *(value for key, value in settings.items() if key.endswith("_token"))]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    texts = [value.get("content") if isinstance(value, dict) else value for value in named]
    return {text: file for text in texts if isinstance(text, str)}


GENERATION = "generation_config.json"
END_FILES = ("config.json", GENERATION)
"""Files that name end tokens besides the tokenizer. Engines stop at those of both."""


def end_tokens(path: Path) -> list[int]:
    """The end tokens that a file of a model folder names; [] if it does not exist."""
    ends = _object(path).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _check_end_tokens(path: Path, vocabulary: int) -> None:
    for end in end_tokens(path):
        if type(end) is not int or not 0 <= end < vocabulary:
            raise SettingsError(f"{path} has eos_token_id {end!r}, which is not one of the model's {vocabulary} ids")


# -- the files of a chat template --------------------------------------------------------------------------------------

TEMPLATE, DEFAULT = "chat_template.jinja", "default"


def check_templates(folder: Path) -> None:
    """Raise ValueError if a folder's chat templates cannot be read, or transformers takes none of them by default."""
    found, named = _default_templates(folder), list((folder / CHAT_TEMPLATES).glob("*.jinja"))
    if any(path.name != SETTINGS for path in found) or (found and not named):
        return
    elsewhere = [folder / "chat_template.json", *folder.glob(f"*/{TEMPLATE}"), *named]
    if _stated_templates(folder):
        elsewhere.append(folder / SETTINGS)
    if misplaced := next((path for path in elsewhere if path.is_file()), None):
        also = f" and ignores the one in {SETTINGS}" if found else ""
        raise SettingsError(
            f"{misplaced}: transformers does not take a conversation's default chat template from here{also}: copy the "
            f"template to {folder / TEMPLATE}"
        )


def _default_templates(folder: Path) -> dict[Path, str]:
    """The default chat templates of a folder by file, in transformers' order, of which it takes the first. Raises
    ValueError if one cannot be read."""
    found = {path: _text(path) for path in (folder / CHAT_TEMPLATES / "default.jinja", folder / TEMPLATE)}
    stated = {folder / SETTINGS: _stated_templates(folder).get(DEFAULT)}
    return {path: text for path, text in (found | stated).items() if text is not None}


def _text(path: Path) -> str | None:
    """The text of a chat template's file; None if there is none."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read as UTF-8 text ({error}): copy or download it again") from error


def _stated_templates(folder: Path) -> dict[str, str]:
    """The chat templates in ``tokenizer_config.json``, by name."""
    stated: Any = _object(folder / SETTINGS).get("chat_template") or {}
    with suppress(TypeError, LookupError):
        stated = {entry["name"]: entry["template"] for entry in stated} if isinstance(stated, list) else stated
    stated = {DEFAULT: stated} if isinstance(stated, str) else stated
    if isinstance(stated, dict) and all(isinstance(text, str) for text in stated.values()):
        return stated
    raise SettingsError(
        f"{folder / SETTINGS} has chat_template {str(stated)[:60]!r}, which must be text, or a list of objects with "
        "name and template: copy or download it again"
    )


def template_warning(folder: Path) -> str:
    """A warning about different default chat templates of a folder; "" if there is no more than one."""
    (taken, text), *others = [*_default_templates(folder).items()] or [(folder, "")]
    differing = [path.relative_to(folder) for path, other in others if other.strip() != text.strip()]
    if not differing:
        return ""
    return (
        f"{taken} and {' and '.join(map(str, differing))} have different chat templates: the former is used, as by "
        "transformers; versions before 4.53 use the one in tokenizer_config.json"
    )


# -- comparing two vocabularies: token ids of one model may be passed to another only if they mean the same text ------

NAMED = 3
"""How many tokens an error message lists."""


def tokenizer_difference(folder: Path, other: Path) -> str:
    """Describe how the token ids of two model folders differ; "" if every id stands for the same token in both.

    Only the vocabularies are compared, including added tokens. Tokenisation rules may differ, because models exchange
    ids, not text. A model may have more embeddings than tokens.

    Raises:
        ValueError: ``tokenizer.json`` of a folder is missing or cannot be read.
    """
    here, there = folder / "tokenizer.json", other / "tokenizer.json"
    if here.is_file() and there.is_file() and here.read_bytes() == there.read_bytes():
        return ""
    tokens, others = read_vocabulary(folder), read_vocabulary(other)
    if tokens == others:
        return ""
    differing = sorted(token for token in tokens.keys() & others.keys() if tokens[token] != others[token])
    missing = sorted(tokens.keys() ^ others.keys(), key=lambda token: (token in others, token))
    parts = [f"{token!r} is {tokens[token]} in {folder} and {others[token]} in {other}" for token in differing[:NAMED]]
    if not parts:
        parts = [f"{token!r} is only in {folder if token in tokens else other}" for token in missing[:NAMED]]
    return f"{len(differing) + len(missing)} tokens differ: {', '.join(parts)}"

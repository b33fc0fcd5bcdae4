"""Finds Hugging Face model folders, or downloads them, before anything is spawned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from monarch_rl.errors import SettingsError
from monarch_rl.model.config import ModelConfig, read_config, read_frozen

DOWNLOADED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.md", "LICENSE*")
"""Files of a Hub repository that are downloaded."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The only sub-folder of a model folder that transformers reads: one ``*.jinja`` for each named chat template."""
NOTES = (".index.json", ".stamp")
"""Endings of files about weights: which file has which tensor, and how tools/make_tiny_model.py made them."""
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".ot", ".npz", ".onnx", ".onnx_data"),
    *NOTES,
)
"""Endings of files with weights, of which only safetensors are read, with a trainer's state, or with notes on them."""
LFS = b"version https://git-lfs"
"""Beginning of a file that stands for one of Git LFS, in a clone without it."""
MISTRALS_OWN = "consolidated"
"""Prefix of files in a Mistral folder that hold the weights a second time, under other than the Hugging Face tensor
names. They are not read."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def resolve_model(name: str, tokenizer: bool = True) -> ModelConfig:
    """The config of a model and its local folder, downloaded from the Hugging Face Hub if ``name`` is not a folder.

    Args:
        name: a folder with ``config.json``, safetensors and a tokenizer, or a Hub name; see :func:`find_folder`.
        tokenizer: whether the folder must have a tokenizer; callers that only use token ids need none.

    Raises:
        ValueError: ``name`` is neither a folder nor a reachable Hub repository, a file or a key of the config is
            missing or invalid, or the architecture is not supported.
    """
    folder = find_folder(name)
    config = read_config(folder)
    architecture = config.architecture
    if lacking := {key: value for key, value in architecture.needed_keys.items() if key not in config.raw}:
        raise SettingsError(
            f"model {name}: its config lacks {', '.join(lacking)}, without which SGLang does not start (transformers 5 "
            f"leaves them out). Add the values of {architecture.label}'s own config: {json.dumps(lacking)}"
        )
    _check_files(name, folder)
    if tokenizer and not has_tokenizer(folder):
        raise SettingsError(f"model {name}: no tokenizer in {folder}; it needs one of {', '.join(TOKENIZERS)}")
    return config


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZERS)


def resolve_frozen(name: str) -> ModelConfig:
    """The config of a frozen model (a judge or teacher), which is served and never trained, and its local folder.

    Args:
        name: Hugging Face folder or Hub name; see :func:`resolve_model`.

    Raises:
        ValueError: as for :func:`resolve_model`.
    """
    folder = find_folder(name)
    config = read_frozen(folder)
    if not config.reward_labels:
        return resolve_model(str(folder))
    _check_files(name, folder)
    return config


def _check_files(name: str, folder: Path) -> None:
    """Raise ValueError if the folder has no weights, or files that its download has left out."""
    for path in (*folder.glob("*.safetensors"), *(folder / file for file in copied_files(folder))):
        try:
            with path.open("rb") as file:
                pointer = file.read(len(LFS)) == LFS
        except OSError as error:
            raise SettingsError(f"{path} cannot be read ({error.strerror}): copy or download it again") from error
        if pointer:
            raise SettingsError(f"{path} only names a file of Git LFS: fetch it by `git lfs pull`")
    if not any(folder.glob("*.safetensors")):
        raise SettingsError(f"model {name}: no *.safetensors file in {folder}; save the weights as safetensors")


def find_folder(name: str) -> Path:
    """The local folder of a model, absolute.

    Args:
        name: a folder, or a Hub name, ``org/name`` or ``org/name@revision``, whose files are downloaded unless they are
            in the Hub's cache. The revision is a branch, a tag or a commit.

    Raises:
        ValueError: there is none.
    """
    return _local_folder(name) or _download(name)


def _local_folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder.resolve() if folder.is_dir() else None
    except (OSError, RuntimeError):  # a name too long for a file, or "~" of a user that does not exist
        return None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    # Patterns match "/" too: of sub-folders only chat templates are wanted, not a second copy of the weights.
    ignored = [f"{MISTRALS_OWN}*", *(f"*/{pattern}" for pattern in DOWNLOADED if pattern != "*.jinja")]
    download = partial(
        snapshot_download,
        repository,
        revision=revision or None,
        allow_patterns=list(DOWNLOADED),
        ignore_patterns=ignored,
    )
    failures = HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError
    try:
        return Path(download()).resolve()
    except failures as error:
        with suppress(*failures):  # of a commit it asks the Hub for the files' names, even if it has the files
            return Path(download(local_files_only=True)).resolve()
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SettingsError(
            f"no such model: {name} is neither a folder nor a Hugging Face Hub repository that can be "
            f"reached ({reason}). Give a folder with config.json, or a Hub name such as Qwen/Qwen3-0.6B; "
            f"tools/make_tiny_model.py makes .cache/tiny-qwen3."
        ) from error


# -- a model's name, for records that are read later, elsewhere and by others ------------------------------------------


def name_and_revision(folder: Path) -> tuple[str, str | None]:
    """The Hub name and commit of a folder in the Hub's cache; for any other, its absolute path and None."""
    folder = folder.expanduser().resolve()
    repository = folder.parents[1] if len(folder.parents) > 1 else folder
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):  # models--ORG--NAME/snapshots/...
        from huggingface_hub import constants

        if repository.parent == Path(constants.HF_HUB_CACHE).resolve():  # from another cache it would not be found
            return repository.name.removeprefix("models--").replace("--", "/"), folder.name
    return str(folder), None


def full_name(name: str) -> str:
    """A name by which :func:`find_folder` finds the same model later, from any directory: ``org/name@commit`` for a
    folder in the Hub's cache, the absolute path for any other, and ``name`` itself if it is no folder."""
    folder = _local_folder(name)
    if folder is None:
        return name
    found, revision = name_and_revision(folder)
    return f"{found}@{revision}" if revision else found


def is_named(full: str, name: str) -> bool:
    """Whether ``name`` may have become ``full`` by :func:`full_name`: it is a path of the same folder, or the Hub name
    without a revision."""
    return full == full_name(name) or full.startswith(f"{name}@")


def abbreviates(name: str, full: str) -> bool:
    """Whether ``name``, given in another directory or later, may mean what :func:`full_name` recorded: the Hub name
    without its commit, or the end of its path, which leads nowhere from here."""
    if full.startswith(f"{name}@"):
        return True
    parts = Path(name).parts
    return _local_folder(name) is None and Path(full).parts[-len(parts) :] == parts


# -- copying a folder --------------------------------------------------------------------------------------------------


def copied_files(folder: Path) -> Iterator[Path]:
    """The files of a model folder, relative to it, that belong to a copy with other weights: all at its top but the
    weights and hidden ones, and the named chat templates. What other sub-folders hold (``original/``, ``onnx/``) is a
    copy of the old weights in another form, or of another program."""
    for path in sorted((*folder.iterdir(), *(folder / CHAT_TEMPLATES).glob("*.jinja"))):
        if not path.is_dir() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
            yield path.relative_to(folder)


def left_out(folder: Path) -> list[str]:
    """What a copy of a model folder lacks besides the weights that are read: other files and sub-folders at its top."""
    copied = {path.parts[0] for path in copied_files(folder)}
    names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(name for name in names if name not in copied and not name.endswith((".safetensors", *NOTES)))


def copy_files(source: Path, folder: Path) -> None:
    """Copy :func:`copied_files` to an existing folder. Raises OSError."""
    for name in copied_files(source):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)  # without its mode: a source may be read-only

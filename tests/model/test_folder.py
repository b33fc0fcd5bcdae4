"""A model keeps its name and its files: wherever a record of it is read later, and wherever it is saved again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from monarch_rl.errors import SettingsError
from monarch_rl.model.folder import (
    abbreviates,
    copied_files,
    copy_files,
    find_folder,
    full_name,
    is_named,
    left_out,
    name_and_revision,
)

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with two revisions of a repository, and no network. Returns the repository's folder."""
    root = tmp_path / "hub" / "models--org--tiny.model"
    (root / "refs").mkdir(parents=True)
    for revision, commit in COMMITS.items():
        (root / "refs" / revision).write_text(commit)
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "snapshots" / commit / "config.json").write_text(json.dumps({"revision": revision}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return root


@pytest.mark.parametrize(
    ("name", "commit"),
    [
        ("org/tiny.model", COMMITS["main"]),
        ("org/tiny.model@main", COMMITS["main"]),
        ("org/tiny.model@v1", COMMITS["v1"]),
        (f"org/tiny.model@{COMMITS['v1']}", COMMITS["v1"]),
    ],
)
def test_a_hub_name_is_recorded_with_its_commit(hub: Path, name: str, commit: str) -> None:
    folder = find_folder(name)
    assert folder == hub / "snapshots" / commit
    assert name_and_revision(folder) == ("org/tiny.model", commit)
    assert full_name(str(folder)) == f"org/tiny.model@{commit}"
    (hub / "refs" / "main").unlink()  # the branch may move, or be deleted
    assert find_folder(full_name(str(folder))) == folder


def test_a_folder_in_another_cache_is_recorded_by_its_path(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied by hand, or downloaded with another HF_HOME: by its name it would not be found."""
    folder = hub / "snapshots" / COMMITS["v1"]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))
    assert name_and_revision(folder) == (str(folder), None) and find_folder(full_name(str(folder))) == folder


def test_a_name_that_is_no_folder_is_full(hub: Path) -> None:
    assert full_name("org/tiny.model") == "org/tiny.model"


def test_a_revision_that_does_not_exist_is_refused_with_its_name(hub: Path) -> None:
    with pytest.raises(SettingsError, match=r"org/tiny\.model@v2"):
        find_folder("org/tiny.model@v2")


@pytest.mark.parametrize("place", ["models/tiny", "models/../models/tiny", "models/link", "org/tiny.model@v1"])
def test_a_folder_is_recorded_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Path, place: str
) -> None:
    """A folder is preferred to a Hub name of the same spelling. A link may point to another folder later."""
    for name in ("models/tiny", "org/tiny.model@v1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to("tiny")
    monkeypatch.chdir(tmp_path)
    folder = find_folder(place)
    monkeypatch.chdir("/")
    assert folder == (tmp_path / place).resolve() and find_folder(full_name(str(folder))) == folder
    assert name_and_revision(folder) == (str(folder), None)


def test_an_earlier_records_name_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Path) -> None:
    """Runs of version 0.1 recorded what the flag said."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "other"):
        (tmp_path / name).mkdir()
    assert is_named(str(tmp_path / "tiny"), "tiny") and is_named(str(tmp_path / "tiny"), str(tmp_path / "tiny"))
    assert not is_named(str(tmp_path / "tiny"), "other") and not is_named(str(tmp_path / "tiny"), "absent")
    assert is_named(f"org/tiny.model@{COMMITS['v1']}", "org/tiny.model")
    assert is_named(f"org/tiny.model@{COMMITS['v1']}", f"org/tiny.model@{COMMITS['v1']}")
    assert not is_named(f"org/tiny.model@{COMMITS['v1']}", f"org/tiny.model@{COMMITS['main']}")
    assert not is_named(f"org/tiny.model-large@{COMMITS['v1']}", "org/tiny.model")


def test_flags_of_another_directory_abbreviate_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert abbreviates(".cache/tiny", "/home/me/.cache/tiny") and abbreviates("org/tiny", f"org/tiny@{'a' * 40}")
    assert not abbreviates(".cache/tiny", "/home/me/.cache/tiny-qwen3") and not abbreviates("tin", "org/tiny@1")
    assert not abbreviates("org/tiny@v1", f"org/tiny@{'a' * 40}"), "another revision may be asked for"
    (tmp_path / ".cache" / "tiny").mkdir(parents=True)
    assert not abbreviates(".cache/tiny", "/home/me/.cache/tiny"), "it is another folder here"


KEPT = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "qwen.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja", "modeling_own.py"),
    *("additional_chat_templates/rag.jinja", "LICENSE", "README.md", "preprocessor_config.json", "tokenizer.model.v3"),
]
LEFT = [
    *("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    *("pytorch_model.bin.index.json", "consolidated.safetensors", "model.gguf", "training_args.bin", "made_with.stamp"),
    *("original/params.json", "original/tokenizer.model", "onnx/model.onnx", ".gitattributes", ".cache/huggingface/x"),
    *("additional_chat_templates/notes.txt", "checkpoint-500/config.json"),
]


def test_a_copy_has_every_file_but_weights_and_foreign_sub_folders(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    for name in [*KEPT, *LEFT]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
        (source / name).chmod(0o444)  # as in a read-only cache
    copy.mkdir()
    copy_files(source, copy)
    found = {str(path.relative_to(copy)): path for path in copy.rglob("*") if path.is_file()}
    assert found.keys() == set(KEPT) == set(map(str, copied_files(source)))
    assert all(path.read_text() == name and path.stat().st_mode & 0o200 for name, path in found.items())
    named = {"checkpoint-500", "model.gguf", "onnx", "original", "pytorch_model.bin", "training_args.bin"}
    assert left_out(source) == sorted(named)
    shutil.rmtree(source)
    assert all(path.is_file() for path in found.values())

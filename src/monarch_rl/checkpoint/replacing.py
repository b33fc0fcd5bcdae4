"""Folders of a model that are replaced as a whole: whatever ends the process that does it, the name has the old one or
the new one, at the latest when the next process asks (:func:`finish_replacing`)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from monarch_rl.checkpoint.folders import flush


def partial_folder(folder: Path) -> Path:
    """Where a folder is written before it is complete: on the same disk, under a name that nobody takes for it."""
    return folder.with_name(f".{folder.name}.partial")


def _old_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def replace_folder(folder: Path) -> None:
    """Give what is complete in :func:`partial_folder` its name; one that has it is removed after that. Raises OSError.

    All of it is flushed first: a name must not be on the disk before what it names.
    """
    partial, old = partial_folder(folder), _old_folder(folder)
    for file in partial.iterdir():
        _flush_file(file)
    flush(partial)
    finish_replacing(folder)
    if partial.exists():  # else the line above has named it
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def finish_replacing(folder: Path) -> None:
    """Do what :func:`replace_folder` of a process that was killed has left, before anything is written to
    :func:`partial_folder` again. Raises OSError."""
    partial, old = partial_folder(folder), _old_folder(folder)
    if not old.exists():
        return
    if not folder.exists():  # killed between two renames, of which the first one comes when the new folder is complete
        (partial if partial.exists() else old).rename(folder)
        flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def finish_all(parent: Path) -> None:
    """As :func:`finish_replacing`, for all folders in one. Raises OSError."""
    for old in parent.glob(".*.old"):
        finish_replacing(parent / old.name.removeprefix(".").removesuffix(".old"))


def _flush_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

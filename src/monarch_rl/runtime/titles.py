"""What ``ps`` shows of a process."""

from __future__ import annotations

import os

import setproctitle


def prepare_titles() -> None:
    """Have ``setproctitle`` find this process's command line, before the environment is changed: later it cannot.

    A title that is longer than the command line would overwrite the environment that others read; not after this.
    """
    before = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"
    setproctitle.getproctitle()
    del os.environ["SPT_NOENV"]
    if before is not None:
        os.environ["SPT_NOENV"] = before


def show_title(title: str) -> None:
    """Have ``ps`` show ``monarch_rl::`` and ``title``."""
    prepare_titles()
    setproctitle.setproctitle(f"monarch_rl::{title}")

"""Command lines whose paths have spaces."""

from __future__ import annotations

import shlex

import pytest

from monarch_rl.runtime.compiler_paths import quote_paths

PATHS = ("/a folder/lib", "/a folder/lib/of torch", "/it's/lib", "/plain/lib")


@pytest.mark.parametrize("quoted", [False, True], ids=["torch 2.13", "later versions"])
def test_every_path_with_spaces_is_one_argument(quoted: bool) -> None:
    """Whether torch has quoted them or not; a path that is a prefix of another one is not confused with it."""
    written = [shlex.quote(path) if quoted else path for path in PATHS]
    line = f"g++ {written[1]} -I{shlex.quote(PATHS[0])} " + " ".join(f"-L{path}" for path in written)
    expected = ["g++", PATHS[1], f"-I{PATHS[0]}", *(f"-L{path}" for path in PATHS)]
    assert shlex.split(quote_paths(line, PATHS)) == expected

"""Imports of the fork server for tokenizers and chat templates: those of transformers."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers.utils import import_utils

# transformers reads the sources of all its models when it is imported, and again when the first of them is used, which
# takes 0.3 CPU-seconds: the second time, it gets what it found the first time, which is still in its cache.
_read = getattr(import_utils, "create_import_structure_from_path", None)  # not in every version
if _read is not None:
    _found = _read(Path(transformers.__file__).parent / "models")
    import_utils.create_import_structure_from_path = lambda _: _found
try:
    import transformers.models
finally:
    if _read is not None:
        import_utils.create_import_structure_from_path = _read

import transformers.models.auto.tokenization_auto  # noqa: E402
import transformers.tokenization_utils_tokenizers  # noqa: E402, F401

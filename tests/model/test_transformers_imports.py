"""The fork server's import of transformers."""

from __future__ import annotations

import sys

from tests.patience import run

PROGRAM = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
import monarch_rl.model.transformers_imports
from transformers.utils import import_utils
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
sources = [path for path in opened if path.endswith(("/bloom/modeling_bloom.py", "/bloom/configuration_bloom.py"))]
print(len(sources), Qwen3Config.__module__, import_utils.create_import_structure_from_path.__name__)
"""


def test_the_sources_of_models_are_read_once_and_all_names_are_there() -> None:
    done = run([sys.executable, "-c", PROGRAM])
    assert done.returncode == 0, done.stderr
    read, module, function = done.stdout.split()
    assert int(read) == 2  # two files
    assert module == "transformers.models.qwen3.configuration_qwen3" and function != "<lambda>"

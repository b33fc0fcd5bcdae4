"""Modules are imported when a name of theirs is used, not when it is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from monarch_rl.runtime.forking.deferred_import import imported_on_first_use

FILES = {
    "heavy_library/__init__.py": "",
    "heavy_library/drawing.py": """
class Plot:
    kinds = ["line"]
    def __init__(self, size):
        self.size = size

def doubled(x):
    return 2 * x
""",
    "light_library.py": """
import heavy_library.drawing as drawing
from heavy_library.drawing import Plot, doubled

def plot(size: Plot | int):
    return size if isinstance(size, Plot) else drawing.Plot(size)
""",
    "subclass_library.py": """
from heavy_library.drawing import Plot
class Bar(Plot):
    pass
""",
}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("heavy_library", "heavy_library.drawing", "light_library", "subclass_library"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def imported() -> bool:
    return "heavy_library" in sys.modules


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("within_the_block", [True, False])
def test_a_deferred_module_is_imported_by_the_first_use_of_its_names(within_the_block: bool) -> None:
    with imported_on_first_use("heavy_library"):
        light = importlib.import_module("light_library")
        assert not isinstance(3, light.Plot), "asking for the class imports nothing"
        if within_the_block:
            assert light.doubled(4) == 8
            assert sys.modules["heavy_library.drawing"].Plot.kinds == ["line"]
    assert imported() == within_the_block, "a stand-in is left, or the module is imported without need"
    made = light.plot(5)
    assert made.size == 5 and imported()
    assert type(made) is importlib.import_module("heavy_library.drawing").Plot
    assert isinstance(made, light.Plot) and light.plot(made) is made and not isinstance(3, light.Plot)
    assert light.Plot.kinds == ["line"] and light.doubled(4) == 8


@pytest.mark.usefixtures("libraries")
def test_imports_after_the_block_give_the_module_itself() -> None:
    with imported_on_first_use("heavy_library"):
        importlib.import_module("light_library")
    drawing = importlib.import_module("heavy_library.drawing")
    assert drawing.doubled(4) == 8 and drawing.__file__ and sys.modules["heavy_library"].__file__


@pytest.mark.usefixtures("libraries")
def test_an_imported_module_is_not_replaced() -> None:
    drawing = importlib.import_module("heavy_library.drawing")
    with imported_on_first_use("heavy_library.drawing"):
        light = importlib.import_module("light_library")
    assert light.Plot is drawing.Plot


@pytest.mark.usefixtures("libraries")
def test_a_placeholder_cannot_be_a_base_class() -> None:
    with imported_on_first_use("heavy_library"), pytest.raises(TypeError, match="heavy_library.drawing cannot be"):
        importlib.import_module("subclass_library")


@pytest.mark.usefixtures("libraries")
def test_a_name_that_the_module_lacks_raises_when_it_is_used() -> None:
    with imported_on_first_use("heavy_library"):
        missing = importlib.import_module("heavy_library.drawing").missing
    with pytest.raises(AttributeError, match="missing"):
        missing()

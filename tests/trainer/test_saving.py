"""Saving: the files are safetensors, ranks write them slice by slice, and a kill leaves no partial model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from monarch_rl.checkpoint.folders import partial_folder
from monarch_rl.model.config import EXTRA_LAYERS, read_config
from monarch_rl.model.lora import LoraSettings
from monarch_rl.model.tensors import INDEX, check_weights, read_header
from monarch_rl.model.weight_files import index_of, plan_files
from monarch_rl.trainer import saving
from monarch_rl.trainer.lora import save_lora
from tests.trainer.programs import run_program, saved
from tools.gpu_parts.common import TINY, Bench, make_model

pytestmark = pytest.mark.core

shapes = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)


@given(shapes, st.sampled_from(["F32", "BF16"]), st.integers(1, 400))
def test_planned_files_are_safetensors_with_every_tensor_once(
    tmp_path_factory: pytest.TempPathFactory, tensor_shapes: list[tuple[int, ...]], dtype: str, most: int
) -> None:
    """safetensors reads the bytes that are written to the planned places; files are small, and the index is right."""
    folder = tmp_path_factory.mktemp("files")
    tensors = {
        f"t{i}": torch.randn(shape).to({"F32": torch.float32, "BF16": torch.bfloat16}[dtype])
        for i, shape in enumerate(tensor_shapes)
    }
    tensors["gate.e_score_correction_bias"] = torch.randn(3)  # in float32, as transformers and SGLang keep it
    files = plan_files(((name, tuple(value.shape)) for name, value in tensors.items()), dtype, most)
    for file in files:
        content = bytearray(file.header) + bytes(file.nbytes - len(file.header))
        for name, place in file.places.items():
            data = tensors[name].view(torch.uint8).numpy().tobytes()
            content[place : place + len(data)] = data
        (folder / file.name).write_bytes(content)
        assert len(file.header) % 8 == 0
        assert len(file.places) == 1 or file.nbytes - len(file.header) <= most
        read_header(folder / file.name)  # raises if the size differs
    found = saved(folder)
    assert list(found) and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    index = index_of(files)
    if len(files) == 1:
        assert files[0].name == "model.safetensors" and not index
        return
    content_of_index = json.loads(index[INDEX])
    assert content_of_index["metadata"] == {"total_size": sum(value.nbytes for value in tensors.values())}
    for name, file_name in content_of_index["weight_map"].items():
        assert name in read_header(folder / file_name)
    assert content_of_index["weight_map"].keys() == tensors.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that is saved in several files, one whose size shows in a process's memory, and their saves.

    An earlier save of the same name was complete, and a rank was killed during the one after it."""
    made = tmp_path_factory.mktemp("saving")
    bench = Bench(torch.device("cpu"), made)
    small = make_model(bench, TINY | {EXTRA_LAYERS: 1}, "small")
    (small / "additional_chat_templates").mkdir()
    (small / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 20}))
    make_model(bench, TINY | {"vocab_size": 60_000, "hidden_size": 128, "dtype": "bfloat16"}, "large")
    with pytest.raises(AssertionError):  # a rank has ended badly
        run_program("saving_ranks.py", made, "small", "never", "kill", ranks=2)
    run_program("saving_ranks.py", made, "small", "small_saved", ranks=2)
    with pytest.raises(AssertionError):
        run_program("saving_ranks.py", made, "small", "small_saved", "kill", ranks=2)
    return made


def test_a_rank_killed_during_a_save_leaves_no_partial_model(folder: Path) -> None:
    """Nothing has the name, or the earlier model has it, whole. Written files are under another name."""
    assert not (folder / "never").exists() and partial_folder(folder / "never").is_dir()
    assert partial_folder(folder / "small_saved").is_dir()
    before, after = saved(folder / "small"), saved(folder / "small_saved")
    half = saved(partial_folder(folder / "small_saved"))
    assert not all(torch.equal(half[name], value) for name, value in before.items()), "it was killed too late"
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_several_files_with_an_index_are_loaded_by_all(folder: Path) -> None:
    """By transformers, and by this project's checks and trainer (``saving_ranks.py`` loads what it has saved)."""
    from transformers import AutoModelForCausalLM

    path = folder / "small_saved"
    index = json.loads((path / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert {file.name for file in path.glob("*.safetensors")} == set(index["weight_map"].values())
    check_weights(read_config(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = saved(folder / "small")
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_saved_model_is_prompted_and_stops_as_in_training(folder: Path) -> None:
    """Templates and generation settings are the source's, with the end tokens of training; its layers for multi-token
    prediction are neither saved nor stated."""
    small, path = folder / "small", folder / "small_saved"
    template = "additional_chat_templates/tool_use.jinja"
    assert (path / template).read_text() == (small / template).read_text()
    assert json.loads((path / "generation_config.json").read_text()) == {"eos_token_id": [2, 7], "top_k": 20}
    stated = json.loads((path / "config.json").read_text())
    assert stated == json.loads((small / "config.json").read_text()) | {EXTRA_LAYERS: 0}


@pytest.mark.parametrize(
    ("base", "recorded"),
    [("models--org--tiny/snapshots/1234", ("org/tiny", "1234")), ("snapshots/1234", ("{}/snapshots/1234", None))],
)
def test_an_adapter_names_its_base_by_hub_name_and_commit_or_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, recorded: tuple[str, str | None]
) -> None:
    """As peft reads them, from any directory."""
    (tmp_path / base).mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save_lora(tmp_path / "adapter", iter({"a": torch.zeros(1)}.items()), LoraSettings(rank=1), Path(base), write=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    named, revision = recorded
    assert (config["base_model_name_or_path"], config["revision"]) == (named.format(tmp_path), revision)


def test_end_tokens_of_the_config_apply_without_a_generation_config(tmp_path: Path) -> None:
    """A file is written only if one is missing, and then has all that the config said."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2], "pad_token_id": 0, "vocab_size": 9}))
    saving._add_end_tokens(tmp_path, (2,))
    assert not (tmp_path / "generation_config.json").exists()
    saving._add_end_tokens(tmp_path, (2, 7))
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"eos_token_id": [2, 7], "pad_token_id": 0}
    before = (tmp_path / "generation_config.json").read_bytes()
    saving._add_end_tokens(tmp_path, (7,))
    assert (tmp_path / "generation_config.json").read_bytes() == before


def test_a_save_after_a_kill_replaces_the_leftovers_and_takes_little_memory(folder: Path) -> None:
    """Less than a third of the rank's weights: it converts and writes a few MiB at a time."""
    run_program("saving_ranks.py", folder, "large", "large_saved", ranks=1)
    run_program("saving_ranks.py", folder, "small", "never", ranks=1)
    assert not partial_folder(folder / "never").exists() and (folder / "never" / INDEX).is_file()
    assert [path.name for path in (folder / "large_saved").glob("*.safetensors")] == ["model.safetensors"]
    before = load_file(folder / "large" / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in saved(folder / "large_saved").items())
    memory = json.loads((folder / "large_saved.json").read_text())
    assert memory["model"] > 50e6 and memory["grown"] < memory["model"] / 3, memory


def test_a_full_disk_is_reported_immediately_by_all_ranks(folder: Path) -> None:
    """The rank with the full disk names the file, the others name the rank: no rank waits in a collective for it."""
    run_program("saving_ranks.py", folder, "small", "full", "full", ranks=2)
    messages = {(full, rank): (folder / f"full_{full}.rank{rank}").read_text() for full in (0, 1) for rank in (0, 1)}
    own = r"OSError: .*'.*\.{}\.partial/{}'"
    weights, adapter = (
        own.format("full_1", r"model-\d+-of-\d+.safetensors"),
        own.format("full_0_adapter", "adapter_model.safetensors"),
    )
    assert re.fullmatch(weights, messages[1, 1]) and re.fullmatch(adapter, messages[0, 0])
    assert re.fullmatch(f"RuntimeError: trainer rank 1 .* the weights: {weights}", messages[1, 0])
    assert re.fullmatch(f"RuntimeError: trainer rank 0 .* the adapter: {adapter}", messages[0, 1])
    # The next save needs no clean-up.
    before, after = saved(folder / "small"), saved(folder / "full_1")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not partial_folder(folder / "full_1").exists() and not (folder / "full_0").exists()


class Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_a_rank_that_cannot_write_or_is_late_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(saving, "world_store", lambda: store)
    monkeypatch.setattr(saving.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(saving.dist, "get_rank", lambda: 1)
    ranks = saving._Ranks("saving/model", 0.05)
    with (
        pytest.raises(RuntimeError, match=r"trainer ranks \[0\] .*make the files"),
        ranks.together("make the files"),
    ):
        pass
    with pytest.raises(OSError, match="No space left"), ranks.together("write the weights"):
        raise OSError("No space left on device")
    monkeypatch.setattr(saving.dist, "get_rank", lambda: 0)
    problem = "trainer rank 1 .*write the weights.*No space left"
    with pytest.raises(RuntimeError, match=problem), ranks.together("write the weights"):
        pass

"""Writing the model under training as a Hugging Face folder, by all ranks at once and a few MiB at a time.

Every rank writes the elements that it holds to where they belong in the files (``model/weight_files.py``): nothing is
gathered, and no rank has more of the model in memory than before. Tensor-parallel ranks that hold columns exchange them
for rows first, one tensor at a time. All is written to another folder, which gets its name
when it is complete. So whoever is killed meanwhile, a folder of that name holds a whole model.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from monarch_rl.checkpoint.folders import finish_replacing, partial_folder, replace_folder
from monarch_rl.model.folder import TEXT_FILES, read_object, saved_dtype
from monarch_rl.model.weight_files import FILE_BYTES, WeightFile, index_of, naming, plan_files
from monarch_rl.runtime import device_work
from monarch_rl.runtime.deadlines import disk_limit_s
from monarch_rl.runtime.network import world_store
from monarch_rl.trainer.lora import merged_shards, save_lora
from monarch_rl.trainer.model import EXPERT, ShardedModel
from monarch_rl.trainer.shards import by_rows, local_run

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""By safetensors' names."""
CHUNK_ELEMENTS = 4 << 20
"""Elements that are converted and written at a time: 16 MiB of float32."""
SHORTEST_POLL_S, LONGEST_POLL_S = 1e-3, 0.05
"""Between two questions whether all ranks have come."""


def save_model(model: ShardedModel, folder: Path, file_bytes: int = FILE_BYTES, dtype_name: str = "") -> None:
    """Write a Hugging Face folder: safetensors, config and tokenizer.

    LoRA is merged into its weights, and also written by itself to the folder ``<name>_adapter`` beside it, in fp32, for
    peft; it belongs to the model that training started from. All ranks call it together.

    Args:
        folder: seen by all ranks. One that exists is replaced when the new one is complete.
        file_bytes: see :func:`~monarch_rl.model.weight_files.plan_files`.
        dtype_name: torch's name of the weights' dtype; empty is that of the source folder.

    Raises:
        RuntimeError: another rank could not write, or had not after :func:`disk_limit_s`; names it.
        OSError: this one could not; names the file. What was written stays in :func:`partial_folder`, which the next
            save to ``folder`` replaces.
    """
    dtype = TORCH_DTYPE_MAP.get(dtype_name or saved_dtype(model.hf_config), torch.float32)
    files = plan_files(model.hf_tensors(), DTYPE_NAMES[dtype], file_bytes)
    limit_s = disk_limit_s(sum(file.nbytes for file in files))
    with device_work.piece("a save of the model", limit_s=limit_s):
        _save(model, folder, files, dtype, _Ranks(f"saving/{folder}", limit_s))


def _save(model: ShardedModel, folder: Path, files: list[WeightFile], dtype: torch.dtype, ranks: _Ranks) -> None:
    partial, first = partial_folder(folder), dist.get_rank() == 0
    with ranks.together("make the files"):
        if first:
            finish_replacing(folder)
            finish_replacing(lora_folder(folder))
            _make(partial, files, model.folder)
            _name_dtype(partial / "config.json", dtype)
    with ranks.together("write the weights"):
        _write(model, partial, files, dtype)
    adapter = lora_folder(folder)
    if model.lora.rank:
        with ranks.together("write the adapter"):
            save_lora(partial_folder(adapter), model.whole_lora(), model.lora, model.folder, write=first)
    with ranks.together("give the folder its name"):
        if first and model.lora.rank:
            replace_folder(adapter)
        if first:
            replace_folder(folder)


def lora_folder(folder: Path) -> Path:
    """Where LoRA of a model that is saved to ``folder`` is written."""
    return folder.with_name(f"{folder.name}_adapter")


def _make(partial: Path, files: list[WeightFile], source: Path) -> None:
    """The folder with all that is known without the weights, which have room in their files."""
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for file in {path for pattern in TEXT_FILES for path in source.glob(pattern)}:
        if not file.name.endswith(".safetensors.index.json"):  # of the old weights
            shutil.copy(file, partial / file.name)
    for name, text in index_of(files).items():
        (partial / name).write_text(text)
    for planned in files:
        with naming(partial / planned.name), (partial / planned.name).open("wb") as written:
            written.write(planned.header)
            written.truncate(planned.nbytes)


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Have a model's config say in which dtype its weights are."""
    values, name = read_object(config), str(dtype).removeprefix("torch.")
    if saved_dtype(values) != name:
        key = "dtype" if "dtype" in values else "torch_dtype"
        config.write_text(json.dumps(values | {key: name}, indent=2) + "\n")


def save_adapter(model: ShardedModel, folder: Path) -> None:
    """Write LoRA alone, in fp32, for peft: see :func:`save_model`. All ranks call it together."""
    first = dist.get_rank() == 0
    if first:
        finish_replacing(folder)
    save_lora(partial_folder(folder), model.whole_lora(), model.lora, model.folder, write=first)
    if first:
        replace_folder(folder)


def _write(model: ShardedModel, partial: Path, files: list[WeightFile], dtype: torch.dtype) -> None:
    """Write what this rank holds. All ranks call it together.

    One that cannot write goes on to exchange columns and to gather LoRA, because others wait for it, and raises at the
    end.
    """
    failed: OSError | None = None
    with ExitStack() as open_files, torch.no_grad():
        written = _PlannedFiles(partial, files, dtype, open_files)
        for name, local, start in _values(model):
            if failed is None:
                failed = written.write(name, local.flatten(), start)
        failed = failed or written.flush()
    if failed is not None:
        raise failed


class _PlannedFiles:
    """The files of a folder that is written.

    Args:
        folder: where they lie, with room for the weights.
        dtype: of the weights in them.
        open_files: closes them.
    """

    def __init__(self, folder: Path, files: list[WeightFile], dtype: torch.dtype, open_files: ExitStack) -> None:
        self._folder, self._dtype, self._open_files = folder, dtype, open_files
        self._places = {name: (file.name, place) for file in files for name, place in file.places.items()}
        self._descriptors: dict[str, int] = {}

    def write(self, name: str, run: torch.Tensor, start: int) -> OSError | None:
        """Write elements of tensor ``name``, from its ``start``-th on; returns what prevented it."""
        file, place = self._places[name]
        try:
            with naming(self._folder / file):
                _write_run(self._descriptor(file), place + start * self._dtype.itemsize, run, self._dtype)
        except OSError as error:
            return error
        return None

    def flush(self) -> OSError | None:
        """Have what was written on the disk; returns what prevented it."""
        try:
            for file, descriptor in self._descriptors.items():
                with naming(self._folder / file):
                    os.fsync(descriptor)
        except OSError as error:
            return error
        return None

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._folder / file, os.O_WRONLY)
            self._open_files.callback(os.close, self._descriptors[file])
        return self._descriptors[file]


def _write_run(descriptor: int, place: int, run: torch.Tensor, dtype: torch.dtype) -> None:
    for chunk in run.split(CHUNK_ELEMENTS):
        data = chunk.to(dtype).cpu().contiguous().view(torch.uint8).numpy().data
        while data:
            written = os.pwrite(descriptor, data, place)
            data, place = data[written:], place + written


def _values(model: ShardedModel) -> Iterator[tuple[str, torch.Tensor, int]]:
    """What this rank writes: name, elements, and the index (row-major) of the first one in the whole tensor. All ranks
    iterate together."""
    weights = model.hf_state()
    lora = model.lora_state()
    merged = merged_shards(weights, lora, model.lora.scaling) if lora else iter(())
    done = set()
    for name, local in merged:
        done.add(name)
        yield name, local, local_run(weights[name])[1]
    for name, value in weights.items():
        if name in done:
            continue
        value = by_rows(value)  # columns are no run of elements
        # What lies whole on every rank is written by the first one; an expert lies on one rank.
        if isinstance(value, DTensor) or EXPERT.search(name) or dist.get_rank() == 0:
            yield name, *local_run(value)


class _Ranks:
    """Has the ranks wait for each other through the world's store: a slow disk must not meet the deadline of a
    collective, at which NCCL ends the process.

    Args:
        name: of what they do; the same on all, and another one each time but for repetitions.
        limit_s: seconds for all of it.
    """

    _repeated = 0

    def __init__(self, name: str, limit_s: float) -> None:
        _Ranks._repeated += 1
        self._name, self._limit_s = f"{name}/{_Ranks._repeated}", limit_s
        self._until = time.monotonic() + limit_s
        self._store = world_store()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """No rank leaves the block before all have done what is in it. If one could not, all raise."""
        rank, key = dist.get_rank(), f"{self._name}/{what}"
        try:
            yield
        except Exception as error:
            self._store.set(f"{key}/{rank}", f"{type(error).__name__}: {error}")
            raise
        self._store.set(f"{key}/{rank}", "")
        self._await(key, what)
        self._store.set(f"{key}/seen/{rank}", "")
        if rank == 0:  # it serves the store, and may end when this is over
            self._await(f"{key}/seen", what)

    def _await(self, key: str, what: str) -> None:
        """Wait until every rank has set its key; raise what one of them says."""
        missing, pause = {other: f"{key}/{other}" for other in range(dist.get_world_size())}, SHORTEST_POLL_S
        while True:
            for other in [other for other, its in missing.items() if self._store.check([its])]:
                failure = self._store.get(missing.pop(other)).decode()  # waits: it is there
                if failure:
                    raise RuntimeError(f"trainer rank {other} could not {what}: {failure}")
            if not missing:
                return
            if time.monotonic() > self._until:
                raise RuntimeError(f"trainer ranks {list(missing)} did not {what} within {self._limit_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

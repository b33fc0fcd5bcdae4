"""Saving the model under training as a Hugging Face folder, written by all ranks at once, a few MiB at a time.

Every rank writes its elements directly to their places in the files (``model/weight_files.py``): nothing is gathered,
and no rank needs memory for more of the model. Tensor-parallel ranks that hold columns first exchange them for rows,
one tensor at a time. Everything is written to a partial folder, which is renamed when it is complete, so that a folder
of the final name always holds a whole model, whichever process is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from monarch_rl.checkpoint.folders import finish_replacing, partial_folder, replace_folder
from monarch_rl.model.config import EXTRA_LAYERS, ModelConfig, read_object
from monarch_rl.model.folder import copy_files
from monarch_rl.model.tensors import saved_dtype
from monarch_rl.model.tokens import GENERATION
from monarch_rl.model.tokens import end_tokens as end_tokens_of
from monarch_rl.model.weight_files import FILE_BYTES, WeightFile, dtype_of, index_of, naming, plan_files
from monarch_rl.runtime import device_work
from monarch_rl.runtime.deadlines import disk_limit_s
from monarch_rl.runtime.network import world_store
from monarch_rl.trainer.lora import merged_shards, save_lora
from monarch_rl.trainer.model import EXPERT, ShardedModel
from monarch_rl.trainer.shards import by_rows, local_span

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""safetensors' names of dtypes."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CHUNK_ELEMENTS = 4 << 20
"""Elements that are converted and written at a time: 16 MiB of float32."""
SHORTEST_POLL_S, LONGEST_POLL_S = 1e-3, 0.05
"""Limits of the growing pause between polls of the store."""


def save_model(
    model: ShardedModel,
    folder: Path,
    file_bytes: int = FILE_BYTES,
    dtype_name: str = "",
    end_tokens: Sequence[int] = (),
) -> None:
    """Write a Hugging Face folder: safetensors, and every other file of the source (:func:`copied_files`).

    LoRA is merged into the weights, and also written separately, in fp32, to the neighbouring folder
    ``<name>_adapter`` for peft, as an adapter of the model that training started from. All ranks call it together.

    Args:
        folder: a folder that all ranks can access. An existing one is replaced when the new one is complete.
        file_bytes: see :func:`~monarch_rl.model.weight_files.plan_files`.
        dtype_name: torch's name of the weights' dtype; empty: the dtype of the source folder.
        end_tokens: ids at which turns ended in training. Those that ``generation_config.json`` lacks are added to it,
            because transformers and servers stop at no others.

    Raises:
        RuntimeError: another rank could not write, or did not finish within :func:`disk_limit_s`; names the rank.
        OSError: this rank could not write; names the file. What was written stays in :func:`partial_folder`, which the
            next save to ``folder`` replaces.
    """
    dtype = TORCH_DTYPE_MAP.get(dtype_name or saved_dtype(model.hf_config), torch.float32)
    files = plan_files(model.hf_tensors(), DTYPE_NAMES[dtype], file_bytes)
    limit_s = disk_limit_s(sum(file.nbytes for file in files))
    with device_work.operation("a save of the model", limit_s=limit_s):
        _save(model, folder, files, dtype, end_tokens, _Ranks(f"saving/{folder}", limit_s))


def _save(
    model: ShardedModel,
    folder: Path,
    files: list[WeightFile],
    dtype: torch.dtype,
    end_tokens: Sequence[int],
    ranks: _Ranks,
) -> None:
    partial, first = partial_folder(folder), dist.get_rank() == 0
    with ranks.together("make the files"):
        if first:
            finish_replacing(folder)
            finish_replacing(lora_folder(folder))
            _make(partial, files, model.folder)
            _adapt_config(partial / "config.json", model.hf_config, dtype)
            _add_end_tokens(partial, end_tokens)
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
    """The adapter's folder of a model with LoRA that is saved to ``folder``."""
    return folder.with_name(f"{folder.name}_adapter")


def _make(partial: Path, files: list[WeightFile], source: Path) -> None:
    """Create the folder with everything but the weights, and the weight files at their full size."""
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    copy_files(source, partial)
    for name, text in index_of(files).items():
        (partial / name).write_text(text)
    for planned in files:
        with naming(partial / planned.name), (partial / planned.name).open("wb") as written:
            written.write(planned.header)
            written.truncate(planned.nbytes)


def _adapt_config(path: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    """Have a model's config state the dtype of the weights, and no layers that the folder does not have."""
    changes: dict[str, Any] = {}
    name = str(dtype).removeprefix("torch.")
    if config.dtype != name:
        changes = dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in config.raw] or ["torch_dtype"], name)
    if config.raw.get(EXTRA_LAYERS):  # they are not trained, so they would draft for another model
        changes[EXTRA_LAYERS] = 0
    if changes:
        path.write_text(json.dumps({**config.raw, **changes}, indent=2) + "\n")


def _add_end_tokens(folder: Path, end_tokens: Sequence[int]) -> None:
    """Add end tokens to ``generation_config.json``, or to those of ``config.json``, which apply without that file."""
    path = folder / GENERATION
    named = end_tokens_of(source := path if path.is_file() else folder / "config.json")
    if lacking := [token for token in end_tokens if token not in named]:
        values = read_object(source)
        if source != path:
            values = {key: values[key] for key in ("bos_token_id", "pad_token_id") if values.get(key) is not None}
        path.write_text(json.dumps(values | {"eos_token_id": [*named, *lacking]}, indent=2) + "\n")


def save_adapter(model: ShardedModel, folder: Path) -> None:
    """Write only LoRA, in fp32, for peft: see :func:`save_model`. All ranks call it together."""
    first = dist.get_rank() == 0
    if first:
        finish_replacing(folder)
    save_lora(partial_folder(folder), model.whole_lora(), model.lora, model.folder, write=first)
    if first:
        replace_folder(folder)


def _write(model: ShardedModel, partial: Path, files: list[WeightFile], dtype: torch.dtype) -> None:
    """Write this rank's elements. All ranks call it together.

    A rank that cannot write continues to exchange columns and to gather LoRA, because others wait for it, and raises at
    the end.
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
    """The weight files of a folder that is being written.

    Args:
        folder: the folder, with files at their full size.
        dtype: the model's dtype.
        open_files: stack that closes the files.
    """

    def __init__(self, folder: Path, files: list[WeightFile], dtype: torch.dtype, open_files: ExitStack) -> None:
        self._folder, self._dtype, self._open_files = folder, dtype, open_files
        self._places = {name: (file.name, place) for file in files for name, place in file.places.items()}
        self._descriptors: dict[str, int] = {}

    def write(self, name: str, run: torch.Tensor, start: int) -> OSError | None:
        """Write ``run`` to tensor ``name``, from its element ``start`` on; returns the error, if any."""
        file, place = self._places[name]
        dtype = _DTYPES[dtype_of(name, DTYPE_NAMES[self._dtype])]
        try:
            with naming(self._folder / file):
                _write_run(self._descriptor(file), place + start * dtype.itemsize, run, dtype)
        except OSError as error:
            return error
        return None

    def flush(self) -> OSError | None:
        """Flush the files to disk; returns the error, if any."""
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
    """Spans that this rank writes: tensor name, elements, and row-major index of the first element in the whole tensor.
    All ranks iterate together."""
    weights = model.hf_state()
    lora = model.lora_state()
    merged = merged_shards(weights, lora, model.lora.scaling) if lora else iter(())
    done = set()
    for name, local in merged:
        done.add(name)
        yield name, local, local_span(weights[name])[1]
    for name, value in weights.items():
        if name in done:
            continue
        value = by_rows(value)  # columns are not a span of elements
        # Tensors that are whole on every rank are written by rank 0; an expert is on one rank only.
        if isinstance(value, DTensor) or EXPERT.search(name) or dist.get_rank() == 0:
            yield name, *local_span(value)


class _Ranks:
    """Barriers through the world's store. A collective would not do: on a slow disk it would exceed its deadline, at
    which NCCL ends the process.

    Args:
        name: name of the operation, the same on all ranks. It may be repeated.
        limit_s: seconds for the whole operation.
    """

    _repeated = 0

    def __init__(self, name: str, limit_s: float) -> None:
        _Ranks._repeated += 1
        self._name, self._limit_s = f"{name}/{_Ranks._repeated}", limit_s
        self._until = time.monotonic() + limit_s
        self._store = world_store()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that no rank leaves before all have finished it. If one fails, all raise."""
        rank, key = dist.get_rank(), f"{self._name}/{what}"
        try:
            yield
        except Exception as error:
            self._store.set(f"{key}/{rank}", f"{type(error).__name__}: {error}")
            raise
        self._store.set(f"{key}/{rank}", "")
        self._await(key, what)
        self._store.set(f"{key}/seen/{rank}", "")
        if rank == 0:  # it hosts the store, and may exit after this
            self._await(f"{key}/seen", what)

    def _await(self, key: str, what: str) -> None:
        """Wait until every rank has set its key. Raises RuntimeError if one reports a failure, or at the deadline."""
        missing, pause = {other: f"{key}/{other}" for other in range(dist.get_world_size())}, SHORTEST_POLL_S
        while True:
            for other in [other for other, its_key in missing.items() if self._store.check([its_key])]:
                failure = self._store.get(missing.pop(other)).decode()  # waits: the key is set
                if failure:
                    raise RuntimeError(f"trainer rank {other} could not {what}: {failure}")
            if not missing:
                return
            if time.monotonic() > self._until:
                raise RuntimeError(f"trainer ranks {list(missing)} did not {what} within {self._limit_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

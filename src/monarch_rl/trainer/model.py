"""Loading a Hugging Face folder into a sharded torchtitan model, and accessing its tensors by Hugging Face names."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from monarch_rl.model.config import read_config
from monarch_rl.trainer.compiling import prepare_to_compile
from monarch_rl.trainer.families import FAMILIES, TitanFamily
from monarch_rl.trainer.lora import add_lora, add_lora_names, initialise_lora, remove_untargeted_lora
from monarch_rl.trainer.model_config import model_config, parallelism_config
from monarch_rl.trainer.platform import force_sum_reduction
from monarch_rl.trainer.settings import TrainerSettings, check_experts, check_tensor_parallel
from monarch_rl.trainer.shards import NamedShape, not_finite_part

_LORA = re.compile(r"[._]lora_[ab](\.weight)?$")
"""Matches the module's names of LoRA's parameters, of projections and of stacked experts. No model folder has them."""
HEAD = "lm_head.weight"
"""Name of the head's weight in both torchtitan and Hugging Face."""
EXPERT = re.compile(r"\.experts\.\d+\.")
"""Matches Hugging Face's names of experts' tensors."""


class ShardedModel:
    """A torchtitan model with the weights of a Hugging Face folder, sharded by FSDP2 over all ranks. A single rank that
    computes in float32 has plain tensors instead.

    With LoRA (``settings.lora``) these weights are frozen, and only LoRA is trained.

    Needs an initialised torch.distributed world. Every method is called by all ranks together.

    Args:
        values: replace the folder's LM head by a new head with one output (``ValueHead``).
    """

    def __init__(
        self, folder: Path, settings: TrainerSettings, dims: ParallelDims, device: torch.device, values: bool = False
    ) -> None:
        self.folder = folder
        self.hf_config = read_config(folder)
        self.lora = settings.lora
        check_experts(self.hf_config, settings)
        check_tensor_parallel(self.hf_config, settings.tp)
        family = FAMILIES[self.hf_config.architecture]
        config = model_config(
            self.hf_config,
            logprob_chunk=settings.logprob_chunk,
            longest=settings.tokens_per_microbatch,
            half_on_gpu=settings.in_half_on_gpu(device.type == "cuda"),
            values=values,
        )
        if self.lora.rank:
            config = add_lora(config, self.lora)
        self.module = _build(config, family, settings, dims, device)
        self._state_dict_adapter: StateDictAdapter = family.state_dict_adapter(config, None)
        if self.lora.rank:
            add_lora_names(self._state_dict_adapter)
        self._load({HEAD} if values else set())
        initialise_lora(self.lora_state(), self.lora_tensors(), self.lora.seed)

    def _load(self, own: set[str]) -> None:
        """Load the folder's weights, except parameters in ``own``, which the folder does not have."""
        state = {name: value for name, value in self.hf_state().items() if name not in own}
        dcp.load(state, storage_reader=self._state_dict_adapter.get_hf_storage_reader(str(self.folder)))
        _check_finite(state, self.folder)
        result = self.module.load_state_dict(self._state_dict_adapter.from_hf(state), strict=False)
        missing = [key for key in result.missing_keys if not _LORA.search(key) and key not in own]
        if missing or result.unexpected_keys:
            raise ValueError(
                f"{self.folder}: the weights do not match config.json: missing {missing}, "
                f"unexpected {result.unexpected_keys}"
            )

    def hf_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the weights without LoRA, by Hugging Face name. The storage stays the same across
        steps."""
        return self._state_dict_adapter.to_hf(self._parameters(lora=False))

    def hf_tensors(self) -> list[NamedShape]:
        """Names and shapes of all weights without LoRA, the same on all ranks.

        Not all of them are in each rank's :meth:`hf_state`: experts are whole tensors on one rank if there are at least
        as many experts as ranks.
        """
        return self._named_shapes(self._parameters(lora=False))

    def trained_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of trained parameters and buffers, by the module's names; with LoRA, LoRA's parameters
        only. The storage stays the same across steps."""
        return self._parameters(lora=self.lora.rank > 0)

    def lora_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of LoRA by peft's names; empty without LoRA. The storage stays the same across steps."""
        return self._state_dict_adapter.to_hf(self._parameters(lora=True))

    def lora_tensors(self) -> list[NamedShape]:
        """Names and shapes of all tensors of LoRA, the same on all ranks; see :meth:`hf_tensors` for experts."""
        return self._named_shapes(self._parameters(lora=True))

    def whole_lora(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of LoRA by peft's names, gathered one parameter at a time (all experts of a layer at once). All
        ranks iterate together."""
        for key, value in self._parameters(lora=True).items():
            names = [name for name, _ in self._named_shapes({key: value})]
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield from zip(names, whole if EXPERT.search(names[0]) else [whole], strict=True)

    def _parameters(self, *, lora: bool) -> dict[str, torch.Tensor]:
        """LoRA's parameters, or all others, by the module's names."""
        return {key: value for key, value in self.module.state_dict().items() if bool(_LORA.search(key)) == lora}

    def _named_shapes(self, state: dict[str, torch.Tensor]) -> list[NamedShape]:
        """Names and shapes of the Hugging Face tensors in ``state`` (by the module's names), one tensor per expert."""
        tensors: list[NamedShape] = []
        for key, value in state.items():
            names = list(self._state_dict_adapter.to_hf({key: value}))
            if names and EXPERT.search(names[0]):
                experts = range(value.shape[0])
                tensors += [(EXPERT.sub(f".experts.{e}.", names[0]), tuple(value.shape[1:])) for e in experts]
            elif names:
                tensors.append((names[0], tuple(value.shape)))
        return tensors


def _check_finite(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Refuse weights that hold NaN or infinity, which every later version would inherit.

    Raises:
        ValueError: names the tensor, and the first such place in this rank's shard.
    """
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.numel() and not all(bound.isfinite() for bound in torch.aminmax(local)):
            raise ValueError(
                f"{folder}: {name} {not_finite_part(value)}: it cannot be trained. Copy or download the weights again, "
                "or use an earlier checkpoint"
            )


@contextmanager
def _without_torchtitans_trainer() -> Iterator[None]:
    """Within the block, ``torchtitan.trainer.Trainer.Config`` is a class that has no instances.

    ``update_from_config`` imports it only to ask whether the config is one. The import also loads pandas, ``datasets``
    and TensorBoard, which takes more than a CPU-second in every rank.
    """
    name = "torchtitan.trainer"
    if name in sys.modules:
        yield
        return
    module: Any = types.ModuleType(name)
    module.Trainer = types.SimpleNamespace(Config=type("Config", (), {}))
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


def _build(
    config: Decoder.Config, family: TitanFamily, settings: TrainerSettings, dims: ParallelDims, device: torch.device
) -> Decoder:
    """Build the sharded model on ``device``, without loading its weights. Adds the sharding to ``config``."""
    with _without_torchtitans_trainer():
        config.update_from_config(config=types.SimpleNamespace(parallelism=parallelism_config(settings)))
    with torch.device("meta"):
        module = config.build()
        if settings.lora.rank:
            remove_untargeted_lora(module, settings.lora)
    checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    recomputed, dtype = checkpointing[settings.activation_checkpoint], settings.computes_in(device.type == "cuda")
    if settings.compile:
        prepare_to_compile()
    if settings.ranks == 1 and dtype == "float32" and not settings.compile:
        # Nothing to shard and nothing to cast. FSDP2 would still copy all parameters and gradients of each block
        # through collectives of one rank (python benchmarks/trainer_profile.py).
        if recomputed is not None:
            recomputed.build(dump_folder="").apply(module)
    else:
        module = family.parallelize(
            module,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=dtype),
            parallelism=parallelism_config(settings),
            compile_config=CompileConfig(enable=settings.compile, components=["model"]),
            ac_config=recomputed,
            dump_folder="",
        )
    force_sum_reduction(module)
    module.to_empty(device=device)
    with torch.no_grad():
        module.init_states()
    return module

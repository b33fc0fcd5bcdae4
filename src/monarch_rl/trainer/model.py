"""From a Hugging Face folder to a sharded torchtitan model, and back."""

from __future__ import annotations

import re
import shutil
import types
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import Embedding, RMSNorm
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from monarch_rl.model.folder import ARCHITECTURES, TEXT_FILES, read_config, rope_parameters, saved_dtype, sparse_layers
from monarch_rl.model.lora import tensor_names
from monarch_rl.trainer.lora import (
    adapt_config,
    draw_adapters,
    drop_adapters,
    merge,
    merged,
    name_adapters,
    save_adapter,
)
from monarch_rl.trainer.mla import deepseek_layers
from monarch_rl.trainer.modules import HalfRotaryEmbedding, LogprobHead, PackedAttention
from monarch_rl.trainer.moe import moe_config
from monarch_rl.trainer.platform import force_sum_reduction
from monarch_rl.trainer.settings import TrainerSettings, check_experts

SPMD_BACKEND = "partial_dtensor"
"""torchtitan's default backend fails in ``fully_shard`` with torch 2.13; this one runs with 2.13 and 2.14."""

_ADAPTER = re.compile(r"[._]lora_[ab](\.weight)?$")
"""The module's names of adapters, which no model folder holds: of projections, and of stacked experts."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In Hugging Face's name of an expert's tensor."""
_LOADED = {"weight": skip_param_init}
"""Weights come from the folder: nothing is drawn at random."""


class LlamaAdapter(Llama3StateDictAdapter):
    """torchtitan's Llama names, without its permutation: see :class:`HalfRotaryEmbedding`."""

    def _permute(self, w: torch.Tensor, *_shape: int) -> torch.Tensor:
        return w

    def _reverse_permute(self, w: torch.Tensor, *_shape: int) -> torch.Tensor:
        return w

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        super()._validate_hf_rope_config(HalfRotaryEmbedding.Config)


def parallelism_config(settings: TrainerSettings) -> ParallelismConfig:
    """FSDP2 over all ranks; experts over ``expert_parallel`` of them, and FSDP2 over those that hold the same ones."""
    return ParallelismConfig(spmd_backend=SPMD_BACKEND, expert_parallel_degree=settings.expert_parallel)


def model_config(hf: dict[str, Any], *, logprob_chunk: int, on_gpu: bool) -> Decoder.Config:
    """torchtitan's model config for a Hugging Face ``config.json``.

    Raises:
        ValueError: the model has a feature that is not supported.
    """
    kind = ARCHITECTURES[hf["architectures"][0]]
    _check_features(hf)
    dim, vocabulary = hf["hidden_size"], hf["vocab_size"]
    model = {"qwen3": Qwen3Model, "llama": Llama3Model, "deepseek_v3": DeepSeekV3Model}[kind]
    return model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=_norm(hf, dim),
        enable_weight_tying=bool(hf.get("tie_word_embeddings", False)),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=dim,
            param_init=_LOADED,
        ),
        lm_head=LogprobHead.Config(in_features=dim, out_features=vocabulary, param_init=_LOADED, chunk=logprob_chunk),
        layers=deepseek_layers(hf, on_gpu=on_gpu) if kind == "deepseek_v3" else _gqa_layers(hf, kind, on_gpu=on_gpu),
    )


def _norm(hf: dict[str, Any], size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init=_LOADED)


def _gqa_layers(hf: dict[str, Any], kind: str, *, on_gpu: bool) -> list[TransformerBlock.Config]:
    """Blocks with grouped-query attention: Qwen's and Llama's."""
    dim, heads = hf["hidden_size"], hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or dim // heads
    block = {"qwen3": Qwen3TransformerBlock, "llama": Llama3TransformerBlock}[kind]
    return [
        block.Config(
            attention_norm=_norm(hf, dim),
            ffn_norm=_norm(hf, dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=heads,
                n_kv_heads=hf["num_key_value_heads"],
                head_dim=head_dim,
                wqkv_param_init=_LOADED,
                wo_param_init=_LOADED,
                inner_attention=VarlenAttention.Config() if on_gpu else PackedAttention.Config(),
                rope=_rope(hf, head_dim),
                # Unfused, every Hugging Face tensor is a parameter of its own, sharded by rows.
                fuse_qkv=False,
                qk_norm=_norm(hf, head_dim) if kind == "qwen3" else None,
            ),
            **_feed_forward(hf, layer),
        )
        for layer in range(hf["num_hidden_layers"])
    ]


def _feed_forward(hf: dict[str, Any], layer: int) -> dict[str, Any]:
    if layer in sparse_layers(hf):
        return {"moe": moe_config(hf)}
    dim, width = hf["hidden_size"], hf["intermediate_size"]
    dense = make_ffn_config(dim=dim, hidden_dim=width, w1_param_init=_LOADED, w2w3_param_init=_LOADED)
    return {"feed_forward": dense}


def _check_features(hf: dict[str, Any]) -> None:
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise ValueError("models with biases in attention or MLP projections are not supported")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported, only 'silu'")
    if hf.get("use_sliding_window"):
        raise ValueError("sliding-window attention is not supported: use_sliding_window must be false")
    if hf.get("quantization_config"):
        raise ValueError("quantised weights are not supported: convert the folder to bfloat16 or float32 first")
    deepseek = ARCHITECTURES[hf["architectures"][0]] == "deepseek_v3"
    if hf.get("shared_expert_intermediate_size") or (hf.get("n_shared_experts") and not deepseek):
        raise ValueError("shared experts are not supported: Qwen3MoeForCausalLM has none")
    if sparse_layers(hf) and hf.get("output_router_logits"):
        raise ValueError(
            "output_router_logits asks for Hugging Face's auxiliary load-balancing loss in training, which is not "
            "supported: set it to false in config.json, as Qwen's models do"
        )


def _rope(hf: dict[str, Any], head_dim: int) -> HalfRotaryEmbedding.Config:
    rope = rope_parameters(hf)
    kind, theta = rope["rope_type"], rope["rope_theta"]
    config = HalfRotaryEmbedding.Config(dim=head_dim, max_seq_len=hf["max_position_embeddings"], theta=theta)
    if kind == "llama3":
        config.scaling = "llama"
        config.scaling_factor = rope["factor"]
        config.low_freq_factor = rope["low_freq_factor"]
        config.high_freq_factor = rope["high_freq_factor"]
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    elif kind != "default":
        raise ValueError(f"rotary scaling {kind!r} is not supported, only 'default' and 'llama3'")
    return config


class ShardedModel:
    """A torchtitan model with the weights of a Hugging Face folder, sharded by FSDP2 over all ranks.

    With adapters (``settings.lora``) those weights are frozen and the adapters alone are trained and published; with
    adapters on experts, the weights that have some are, merged (:attr:`sends_merged`).

    Needs an initialised torch.distributed world; every method is called by all ranks together.
    """

    def __init__(self, folder: Path, settings: TrainerSettings, dims: ParallelDims, device: torch.device) -> None:
        self.folder = folder
        self.hf_config = read_config(folder)
        self.lora = settings.lora
        check_experts(self.hf_config, settings)
        self.sends_merged = self.lora.sends_merged(bool(sparse_layers(self.hf_config)))
        """A version is the adapted weights with their adapters merged into them, and nothing else."""
        on_gpu = device.type == "cuda"
        config = model_config(self.hf_config, logprob_chunk=settings.logprob_chunk, on_gpu=on_gpu)
        if self.lora.rank:
            config = adapt_config(config, self.lora)
        parallelism = parallelism_config(settings)
        config.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
        compute_dtype = settings.compute_dtype
        if compute_dtype == "auto":
            compute_dtype = "bfloat16" if on_gpu else "float32"
        with torch.device("meta"):
            module = config.build()
            if self.lora.rank:
                drop_adapters(module, self.lora)
        kind = ARCHITECTURES[self.hf_config["architectures"][0]]
        parallelize = {
            "qwen3": parallelize_qwen3,
            "llama": parallelize_llama,
            "deepseek_v3": parallelize_deepseekv3,
        }[kind]
        checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
        self.module: Decoder = parallelize(
            module,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=compute_dtype),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=checkpointing[settings.activation_checkpoint],
            dump_folder="",
        )
        force_sum_reduction(self.module)
        self.module.to_empty(device=device)
        with torch.no_grad():
            self.module.init_states()
        adapters = {
            "qwen3": Qwen3StateDictAdapter,
            "llama": LlamaAdapter,
            "deepseek_v3": DeepSeekV3StateDictAdapter,
        }
        self._adapter: StateDictAdapter = adapters[kind](config, None)
        if self.lora.rank:
            name_adapters(self._adapter)
        self._load()
        draw_adapters(self.adapter_state(), self.adapter_tensors(), self.lora.seed)

    def _load(self) -> None:
        state = self.hf_state()
        dcp.load(state, storage_reader=self._adapter.get_hf_storage_reader(str(self.folder)))
        result = self.module.load_state_dict(self._adapter.from_hf(state), strict=False)
        missing = [key for key in result.missing_keys if not _ADAPTER.search(key)]
        if missing or result.unexpected_keys:
            raise ValueError(
                f"{self.folder}: the weights do not match config.json: missing {missing}, "
                f"unexpected {result.unexpected_keys}"
            )

    def hf_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the model's own weights under their Hugging Face names, without adapters.

        The storage stays the same across steps.
        """
        return self._adapter.to_hf(self._own_state(adapters=False))

    def hf_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """All of the model's own tensors as ``(name, shape)``, the same on all ranks.

        Not all of them are in :meth:`hf_state` of each rank: experts are whole tensors of one rank where there are
        enough for all ranks.
        """
        return self._tensors(self._own_state(adapters=False))

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the adapters under peft's names; empty without. The storage stays the same."""
        return self._adapter.to_hf(self._own_state(adapters=True))

    def adapter_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """All adapters as ``(name, shape)``, the same on all ranks; of experts, like :meth:`hf_tensors`."""
        return self._tensors(self._own_state(adapters=True))

    def _own_state(self, *, adapters: bool) -> dict[str, torch.Tensor]:
        """The adapters or all else, under the module's own names."""
        return {key: value for key, value in self.module.state_dict().items() if bool(_ADAPTER.search(key)) == adapters}

    def _tensors(self, state: dict[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...]]]:
        tensors: list[tuple[str, tuple[int, ...]]] = []
        for key, value in state.items():
            names = list(self._adapter.to_hf({key: value}))
            if names and _EXPERT.search(names[0]):
                experts = range(value.shape[0])
                tensors += [(_EXPERT.sub(f".experts.{e}.", names[0]), tuple(value.shape[1:])) for e in experts]
            elif names:
                tensors.append((names[0], tuple(value.shape)))
        return tensors

    def _whole_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathered one by one, those of all experts of a layer together; all ranks go through it together."""
        for key, value in self._own_state(adapters=True).items():
            assert isinstance(value, DTensor)
            names = [name for name, _ in self._tensors({key: value})]
            whole = value.full_tensor()
            yield from zip(names, whole if _EXPERT.search(names[0]) else [whole], strict=True)

    def published_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of what a version consists of: the adapters alone if there are some, else all weights.

        Where it :attr:`sends_merged`, the weights that have adapters, as they are without: see :meth:`merged`.
        """
        if self.sends_merged:
            return self._adapted[0]
        if self.lora.rank:
            return self.adapter_state()
        # A buffer, the bias of a router, lies whole on every rank: the first one sends it.
        first = dist.get_rank() == 0
        return {
            name: value
            for name, value in self.hf_state().items()
            if first or isinstance(value, DTensor) or _EXPERT.search(name)
        }

    def published_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """What a version consists of as ``(name, shape)``, the same on all ranks."""
        adapters = self.adapter_tensors()
        if self.sends_merged:
            names = {name for name, _ in adapters}
            return [(name, shape) for name, shape in self.hf_tensors() if tensor_names(name)[0] in names]
        return adapters if self.lora.rank else self.hf_tensors()

    @cached_property
    def _adapted(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The weights that have adapters, and those: looked up once, as the storage stays the same."""
        adapters = self.adapter_state()
        return {name: w for name, w in self.hf_state().items() if tensor_names(name)[0] in adapters}, adapters

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards of the weights that have adapters, with these added, fp32. All ranks go through it
        together."""
        return merged(*self._adapted, self.lora.scaling)

    def save(self, folder: Path, rank: int) -> None:
        """Write a Hugging Face folder: safetensors in the dtype of the source folder, config and tokenizer.

        Adapters are merged into its weights, and also written by themselves to the folder ``<name>_adapter`` beside
        it, in fp32, for peft; they belong to the model that training started from.

        Args:
            folder: made by rank 0; must be seen by all ranks.
        """
        dtype = TORCH_DTYPE_MAP.get(saved_dtype(self.hf_config), torch.float32)
        weights = self.hf_state()
        if self.lora.rank:
            weights = merge(weights, self.adapter_state(), self.lora.scaling)
            save_adapter(adapter_folder(folder), self._whole_adapters(), self.lora, self.folder, write=rank == 0)
        state = {name: value.to(dtype) for name, value in weights.items()}
        writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True, enable_consolidation=True)
        dcp.save(state, storage_writer=writer)
        if rank == 0:
            shutil.rmtree(folder / "sharded", ignore_errors=True)
            sources = {path for pattern in TEXT_FILES for path in self.folder.glob(pattern)}
            for source in sources:
                if not source.name.endswith(".safetensors.index.json"):  # of the old weights
                    shutil.copy(source, folder / source.name)


def adapter_folder(folder: Path) -> Path:
    """Where the adapter of a model that is saved to ``folder`` is written."""
    return folder.with_name(f"{folder.name}_adapter")

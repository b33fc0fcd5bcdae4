"""From a Hugging Face folder to a sharded torchtitan model, and back."""

from __future__ import annotations

import shutil
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import Embedding, RMSNorm
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from monarch_rl.model_folder import ARCHITECTURES, TEXT_FILES, read_config, saved_dtype
from monarch_rl.trainer.modules import HalfRotaryEmbedding, LogprobHead, PackedAttention
from monarch_rl.trainer.platform import force_sum_reduction
from monarch_rl.trainer.settings import TrainerSettings

SPMD_BACKEND = "partial_dtensor"
"""torchtitan's default backend fails in ``fully_shard`` with torch 2.13; this one runs with 2.13 and 2.14."""

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


def model_config(hf: dict[str, Any], *, logprob_chunk: int, on_gpu: bool) -> Decoder.Config:
    """torchtitan's model config for a Hugging Face ``config.json``.

    Raises:
        ValueError: the model has a feature that is not supported (biases, an unknown rotary scaling).
    """
    kind = ARCHITECTURES[hf["architectures"][0]]
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise ValueError("models with biases in attention or MLP projections are not supported")
    dim, heads = hf["hidden_size"], hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or dim // heads

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init=_LOADED)

    block, model = {
        "qwen3": (Qwen3TransformerBlock, Qwen3Model),
        "llama": (Llama3TransformerBlock, Llama3Model),
    }[kind]
    layers = [
        block.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
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
                qk_norm=norm(head_dim) if kind == "qwen3" else None,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init=_LOADED, w2w3_param_init=_LOADED
            ),
        )
        for _ in range(hf["num_hidden_layers"])
    ]
    tied = bool(hf.get("tie_word_embeddings", False))
    vocabulary = hf["vocab_size"]
    return model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=dim,
            param_init=_LOADED,
        ),
        lm_head=LogprobHead.Config(in_features=dim, out_features=vocabulary, param_init=_LOADED, chunk=logprob_chunk),
        layers=layers,
    )


def _rope(hf: dict[str, Any], head_dim: int) -> HalfRotaryEmbedding.Config:
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling.
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
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

    Needs an initialised torch.distributed world; every method is called by all ranks together.
    """

    def __init__(self, folder: Path, settings: TrainerSettings, dims: ParallelDims, device: torch.device) -> None:
        self.folder = folder
        self.hf_config = read_config(folder)
        on_gpu = device.type == "cuda"
        config = model_config(self.hf_config, logprob_chunk=settings.logprob_chunk, on_gpu=on_gpu)
        parallelism = ParallelismConfig(spmd_backend=SPMD_BACKEND)
        config.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
        compute_dtype = settings.compute_dtype
        if compute_dtype == "auto":
            compute_dtype = "bfloat16" if on_gpu else "float32"
        with torch.device("meta"):
            module = config.build()
        kind = ARCHITECTURES[self.hf_config["architectures"][0]]
        parallelize = {"qwen3": parallelize_qwen3, "llama": parallelize_llama}[kind]
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
        adapters = {"qwen3": Qwen3StateDictAdapter, "llama": LlamaAdapter}
        self._adapter: StateDictAdapter = adapters[kind](config, None)
        self._load()

    def _load(self) -> None:
        state = self.hf_state()
        dcp.load(state, storage_reader=self._adapter.get_hf_storage_reader(str(self.folder)))
        result = self.module.load_state_dict(self._adapter.from_hf(state), strict=False)
        if result.missing_keys or result.unexpected_keys:
            raise ValueError(
                f"{self.folder}: the weights do not match config.json: missing {result.missing_keys}, "
                f"unexpected {result.unexpected_keys}"
            )

    def hf_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards under their Hugging Face names; the storage stays the same across steps."""
        return self._adapter.to_hf(self.module.state_dict())

    def save(self, folder: Path, rank: int) -> None:
        """Write a Hugging Face folder: safetensors in the dtype of the source folder, config and tokenizer.

        Args:
            folder: made by rank 0; must be seen by all ranks.
        """
        dtype = TORCH_DTYPE_MAP.get(saved_dtype(self.hf_config), torch.float32)
        state = {name: value.to(dtype) for name, value in self.hf_state().items()}
        writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True, enable_consolidation=True)
        dcp.save(state, storage_writer=writer)
        if rank == 0:
            shutil.rmtree(folder / "sharded", ignore_errors=True)
            sources = {path for pattern in TEXT_FILES for path in self.folder.glob(pattern)}
            for source in sources:
                if not source.name.endswith(".safetensors.index.json"):  # of the old weights
                    shutil.copy(source, folder / source.name)


def local_run(value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of a tensor, and the index (row-major) of its first element in the whole.

    Raises:
        ValueError: the part is not a contiguous run of elements (sharded along another dimension than 0).
    """
    if not isinstance(value, DTensor):
        return value, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = value.to_local()
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape[1:]) != tuple(value.shape[1:]):
        raise ValueError(f"a tensor sharded as {value.placements} cannot be sent: only shards of whole rows can")
    row = value.numel() // value.shape[0]
    return local, (offset[0] if offset else 0) * row

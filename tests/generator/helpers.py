"""Tiny models with random weights, an event loop on a thread, and helpers for weights and processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from monarch_rl.episode.sampling import Completion, Sampling, SamplingMasks
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.engine import Engine
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings, lora_config, lora_names
from monarch_rl.weights.area import Area
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import Manifest, make_manifest
from tests.generator.transformers_server import TransformersServer
from tests.patience import join, result_of, until

TRANSFORMERS = TransformersServer()

T = TypeVar("T")
Weights = dict[str, torch.Tensor]

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 500, 64, 4, 2, 16, 2
"""500 is no multiple of 64, to which SGLang pads the vocabulary."""
EXPERTS, EXPERT_WIDTH = 4, 48
"""48 is no multiple of 32, to which SGLang pads each rank's share of an expert on a CPU."""
TIED = ("qwen2", "llama")
"""Kinds of models whose embeddings are the LM head as well."""
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 24, 32, 16, 8, 20
"""Ranks and head widths of a DeepSeek's latent attention."""
LOGPROB_BOUND = 2e-5
"""Engine against transformers or trainer, float32, natural log, at temperature 1. The largest difference observed on
these models: against transformers 5.3e-6 for one version, 1.0e-5 for 600 tokens that three versions sampled in turn;
against the trainer, in 120 batches each, 7.6e-6 dense, 8.1e-6 for the Qwen3-MoE, 1.0e-5 for the DeepSeek-V3."""
PART_TOKENS = 16
"""Engines send sampled tokens in parts of this many."""
RUN_S = 500.0
"""Time limit of what :class:`LoopThread` runs, and of an engine's start: below the limit of a test."""


def make_model(folder: Path, kind: str) -> Path:
    """Write a Hugging Face folder by hand: no transformers in the tests' own process. ``kind``: qwen3, moe, qwen2,
    llama, mistral, deepseek."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": kind in TIED,
    }
    architecture, model_type = {
        "qwen3": ("Qwen3ForCausalLM", "qwen3"),
        "moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
        "qwen2": ("Qwen2ForCausalLM", "qwen2"),
        "llama": ("LlamaForCausalLM", "llama"),
        "mistral": ("MistralForCausalLM", "mistral"),
        "deepseek": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    }[kind]
    config |= {"architectures": [architecture], "model_type": model_type}
    if kind == "moe":
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_WIDTH,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if kind == "qwen2":  # as Qwen writes it: biases and the head width are implicit
        config |= {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 1}
        del config["head_dim"], config["attention_bias"]
    if kind == "mistral":
        config |= {"sliding_window": None}
    if kind == "deepseek":
        config |= {
            "num_key_value_heads": HEADS,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": HIDDEN,  # SGLang would pad a shared expert, which a plain copy does not handle
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": Q_RANK,
            "kv_lora_rank": KV_RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 256,
            },
        }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(kind), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_weights(kind: str, seed: int = 0) -> Weights:
    """Every Hugging Face tensor of a tiny model, float32."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        if kind == "deepseek":
            shapes |= _deepseek_block(block, dense=layer == 0)
            continue
        shapes |= {
            block + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            block + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            block + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            block + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            block + "input_layernorm.weight": (HIDDEN,),
            block + "post_attention_layernorm.weight": (HIDDEN,),
        }
        if kind in ("qwen3", "moe"):
            shapes |= {block + f"self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        if kind == "qwen2":
            heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
            shapes |= {block + f"self_attn.{x}_proj.bias": (count * HEAD_DIM,) for x, count in heads.items()}
        prefixes, width = [block + "mlp."], 2 * HIDDEN
        if kind == "moe":
            shapes[block + "mlp.gate.weight"] = (EXPERTS, HIDDEN)
            prefixes, width = [block + f"mlp.experts.{e}." for e in range(EXPERTS)], EXPERT_WIDTH
        for prefix in prefixes:
            shapes |= {prefix + f"{x}_proj.weight": (width, HIDDEN) for x in ("gate", "up")}
            shapes[prefix + "down_proj.weight"] = (HIDDEN, width)
    shapes["model.norm.weight"] = (HIDDEN,)
    if kind not in TIED:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if "norm" in name
        else 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def _deepseek_block(block: str, dense: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        block + "self_attn.q_a_proj.weight": (Q_RANK, HIDDEN),
        block + "self_attn.q_a_layernorm.weight": (Q_RANK,),
        block + "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        block + "self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, HIDDEN),
        block + "self_attn.kv_a_layernorm.weight": (KV_RANK,),
        block + "self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
        block + "self_attn.o_proj.weight": (HIDDEN, HEADS * VALUE),
        block + "input_layernorm.weight": (HIDDEN,),
        block + "post_attention_layernorm.weight": (HIDDEN,),
    }
    widths = {block + "mlp.": 2 * HIDDEN}
    if not dense:
        shapes[block + "mlp.gate.weight"] = (EXPERTS, HIDDEN)
        shapes[block + "mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        names = ["shared_experts", *(f"experts.{e}" for e in range(EXPERTS))]
        widths = {block + f"mlp.{name}.": HIDDEN for name in names}
    for prefix, width in widths.items():
        shapes |= {prefix + f"{x}_proj.weight": (width, HIDDEN) for x in ("gate", "up")}
        shapes[prefix + "down_proj.weight"] = (HIDDEN, width)
    return shapes


def manifest_of(weights: Weights) -> Manifest:
    """One sender owns everything."""
    return make_manifest(
        [(name, tuple(x.shape), x.dtype) for name, x in weights.items()],
        [[(name, 0, x.numel()) for name, x in weights.items()]],
    )


def checksums_of(weights: Weights) -> dict[str, int]:
    return {name: int(tensor_checksum(x)) for name, x in weights.items()}


def expected_of(weights: Weights) -> np.ndarray:
    """Checksums in the order of :func:`manifest_of`, as the trainer sends them."""
    return np.array(list(checksums_of(weights).values()), np.int64)


def in_order(manifest: Manifest, checksums: dict[str, int]) -> np.ndarray:
    """Checksums by name, in the manifest's order; checksums of tensors that it does not have come last."""
    named = [checksums[name] for name in manifest.names if name in checksums]
    return np.array(named + [x for name, x in checksums.items() if name not in manifest.names], np.int64)


class Staging:
    """The areas that receive versions in turn, filled as a transport fills them."""

    def __init__(self, weights: Weights, areas: int = 2) -> None:
        self.manifest = manifest_of(weights)
        self._areas = [Area(self.manifest.nbytes) for _ in range(areas)]

    def area(self, version: int) -> Area:
        return self._areas[version % len(self._areas)]

    def fill(self, version: int, weights: Weights) -> None:
        for spec in self.manifest.tensors:
            spec.view(self.area(version).buffer).copy_(weights[spec.name])

    def byte(self, version: int, name: str, offset: int) -> torch.Tensor:
        """One byte of a tensor in the area, for corruption."""
        spec = self.manifest.tensors[self.manifest.names.index(name)]
        return self.area(version).buffer[spec.offset + offset : spec.offset + offset + 1]

    async def commit(self, engine: Engine, version: int, expected: dict[str, int]) -> CommitReport:
        return await engine.commit(version, self.manifest, self.area(version).handle, in_order(self.manifest, expected))


def watched(engine: Engine, field: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that SGLang reports for its requests in one field, message by message from now on."""
    values: list[Any] = []
    manager = engine._sglang.manager
    handle = manager._handle_batch_output

    async def watch(output: Any) -> None:
        values.extend(getattr(output, field) or [])
        await handle(output)

    monkeypatch.setattr(manager, "_handle_batch_output", watch)
    return values


def check_masks(completion: Completion, prompt: list[int], reading: Reading, at_most: int) -> None:
    """Each token was sampled from its mask, by the distribution restricted to it; the mask has the most likely ids."""
    sampling_masks = completion.sampling_masks
    assert sampling_masks is not None and len(sampling_masks.counts) == len(completion.token_ids)
    assert sampling_masks.counts.min() >= 1 and sampling_masks.counts.max() <= at_most
    rows = reading.logprobs[len(prompt) - 1 :]
    for place, token in enumerate(completion.token_ids):
        ids, row = sampling_masks[place : place + 1].ids, rows[place]
        expected = row[token] - np.logaddexp.reduce(row[ids])
        assert abs(completion.logprobs[place] - expected) < LOGPROB_BOUND
        left_out = np.delete(row, ids)
        assert row[ids].min() > left_out.max() - LOGPROB_BOUND


@dataclass(frozen=True)
class RunningRequests:
    """Requests in progress, and the parts of each that have arrived."""

    engine: Engine
    tasks: list[asyncio.Task[Completion]]
    parts: list[list[Completion]]

    @classmethod
    def start(cls, engine: Engine, prompts: Sequence[list[int]], *samplings: Sampling) -> RunningRequests:
        """With one ``Sampling`` for all, or one per prompt."""
        parts: list[list[Completion]] = [[] for _ in prompts]
        wanted = samplings if len(samplings) > 1 else samplings * len(prompts)
        asked = zip(prompts, wanted, parts, strict=True)
        return cls(engine, [asyncio.ensure_future(engine.generate(p, s, of.append)) for p, s, of in asked], parts)

    async def wait_for_tokens(self) -> None:
        """Wait until ``2 * PART_TOKENS`` more tokens of each request have arrived, the last by the served version."""
        version, goals = self.engine.requests.version, [count + 2 * PART_TOKENS for count in self.counts()]

        def all_arrived() -> bool:
            short = [
                task
                for task, parts, count, goal in zip(self.tasks, self.parts, self.counts(), goals, strict=True)
                if count < goal or parts[-1].policy_versions[-1] != version
            ]
            for task in short:
                assert not task.done(), f"a request ended too early: {task.result()}"
            return not short

        await until(all_arrived, f"{2 * PART_TOKENS} more tokens of each request, now by version {version}", RUN_S)

    async def completions(self) -> list[Completion]:
        return await asyncio.gather(*self.tasks)

    def counts(self) -> list[int]:
        """Tokens of each request that have arrived."""
        return [sum(len(part.token_ids) for part in parts) for parts in self.parts]


async def check_nothing_is_served(engine: Engine, *running: RunningRequests) -> None:
    """After a failed commit: new requests wait for the next one, and the scheduler samples nothing though it runs.

    Its answers prove that it runs. Each takes one turn of its loop, in which it would sample a token of each sequence.

    Args:
        engine: has a request that was submitted after the commit.
        running: requests that ran before.
    """
    state = engine._sglang.manager.get_internal_state
    await state()  # by then all earlier tokens have arrived
    before = [requests.counts() for requests in running]
    for _ in range(2 * PART_TOKENS):
        await state()
    assert [requests.counts() for requests in running] == before
    assert [wait.what for wait in engine.requests.waits()][-1:] == ["a commit to end"], engine.requests.waits()


def check_parts(parts: list[Completion], completion: Completion) -> None:
    """Parts are a prefix of the completion: never all of it, and all but its last ``PART_TOKENS``."""
    count = sum(len(part.token_ids) for part in parts)
    whole = len(completion.token_ids)
    assert 0 < whole - count <= PART_TOKENS, f"{count} of {whole} tokens came in parts"
    assert all(part.expert_routes is None for part in parts)
    if completion.sampling_masks is not None:
        part_sets = SamplingMasks.join([part.sampling_masks for part in parts if part.sampling_masks is not None])
        assert part_sets.counts.tolist() == completion.sampling_masks.counts[:count].tolist()
        assert part_sets.ids.tolist() == completion.sampling_masks[:count].ids.tolist()
    for name in ("token_ids", "logprobs", "policy_versions"):
        arrays = [getattr(part, name) for part in parts]
        assert all(array.dtype == getattr(completion, name).dtype and len(array) for array in arrays)
        assert np.concatenate([*arrays, []]).tolist() == getattr(completion, name)[:count].tolist(), name


def next_version(weights: Weights, seed: int) -> Weights:
    """The weights after an imaginary step: every element a little different."""
    generator = torch.Generator().manual_seed(seed)
    return {name: x * (1 + 0.05 * torch.randn(x.shape, generator=generator)) for name, x in weights.items()}


def weights_in(folder: Path) -> Weights:
    """Every tensor of a Hugging Face folder."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def adapter(folder: Path, lora: LoraSettings, seed: int) -> Weights:
    """An adapter as training might leave it: neither A nor B is zero."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, weight in weights_in(folder).items():
        if name.split(".")[-2] in lora.targets and name.endswith(".weight"):
            name_a, name_b = lora_names(name)
            made[name_a] = torch.randn(lora.rank, weight.shape[1], generator=generator) * 0.2
            made[name_b] = torch.randn(weight.shape[0], lora.rank, generator=generator) * 0.05
    return made


def merged(folder: Path, lora: LoraSettings, tensors: Weights) -> Weights:
    """The folder's weights with an adapter merged into them."""
    weights = weights_in(folder)
    for name in weights:
        name_a, name_b = lora_names(name)
        if name_a in tensors:
            weights[name] = weights[name] + lora.alpha / lora.rank * tensors[name_b] @ tensors[name_a]
    return weights


def reference_logprobs(
    folder: Path,
    completions: Sequence[tuple[list[int], Completion]],
    weights: Weights | None = None,
    lora: LoraSettings = FULL_TRAINING,
) -> list[np.ndarray]:
    """transformers' float32 log-probs of sampled tokens, from a process that never imported SGLang.

    ``weights`` replace the weights in ``folder`` if given; with ``lora`` they are an adapter, for peft.
    """
    folders = [folder]
    if weights is not None and not lora.rank:
        folders = [_with_weights(folder, weights)]
    elif weights is not None:
        adapted = Path(tempfile.mkdtemp(dir=folder.parent))
        save_file(weights, adapted / "adapter_model.safetensors", metadata={"format": "pt"})
        (adapted / "adapter_config.json").write_text(json.dumps(lora_config(lora, str(folder))))
        folders.append(adapted)
    asked = [[prompt, completion.token_ids.tolist()] for prompt, completion in completions]
    return _ask_transformers("transformers_logprobs", folders, asked)


def reference_in_turn(
    folder: Path, completions: Sequence[tuple[list[int], Completion]], weights: dict[int, Weights]
) -> list[np.ndarray]:
    """transformers' float32 log-probs of sampled tokens, each under the version that it carries, over the keys and
    values left by the versions before it.

    Args:
        weights: by version; they replace the weights in ``folder``.
    """
    versions = sorted(weights)
    asked = [
        [prompt, completion.token_ids.tolist(), [versions.index(v) for v in completion.policy_versions.tolist()]]
        for prompt, completion in completions
    ]
    folders = [_with_weights(folder, weights[version]) for version in versions]
    return _ask_transformers("transformers_in_turn", folders, asked)


@dataclass(frozen=True)
class Reading:
    """How a sequence of n tokens is read."""

    expert_routes: np.ndarray
    """int [n, layers, k], sorted: the experts of each token."""
    logprobs: np.ndarray
    """float32 [n, vocabulary]: of the next token after each."""


def reference_reading(
    folder: Path, sequences: Sequence[tuple[list[int], list[int]]], weights: dict[int, Weights]
) -> list[Reading]:
    """How transformers reads ``(ids, the version that reads each)``, each over the past left by the versions before it.

    Args:
        weights: by version; they replace the weights in ``folder``.
    """
    versions = sorted(weights)
    asked = [[ids, [versions.index(version) for version in readers]] for ids, readers in sequences]
    folders = [_with_weights(folder, weights[version]) for version in versions]
    answers = TRANSFORMERS.ask("transformers_reading", folders, asked)
    return [Reading(np.asarray(expert_routes), np.asarray(logprobs, np.float32)) for expert_routes, logprobs in answers]


def _with_weights(folder: Path, weights: Weights) -> Path:
    changed = Path(tempfile.mkdtemp(dir=folder.parent)) / folder.name
    shutil.copytree(folder, changed)
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    return changed


def _ask_transformers(module: str, folders: list[Path], asked: list[list[list[int]]]) -> list[np.ndarray]:
    return [np.asarray(row, np.float32) for row in TRANSFORMERS.ask(module, folders, asked)]


class LoopThread:
    """An event loop on a thread of its own: engines belong to one loop, and signal handlers stay untouched there."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, awaitable: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(awaited(), self.loop)
        try:
            return result_of(future, "a coroutine on the loop of the engines", RUN_S)
        finally:
            future.cancel()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        join(self._thread)


def gone(pid: int) -> bool:
    """Ended; a zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

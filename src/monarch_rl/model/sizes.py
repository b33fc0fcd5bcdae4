"""Sizes of a model's components, in elements, from which memory plans are computed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import LoraSettings
from monarch_rl.model.tensors import expected_tensors, projections

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class CacheSizes:
    """Size of one token in the KV cache of an engine without tensor parallelism."""

    layers: int
    width: int
    """Elements per layer."""
    kv_heads: int
    """Number of heads over which the cache can be sharded; 1 for latent attention, whose cache cannot be."""


@dataclass(frozen=True)
class ModelSizes:
    """Elements of a model's components, and widths of its activations."""

    elements: int
    """Elements of all tensors."""
    lm_head: int
    """Elements of a separate LM head; 0 if it is tied to the embeddings."""
    vocabulary: int
    width: int
    layers: int
    sparse: int
    """Layers with experts."""
    largest_layer: int
    """Elements of the largest layer, without its experts."""
    layer_experts: int
    """Elements of all routed experts of a sparse layer; 0 for a dense model."""
    query: int
    """Width of a token's queries over all heads, and of its attention output."""
    key: int
    """Width of a token's keys over all heads, and of its values."""
    head: int
    """Width of the part of a head that rotary embeddings rotate."""
    cache: CacheSizes
    normed_heads: bool
    hidden: int
    """Width of a dense MLP."""
    expert_hidden: int
    """Width of all experts that process a token together: routed and shared ones; 0 for a dense model."""
    chosen: int
    """Experts that the router chooses per token."""

    @property
    def embeddings(self) -> int:
        """Elements of the embeddings. A separate LM head has as many."""
        return self.vocabulary * self.width


def cache_sizes(config: ModelConfig) -> CacheSizes:
    """The size of a token in the KV cache."""
    layers = config.num_hidden_layers
    if config.architecture.latent_attention:
        return CacheSizes(layers, config.kv_lora_rank + config.qk_rope_head_dim, 1)
    return CacheSizes(layers, 2 * config.num_key_value_heads * config.head_dim, config.num_key_value_heads)


def sizes_of(config: ModelConfig) -> ModelSizes:
    """The sizes of a model."""
    layers, experts = [0] * config.num_hidden_layers, [0] * config.num_hidden_layers
    elements, tensors = 0, expected_tensors(config)
    for name, shape in tensors.items():
        count = math.prod(shape)
        elements += count
        if found := _LAYER.match(name):
            (experts if ".mlp.experts." in name else layers)[int(found[1])] += count
    heads, cache = config.num_attention_heads, cache_sizes(config)
    if config.architecture.latent_attention:
        head = config.qk_rope_head_dim
        query = key = heads * (config.qk_nope_head_dim + head)
    else:
        head = config.head_dim
        query, key = heads * head, cache.width // 2
    chosen = config.num_experts_per_tok if config.num_experts else 0
    return ModelSizes(
        elements=elements,
        lm_head=math.prod(tensors.get("lm_head.weight", (0,))),
        vocabulary=config.vocab_size,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        sparse=len(config.sparse_layers),
        largest_layer=max(layers),
        layer_experts=max(experts),
        query=query,
        key=key,
        head=head,
        cache=cache,
        normed_heads=config.architecture.normed_heads,
        hidden=config.intermediate_size,
        expert_hidden=config.moe_intermediate_size * (chosen + config.n_shared_experts),
        chosen=chosen,
    )


@dataclass(frozen=True)
class TrainedModel:
    """Sizes of a model, of its trained adapters, and of a policy version as it is sent."""

    sizes: ModelSizes
    lora: int
    """Elements of all adapters, A and B; 0 is full training."""
    served_lora: int
    """Elements of the adapters that engines serve as adapters; 0 if adapters are sent merged into the weights."""
    version: int
    """Elements that trainer ranks send per version: all weights, the adapters, or the weights that adapters are merged
    into."""
    positions: int
    """Maximum tokens per sequence."""


def trained_model(config: ModelConfig, lora: LoraSettings) -> TrainedModel:
    """The sizes of a model that is trained with these LoRA settings."""
    sizes, tensors = sizes_of(config), expected_tensors(config)
    shapes = [shape for target in lora.targets for _, shape in projections(tensors, target)] if lora.rank else []
    adapters = sum(lora.rank * sum(shape) for shape in shapes)
    merged = lora.sends_merged(sizes.sparse > 0)
    version = sum(map(math.prod, shapes)) if merged else adapters or sizes.elements
    return TrainedModel(sizes, adapters, 0 if merged else adapters, version, config.max_position_embeddings)

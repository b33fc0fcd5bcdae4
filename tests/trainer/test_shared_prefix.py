"""Shared prefixes are computed once, with the log-probs and gradients of separate episodes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.episode.episode import Episode  # noqa: E402
from monarch_rl.model.config import parse_config  # noqa: E402
from monarch_rl.model.lora import LoraSettings  # noqa: E402
from monarch_rl.trainer import attention  # noqa: E402
from monarch_rl.trainer.attention import PackedAttention, PrefixVarlenAttention  # noqa: E402
from monarch_rl.trainer.attention_layout import AttentionLayout  # noqa: E402
from monarch_rl.trainer.batch import (  # noqa: E402
    MicroBatch,
    layout_rows,  # noqa: E402
    pack,
)
from monarch_rl.trainer.lora import add_lora  # noqa: E402
from monarch_rl.trainer.model_config import model_config  # noqa: E402
from monarch_rl.trainer.moe import ReplayRouter  # noqa: E402
from monarch_rl.trainer.token_logprobs import SampledTokens, TokenLogprobs  # noqa: E402
from tests.episode.trees import EXPERTS, VOCABULARY, K, distinct_inputs, tree_of, trees  # noqa: E402
from tests.trainer.reference import MOE, QWEN3  # noqa: E402
from tests.trainer.test_mla import CONFIG as DEEPSEEK  # noqa: E402

CPU = torch.device("cpu")
LOGPROB_BOUND = 1e-5
"""Nats, fp32. The largest difference observed in 320 micro-batches of these models was 1e-6."""
GRADIENT_BOUND = 2e-5
"""Share of the norm of each parameter's gradient, or of a hundredth of the whole gradient's if that is more (for a
query with one key only rounding errors remain), fp32; the largest observed was 2e-6."""
HEADS = 4
ATTENTION = {"mha": (4, 8, 8), "gqa": (2, 8, 8), "mla": (4, 12, 8)}
"""Key-value heads, elements of a query and a key, elements of a value. ``mla``: with keys of every head, and rotary
elements in them, but not in values."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "head_dim": 12,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": QWEN3 | SHAPE | {"architectures": ["Qwen3ForCausalLM"]},
    "biased": QWEN3 | SHAPE | {"architectures": ["Qwen2ForCausalLM"]},
    "moe": MOE | SHAPE | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "num_experts_per_tok": K},
    "mla": DEEPSEEK | {"vocab_size": VOCABULARY, "n_routed_experts": 2 * EXPERTS, "num_experts_per_tok": K},
}
"""``mla`` has a dense layer and two of experts; the others have as many layers as trees have routes."""


@cache
def model(kind: str, lora: bool = False) -> Any:
    """A model with random weights, not sharded."""
    config: Any = model_config(parse_config(CONFIGS[kind]), logprob_chunk=16, longest=512, half_on_gpu=False)
    if lora:
        config = add_lora(config, LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "down_proj")))
    torch.manual_seed(0)
    with torch.device("meta"):
        module = config.build()
    module.to_empty(device="cpu")
    with torch.no_grad():
        module.init_states()
        for name, parameter in module.named_parameters():
            norm = parameter.ndim == 1 and "norm" in name
            parameter.copy_(torch.randn_like(parameter) * 0.05 + norm)
    return module.train()


def computed(
    module: Any, batch: MicroBatch, replay: bool, others: bool = True
) -> tuple[TokenLogprobs, dict[str, torch.Tensor]]:
    """Log-probs of the sampled tokens and, with ``others``, of two more ids at each position, which depend on its
    episode; and the gradients of a weighted sum of them."""
    module.zero_grad()
    routers = [part for part in module.modules() if isinstance(part, ReplayRouter)]
    for layer, router in enumerate(routers):
        router.routes_BLK = None if batch.expert_routes is None else batch.expert_routes[:, :, layer]
        router.replay = replay
    sampled = SampledTokens(
        batch.sampled_after, batch.targets, temperature=0.8, sampling_masks=batch.sampling_masks, rows=batch.rows
    )
    if others and batch.sampling_masks is None:  # each episode's own, also for shared tokens
        ids = batch.targets if batch.rows is None else batch.targets[batch.rows]
        sampled = sampled.with_others([(ids + batch.sequences) % 30, (ids + 1) % 30])
    module.lm_head.sampled_tokens = sampled
    output = module(batch.token_ids, positions=batch.positions, attention_masks=batch.attention)
    each = output.logprobs if output.others is None else output.logprobs + output.others.sum(-1)
    (each * batch.advantages * batch.weights).sum().backward()
    grads = {name: part.grad.clone() for name, part in module.named_parameters() if part.grad is not None}
    return output.each(torch.Tensor.detach), grads


def check_equal_to_separate(module: Any, groups: list[list[Episode]], replay: bool = True) -> None:
    """In one micro-batch, with other advantages and weights for each episode."""
    episodes = [episode for group in groups for episode in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    advantages = torch.linspace(-1.5, 2.0, len(episodes))
    weights = torch.linspace(0.3, 0.7, len(episodes))
    shared = pack(episodes, advantages, weights, 0, CPU, numbers)
    separate = pack(episodes, advantages, weights, 0, CPU)
    assert separate.rows is None and separate.num_tokens == shared.separate_tokens == separate.separate_tokens
    assert shared.num_tokens == sum(map(distinct_inputs, groups))
    for name in ("behaviour_logprobs", "advantages", "weights", "lags", "sequences"):
        assert torch.equal(getattr(shared, name), getattr(separate, name))
    if not len(shared.targets):
        return
    ours, our_grads = computed(module, shared, replay)
    theirs, their_grads = computed(module, separate, replay)
    for our_values, their_values in zip(ours, theirs, strict=True):
        if our_values is None or their_values is None:
            assert our_values is their_values is None and shared.sampling_masks is not None
            continue
        assert our_values.shape == their_values.shape
        assert (our_values - their_values).abs().max() < LOGPROB_BOUND
    assert our_grads.keys() == their_grads.keys() and our_grads
    total = torch.stack([value.norm() for value in their_grads.values()]).norm()
    for name, expected in their_grads.items():
        bound = GRADIENT_BOUND * max(expected.norm(), 1e-2 * total)
        assert (our_grads[name] - expected).norm() < bound, name


def groups_of(**parts: Any) -> st.SearchStrategy[list[list[Episode]]]:
    return st.lists(trees(**parts), min_size=1, max_size=3)


@settings(max_examples=60)
@given(groups=st.booleans().flatmap(lambda masks: groups_of(kept=masks)))
def test_dense(groups: list[list[Episode]]) -> None:
    check_equal_to_separate(model("dense"), groups)


@settings(max_examples=20)
@given(groups=groups_of(kept=True))
def test_biases(groups: list[list[Episode]]) -> None:
    check_equal_to_separate(model("biased"), groups)


@settings(max_examples=30)
@given(groups=groups_of(kept=True))
def test_lora(groups: list[list[Episode]]) -> None:
    module = model("dense", lora=True)
    assert {name.split(".")[-2] for name, p in module.named_parameters() if p.requires_grad} == {"lora_a", "lora_b"}
    check_equal_to_separate(module, groups)


@settings(max_examples=30)
@given(groups=groups_of(routes=True, kept=True))
def test_experts_replayed(groups: list[list[Episode]]) -> None:
    check_equal_to_separate(model("moe"), groups)


@settings(max_examples=30)
@given(groups=groups_of(routes=True, experts=2 * EXPERTS))
def test_latent_attention(groups: list[list[Episode]]) -> None:
    check_equal_to_separate(model("mla"), groups)


@pytest.mark.parametrize("kind", ["moe", "mla"])
def test_experts_chosen_by_the_trainer(kind: str) -> None:
    """Fixed trees: where two scores are nearly equal, the last bits would decide."""
    check_equal_to_separate(model(kind), [tree_of([20, 18, 18, 9], [(0, 0), (0, 12), (1, 15), (0, 5)], 3)])


def test_a_long_shared_prefix_and_long_answers() -> None:
    """Long enough that segments are computed in several calls, causal ones and masked ones."""
    groups = [
        tree_of([170, 180, 165, 172, 290], [(0, 0), (0, 150), (0, 160), (2, 164), (0, 40)], 5),
        tree_of([40, 120], [(0, 0), (0, 38)], 6),
    ]
    episodes, numbers = [episode for group in groups for episode in group], [0] * 5 + [1] * 2
    calls = pack(episodes, torch.zeros(7), torch.zeros(7), 0, CPU, numbers).attention.padded_calls.calls
    assert {call.mask is None for call in calls} == {True, False} and len(calls) > 2
    check_equal_to_separate(model("dense"), groups)


def test_a_shared_token_has_one_row_and_the_last_one_a_target_for_each_branch() -> None:
    """Two episodes fork after 5 tokens, of which 2 were sampled; the third equals the first."""
    episodes = tree_of([8, 8, 8], [(0, 0), (0, 5), (0, 8)], 0)
    for episode in episodes:
        episode.turns[0].trainable[:] = np.arange(8) >= 3
    batch = pack(episodes, torch.zeros(3), torch.zeros(3), 0, CPU, [0, 0, 0])
    assert batch.num_tokens == 7 + 2 and len(batch.behaviour_logprobs) == 15
    assert len(batch.targets) == 2 + 3 + 3
    assert (torch.bincount(batch.sampled_after) == 2).sum() == 1
    assert batch.rows is not None
    by_episode = [batch.rows[batch.sequences == episode].tolist() for episode in range(3)]
    assert by_episode[0] == by_episode[2] and by_episode[0][:2] == by_episode[1][:2]


@settings(max_examples=60)
@given(groups=groups_of(), seed=st.integers(0, 100))
def test_columns_stay_aligned_with_their_tokens(groups: list[list[Episode]], seed: int) -> None:
    """A token that several episodes share has a value per episode, like its behaviour log-prob."""
    rng = np.random.default_rng(seed)
    episodes = [episode for group in groups for episode in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    for episode in episodes:
        episode.fill_column("value", rng.normal(size=episode.num_tokens))
        episode.fill_column("copy", episode.logprobs)
    batch = pack(episodes, torch.zeros(len(episodes)), torch.zeros(len(episodes)), 0, CPU, numbers, ["value", "copy"])
    assert batch.columns.keys() == {"value", "copy"} and batch.num_sequences == len(episodes)
    assert torch.equal(batch.columns["copy"], batch.behaviour_logprobs)
    targets = batch.targets if batch.rows is None else batch.targets[batch.rows]
    for number, episode in enumerate(episodes):
        own, sampled = batch.sequences == number, episode.trainable
        assert batch.columns["value"].dtype == torch.float32
        assert batch.columns["value"][own].tolist() == episode.column("value")[sampled].tolist()
        assert targets[own].tolist() == episode.token_ids[sampled].tolist()


def test_a_rank_without_episodes_has_all_columns() -> None:
    batch = pack([], torch.zeros(0), torch.zeros(0), 0, CPU, [], ["value"])
    assert batch.columns["value"].shape == batch.behaviour_logprobs.shape == (0,)


def test_an_episode_without_a_column_that_others_have_is_refused() -> None:
    episodes = tree_of([8, 8], [(0, 0), (0, 5)], 0)
    episodes[0].fill_column("value", np.zeros(8))
    with pytest.raises(ValueError, match=r"\bvalue\b.*\[\]"):
        pack(episodes, torch.zeros(2), torch.zeros(2), 0, CPU, [0, 0], ["value"])


def test_a_token_sampled_from_different_masks_has_a_row_for_each() -> None:
    """The log-prob depends on the mask, the model's hidden state does not."""
    episodes = tree_of([6, 6], [(0, 0), (0, 6)], 1, kept=True)
    turn = episodes[1].turns[0]
    (place, *_) = np.flatnonzero(turn.trainable)
    assert turn.sampling_masks is not None
    before = int(turn.sampling_masks.counts[:place].sum())
    (other,) = [i for i in range(before, before + 9) if turn.sampling_masks.ids[i] != turn.token_ids[place]][:1]
    turn.sampling_masks.ids = turn.sampling_masks.ids.copy()
    turn.sampling_masks.ids[other] = VOCABULARY - 1
    batch = pack(episodes, torch.zeros(2), torch.zeros(2), 0, CPU, [0, 0])
    sampled = int(turn.trainable.sum())
    assert batch.num_tokens == 5 and len(batch.targets) == sampled + 1
    check_equal_to_separate(model("dense"), [episodes])


# ---- the attention of both kinds of machine ------------------------------------------------------------------


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """By the definition, one query at a time: it attends to the inputs of its episode up to itself."""
    outputs = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    for segment in layout.segments:
        for n in range(len(segment.path) - segment.own, len(segment.path)):
            place, keys = segment.path[n], segment.path[: n + 1]
            for head in range(HEADS):
                kv = head * k.shape[1] // HEADS
                scores = (k[keys, kv] @ q[place, head]) * q.shape[-1] ** -0.5
                outputs[place, head] = scores.softmax(0) @ v[keys, kv]
    return outputs


def documented_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    num_splits: int | None,
) -> torch.Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` as documented, in fp32, with flash attention's causal mask for fewer
    queries than keys: aligned at the bottom right (its README, since version 2.1). FA3 supports narrower values."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert all(x.is_contiguous() and x.ndim == 3 for x in (query, key, value))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    # "When enabled, H_k and H_v must evenly divide H_q"; otherwise they must be equal.
    kv_heads = key.shape[1]
    assert query.shape[-1] == key.shape[-1]
    assert value.shape[-1] == key.shape[-1] or attention.current_flash_attention_impl() == "FA3"
    assert value.shape[1] == kv_heads and (kv_heads == HEADS or (enable_gqa and HEADS % kv_heads == 0))
    assert (window_size, scale) == ((-1, 0), query.shape[-1] ** -0.5) and num_splits in (1, None)
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key) if len(key) == len(value) else -1)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    parts = []
    bounds = zip(*(x.unfold(0, 2, 1).tolist() for x in (cu_seq_q, cu_seq_k)), strict=True)
    for (q_start, q_end), (k_start, k_end) in bounds:
        q, k, v = query[q_start:q_end].float(), key[k_start:k_end].float(), value[k_start:k_end].float()
        k, v = (x.repeat_interleave(HEADS // kv_heads, 1) for x in (k, v))
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qnh,knh->nqk", q, k) * scale
        parts.append(torch.einsum("nqk,knh->qnh", scores.masked_fill(~seen, float("-inf")).softmax(-1), v))
    return torch.cat(parts).to(torch.bfloat16)


def attention_of(module: Any, inputs: list[torch.Tensor], layout: AttentionLayout) -> list[torch.Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    kwargs = {"attention_masks": layout, "scale": q.shape[-1] ** -0.5, "enable_gqa": k.shape[1] < HEADS}
    output = module(q[None], k[None], v[None], **kwargs)[0]
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return [output.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


@pytest.mark.parametrize("kind", ATTENTION)
@settings(max_examples=20)
@given(groups=groups_of(most=5, longest=12), seed=st.integers(0, 100))
def test_both_kinds_of_attention_equal_the_definition(kind: str, groups: list[list[Episode]], seed: int) -> None:
    kv_heads, width, value_width = ATTENTION[kind]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    rows = layout_rows([episode for group in groups for episode in group], numbers)
    layout = AttentionLayout(rows.segments(), CPU)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, width), (kv_heads, width), (kv_heads, value_width)]
    q, k, v = inputs = [torch.randn(rows.width, *shape, generator=generator) for shape in shapes]
    expected = dense_attention(q, k, v, layout)
    on_cpu = attention_of(PackedAttention(PackedAttention.Config()), inputs, layout)
    assert len(on_cpu) == 4
    assert (on_cpu[0] - expected).abs().max() < 1e-6
    for kernel in (None, "FA3"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "varlen_attn", documented_varlen)
            patch.setattr(attention, "current_flash_attention_impl", lambda kernel=kernel: kernel)
            on_gpu = attention_of(PrefixVarlenAttention(PrefixVarlenAttention.Config()), inputs, layout)
        for ours, theirs in zip(on_cpu, on_gpu, strict=True):
            assert (ours - theirs).norm() < 0.02 * max(ours.norm(), 1.0)  # the kernel's inputs are bfloat16

"""Part ``trainer``: attention, the LM head, updates including a mixture of experts, and float32 compared with bfloat16,
on one rank. Does not need SGLang."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from monarch_rl.trainer.platform import prepare, tensor_float32

prepare()

from monarch_rl.episode.episode import Episode, Group  # noqa: E402
from monarch_rl.runtime.network import held_port  # noqa: E402
from monarch_rl.trainer.attention import PackedAttention, PrefixVarlenAttention  # noqa: E402
from monarch_rl.trainer.attention_layout import AttentionLayout  # noqa: E402
from monarch_rl.trainer.batch import (  # noqa: E402
    MicroBatch,
    layout_rows,  # noqa: E402
    pack,
)
from monarch_rl.trainer.objective import supervised  # noqa: E402
from monarch_rl.trainer.policy import Policy  # noqa: E402
from monarch_rl.trainer.settings import TrainerSettings  # noqa: E402
from tools.gpu_parts.common import (  # noqa: E402
    GIB,
    Bench,
    Findings,
    expert_shape,
    make_groups,
    make_model,
    model_shape,
)

STEPS = 5
LR = 1e-4
ATTENTION_BOUND = {"bfloat16": 2e-2, "float32": 1e-5}
"""Maximum norm of the error, relative to the reference's norm. bfloat16 has a relative rounding error of 2e-3, and
probabilities and their gradients are rounded, too; float32 has 6e-8, and a sum of a thousand products about 1e-6. A
wrong key causes a far larger error."""
HEAD_BOUND = 1e-3
"""Maximum error relative to the largest logit. The products are identical, so only the order of sums matters. bfloat16
rounding would be 4e-3."""
SHARED_BOUND = {"bfloat16": 0.2, "float32": 1e-4}
"""Maximum p99 difference in nats of log-probs with and without sharing prefixes (the limits of tools/parity.py)."""


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    with tensor_float32(False):  # so that the reference is exact, whatever the environment sets
        attention(bench, found)
    head(bench, found)
    folder = make_model(bench, model_shape(bench))
    with held_port() as port:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        updates(bench, found, folder)
        experts(bench, found)
        if bench.on_gpu:
            compiled(bench, found, folder)
            precisions(bench, found, folder)


# -- attention --------------------------------------------------------------------------------------------------------


def attention(bench: Bench, found: Findings) -> None:
    """Compare both attention implementations with masked reference attention, on a row with shared prefixes."""
    groups = make_groups(500, groups=3, size=4, prompt=200, answer=150)
    episodes = [episode for group in groups for episode in group.episodes]
    layout = layout_rows(episodes, [group.group_id for group in groups for _ in group.episodes])
    segments = AttentionLayout(layout.segments(), bench.device)
    mask = torch.zeros(layout.width, layout.width, dtype=torch.bool)
    for segment in segments.segments:
        for place in range(segment.own):
            mask[segment.start + place, segment.path[: len(segment.path) - segment.own + place + 1]] = True
    torch.manual_seed(0)
    heads, kv_heads, size = 16, 8, 128
    shapes = [(layout.width, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    # Values that bfloat16 represents exactly, so that both dtypes have the same inputs.
    q, k, v, gradient = (torch.randn(s, device=bench.device).bfloat16().float() for s in shapes)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(~mask.to(bench.device), float("-inf"))
        return (scores.softmax(-1) @ v)[0].transpose(0, 1)

    def ours(module: Any) -> Callable[..., torch.Tensor]:
        def compute(*qkv: torch.Tensor) -> torch.Tensor:
            result = module(*(x.unsqueeze(0) for x in qkv), attention_masks=segments, enable_gqa=True)
            assert isinstance(result, torch.Tensor)
            return result[0]

        return compute

    expected = _with_gradients(plain, [q, k, v], gradient)
    modules: dict[str, Any] = {"float32": PackedAttention(PackedAttention.Config())}
    if bench.on_gpu:
        modules["bfloat16"] = PrefixVarlenAttention(PrefixVarlenAttention.Config())
        found.note(attention_kernels=torch.nn.attention.current_flash_attention_impl() or "torch's FlashAttention 2")
    for dtype, module in modules.items():
        inputs = [x.to(getattr(torch, dtype)) for x in (q, k, v)]
        computed = _with_gradients(ours(module), inputs, gradient.to(inputs[0].dtype))
        for name, value, reference in zip(("output", "q", "k", "v"), computed, expected, strict=True):
            error = float((value.float() - reference).norm() / reference.norm())
            found.note(**{f"attention_{dtype}_{name}": error})
            found.require(error < ATTENTION_BOUND[dtype], f"{name} of attention in {dtype} is off by {error:.2g}")


def _with_gradients(
    compute: Callable[..., torch.Tensor], inputs: list[torch.Tensor], gradient: torch.Tensor
) -> list[torch.Tensor]:
    """The output, followed by the gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = compute(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


# -- the LM head ------------------------------------------------------------------------------------------------------


def head(bench: Bench, found: Findings) -> None:
    """Compare the head's matrix product of bfloat16 values in float32, in TF32, and in bfloat16 with a float32
    result."""
    if not bench.on_gpu:
        return
    torch.manual_seed(0)
    hidden = torch.randn(1024, 1024, device=bench.device).bfloat16().float()
    weight = (torch.randn(151_936, 1024, device=bench.device) / 32).bfloat16().float()
    results, before = {}, torch.get_float32_matmul_precision()
    for precision, name in (("highest", "fp32"), ("high", "tf32")):
        torch.set_float32_matmul_precision(precision)
        found.note(**{f"head_{name}_ms": 1e3 * bench.seconds(lambda: F.linear(hidden, weight))})
        results[name] = F.linear(hidden, weight)
    torch.set_float32_matmul_precision(before)
    narrow = hidden.bfloat16(), weight.bfloat16().t()
    found.note(head_bf16_ms=1e3 * bench.seconds(lambda: torch.mm(*narrow, out_dtype=torch.float32)))
    results["bf16"] = torch.mm(*narrow, out_dtype=torch.float32)
    for name in ("tf32", "bf16"):
        error = float((results[name] - results["fp32"]).abs().max() / results["fp32"].abs().max())
        found.note(**{f"head_{name}_difference": error})
        found.require(error < HEAD_BOUND, f"a head in {name} changes logits by {error:.2g} of the largest")


# -- the policy -------------------------------------------------------------------------------------------------------


def updates(bench: Bench, found: Findings, folder: Path) -> None:
    """Require that repeated updates on one batch lower its loss, and that log-probs do not depend on prefix sharing."""
    settings = TrainerSettings(ranks=1, lr=LR, tokens_per_microbatch=8192 if bench.on_gpu else 512)
    policy = Policy(folder, settings, total_steps=STEPS)
    dtype = settings.computes_in(bench.on_gpu)
    caches = {x.data_ptr(): x.nbytes for name, x in policy.module.named_buffers() if name.endswith("rope.cache")}
    found.note(rotary_caches=len(caches), rotary_mib=sum(caches.values()) / 2**20)
    found.require(len(caches) == 1, f"there are {len(caches)} rotary caches instead of one")
    if bench.on_gpu:
        found.note(allocated_gib=torch.cuda.memory_allocated() / GIB)
    vocabulary = model_shape(bench)["vocab_size"]
    sizes = (
        dict(groups=8, size=8, prompt=256, answer=768) if bench.on_gpu else dict(groups=3, size=3, prompt=9, answer=9)
    )
    groups = make_groups(vocabulary, **sizes)
    apart(found, policy, groups, dtype)
    batches = batches_of(groups, policy.device)
    losses, seconds = repeated(bench, policy, batches)
    found.note(dtype=dtype, loss_first=losses[0], loss_last=losses[-1], step_ms=1e3 * seconds)
    found.note(computed_tokens_per_s=sum(batch.num_tokens for batch in batches) / seconds)
    found.note(tokens_per_s=sum(batch.separate_tokens for batch in batches) / seconds)
    if bench.on_gpu:
        found.note(peak_gib=torch.cuda.max_memory_allocated() / GIB)
    found.require(falls(losses), f"repeated updates on one batch did not lower its loss: {losses}")


def experts(bench: Bench, found: Findings) -> None:
    """Require that repeated updates of a mixture of experts on one batch lower its loss. Covers the products of each
    expert's rows, forward and backward, and the sum over a token's experts."""
    config = expert_shape(bench)
    settings = TrainerSettings(ranks=1, lr=LR, tokens_per_microbatch=4096 if bench.on_gpu else 512)
    policy = Policy(make_model(bench, config, "experts"), settings, total_steps=STEPS)
    sizes = dict(size=8, prompt=128, answer=256) if bench.on_gpu else dict(size=3, prompt=9, answer=9)
    groups = make_groups(config["vocab_size"], groups=2, **sizes)
    losses, seconds = repeated(bench, policy, batches_of(groups, policy.device))
    found.note(experts_loss_first=losses[0], experts_loss_last=losses[-1], experts_step_ms=1e3 * seconds)
    found.require(falls(losses), f"repeated updates on one batch did not lower its loss, with experts: {losses}")


def batches_of(groups: list[Group], device: torch.device) -> list[MicroBatch]:
    """One micro-batch per group; all trainable tokens have the same weight."""
    trainable = sum(episode.num_trainable for group in groups for episode in group.episodes)
    return [pack_groups([group], 1 / trainable, device) for group in groups]


def repeated(bench: Bench, policy: Policy, batches: list[MicroBatch]) -> tuple[list[float], float]:
    """The losses of repeated updates on the same batches, and the seconds of the fastest update."""
    losses: list[float] = []

    def step() -> None:
        losses.append(policy.update(batches, supervised)["loss"])

    return losses, bench.seconds(step, STEPS - 1)


def falls(losses: list[float]) -> bool:
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def apart(found: Findings, policy: Policy, groups: list[Group], dtype: str) -> None:
    """Compare the log-probs of a group whose prompt is computed once with those of its separate episodes."""
    episodes = groups[0].episodes
    with torch.no_grad():
        shared = policy.token_logprobs(pack_groups(groups[:1], 1.0, policy.device)).logprobs
        alone = torch.cat([policy.token_logprobs(pack_separate([e], 1.0, policy.device)).logprobs for e in episodes])
    difference = float((shared - alone).abs().quantile(0.99))
    found.note(shared_prefix_p99=difference)
    found.require(difference < SHARED_BOUND[dtype], f"sharing a prefix changes log-probs by {difference:.2g} nats")


def compiled(bench: Bench, found: Findings, folder: Path) -> None:
    """Repeat the updates of :func:`updates` with compiled blocks; records the times of the first and the fastest later
    one."""
    gc.collect()
    torch.cuda.empty_cache()
    settings = TrainerSettings(ranks=1, lr=LR, tokens_per_microbatch=8192, compile=True)
    policy = Policy(folder, settings, total_steps=STEPS)
    groups = make_groups(model_shape(bench)["vocab_size"], groups=8, size=8, prompt=256, answer=768)
    batches = batches_of(groups, policy.device)
    started = time.perf_counter()
    losses = [policy.update(batches, supervised)["loss"]]
    found.note(compiled_first_s=time.perf_counter() - started)
    later, seconds = repeated(bench, policy, batches)
    found.note(compiled_step_ms=1e3 * seconds, compiled_loss_first=losses[0], compiled_loss_last=later[-1])
    found.require(falls(losses + later), f"compiled updates on one batch did not lower its loss: {losses + later}")


def precisions(bench: Bench, found: Findings, folder: Path) -> None:
    """Compare log-probs in bfloat16 with those in float32, which also uses another attention implementation."""
    config, computed = model_shape(bench), {}
    groups = make_groups(config["vocab_size"], groups=1, size=4, prompt=128, answer=256)
    for dtype in ("float32", "bfloat16"):
        gc.collect()
        torch.cuda.empty_cache()
        policy = Policy(folder, TrainerSettings(ranks=1, compute_dtype=dtype), total_steps=1)  # type: ignore[arg-type]
        with torch.no_grad():
            computed[dtype] = policy.token_logprobs(pack_groups(groups, 1.0, policy.device)).logprobs
        del policy
    difference = (computed["float32"] - computed["bfloat16"]).abs()
    found.note(bf16_p99=float(difference.quantile(0.99)), bf16_mean=float(difference.mean()))
    found.require(
        float(difference.quantile(0.99)) < SHARED_BOUND["bfloat16"], "log-probs in bfloat16 and float32 differ too much"
    )


def pack_groups(groups: list[Group], weight: float, device: torch.device) -> MicroBatch:
    """Groups as one micro-batch, in which each trainable token has the weight ``weight``."""
    episodes = [episode for group in groups for episode in group.episodes]
    numbers = [group.group_id for group in groups for _ in group.episodes]
    return pack(episodes, torch.zeros(len(episodes)), torch.full((len(episodes),), weight), 0, device, numbers)


def pack_separate(episodes: list[Episode], weight: float, device: torch.device) -> MicroBatch:
    """Episodes as one micro-batch, without shared prefixes."""
    return pack(episodes, torch.zeros(len(episodes)), torch.full((len(episodes),), weight), 0, device)

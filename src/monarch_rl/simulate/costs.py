"""Latency models of a simulated run. All times are in seconds."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated

import tyro

from monarch_rl.errors import SettingsError

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Distribution:
    """A distribution of positive numbers: constant, lognormal, or empirical."""

    mean: float = 0.0
    """Mean before clipping to `maximum`."""
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0 is constant. Answer lengths have about 0.5 to 1.5."""
    maximum: float = math.inf
    """Larger values are clipped to this: the token limit of an answer, the deadline of a score."""
    group_share: float = 0.0
    """Share of the variance (of the logarithm, or of the rank) that the episodes of a group have in common; 0 if
    lengths do not depend on the prompt. The larger it is, the longer a group with long answers takes."""
    samples: Annotated[tuple[float, ...], tyro.conf.Suppress] = ()
    """Measured values to sample from instead of a lognormal (--from-run)."""

    def __post_init__(self) -> None:
        if self.mean < 0 or self.sigma < 0 or self.maximum <= 0:
            raise SettingsError(
                f"mean and sigma must not be negative, and maximum must be positive; got {self.mean}, {self.sigma}, "
                f"{self.maximum}"
            )
        if not 0 <= self.group_share <= 1:
            raise SettingsError(f"group-share must be in 0..1, got {self.group_share}")
        object.__setattr__(self, "samples", tuple(sorted(self.samples)))

    def draw(self, group: object, episode: object) -> float:
        """Sample the value of one episode: the same for the same names, in every process. Episode names must be
        unique."""
        if not self.samples and self.sigma == 0:
            return min(self.mean, self.maximum)
        z = math.sqrt(1 - self.group_share) * normal(episode)
        if self.group_share:
            z += math.sqrt(self.group_share) * normal("group", group)
        if self.samples:
            place = int(_NORMAL.cdf(z) * len(self.samples))
            return min(self.samples[min(place, len(self.samples) - 1)], self.maximum)
        return min(self.mean * math.exp(self.sigma * z - self.sigma**2 / 2), self.maximum)

    @property
    def average(self) -> float:
        """Mean of the values: of the samples, or else ``mean`` (clipped to `maximum`, ignoring the clipping of
        values)."""
        return sum(self.samples) / len(self.samples) if self.samples else min(self.mean, self.maximum)


def uniform(*names: object) -> float:
    """A pseudorandom number in (0, 1), determined by the names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=7).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**56


def normal(*names: object) -> float:
    """A pseudorandom standard normal number, determined by the names."""
    return _NORMAL.inv_cdf(uniform(*names))


@dataclass(frozen=True)
class DecodeCosts:
    """A generator replica with continuous batching."""

    step_s: float = 0.02
    """Seconds of a decoding step, independent of the number of sequences: reading the weights, the scheduler. Measure
    with `python -m sglang.bench_one_batch`, or use --from-run."""
    sequence_s: float = 0.0001
    """Seconds that each running sequence adds to a step."""
    prefill_token_s: float = 0.0
    """Seconds per prompt token, during which decoding is paused. A group's prompt is computed once per version."""
    max_running: int = 64
    """Maximum number of sequences decoded at once; others wait in the replica (generator.max-running-requests)."""
    kv_tokens: float = math.inf
    """Capacity of the KV cache in tokens. A request waits until its prompt and its whole answer fit. A real engine
    starts more requests and retracts some; the model does not."""

    def __post_init__(self) -> None:
        if self.step_s < 0 or self.sequence_s < 0 or self.step_s + self.sequence_s <= 0:
            raise SettingsError(f"a step must take time, got step-s {self.step_s}, sequence-s {self.sequence_s}")
        if self.prefill_token_s < 0 or self.max_running < 1 or self.kv_tokens <= 0:
            raise SettingsError(
                "prefill-token-s must not be negative, max-running must be at least 1, and kv-tokens must be positive"
            )


@dataclass(frozen=True)
class TrainerCosts:
    """The trainer mesh. Time per token scales inversely with the number of devices."""

    step_s: float = 0.5
    """Fixed seconds of an update: optimizer, collectives, packing."""
    token_s: float = 0.0001
    """Seconds per trained (sampled) token on one device, including its share of prompt tokens."""

    def __post_init__(self) -> None:
        if self.step_s < 0 or self.token_s < 0:
            raise SettingsError(f"times must not be negative, got step-s {self.step_s}, token-s {self.token_s}")


@dataclass(frozen=True)
class Costs:
    """All latencies of a run."""

    length: Distribution = field(default_factory=lambda: Distribution(512, 0.8, 4096))
    """Tokens per answer."""
    prompt_tokens: int = 128
    """Tokens per prompt."""
    decode: DecodeCosts = field(default_factory=DecodeCosts)
    trainer: TrainerCosts = field(default_factory=TrainerCosts)
    score: Distribution = field(default_factory=Distribution)
    """Seconds per score, in one of a worker's scoring processes."""
    equal_rewards: float = 0.0
    """Share of groups whose rewards are all equal; it matters with buffer.drop-equal-rewards."""
    snapshot_s: float = 0.0
    """Seconds for the trainer to copy a new version: the only part of publishing that it waits for."""
    transfer_s: float = 0.0
    """Seconds to send a new version to the replicas; decoding continues meanwhile. benchmarks/weights.py measures it,
    snapshots and commits."""
    commit_s: float = 0.0
    """Seconds for which decoding pauses to switch to a new version."""
    call_s: float = 0.0
    """Round-trip seconds of an actor call: under 1 ms on an idle machine, several on busy cores. A step makes about ten
    consecutive calls. Not added to requests to replicas."""
    stage: Distribution = field(default_factory=Distribution)
    """Seconds that a group spends in stages (run.start(stages=...)) before it is submitted; with a mean of 0 there are
    no stages."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise SettingsError(f"prompt-tokens must be at least 1, got {self.prompt_tokens}")
        if min(self.snapshot_s, self.transfer_s, self.commit_s, self.call_s) < 0:
            raise SettingsError("snapshot-s, transfer-s, commit-s and call-s must not be negative")
        if not 0 <= self.equal_rewards <= 1:
            raise SettingsError(f"equal-rewards must be in 0..1, got {self.equal_rewards}")
        if not self.length.samples and self.length.mean < 1:
            raise SettingsError(f"length.mean must be at least 1 token, got {self.length.mean}")

"""How long things take: the latency models behind a simulated run. All times are in seconds."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated

import tyro

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Distribution:
    """Numbers above 0: constant, lognormal, or as measured."""

    mean: float = 0.0
    """Mean, before `maximum` cuts."""
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0 is constant. Lengths of answers have about 0.5 to 1.5."""
    maximum: float = math.inf
    """Larger ones are cut to this: the limit of tokens of an answer, the deadline of a score."""
    group_share: float = 0.0
    """Share of the variance (of the logarithm, or of the rank) that the episodes of a group have in common: 0 if
    lengths do not depend on the prompt. The larger, the longer a group of long answers lasts."""
    samples: Annotated[tuple[float, ...], tyro.conf.Suppress] = ()
    """Measured numbers, drawn instead of a lognormal (--from-run)."""

    def __post_init__(self) -> None:
        if self.mean < 0 or self.sigma < 0 or self.maximum <= 0:
            raise ValueError(
                f"mean and sigma must not be negative, maximum positive; got {self.mean}, {self.sigma}, {self.maximum}"
            )
        if not 0 <= self.group_share <= 1:
            raise ValueError(f"group-share must be in 0..1, got {self.group_share}")
        object.__setattr__(self, "samples", tuple(sorted(self.samples)))

    def draw(self, group: object, episode: object) -> float:
        """The number of one episode: the same for the same names, in every process. No two episodes share a name."""
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
        """The mean of the numbers drawn, ignoring what `maximum` cuts."""
        return sum(self.samples) / len(self.samples) if self.samples else min(self.mean, self.maximum)


def uniform(*names: object) -> float:
    """A number in (0, 1) that depends on the names alone."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=7).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**56


def normal(*names: object) -> float:
    """A standard normal number that depends on the names alone."""
    return _NORMAL.inv_cdf(uniform(*names))


@dataclass(frozen=True)
class DecodeCosts:
    """A generator replica: continuous batching."""

    step_s: float = 0.02
    """Seconds of a decoding step, whatever runs: reading the weights, the scheduler. Run benchmarks/speed.py, or
    --from-run."""
    sequence_s: float = 0.0001
    """Seconds that each running sequence adds to a step."""
    prefill_token_s: float = 0.0
    """Seconds of a prompt's token; decoding stands still meanwhile. A group's prompt is computed once per version."""
    max_running: int = 64
    """Sequences decoded at once; more wait in the replica (generator.max-running-requests)."""
    kv_tokens: float = math.inf
    """Tokens that the KV cache holds. A request waits until its prompt and its whole answer fit. A real engine starts
    more and takes some back; the model does not."""

    def __post_init__(self) -> None:
        if self.step_s < 0 or self.sequence_s < 0 or self.step_s + self.sequence_s <= 0:
            raise ValueError(f"a step must take time, got step-s {self.step_s}, sequence-s {self.sequence_s}")
        if self.prefill_token_s < 0 or self.max_running < 1 or self.kv_tokens <= 0:
            raise ValueError("prefill-token-s must not be negative, max-running at least 1, kv-tokens positive")


@dataclass(frozen=True)
class TrainerCosts:
    """The trainer mesh: twice the devices are twice as fast."""

    step_s: float = 0.5
    """Seconds of an update, whatever it trains: optimiser, collectives, packing."""
    token_s: float = 0.0001
    """Seconds that each trained (drawn) token adds, on one device. Prompts are included."""

    def __post_init__(self) -> None:
        if self.step_s < 0 or self.token_s < 0:
            raise ValueError(f"times must not be negative, got step-s {self.step_s}, token-s {self.token_s}")


@dataclass(frozen=True)
class Costs:
    """All latencies of a run."""

    length: Distribution = field(default_factory=lambda: Distribution(512, 0.8, 4096))
    """Tokens of an answer."""
    prompt_tokens: int = 128
    """Tokens of a prompt."""
    decode: DecodeCosts = field(default_factory=DecodeCosts)
    trainer: TrainerCosts = field(default_factory=TrainerCosts)
    score: Distribution = field(default_factory=Distribution)
    """Seconds of a score, in one of a worker's scoring processes."""
    equal_rewards: float = 0.0
    """Share of groups whose rewards are all equal; it matters with buffer.drop-equal-rewards."""
    snapshot_s: float = 0.0
    """Seconds of the trainer's copy of a new version: the only part of publishing that it waits for."""
    transfer_s: float = 0.0
    """Seconds in which a new version is sent to the replicas, while they decode."""
    commit_s: float = 0.0
    """Seconds for which decoding stands still for it."""
    call_s: float = 0.0
    """Seconds of a call to an actor and its answer: under 1 ms on a quiet machine, several on busy cores. A step has
    about ten, one after the other. Requests to replicas do not pay it."""
    stage: Distribution = field(default_factory=Distribution)
    """Seconds that a group spends in stages (run.start(stages=...)) before it is put; a mean of 0 has no stage."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt-tokens must be at least 1, got {self.prompt_tokens}")
        if min(self.snapshot_s, self.transfer_s, self.commit_s, self.call_s) < 0:
            raise ValueError("snapshot-s, transfer-s, commit-s and call-s must not be negative")
        if not 0 <= self.equal_rewards <= 1:
            raise ValueError(f"equal-rewards must be in 0..1, got {self.equal_rewards}")
        if not self.length.samples and self.length.mean < 1:
            raise ValueError(f"length.mean must be at least 1 token, got {self.length.mean}")

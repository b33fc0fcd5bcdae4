"""Plans the memory of a run before anything is spawned: how much each role needs, whether it fits, and what would fit.

The arithmetic is in docs/memory.md; ``tools/memory.py`` prints it for models and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import ceil
from typing import Any, NamedTuple

from monarch_rl.errors import SettingsError
from monarch_rl.generator.replica_memory import (
    STATIC,
    automatic_fraction,
    cache_tokens,
    item_bytes,
    longest_sequence,
    replica_memory,
    share,
)
from monarch_rl.generator.settings import GeneratorSettings, check_served
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import LoraSettings
from monarch_rl.model.sizes import TrainedModel, trained_model
from monarch_rl.runtime.devices import Devices
from monarch_rl.trainer.memory import trainer_memory
from monarch_rl.trainer.settings import TrainerSettings, check_experts
from monarch_rl.weights.transport import TRANSPORTS, TransferSettings, Transport

USABLE = 0.95
"""Share of a GPU's memory that plans may use. The rest is for allocator fragmentation and for the driver."""
TRAINER, REPLICA = "a trainer rank", "a generator replica"
BOTH = f"{TRAINER} with {REPLICA}"
"""Both on one device."""
SHARED_FRACTION = 0.98
"""``generator.memory_fraction`` on a shared device. There SGLang is given its cache's size in tokens instead: a share
would refer to the memory that is free at its start, which depends on the trainer's progress."""
NAMED = 3
"""Maximum number of settings that an error suggests."""
FEWEST_TOKENS, FEWEST_LOGITS, FEWEST_REQUESTS = 1024, 64, 16
"""Smallest suggested values: lower ones free next to nothing, and cost much speed."""
MOST_RANKS, MOST_TP = 128, 16
LORA_RANK = 16


class Sides(NamedTuple):
    """The settings that determine how much memory a run needs."""

    trainer: TrainerSettings
    generator: GeneratorSettings
    weights: TransferSettings
    colocate: bool = False
    """Whether a trainer rank and a replica share a device."""
    trained: bool = True
    """Whether there are trainer ranks, which send versions to the replicas."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory needs of a trainer rank and of a replica, in bytes by purpose, each on its fullest device."""

    trainer: Mapping[str, int]
    replica: Mapping[str, int]
    """The KV cache is counted with its minimum size."""
    room: int
    """Usable bytes of a device."""
    cache_tokens: int
    """Tokens that fit in the replica's KV cache."""
    memory_fraction: float
    """``generator.memory_fraction`` that leaves enough memory for everything else."""

    def needed(self, who: str) -> Mapping[str, int]:
        """Bytes by purpose for :data:`TRAINER`, :data:`REPLICA`, or :data:`BOTH` together."""
        if who == BOTH:
            sides = ((TRAINER, self.trainer), (REPLICA, self.replica))
            return {f"{purpose} of {side}": nbytes for side, needed in sides for purpose, nbytes in needed.items()}
        return self.trainer if who == TRAINER else self.replica

    def fits(self, who: str) -> bool:
        """Whether ``who`` fits on a device."""
        return sum(self.needed(who).values()) <= self.room


def plan_memory(config: ModelConfig, s: Sides, device_bytes: int) -> MemoryPlan:
    """Plan the memory of a run on GPUs.

    Args:
        s: the settings to plan for.
        device_bytes: memory of a GPU.
    """
    return _plan(trained_model(config, s.trainer.lora), s, device_bytes)


def _plan(model: TrainedModel, s: Sides, device_bytes: int) -> MemoryPlan:
    generator, room = s.generator, int(USABLE * device_bytes)
    served = item_bytes(generator, on_gpu=True)
    trainer = trainer_memory(model, s.trainer, s.weights, on_gpu=True, served=served)
    tokens = longest_sequence(generator, model.positions, s.trainer.tokens_per_microbatch)
    replica = replica_memory(
        model,
        generator,
        s.weights,
        on_gpu=True,
        tokens=tokens,
        senders=s.trainer.ranks,
        device_bytes=device_bytes,
    )
    left = room - sum(trainer.values()) if s.colocate else room
    automatic = SHARED_FRACTION if s.colocate else automatic_fraction(replica, left, device_bytes)
    fraction = generator.memory_fraction or automatic
    other = sum(nbytes for purpose, nbytes in replica.items() if purpose not in STATIC)
    if generator.memory_fraction and not s.colocate:
        left = min(left, int(generator.memory_fraction * device_bytes) + other)
    fitting = cache_tokens(model, replica, generator, left)
    return MemoryPlan(trainer, replica, room, generator.max_total_tokens or max(0, fitting), fraction)


def check_gpu_memory(config: ModelConfig, s: Sides, offered: Devices) -> None:
    """Refuse a run that does not fit its GPUs.

    Args:
        s: the settings to check.
        offered: the devices of the launch; nothing is checked if their memory is unknown.

    Raises:
        ValueError: lists the memory needed by purpose, and settings that would make it fit.
    """
    if not offered.memory:
        return
    plan = plan_memory(config, s, offered.memory)
    for who in (BOTH,) if s.colocate else (TRAINER, REPLICA) if s.trained else (REPLICA,):
        if not plan.fits(who):
            needed, ladders = plan.needed(who), [] if who == REPLICA else _trainer_ladders(config, s, offered)
            ladders += [] if who == TRAINER else _replica_ladders(config, s, offered, lora=who == REPLICA)
            raise SettingsError(
                f"{who} needs {_gib(sum(needed.values()))} GiB at its peak ({describe(needed)}), but a GPU here has "
                f"{_gib(plan.room)} GiB available: {_advice(config, ladders, offered.memory, who, s)}"
            )
    other = sum(nbytes for purpose, nbytes in plan.replica.items() if purpose not in STATIC)
    if s.generator.memory_fraction and not s.colocate and other > (1 - s.generator.memory_fraction) * offered.memory:
        most = automatic_fraction(plan.replica, plan.room, offered.memory)
        raise SettingsError(
            f"generator.memory-fraction {s.generator.memory_fraction:g} leaves "
            f"{_gib((1 - s.generator.memory_fraction) * offered.memory)} GiB of a GPU to everything but weights and KV "
            f"cache, which needs {_gib(other)} GiB "
            f"({describe({p: n for p, n in plan.replica.items() if p not in STATIC})}): give at most {most:g}, or 0 to "
            "have it computed"
        )
    static = sum(nbytes for purpose, nbytes in plan.replica.items() if purpose in STATIC)
    # Rounded in the same way as the automatic share, so that a planned share is never refused.
    if s.generator.memory_fraction and not s.colocate and share(static, offered.memory) > s.generator.memory_fraction:
        tokens = s.generator.max_total_tokens
        cache = f"the {tokens} tokens of generator.max-total-tokens" if tokens else "a cache for one sequence"
        raise SettingsError(
            f"generator.memory-fraction {s.generator.memory_fraction:g} gives weights and KV cache "
            f"{_gib(s.generator.memory_fraction * offered.memory)} GiB of a GPU, but they need {_gib(static)} GiB with "
            f"{cache}: give at least {ceil(1000 * static / offered.memory) / 1000:g}, or 0 to have it computed"
        )


def describe(needed: Mapping[str, int]) -> str:
    """Purposes with their sizes in GiB, the largest first."""
    return ", ".join(f"{purpose} {_gib(nbytes)}" for purpose, nbytes in sorted(needed.items(), key=lambda x: -x[1]))


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"


class _Change(NamedTuple):
    """A change of one setting: its text in messages, and a function that applies it."""

    text: str
    apply: Callable[[Sides], Sides]


_Ladder = list[_Change]
"""Changes of one setting, each of which frees more memory than the previous one."""


def _of_trainer(flag: str, **values: Any) -> _Change:
    return _Change(flag, lambda s: s._replace(trainer=replace(s.trainer, **values)))


def _of_generator(flag: str, **values: Any) -> _Change:
    return _Change(flag, lambda s: s._replace(generator=replace(s.generator, **values)))


def _of_weights(flag: str, **values: Any) -> _Change:
    return _Change(flag, lambda s: s._replace(weights=replace(s.weights, **values)))


def _halves(value: int, fewest: int) -> list[int]:
    """Half of a value, a quarter of it, and so on."""
    return [value >> n for n in range(1, 32) if value >> n >= fewest]


def _doubles(value: int, most: int) -> list[int]:
    return [value << n for n in range(1, 32) if value << n <= most]


def _trainer_ladders(config: ModelConfig, s: Sides, offered: Devices) -> list[_Ladder]:
    """Changes that could make a trainer rank fit, the cheapest first."""
    t = s.trainer
    weaker = {"none": ["selective", "full"], "selective": ["full"], "full": []}[t.activation_checkpoint]
    tokens, chunks = _halves(t.tokens_per_microbatch, FEWEST_TOKENS), _halves(t.logprob_chunk, FEWEST_LOGITS)
    others = 0 if s.colocate else s.generator.replicas * s.generator.tp
    most = min(MOST_RANKS, offered.total - others)
    ranks = [n for n in _doubles(t.ranks, most) if _accepted(check_experts, config, replace(t, ranks=n))]
    ladders = [
        [_of_trainer(f"trainer.activation-checkpoint {kind}", activation_checkpoint=kind) for kind in weaker],
        [_of_trainer(f"trainer.ranks {n}", ranks=n) for n in ranks],
        [_of_trainer(f"trainer.tokens-per-microbatch {n}", tokens_per_microbatch=n) for n in tokens],
        [_of_trainer(f"trainer.logprob-chunk {n}", logprob_chunk=n) for n in chunks],
        *_weights_ladders(s, lambda transport: transport.sends_from_rank_0),
        _lora_ladder(s),
    ]
    return [ladder for ladder in ladders if ladder]


def _replica_ladders(config: ModelConfig, s: Sides, offered: Devices, lora: bool) -> list[_Ladder]:
    """Changes that could make a replica fit, the cheapest first."""
    g = s.generator
    longest = _halves(g.max_total_tokens or g.context_length or config.max_position_embeddings, FEWEST_TOKENS)
    flag = "max-total-tokens" if g.max_total_tokens else "context-length"
    requests = _halves(g.running_requests(on_gpu=True), FEWEST_REQUESTS)
    leanest = [  # transports for which a replica holds no versions
        name
        for name, t in TRANSPORTS.items()
        if not t.received_versions
        and name != s.weights.resolved_transport
        and (offered.num_hosts == 1 or not t.one_host)
    ]
    others = 0 if s.colocate or not s.trained else s.trainer.ranks
    most = min(MOST_TP, (offered.total - others) // g.replicas)
    divided = [n for n in _doubles(g.tp, most) if _accepted(check_served, config, replace(g, tp=n), True)]
    ladders = [
        *_weights_ladders(s, lambda transport: transport.received_versions),
        [_of_generator(f"generator.tp {n}", tp=n) for n in divided],
        [_of_weights(f"weights.transport {name}", transport=name) for name in leanest],
        [_of_generator(f"generator.max-running-requests {n}", max_running_requests=n) for n in requests],
        [_of_generator(f"generator.{flag} {n}", **{flag.replace("-", "_"): n}) for n in longest],
        _lora_ladder(s) if lora else [],
    ]
    return [ladder for ladder in ladders if ladder]


def _weights_ladders(s: Sides, held: Callable[[Transport], int]) -> list[_Ladder]:
    """Changes of the weight transfer. ``held`` compares the versions that a transport holds on this side."""
    ladders = []
    if s.weights.delta:
        ladders.append([_of_weights("weights.delta False", delta=False)])
    if max(map(held, s.weights.candidates)) > held(TRANSPORTS["collective"]) and not s.colocate:
        ladders.append([_of_weights("weights.transport collective", transport="collective")])
    return ladders


def _lora_ladder(s: Sides) -> _Ladder:
    if s.trainer.lora.rank or s.trainer.tp > 1:
        return []
    return [_of_trainer(f"trainer.lora.rank {LORA_RANK}", lora=LoraSettings(rank=LORA_RANK))]


def _accepted(check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


def _advice(config: ModelConfig, ladders: list[_Ladder], device_bytes: int, who: str, s: Sides) -> str:
    """Up to three changes each of which makes ``who`` fit; if there are none, two or three that do so together. None of
    them makes the other side too large."""
    other = {TRAINER: REPLICA, REPLICA: TRAINER, BOTH: BOTH}[who]
    other_fits = plan_memory(config, s, device_bytes).fits(other)
    models: dict[LoraSettings, TrainedModel] = {}

    def fitting(*changes: _Change) -> bool:
        changed = s
        for change in changes:
            changed = change.apply(changed)
        lora = changed.trainer.lora
        if lora not in models:
            models[lora] = trained_model(config, lora)
        plan = _plan(models[lora], changed, device_bytes)
        return plan.fits(who) and plan.fits(other) >= other_fits

    found = (next((change.text for change in ladder if fitting(change)), None) for ladder in ladders)
    if alone := list(islice(filter(None, found), NAMED)):
        return f"it fits with {' or '.join(alone)}"
    for count in range(2, NAMED + 1):
        for together in combinations(ladders, count):
            if fitting(*(ladder[-1] for ladder in together)):
                return f"it fits with {' and '.join(change.text for change in _relaxed(together, fitting))}"
    return f"no {NAMED} settings make it fit; use a smaller model, or GPUs with more memory"


def _relaxed(ladders: tuple[_Ladder, ...], fitting: Callable[..., bool]) -> list[_Change]:
    """The smallest change of each ladder with which it still fits."""
    chosen = [ladder[-1] for ladder in ladders]
    for index, ladder in enumerate(ladders):
        for change in ladder:
            if fitting(*chosen[:index], change, *chosen[index + 1 :]):
                chosen[index] = change
                break
    return chosen

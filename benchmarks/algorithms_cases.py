"""The cases of algorithms.py: objectives, corrections and advantages, with their lags and their order."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.objectives import Correction, PolicyObjective, RatioObjective

LOSS, ADVANTAGE = "--objective", "--trainer.loss.advantage"
TO_BEHAVIOUR = ("--objective.ratio-to", "behaviour")
CORRECTED = "--trainer.loss.corrections"
FOUR: dict[str, tuple[str, ...]] = {
    "dapo": (LOSS, "ppo_clip", *TO_BEHAVIOUR),
    "gspo": (LOSS, "gspo", *TO_BEHAVIOUR, "--trainer.loss.aggregation", "sequence_mean"),
    "cispo": (LOSS, "cispo", *TO_BEHAVIOUR),
    "decoupled": (LOSS, "decoupled"),
}
"""The objectives that are compared with all seeds, at both lags. Their ratio is to the behaviour policy: the ratio to
the trainer's own policy is 1 with one update per batch, which makes all of them the policy gradient. ``decoupled`` uses
the ratio to the behaviour policy as a weight."""
LAGS, OTHER_LAG = (0, 8), 2
WITH: dict[str, tuple[str, ...]] = {"gae": ("--trainer.critic.lr", "1e-3")}
"""Flags that an advantage needs in addition to its name."""
TEACHER = "a teacher, as in recipes/distill.py"
NEEDS_MORE = {
    "distillation": TEACHER,
    "sequence_distillation": TEACHER,
    "supervised": "rows of prompt and answer",
}
"""Names of advantages and objectives that the main job alone cannot run, and what they need."""
MORE: dict[str, tuple[str, ...]] = {
    "dapo, dual clip 3": (*FOUR["dapo"], "--objective.dual-clip", "3"),
    "dapo, opsm": (*FOUR["dapo"], CORRECTED, "opsm"),
    "gspo, clip 0.2": (*FOUR["gspo"], "--objective.clip-low", "0.2", "--objective.clip-high", "0.2"),
    "gspo, opsm": (*FOUR["gspo"], CORRECTED, "opsm"),
    "token mean": ("--trainer.loss.aggregation", "token_mean"),
    "sequence mean": ("--trainer.loss.aggregation", "sequence_mean"),
    "positives only": ("--trainer.loss.positives-only",),
    "overlong penalty": ("--trainer.loss.overlong-limit", "8"),
    "entropy bonus 0.01": ("--trainer.loss.entropy-coefficient", "0.01"),
    "KL in the loss (k2, 0.01)": ("--trainer.reference", "--trainer.loss.kl-coefficient", "0.01")
    + ("--trainer.loss.kl-estimate", "k2"),
    "KL in the reward (k1, 0.01)": ("--trainer.reference", "--trainer.loss.kl-coefficient", "0.01")
    + ("--trainer.loss.kl-estimate", "k1", "--trainer.loss.kl-in", "reward"),
    "decoupled, opsm": (*FOUR["decoupled"], CORRECTED, "opsm"),
    "cispo, opsm": (*FOUR["cispo"], CORRECTED, "opsm"),
    "dapo, 2 epochs": (LOSS, "ppo_clip", "--trainer.epochs", "2"),
    "decoupled, 2 mini-batches": (LOSS, "decoupled", "--trainer.minibatches", "2"),
}
"""Combinations, and settings that have no name in the registry."""
MENDING = ("dapo, dual clip 3", "dapo, opsm", "gspo, clip 0.2", "gspo, opsm")
"""Combinations for stale tokens, at the larger lag only, with the first seed."""
MENDED = {"decoupled, opsm": "decoupled", "cispo, opsm": "cispo"}
"""Cases with three seeds, for the objectives that lose most by the lag, each with the case without its correction. They
refuse ``tis`` and ``icepop``, because they already weigh by the behaviour policy; ``sequence_mask`` breaks stale
runs."""
ALIKE = {
    LAGS[0]: ("dapo", "cispo", "decoupled"),
    OTHER_LAG: ("pg, tis", "advantage dr_grpo", "advantage rloo"),
}
"""By lag, cases whose gradients are equal up to a factor, to which AdamW is invariant: their ratios are 1, or ``rloo``
is ``dr_grpo`` times 8/7, or all tokens have one lag. Differences between them are noise."""


@dataclass(frozen=True)
class Case:
    """One run of the benchmark."""

    name: str
    lag: int
    seed: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Of recipes/grpo.py."""
        return FLAGS[self.name]


def _of_losses() -> dict[str, tuple[str, ...]]:
    """Return policy objectives other than the four."""
    there = {flags[1] for flags in FOUR.values()} | {"pg"}
    others = [name for name in PolicyObjective.names() if name not in there]
    return {name: (LOSS, name, *(TO_BEHAVIOUR if name in RatioObjective.names() else ())) for name in others}


def _of_corrections() -> dict[str, tuple[str, ...]]:
    """Return the policy gradient without and with each correction."""
    given: dict[str, tuple[str, ...]] = {"no correction": ()} | {name: (name,) for name in Correction.names()}
    return {f"pg, {name}": (LOSS, "pg", CORRECTED, *names) for name, names in given.items()}


def _of_advantages() -> dict[str, tuple[str, ...]]:
    return {
        f"advantage {name}": (ADVANTAGE, name, *WITH.get(name, ())) for name in ADVANTAGES if name not in NEEDS_MORE
    }


OTHERS = (
    _of_losses()
    | _of_corrections()
    | _of_advantages()
    | {name: flags for name, flags in MORE.items() if name not in (*MENDING, *MENDED)}
)
FLAGS = FOUR | OTHERS | MORE
"""Flags by name of the case. Everything else is the default: advantage ``dr_grpo``, objective ``ppo_clip`` with the
ratio to the trainer's policy, correction ``tis``."""


def plan(seeds: tuple[int, ...]) -> list[Case]:
    """Return all runs, the most valuable first: the four with the first seed, corrections at the larger lag, the four
    with two more seeds, everything else, the four with the remaining seeds."""

    def four(some: tuple[int, ...]) -> list[Case]:
        return [Case(name, lag, seed) for seed in some for lag in LAGS for name in FOUR]

    at_once, after = seeds[:3], seeds[3:]
    mending = [Case(name, LAGS[-1], seeds[0]) for name in (*_of_corrections(), *MENDING)]
    mended = [Case(name, LAGS[-1], seed) for seed in at_once for name in MENDED]
    others = [Case(name, OTHER_LAG, seeds[0]) for name in OTHERS]
    return four(at_once[:1]) + mending + four(at_once[1:]) + mended + others + four(after)

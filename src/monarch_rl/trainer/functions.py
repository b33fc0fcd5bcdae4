"""The functions that a run trains with, on their way from the recipe to the trainer ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from monarch_rl.algorithms.advantages import ADVANTAGES, gae
from monarch_rl.algorithms.functions import named, needed_columns, other_token_columns, place_of
from monarch_rl.algorithms.group_view import Advantage, Remembers, remembering
from monarch_rl.episode.serialization import BEHAVIOUR
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.trainer.loss_settings import NO_CRITIC, CriticSettings, LossSettings
from monarch_rl.trainer.objective import OBJECTIVES, OLD, REFERENCE, RETURNS, TEACHER, VALUE, Objective

FILLED_BY_TRAINER: Mapping[str, str] = {OLD: "log-probs of the trainer's policy at the start of the batch"}
"""Columns that the trainer fills itself, for objectives, and what they hold."""
FILLED_BY_ENGINE: Mapping[str, str] = {BEHAVIOUR: "log-probs of the policy that drew each token"}
"""Columns that every group has, for advantages. Objectives have ``batch.behaviour_logprobs``."""
REFERENCE_MODEL = {REFERENCE: "log-probs of the model that training started from"}
"""The same, with ``trainer.reference``."""
CRITIC = {
    VALUE: "what the critic expects, before each drawn token, that the sequence will still get",
    RETURNS: "what it learns that this should have been",
}
"""The same, with ``trainer.critic``; advantages have the first one, too."""

BEYOND_THE_GROUP = ("reinforce_pp", "seat_baselines", "gae")
"""Advantages that do not compare a group's rewards with each other alone, so that equal ones teach."""
WITHOUT_REWARDS = {"advantage": ("distillation",), "objective": ("distillation", "supervised")}
"""Advantages and objectives that teach the same whatever the rewards are; ``sequence_distillation`` is a partial of the
first."""


@dataclass(frozen=True, slots=True)
class TrainingFunctions:
    """What a run trains with. Functions travel by cloudpickle, so one of a script, a closure or a ``functools.partial``
    will do."""

    advantage: ByValue[Advantage]
    objective: ByValue[Objective]
    advantage_columns: tuple[str, ...] = ()
    """Those that the advantage reads: every rank gets them of all episodes of a batch."""

    @classmethod
    def of(
        cls,
        advantage: Advantage | str,
        objective: Objective | str,
        loss: LossSettings,
        critic: CriticSettings = NO_CRITIC,
    ) -> TrainingFunctions:
        """Functions, or the names of some (``ADVANTAGES``, ``OBJECTIVES``).

        Args:
            loss: for objectives that are named.
            critic: fills the column ``value``, if there is one, and tells ``gae`` how to discount.

        Raises:
            ValueError: there is no function of this name, or the settings do not go with it, or name another
                advantage; or a ``functools.partial`` of ``gae`` discounts in another way than the critic.
            TypeError: a function cannot be sent to other processes; says why.
        """
        name = advantage if isinstance(advantage, str) else name_of(advantage)
        _check_advantage(name or place_of(advantage), loss)
        if isinstance(advantage, str):
            advantage = named(ADVANTAGES, advantage, "advantage")()
        if name:
            loss = replace(loss, advantage=name)  # refuses what does not go with it
        advantage = _discounted(advantage, critic)
        if isinstance(objective, str):
            if objective == "supervised":
                _check_supervised(loss)
            objective = named(OBJECTIVES, objective, "objective")(loss)
        if loss.teacher_top and not other_token_columns(objective):
            raise ValueError(
                f"trainer.loss.teacher-top {loss.teacher_top}: the objective {place_of(objective)} reads log-probs of "
                "no token but the drawn one. Give the objective distillation, or leave it out"
            )
        return cls(
            ByValue(advantage, f"the advantage {place_of(advantage)}"),
            ByValue(objective, f"the objective {place_of(objective)}"),
            tuple(name for name in needed_columns(advantage) if not (critic.enabled and name == VALUE)),
        )

    @classmethod
    def of_settings(cls, loss: LossSettings, critic: CriticSettings = NO_CRITIC) -> TrainingFunctions:
        """What the settings name."""
        return cls.of(loss.advantage, "reinforcement", loss, critic)

    def load(self) -> LoadedFunctions:
        """On a trainer rank: the functions themselves."""
        return LoadedFunctions(self.advantage.load(), self.objective.load(), self.advantage_columns)


@dataclass(frozen=True, slots=True)
class LoadedFunctions:
    """The functions of one trainer rank. What an advantage remembers is the same on all ranks; an objective sees the
    micro-batches of its own rank alone."""

    advantage: Advantage
    objective: Objective
    advantage_columns: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What functions keep from batch to batch (:class:`Remembers`), by kind; empty if they keep nothing."""
        return {kind: function.state_dict() for kind, function in self._remembering().items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Go on from :meth:`state_dict`. Raises ValueError if other functions remembered something then."""
        remembering = self._remembering()
        if remembering.keys() != state.keys():
            here = {kind: place_of(function) for kind, function in remembering.items()}
            raise ValueError(
                f"the saved run remembers something of its {sorted(state)}, this one of {here}: resume with the "
                "functions that it was started with"
            )
        for kind, function in remembering.items():
            function.load_state_dict(state[kind])

    def _remembering(self) -> dict[str, Remembers]:
        functions: dict[str, object] = {"advantage": self.advantage, "objective": self.objective}
        found = {kind: remembering(function) for kind, function in functions.items()}
        return {kind: function for kind, function in found.items() if function is not None}


def name_of(advantage: Advantage) -> str:
    """The name of a function that is in ``ADVANTAGES``, also of a partial of one; "" of one's own."""
    function, given = unwrapped(advantage)
    found = {}
    for name, make in ADVANTAGES.items():
        entry, own = unwrapped(make())
        if (function is entry or type(function) is make) and own.items() <= given.items():
            found[name] = len(own)
    return max(found, key=lambda name: found[name], default="")  # entries may be partials of each other


def unwrapped(function: Any) -> tuple[object, dict[str, Any]]:
    """What partials call, and with which arguments by name."""
    given: dict[str, Any] = {}
    while isinstance(function, partial):
        function, given = function.func, function.keywords | given
    return function, given


def _check_advantage(given: str, loss: LossSettings) -> None:
    """Refuse an advantage of the settings that is not the one which the recipe gives, by name or place."""
    if loss.advantage not in (LossSettings().advantage, given):
        raise ValueError(
            f"trainer.loss.advantage {loss.advantage}: the recipe gives run.start() the advantage {given}. Leave the "
            "flag out, or have the recipe give s.trainer.loss.advantage"
        )


def _check_supervised(loss: LossSettings) -> None:
    """Refuse what the objective ``supervised`` does not read."""
    defaults = LossSettings()
    names = [field.name for field in fields(loss) if field.name not in ("advantage", "aggregation", "max_tokens")]
    for name in names:  # in their order: of several the same one is named each time
        if getattr(loss, name) != getattr(defaults, name):
            raise ValueError(
                f"{loss.flag(name)}: the objective supervised is the cross-entropy of what was drawn, and reads of "
                "trainer.loss only aggregation and max-tokens. Leave it out, or take another objective"
            )


def _discounted(advantage: Advantage, critic: CriticSettings) -> Advantage:
    """``gae`` discounts as the critic does, because that learns the sum of advantage and value; others stay as they
    are. Raises ValueError if a partial has values of its own, other ones."""
    function, given = unwrapped(advantage)
    if function is not cast(Advantage, gae) or (given and not critic.enabled):
        return advantage
    for name in ("gamma", "lam"):
        if name in given and given[name] != getattr(critic, name):
            raise ValueError(
                f"the advantage gae has {name} {given[name]:g}, and the critic learns with trainer.critic.{name} "
                f"{getattr(critic, name):g}: give trainer.critic.{name} {given[name]:g}, and gae without it"
            )
    return cast(Advantage, partial(gae, **({"gamma": critic.gamma, "lam": critic.lam} | given)))


def check_columns(
    functions: TrainingFunctions, filled: Mapping[str, str], reference: bool = False, critic: bool = False
) -> None:
    """Refuse functions that read columns which nobody fills, a critic and a reference that nobody asks, and columns
    that both a stage and the trainer fill.

    Args:
        filled: columns, and the stages that fill them.
        reference: the trainer fills the column ``reference``.
        critic: the trainer fills those of :data:`CRITIC`.

    Raises:
        ValueError: names function, file and line, and the column.
    """
    if reference and REFERENCE in filled:
        raise ValueError(
            f"the column {REFERENCE!r} would be filled by --trainer.reference and by the stage {filled[REFERENCE]!r}: "
            "leave one of them out"
        )
    kinds = {"advantage": functions.advantage.load(), "objective": functions.objective.load()}
    if reference and REFERENCE not in needed_columns(kinds["objective"]):
        raise ValueError(
            f"trainer.reference: the objective {place_of(kinds['objective'])} does not read the column {REFERENCE!r}, "
            "for which a whole copy of the model would be kept. Give trainer.loss.kl-coefficient, such as 0.001, or "
            "leave the reference out"
        )
    if critic:
        _check_critic(kinds, filled)
    for kind, function in kinds.items():
        known = {*filled, *(FILLED_BY_TRAINER if kind == "objective" else FILLED_BY_ENGINE)}
        known |= {VALUE} if critic else set()
        known |= REFERENCE_MODEL.keys() if reference and kind == "objective" else set()
        known |= CRITIC.keys() if critic and kind == "objective" else set()
        for name in needed_columns(function):
            if name not in known:
                flag = "--trainer.reference, or " if name == REFERENCE and kind == "objective" else ""
                flag = "--trainer.critic.lr, such as 1e-5, or " if name == VALUE else flag
                made = f"{name}(run.frozen(...))" if name in (REFERENCE, TEACHER) else f"Stage(..., fills=({name!r},))"
                raise ValueError(
                    f"the {kind} {place_of(function)} needs the column {name!r}, which nobody fills (filled are "
                    f"{', '.join(sorted(known))}): give {flag}run.start() a stage that does, stages=[{made}]"
                )


def equal_rewards_warning(functions: TrainingFunctions) -> str:
    """What is said of ``buffer.drop_equal_rewards`` where the groups that it drops would teach; empty where they would
    not, or where the advantage is a recipe's own, of which that is not known.

    Raises:
        ValueError: by these functions no reward teaches anything, so that none is a reason to drop a group.
    """
    flag = "buffer.drop-equal-rewards"
    kinds: dict[str, ByValue[Any]] = {"objective": functions.objective, "advantage": functions.advantage}
    made: dict[str, dict[str, object]] = {
        "objective": {name: make(LossSettings()) for name, make in OBJECTIVES.items()},
        "advantage": {name: make() for name, make in ADVANTAGES.items()},
    }
    name = ""
    for kind, function in kinds.items():
        names = {place_of(made[kind][name]): name for name in reversed(made[kind])}  # a partial has the first's place
        name = names.get(place_of(function.load()), "")
        if name in WITHOUT_REWARDS[kind]:
            raise ValueError(
                f"{flag}: the {kind} {name} reads no rewards, so all groups teach alike, and those of equal rewards "
                "would be dropped. Leave it out"
            )
    if name not in BEYOND_THE_GROUP:
        return ""
    return (
        f"{flag}: the advantage {name} does not compare within the group alone, so the groups that are dropped would "
        "teach. Leave it out, or take the advantage dr_grpo, grpo, rloo or max_rl"
    )


def check_that_columns_are_read(functions: TrainingFunctions, columns: Sequence[str]) -> None:
    """Refuse columns, which a model would be asked for, that neither function reads. Raises ValueError."""
    read = {*needed_columns(functions.advantage.load()), *needed_columns(functions.objective.load())}
    for name in columns:
        if name not in read:
            instead = "teacher(..., top=s.trainer.loss.teacher_top)"
            instead = "trainer.loss.kl-coefficient, such as 0.001" if name == REFERENCE else instead
            instead = "the objective or the advantage distillation" if name == TEACHER else instead
            raise ValueError(
                f"a stage fills the column {name!r}, which neither the advantage nor the objective reads, so a model "
                f"would compute it for nothing. Give {instead}, decorate a function of yours that reads it with "
                f"@needs({name!r}), or leave the stage out"
            )


def _check_critic(functions: Mapping[str, object], filled: Mapping[str, str]) -> None:
    for name in CRITIC.keys() & filled.keys():
        raise ValueError(
            f"the column {name!r} is filled by the stage {filled[name]}, and by the trainer's critic: leave out the "
            "stage, or trainer.critic.lr"
        )
    if not any(CRITIC.keys() & set(needed_columns(function)) for function in functions.values()):
        raise ValueError(
            "trainer.critic.lr: neither the advantage nor the objective reads what the critic estimates. Give "
            "trainer.loss.advantage gae, or leave the critic out"
        )

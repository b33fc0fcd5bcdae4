"""Advantage and objective of a run: sending them from the recipe to the trainer ranks, and checking their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from monarch_rl.algorithms.advantages import ADVANTAGES, gae
from monarch_rl.algorithms.functions import named, needed_columns
from monarch_rl.algorithms.group_view import Advantage, Remembers, remembering
from monarch_rl.algorithms.objectives import Distillation, Objective, PPOClip
from monarch_rl.episode.serialization import BEHAVIOUR
from monarch_rl.errors import Refusals, SettingsError
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.trainer.loss_settings import NO_CRITIC, CriticSettings, LossSettings
from monarch_rl.trainer.objective import (
    OLD,
    REFERENCE,
    RETURNS,
    TEACHER,
    VALUE,
    LossFunction,
    loss_function,
    made_from,
    supervised,
)
from monarch_rl.user_code import code_behind, place_of

FILLED_BY_TRAINER: Mapping[str, str] = {OLD: "log-probs of the trainer's policy at the start of the batch"}
"""Columns that the trainer always fills, for objectives, and their contents."""
FILLED_BY_ENGINE: Mapping[str, str] = {BEHAVIOUR: "log-probs of the policy that sampled each token"}
"""Columns that every group has, for advantages. Objectives use ``batch.behaviour_logprobs``."""
REFERENCE_MODEL = {REFERENCE: "log-probs of the model that training started from"}
"""Columns that the trainer fills with ``trainer.reference``, for objectives."""
CRITIC = {
    VALUE: "the critic's estimate, before each sampled token, of the return of the rest of the sequence",
    RETURNS: "the target of that estimate",
}
"""Columns that the trainer fills with ``trainer.critic``: both for objectives, the first also for advantages."""

BEYOND_THE_GROUP = ("reinforce_pp", "seat_baselines", "gae")
"""Advantages that also compare with rewards of other groups or a critic, so that groups of equal rewards teach."""
WITHOUT_REWARDS = ("distillation", "sequence_distillation")
"""Advantages that read no rewards."""


@dataclass(frozen=True, slots=True)
class TrainingFunctions:
    """The functions that a run trains with. They are sent by cloudpickle, so functions of a script, closures and
    ``functools.partial`` objects work."""

    advantage: ByValue[Advantage]
    objective: ByValue[LossFunction]
    advantage_columns: tuple[str, ...] = ()
    """Columns that the advantage reads: every rank gets them for all episodes of a batch."""

    @classmethod
    def of(
        cls,
        advantage: Advantage | str,
        objective: Objective | LossFunction,
        loss: LossSettings,
        critic: CriticSettings = NO_CRITIC,
    ) -> TrainingFunctions:
        """An advantage given as a function or by its name in ``ADVANTAGES``, and an objective or a loss function.

        Args:
            loss: the settings that all objectives share. A recipe's own loss function reads only their aggregation,
                through ``MicroBatch.weights``.
            critic: settings of the critic. If enabled, it fills the column ``value``, and ``gae`` uses its discounts.

        Raises:
            ValueError: no advantage has this name; the settings do not fit the functions, or name another advantage; or
                a ``functools.partial`` of ``gae`` has other discounts than the critic. All problems together.
            TypeError: a function cannot be sent to other processes; states why.
        """
        name = advantage if isinstance(advantage, str) else name_of(advantage)
        if isinstance(advantage, str):
            advantage = named(ADVANTAGES, advantage, "advantage")()
        refusals = Refusals()
        with refusals:
            _check_advantage(name or place_of(advantage), loss)
        with refusals:
            if name:
                loss = replace(loss, advantage=name)  # raises if the other settings do not fit it
        with refusals:
            advantage = _discounted(advantage, critic)
        if objective is supervised:
            with refusals:
                _check_supervised(loss)
        refusals.raise_all()
        function = loss_function(objective, loss) if isinstance(objective, Objective) else objective
        return cls(
            ByValue.checked(advantage, f"the advantage {place_of(advantage)}"),
            ByValue.checked(function, f"the objective {place_of(function)}"),
            tuple(name for name in needed_columns(advantage) if not (critic.enabled and name == VALUE)),
        )

    @classmethod
    def of_settings(cls, loss: LossSettings, critic: CriticSettings = NO_CRITIC) -> TrainingFunctions:
        """The advantage that the settings name, and the default objective."""
        return cls.of(loss.advantage, PPOClip(), loss, critic)

    def load(self) -> LoadedFunctions:
        """Unpickle the functions, on a trainer rank."""
        return LoadedFunctions(self.advantage.load(), self.objective.load(), self.advantage_columns)


@dataclass(frozen=True, slots=True)
class LoadedFunctions:
    """The functions of one trainer rank. The state of an advantage is the same on all ranks; an objective sees only the
    micro-batches of its own rank."""

    advantage: Advantage
    objective: LossFunction
    advantage_columns: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of the functions (:class:`Remembers`), by kind; empty if they have none."""
        return {kind: function.state_dict() for kind, function in self._remembering().items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Restore a :meth:`state_dict`. Raises ValueError if it is the state of other functions."""
        functions = self._remembering()
        if functions.keys() != state.keys():
            here = {kind: place_of(function) for kind, function in functions.items()}
            raise SettingsError(
                f"the checkpoint holds state of {sorted(state)}, but the functions with state are {here}: resume with "
                "the functions that the run was started with"
            )
        for kind, function in functions.items():
            function.load_state_dict(state[kind])

    def _remembering(self) -> dict[str, Remembers]:
        functions: dict[str, object] = {"advantage": self.advantage, "objective": self.objective}
        found = {kind: remembering(function) for kind, function in functions.items()}
        return {kind: function for kind, function in found.items() if function is not None}


def name_of(advantage: Advantage) -> str:
    """The name in ``ADVANTAGES`` of an advantage or a partial of one; "" for a recipe's own function."""
    function, given = unwrapped(advantage)
    found = {}
    for name, make in ADVANTAGES.items():
        entry, own = unwrapped(make())
        if (function is entry or type(function) is make) and own.items() <= given.items():
            found[name] = len(own)
    return max(found, key=lambda name: found[name], default="")  # entries may be partials of each other


def unwrapped(function: Any) -> tuple[object, dict[str, Any]]:
    """The function that nested partials call, and the keyword arguments that they give it."""
    given: dict[str, Any] = {}
    while isinstance(function, partial):
        function, given = function.func, function.keywords | given
    return function, given


def _check_advantage(given: str, loss: LossSettings) -> None:
    """Refuse settings that name another advantage than ``given``, the name or place of the recipe's."""
    if loss.advantage not in (LossSettings().advantage, given):
        raise SettingsError(
            f"trainer.loss.advantage {loss.advantage}: the recipe gives run.start() the advantage {given}. Leave the "
            "flag out, or pass s.trainer.loss.advantage to run.start() in the recipe"
        )


def check_unread_objective(settings: Objective, default: Objective, given: Objective | LossFunction) -> None:
    """Refuse an objective of the settings that the recipe does not train with.

    Args:
        settings: the objective of the run's settings.
        default: the recipe's default of it.
        given: what the recipe trains with. A function of its own may read the settings' objective: it is not checked.

    Raises:
        ValueError: names both.
    """
    if settings == default:
        return
    trained: str = settings.name
    unread = False
    if isinstance(given, Objective):
        # A recipe may change parameters of the settings' objective; one that has only defaults was not made from it.
        trained, unread = given.name, given != settings and given == Objective.defaults_of(given.name)
    elif given is supervised:
        trained = "supervised"
    if trained != settings.name or unread:
        whose = f"{trained} with default parameters" if trained == settings.name else trained
        raise SettingsError(
            f"objective {settings.name}: the recipe gives run.start() the objective {whose}. Leave the flag out, or "
            "pass s.objective to run.start() in the recipe"
        )


def _check_supervised(loss: LossSettings) -> None:
    """Refuse settings that the objective ``supervised`` does not read."""
    defaults = LossSettings()
    names = [field.name for field in fields(loss) if field.name not in ("advantage", "aggregation", "max_tokens")]
    for name in names:  # in the order of the fields, so that the message is always the same
        if getattr(loss, name) != getattr(defaults, name):
            raise SettingsError(
                f"{loss.flag(name)}: the objective supervised is the cross-entropy of the tokens, and reads only "
                "aggregation and max-tokens of trainer.loss. Leave the flag out, or use another objective"
            )


def _discounted(advantage: Advantage, critic: CriticSettings) -> Advantage:
    """``gae`` with the critic's discounts; other advantages unchanged.

    Raises:
        ValueError: a partial of ``gae`` has other discounts than the critic.
    """
    # The critic learns the sum of advantage and value, so both must use the same discounts.
    function, given = unwrapped(advantage)
    if function is not cast(Advantage, gae) or (given and not critic.enabled):
        return advantage
    for name in ("gamma", "lam"):
        if name in given and given[name] != getattr(critic, name):
            raise SettingsError(
                f"the advantage gae has {name} {given[name]:g}, but the critic learns with trainer.critic.{name} "
                f"{getattr(critic, name):g}: give trainer.critic.{name} {given[name]:g}, and no {name} to gae"
            )
    return cast(Advantage, partial(gae, **({"gamma": critic.gamma, "lam": critic.lam} | given)))


def check_columns(
    functions: TrainingFunctions, filled: Mapping[str, str], reference: bool = False, critic: bool = False
) -> None:
    """Refuse columns that are read but not filled, or filled by both a stage and the trainer, and a critic or reference
    model that no function reads.

    Args:
        filled: stage that fills each column, by column name.
        reference: whether the trainer fills the column ``reference``.
        critic: whether the trainer fills the columns of :data:`CRITIC`.

    Raises:
        ValueError: names the column, and the function with its file and line; all problems together.
    """
    refusals = Refusals()
    if reference and REFERENCE in filled:
        refusals.add(
            f"the column {REFERENCE!r} would be filled by --trainer.reference and by the stage {filled[REFERENCE]!r}: "
            "leave one of them out"
        )
    kinds = {"advantage": functions.advantage.load(), "objective": functions.objective.load()}
    if reference and REFERENCE not in needed_columns(kinds["objective"]):
        refusals.add(
            f"trainer.reference: the objective {place_of(kinds['objective'])} does not read the column {REFERENCE!r}, "
            "for which a whole copy of the model would be kept. Give trainer.loss.kl-coefficient, such as 0.001, or "
            "leave the flag out"
        )
    if critic:
        for name in CRITIC.keys() & filled.keys():
            refusals.add(
                f"the column {name!r} is filled by the stage {filled[name]} and by the trainer's critic: leave out the "
                "stage, or the critic"
            )
        if not any(CRITIC.keys() & set(needed_columns(function)) for function in kinds.values()):
            refusals.add(
                "trainer.critic.lr: neither the advantage nor the objective reads a column of the critic. Give "
                "trainer.loss.advantage gae, or leave the critic out"
            )
    for kind, function in kinds.items():
        available = {*filled, *(FILLED_BY_TRAINER if kind == "objective" else FILLED_BY_ENGINE)}
        available |= {VALUE} if critic else set()
        available |= REFERENCE_MODEL.keys() if reference and kind == "objective" else set()
        available |= CRITIC.keys() if critic and kind == "objective" else set()
        for name in needed_columns(function):
            if name not in available:
                flag = "--trainer.reference, or " if name == REFERENCE and kind == "objective" else ""
                flag = "the trainer a critic (recipes/ppo.py, with trainer.critic.lr), or " if name == VALUE else flag
                stage = f"{name}(run.frozen(...))" if name in (REFERENCE, TEACHER) else f"Stage(..., fills=({name!r},))"
                refusals.add(
                    f"the {kind} {place_of(function)} needs the column {name!r}, which nothing fills (filled are "
                    f"{', '.join(sorted(available))}): give {flag}run.start() a stage that does, stages=[{stage}]"
                )
    refusals.raise_all()


def without_rewards(functions: TrainingFunctions) -> str:
    """Which of the functions shows that no reward is read, in words; empty if rewards are read, or it is not known."""
    function, name = functions.objective.load(), name_of(functions.advantage.load())
    made = made_from(function)
    if code_behind(function) == code_behind(supervised):
        return "the objective supervised"
    if made is not None and isinstance(made[0], Distillation):
        return "the objective distillation"
    return f"the advantage {name}" if name in WITHOUT_REWARDS else ""


def equal_rewards_warning(functions: TrainingFunctions) -> str:
    """The warning about ``buffer.drop_equal_rewards`` if groups that it drops would have non-zero advantages; empty if
    not, or if the advantage is a recipe's own, for which this is not known.

    Raises:
        ValueError: the functions read no rewards, so groups of equal rewards teach like all others.
    """
    flag, name = "buffer.drop-equal-rewards", name_of(functions.advantage.load())
    if cause := without_rewards(functions):
        raise SettingsError(
            f"{flag}: {cause} reads no rewards, so groups of equal rewards teach as much as others, and "
            "would be dropped. Leave the flag out"
        )
    if name not in BEYOND_THE_GROUP:
        return ""
    return (
        f"{flag}: the advantage {name} does not compare rewards within a group only, so the dropped groups would have "
        "taught something. Leave the flag out, or use the advantage dr_grpo, grpo, rloo or max_rl"
    )


def check_that_columns_are_read(functions: TrainingFunctions, columns: Sequence[str]) -> None:
    """Refuse columns that a model computes but neither function reads.

    Raises:
        ValueError: names the column, and what to change.
    """
    read = {*needed_columns(functions.advantage.load()), *needed_columns(functions.objective.load())}
    for name in columns:
        if name not in read:
            instead = "teacher(..., top=s.objective.top)"
            instead = "trainer.loss.kl-coefficient, such as 0.001" if name == REFERENCE else instead
            instead = "the objective or the advantage distillation" if name == TEACHER else instead
            raise SettingsError(
                f"a stage fills the column {name!r}, which neither the advantage nor the objective reads, so a model "
                f"would compute it for nothing. Give {instead}, decorate your function that reads it with "
                f"@needs({name!r}), or leave the stage out"
            )

"""The command line of settings, and named settings classes: on the command line, in Python, and in JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import tyro
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from monarch_rl.algorithms.objectives import (
    GSPO,
    OPSM,
    TIS,
    Correction,
    CorrectionName,
    Corrections,
    Distillation,
    Objective,
    ObjectiveName,
    PPOClip,
)
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.moved import MOVED_FLAGS
from monarch_rl.settings.cli import NotAFlag, cli, saved_defaults
from monarch_rl.settings.other_projects import OPENRLHF, TRL, VERL, hint
from monarch_rl.settings.ranges import CheckedSettings, NamedSettings, Range, from_plain, limits, to_plain
from monarch_rl.trainer.loss_settings import LossSettings, check_objective
from monarch_rl.trainer.settings import TrainerSettings

OBJECTIVES = [Objective.of_name(name) for name in Objective.names()]
CORRECTIONS = [Correction.of_name(name) for name in Correction.names()]


@dataclass(frozen=True)
class Settings:
    """Minimal settings of a recipe."""

    steps: int = 1
    objective: Objective = field(default_factory=PPOClip)
    corrections: Corrections = None
    hidden: NotAFlag[LossSettings] = LossSettings(lag_discount=0.5)


def refusal(*args: str, kind: type = Settings) -> str:
    """The error of a refused command line, on one line."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
        cli(kind, args=args)
    assert ended.value.code == 2
    return re.sub(r"[\s\u2500-\u257f]+|-{5,}", " ", error.getvalue())


def own(kind: type[NamedSettings]) -> list[str]:
    """The parameter names of a class."""
    return [each.name for each in dataclasses.fields(kind) if each.name != "name"]  # type: ignore[arg-type]


def test_listed_names_equal_those_of_the_classes() -> None:
    assert list(get_args(ObjectiveName)) == Objective.names()
    assert list(get_args(CorrectionName)) == Correction.names()
    for kind in [*OBJECTIVES, *CORRECTIONS]:
        assert kind().name == kind.own_name()


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_name_selects_its_class_with_exactly_its_own_flags(kind: type[Objective]) -> None:
    name = kind.own_name()
    assert cli(Settings, args=["--objective", name]).objective == Objective.defaults_of(name)
    others = {flag for other in OBJECTIVES for flag in own(other)} - {*own(kind)}
    for flag in sorted(others):
        given = f"--{kind.flag(flag)}"
        assert given in refusal(f"--objective={name}", f"{given}=1"), f"{given} is not a flag of {name}"


def values(kind: type[NamedSettings], name: str) -> st.SearchStrategy[Any]:
    """Values of a parameter that its range or its list of words allows."""
    allowed, words = limits(kind)[name]
    if words:
        return st.sampled_from(words)
    assert allowed is not None, f"{kind.__name__}.{name} has no range"
    if get_type_hints(kind)[name] is int:
        return st.integers(int(allowed.low), int(allowed.high))
    return st.floats(allowed.low, allowed.high)


@st.composite
def named(draw: st.DrawFn, kinds: list[Any]) -> NamedSettings:
    """Settings of one of these classes with any allowed parameters."""
    kind: type[NamedSettings] = draw(st.sampled_from(kinds))
    chosen = {name: draw(values(kind, name)) for name in own(kind) if draw(st.booleans())}
    try:
        return kind(**chosen)
    except ValueError:  # parameters that contradict each other
        assume(False)
        raise


@settings(max_examples=30, deadline=None)
@given(named(OBJECTIVES))
def test_an_objective_round_trips_through_the_command_line(objective: Objective) -> None:
    changed = {name: getattr(objective, name) for name in own(type(objective))}
    args = [f"--{objective.flag(name)}={value}" for name, value in changed.items()]
    assert cli(Settings, args=[*args, "--objective", objective.name]).objective == objective


@given(named([*OBJECTIVES, *CORRECTIONS]))
def test_named_settings_round_trip_through_json(value: NamedSettings) -> None:
    """Read by their family, which has no parameters itself."""
    plain = json.loads(json.dumps(to_plain(value)))
    family: Any = Objective if isinstance(value, Objective) else Correction
    assert from_plain(family, plain) == value and type(from_plain(family, plain)) is type(value)
    loss = LossSettings(corrections=(value,)) if isinstance(value, Correction) else LossSettings()
    assert from_plain(LossSettings, json.loads(json.dumps(to_plain(loss)))) == loss


@pytest.mark.parametrize("kind", [*OBJECTIVES, *CORRECTIONS])
def test_a_wrong_parameter_is_refused_by_its_flag(kind: type[NamedSettings]) -> None:
    for name in own(kind):
        for wrong in (-1, 10**20, float("nan"), float("inf"), "nonsense", None):
            with pytest.raises(ValueError, match=rf"^{re.escape(kind.flag(name))} must "):
                kind(**{name: wrong})
    with pytest.raises(TypeError, match="positional"):
        kind(kind.own_name())  # type: ignore[call-arg]


@pytest.mark.parametrize("family", [Objective, Correction])
def test_an_unknown_name_is_refused_with_all_names(family: type[NamedSettings]) -> None:
    message = rf"^{re.escape(family.flag('name'))} must be one of {', '.join(family.names())}, got "
    for wrong in ("gsp", "", "Objective"):
        with pytest.raises(ValueError, match=message):
            family.of_name(wrong)
        with pytest.raises(ValueError, match=message):
            from_plain(family, {"name": wrong})
    with pytest.raises(ValueError, match=message):
        from_plain(family, {})


def test_an_unknown_name_on_the_command_line_is_refused_with_all_names() -> None:
    for args in (["--objective", "gsp"], ["--objective=gsp"], ["--objective=gspo", "--objective", "gsp"]):
        message = refusal(*args)
        assert "--objective" in message and "'gsp'" in message
        assert [name for name in Objective.names() if name not in message] == []
    assert "--objective" in refusal("--objective")


def test_the_last_of_several_names_wins() -> None:
    args = ["--objective", "gspo", "--steps", "3", "--objective=cispo", "--objective.clip-high", "4"]
    found = cli(Settings, args=args)
    assert found.steps == 3 and found.objective == Objective.of_name("cispo")(clip_high=4.0)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Distilling(Settings):
    """A recipe with an objective and parameters of its own."""

    objective: Objective = field(default_factory=lambda: Distillation(top=4))


def test_parameters_of_a_recipe_belong_to_its_own_objective() -> None:
    assert cli(Distilling, args=[]).objective == Distillation(top=4)
    forward = Distillation(top=4, divergence="forward")
    for args in ([], ["--objective", "distillation"]):
        assert cli(Distilling, args=[*args, "--objective.divergence", "forward"]).objective == forward
    assert cli(Distilling, args=["--objective", "gspo"]).objective == GSPO()
    assert "--objective.top" in refusal("--objective=gspo", "--objective.top=4", kind=Distilling)


@dataclass(frozen=True)
class Contradicted(CheckedSettings, flags=""):
    """A recipe whose shared settings fit its own objective only."""

    objective: Objective = field(default_factory=PPOClip)
    loss: LossSettings = field(default_factory=lambda: LossSettings(positives_only=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_objective(self.objective, self.loss)


def test_a_name_may_be_given_with_flags_that_resolve_its_conflict_with_the_recipe() -> None:
    args = ["--objective", "distillation"]
    assert cli(Contradicted, args=[*args, "--loss.no-positives-only"]).objective == Distillation()
    assert "trainer.loss.positives-only: the objective distillation" in refusal(*args, kind=Contradicted)


def test_help_has_the_flags_of_the_named_objective(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli(Settings, args=["--objective", "sapo", "--help"], description="Of this recipe.")
    output = capsys.readouterr().out
    assert ended.value.code == 0 and "Of this recipe." in output and "--objective.tau-negative" in output
    assert "clip-high" not in output and "hidden" not in output


def test_another_name_without_its_class_is_refused_with_advice() -> None:
    """As with plain tyro."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(SystemExit):
        tyro.cli(Settings, args=["--objective", "gspo"])
    message = re.sub(r"[\s\u2500-\u257f]+", " ", error.getvalue())
    assert [part for part in ("objective gspo: ", "ppo_clip", "GSPO", "monarch_rl.cli()") if part not in message] == []
    with pytest.raises(ValueError, match="^objective gspo: .*GSPO"):
        PPOClip(name="gspo")


def test_corrections_are_given_by_name() -> None:
    assert cli(Settings, args=[]).corrections is None
    assert cli(Settings, args=["--corrections"]).corrections == ()
    assert cli(Settings, args=["--corrections", "tis", "opsm"]).corrections == (TIS(), OPSM())
    assert [name for name in Correction.names() if name not in refusal("--corrections", "tis", "opms")] == []


def test_a_field_that_is_not_a_flag_keeps_the_recipes_value() -> None:
    assert cli(Settings, args=["--steps", "2"]).hidden.lag_discount == 0.5
    assert "--hidden.lag-discount" in refusal("--hidden.lag-discount", "1")


def test_a_removed_flag_is_refused_with_its_replacement() -> None:
    @dataclass(frozen=True)
    class Run(Settings):
        trainer: TrainerSettings = field(default_factory=TrainerSettings)
        checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
        by: str = "own"

    for args, replacement in (
        (["--trainer.loss.policy-loss", "gspo"], "--objective"),
        (["--trainer.loss.clip_high=0.3"], "--objective.clip-high"),
        (["--steps=2", "--checkpoint.no-keep-best"], "checkpoint.keep_best"),
        (["--trainer.critic.lr", "1e-5"], "recipes/ppo.py"),
        (["--weights.deadline-s=5"], "--patience"),
    ):
        given = next(arg for arg in args if "." in arg).partition("=")[0]
        message = refusal(*args, kind=Run)
        assert message.startswith(f"error: {given} was removed in monarch_rl 0.2: ") and replacement in message
    assert cli(Run, args=["--by=mine"]).by == "mine", "a recipe may have a flag of that name"
    for flag, replacement in MOVED_FLAGS.items():
        assert replacement in refusal(f"--{flag}=1")


@dataclass(frozen=True, kw_only=True)
class Kind(NamedSettings, flags="kind"):
    name: str


@dataclass(frozen=True, kw_only=True)
class Round(Kind):
    name: str = "round"
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Oval(Round):
    name: str = "oval"


def test_a_named_class_may_derive_from_another_one() -> None:
    assert Kind.names() == ["round", "oval"] and Round.names() == ["round", "oval"] and Oval.names() == ["oval"]
    assert Kind.of_name("oval") is Round.of_name("oval") is Oval and Kind.of_name("round") is Round
    assert from_plain(Kind, to_plain(Oval(radius=2.0))) == Oval(radius=2.0)
    with pytest.raises(ValueError, match="^kind must be one of oval, got 'round'"):
        Oval.of_name("round")


# -- saved settings as defaults ---------------------------------------------------------------------------------------


def test_saved_settings_replace_defaults_and_flags_override_them() -> None:
    """Including nested settings that lack some fields, and another objective."""
    saved = {"objective": to_plain(GSPO(clip_high=0.5)), "hidden": {"entropy_coefficient": 0.25}}
    with saved_defaults(saved):
        found = cli(Settings, args=["--objective.clip-low=0.25"])
    assert found.objective == GSPO(clip_low=0.25, clip_high=0.5)
    assert found.hidden == LossSettings(lag_discount=0.5, entropy_coefficient=0.25)
    assert cli(Settings, args=[]) == Settings(), "saved defaults apply to one command line"
    with pytest.raises(ValueError, match="monarch_rl.cli"), saved_defaults(saved):
        pass


def test_unreadable_saved_settings_are_refused_with_the_version_that_reads_them() -> None:
    saved = {"hidden": {"policy_loss": "gspo"}}
    for writer, named in (
        ("0.1.0", "use monarch_rl 0.1.0"),
        ("", "use that version"),
        (version("monarch_rl"), "recipe"),
    ):
        with (
            pytest.raises(ValueError, match=f"LossSettings has no policy_loss.*: .*{named}"),
            saved_defaults(saved, writer),
        ):
            cli(Settings, args=[])
    assert cli(Settings, args=[]) == Settings()


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ("--trainer.learning-rate", "--trainer.lr"),
        ("--learning_rate=1e-6", "--trainer.lr"),
        ("--num-generations", "--rollout.group-size"),
        ("--per-device-train-batch-size", "--groups-per-step"),
        ("--beta", "--trainer.reference"),
        ("--objective.epsilon", "--objective.clip-low"),
        ("--kl-coef", "--trainer.loss.kl-coefficient"),
        ("--actor_rollout_ref.rollout.n", "--rollout.group-size"),
        ("actor_rollout_ref.rollout.n=8", "--rollout.group-size"),
        ("+trainer.save_freq=8", "--checkpoint.every-steps"),
        ("--n_samples_per_prompt", "--rollout.group-size"),
        ("--actor_learning_rate=1e-6", "--trainer.lr"),
        ("--rollout.n", "--rollout.group-size"),
    ],
)
def test_a_setting_of_another_project_is_refused_with_the_flag_here(given: str, flag: str) -> None:
    message = refusal(given, "1")
    assert given.partition("=")[0] in message and flag in message.replace(",", " ").split()


@pytest.mark.parametrize(
    "given",
    [
        "reward_model.enable=True",
        "custom_reward_function.path=reward.py",
        "critic.optim.lr=1e-5",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        "+actor_rollout_ref.rollout.multi_turn.enable=True",
    ],
)
def test_a_key_of_verl_is_not_taken_for_another_one_with_the_same_end(given: str) -> None:
    """No other setting is named, not even for a reward model's ``enable`` that of the group filter."""
    assert hint(given.partition("=")[0].lstrip("+")) is None
    assert "here:" not in refusal(given)


def test_a_flag_without_its_prefix_is_answered_with_the_whole_flag() -> None:
    assert "--trainer.minibatches" in refusal("--mini_batches=2", "--minibatches=2", kind=Several).split()
    assert "--checkpoint.keep" in refusal("--trainer.keep", "2", kind=Several).split()
    found = cli(Settings, args=["--objective", "distillation", "--objective.top", "8"])  # no flag of the default class
    assert found.objective == Distillation(top=8)


def test_settings_of_other_projects_and_removed_flags_are_refused_together() -> None:
    message = refusal("--learning-rate", "1", "--trainer.betas", "1", "--save-steps", "2")
    assert message.count("error: ") == 3 and "--learning-rate" in message
    assert "--trainer.betas" in message and "--save-steps" in message


@dataclass(frozen=True)
class WithBeta(Settings):
    """A recipe with a flag of the name of another project's setting."""

    beta: float = 0.0


def test_a_flag_of_the_recipe_wins_over_the_name_of_another_project() -> None:
    assert cli(WithBeta, args=["--beta", "1"]).beta == 1
    assert cli(Settings, args=["--steps", "3", "--objective.clip-low=0.1"]).steps == 3


def test_the_flags_that_take_the_place_of_other_projects_settings_exist() -> None:
    recipes = json.loads((Path(__file__).parents[1] / "references" / "flags.json").read_text()).values()
    exist = {f"--{flag}" for flags in recipes for flag in flags}
    named = {
        flag
        for text in [*TRL.values(), *VERL.values(), *OPENRLHF.values()]
        for flag in re.findall(r"--[a-z.-]+[a-z]", text)
    }
    assert len(named) > 30 and named - exist == set()


@dataclass(frozen=True)
class Several(CheckedSettings, flags=""):
    """A recipe with settings of several packages, and a contradiction of its own."""

    steps: Annotated[int, Range(1, 10)] = 10
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def contradictions(self) -> list[str]:
        return ["steps are fewer than ranks"] * (self.steps < self.trainer.ranks)


def test_all_wrong_settings_are_refused_at_once() -> None:
    """Over all classes; contradictions, which rely on allowed values, only where all values are allowed."""
    given = ["--steps=0", "--trainer.lr=nan", "--trainer.minibatches=0", "--checkpoint.keep=-1"]
    message = refusal(*given, kind=Several)
    assert [flag for flag in given if flag[2:].partition("=")[0] not in message] == []
    assert message.count("error: ") == 4 and "fewer" not in message
    with pytest.raises(ValueError, match=r"trainer\.lr(.|\n)*trainer\.minibatches"):
        TrainerSettings(lr=float("nan"), minibatches=0)
    unread = ["--trainer.loss.kl-estimate=k1", "--trainer.loss.kl-in=reward"]
    both = refusal("--steps=1", "--trainer.ranks=2", *unread, kind=Several)
    assert "kl-estimate" in both and "kl-in" in both and "fewer" not in both
    assert "fewer" in refusal("--steps=1", "--trainer.ranks=2", kind=Several)


@dataclass(frozen=True)
class Divided(CheckedSettings, flags=""):
    """A recipe whose own check relies on the range of its setting."""

    parts: Annotated[int, Range(1, 10)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if 10 % self.parts:
            raise ValueError("10 steps cannot be divided")


def test_a_recipes_own_check_runs_after_that_of_the_ranges() -> None:
    assert "at least 1" in refusal("--parts=0", kind=Divided)
    assert "divided" in refusal("--parts=3", kind=Divided)

"""The settings of a whole run, and the checks that involve several packages.

:func:`check` runs all checks of a run. Those of one package's settings are next to them: ``rollout/settings.py``,
``generator/settings.py``, ``trainer/settings.py``, ``trainer/loss_settings.py``.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch

from monarch_rl.algorithms.objectives import Objective, PPOClip
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.checkpoint.journal import JournalSettings
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.errors import Refusals, SettingsError
from monarch_rl.generator.gpu import check_driver, check_environment
from monarch_rl.generator.settings import (
    GeneratorSettings,
    check_attention,
    check_context,
    check_served,
    engine_limits,
)
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.folder import full_name, resolve_model
from monarch_rl.model.tensors import check_folder, model_bytes
from monarch_rl.model.tokens import FolderTokenizer
from monarch_rl.observe.redact import redact_values
from monarch_rl.observe.trackers import check_trackers
from monarch_rl.pipeline.memory import Sides, check_cache, check_cpu_trainer, check_gpu_memory, cpu_weights, plan_memory
from monarch_rl.pipeline.recovery import RecoverySettings
from monarch_rl.rollout.evaluation import EvaluationSettings
from monarch_rl.rollout.settings import (
    SLOW_TOKENS_PER_S,
    RolloutSettings,
    check_characters,
    check_lengths,
    check_processes,
    check_prompts,
    check_rollout,
)
from monarch_rl.runtime.devices import Devices
from monarch_rl.runtime.machine_memory import memory_limit
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import FOREVER_S, Automatic, CheckedSettings, Range, flattened, to_plain, unchecked
from monarch_rl.tasks.mixture import Mixture
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.loss_settings import check_objective
from monarch_rl.trainer.settings import TrainerSettings, check_hosts, check_trained
from monarch_rl.watch.watch import STALL_S
from monarch_rl.weights.transport import TRANSPORTS, TransferSettings, transports_on

S = TypeVar("S", bound="RunSettings")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Allowed names of runs."""
SHORTEST_S = 30.0
"""A `patience` below 1 makes no deadline shorter than this."""
SMALL_CORES = 2
"""Cores of a machine without GPUs up to which the defaults are one trainer rank and one replica."""
UPDATE_S = 600.0
"""Seconds that a step may take, however few tokens it generates."""


@dataclass(frozen=True)
class RunSettings(CheckedSettings, flags=""):
    """The settings of every run. A recipe subclasses it to change defaults and add fields."""

    model: str = "Qwen/Qwen3-0.6B"
    """Model to train (Qwen3, Qwen3-MoE, Qwen2, Llama, Mistral, DeepSeek-V3): a Hugging Face folder, or a Hub name,
    `org/name` or `org/name@revision`. The run's settings record the absolute path or the commit."""
    steps: Annotated[int, Range(1, 10**9)] = 250
    """Batches to train on. Each produces one policy version, in trainer.epochs x trainer.minibatches optimiser steps
    (1 by default)."""
    colocate: bool = False
    """Let trainer ranks and generator replicas share devices, so that one GPU is enough. They divide its memory, and
    training and generation slow each other down (docs/memory.md)."""
    groups_per_step: Annotated[int, Range(1, 1_000_000)] = 32
    """Prompts per batch. Each prompt is rolled out rollout.group-size times."""
    held_out: Annotated[int, Range(1, 1_000_000)] = 200
    """Held-out items per evaluation. Sets listed in evaluation.sets are evaluated in full."""
    evaluate_every: Annotated[int, Range(0, 10**9, "0 is only before and after training")] = 0
    """Steps between evaluations during training; 0 evaluates only before and after training. Training rollouts continue
    during an evaluation, but the next update waits for its end unless evaluation.share is set."""
    output: Path = Path("runs")
    """Folder in which each run creates its own folder."""
    name: str = ""
    """Name of the run, with which its folder begins: letters, digits, `.`, `_` and `-`. Empty: the recipe's name."""
    resume: str | None = None
    """Folder of the run to resume from its newest checkpoint. `auto`: the newest unfinished run of this recipe in
    `output` (with a `name`: the newest of that name), or a new run if there is none. Repeat the run's other flags:
    changed settings are listed, and refused if the run cannot resume with them."""
    track: tuple[str, ...] = ("tensorboard",)
    """Trackers that get the metrics besides metrics.jsonl: `tensorboard` (4 KB per step), `wandb` (Weights & Biases;
    sends metrics, settings and rollouts to its servers unless WANDB_MODE=offline; project WANDB_PROJECT or
    monarch_rl), or `none`. One that fails is dropped, and no step waits for one."""
    report: bool = True
    """Write report.html, a page that shows the run in any browser, when the run has ended, failed, or was interrupted
    by Ctrl-C."""
    probe: bool = True
    """Run one item of each task before the engines start, with a stand-in for the model, to find mistakes in episodes
    and rewards within 10 s. Turn it off if they have effects that must not happen once more. Environments and judges
    are not called."""
    patience: Annotated[float, Range(0.1, 1000)] = 1.0
    """Multiplies the deadlines of the start of an engine, a request to it, a slot, a transfer (and the number of
    attempts at it), a drain and an update. Raise it on a slow or crowded machine or network."""
    update_deadline_s: NotAFlag[Annotated[float | None, Range(30, FOREVER_S)]] = None
    """Seconds that a step may take, from waiting for its batch to the end of its update, before the run fails. None:
    600, or 300 + rollout.max-new-tokens / 20 if that is more. After the first step the limit drops to 10 times the
    longest recent step, but not below the deadline of an engine's start + 60."""
    stall_s: Annotated[float, Range(2, FOREVER_S)] = STALL_S
    """Seconds after which a stuck process is reported and replaced; the run ends if it cannot be replaced. If nothing
    advances but no process is stuck, the run ends after twice as long."""
    objective: Objective = field(default_factory=PPOClip)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    generator: GeneratorSettings = field(default_factory=GeneratorSettings)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    weights: TransferSettings = field(default_factory=TransferSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    journal: JournalSettings = field(default_factory=JournalSettings)

    @property
    def first_replica_device(self) -> int:
        """Number of the replicas' first device; trainer ranks start at device 0."""
        return 0 if self.colocate else self.trainer.ranks

    @property
    def first_frozen_device(self) -> int:
        """Number of the first device of the frozen models' engines, which share none."""
        return memory_sides(self).num_devices

    @property
    def transfers(self) -> TransferSettings:
        """The transfer settings with the transport resolved: with ``colocate`` the default is ``shared_memory``."""
        if self.colocate and self.weights.transport is None:
            return replace(self.weights, transport="shared_memory")
        return self.weights

    @property
    def update_limit_s(self) -> float:
        """Seconds that a step may take, without ``patience``."""
        generation_s = self.rollout.max_new_tokens / SLOW_TOKENS_PER_S
        return self.update_deadline_s or max(UPDATE_S, UPDATE_S / 2 + generation_s)

    def with_patience(self: S) -> S:
        """The settings with ``patience`` multiplied into the deadlines, and a patience of 1. Actors get these;
        ``settings.json`` has the deadlines without it, so that a resumed run may have another patience."""
        return replace(
            self,
            patience=1.0,
            generator=replace(
                self.generator,
                start_deadline_s=self.generator.start_deadline_s and self.patient_s(self.generator.start_deadline_s),
                drain_deadline_s=self.patient_s(self.generator.drain_deadline_s, 1.0),
            ),
            rollout=replace(
                self.rollout,
                generate_deadline_s=self.patient_s(self.rollout.generate_limit_s),
                slot_deadline_s=self.patient_s(self.rollout.slot_deadline_s),
            ),
            weights=replace(
                self.transfers,
                deadline_s=self.patient_s(self.weights.deadline_s, 1.0),
                attempts=min(math.ceil(self.patience * self.weights.attempts), 1000),
            ),
            update_deadline_s=self.patient_s(self.update_limit_s),
        )

    def patient_s(self, seconds: float, shortest_s: float = SHORTEST_S) -> float:
        """A deadline multiplied by ``patience``, but not below ``shortest_s`` where it was not."""
        return min(max(self.patience * seconds, min(seconds, shortest_s)), FOREVER_S)

    @property
    def default_objective(self) -> Objective:
        """The objective of the recipe, if no flag gives another one."""
        # Read from the field, because a recipe's settings may have other fields without a default.
        own: Any = type(self).__dataclass_fields__["objective"]
        default: Objective = own.default if own.default_factory is MISSING else own.default_factory()
        return default

    def contradictions(self) -> Iterator[str]:
        if self.name and not NAME.fullmatch(self.name):
            yield (
                f"name {self.name!r} must be at most 100 letters, digits, '.', '_' and '-', and begin with a letter or "
                "digit: the run's folder begins with it"
            )
        try:
            check_objective(self.objective, self.trainer.loss)
        except SettingsError as error:
            yield str(error)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due after ``step``. False for the last step, after which recipes always evaluate."""
        return self.evaluate_every > 0 and step % self.evaluate_every == 0 and step < self.steps


def prepare(s: S, offered: Devices, task: Task | None = None) -> tuple[S, ModelConfig]:
    """Run :func:`check`; returns the settings with automatic values resolved and the model's folder, and the model's
    config. Idempotent."""
    s = sized(s, offered)
    model = check(s, offered, task)
    return replace(resolve(s, offered, model), model=str(model.folder)), model


def to_record(s: RunSettings) -> dict[str, Any]:
    """The settings as JSON, with the full name of the model, by which checkpoints and tools find it later, from other
    directories, and when a branch on the Hub has moved, and without what looks like a key."""
    record: dict[str, Any] = redact_values(to_plain(s) | {"model": full_name(s.model)})
    return record


def changed_settings(given: RunSettings) -> dict[str, list[Any]]:
    """Default and given value of each setting that is not the default of the recipe's class, by name
    (``trainer.lr``); empty if that class cannot be made without arguments."""
    try:
        with unchecked():  # defaults alone may contradict each other: a flag that has to be given
            defaults = type(given)()
    except Exception:  # a recipe's own __post_init__ may raise anything
        return {}
    old, new = (dict(flattened(to_plain(settings))) for settings in (defaults, given))
    return {name: [old.get(name), value] for name, value in new.items() if old.get(name) != value}


def sized(s: S, offered: Devices) -> S:
    """The settings with the numbers of trainer ranks and replicas for this machine, where they are not given.

    On two cores, processes beyond one of each kind only take turns: a step of the main job takes longer
    (benchmarks/results/trl_main_cpu.txt).
    """
    cores = len(os.sched_getaffinity(0))
    small = offered.kind == "cpu" and offered.num_hosts == 1 and cores <= SMALL_CORES
    trainer, generator = s.trainer, s.generator
    if isinstance(trainer.ranks, Automatic):
        fewest = math.lcm(trainer.tp, trainer.expert_parallel) if small else int(trainer.ranks)
        trainer = replace(trainer, ranks=fewest)
    if isinstance(generator.replicas, Automatic):
        generator = replace(generator, replicas=1 if small else int(generator.replicas))
    return replace(s, trainer=trainer, generator=generator)


def chosen_sizes(given: RunSettings, resolved: RunSettings) -> list[str]:
    """The numbers of trainer ranks and replicas that were not given, as text."""
    sizes = [
        ("trainer.ranks", given.trainer.ranks, resolved.trainer.ranks),
        ("generator.replicas", given.generator.replicas, resolved.generator.replicas),
    ]
    return [f"{flag} {chosen}" for flag, value, chosen in sizes if isinstance(value, Automatic)]


def check(s: RunSettings, offered: Devices, task: Task | None = None) -> ModelConfig:
    """Refuse settings that cannot work, before anything is spawned; returns the model's config.

    Args:
        offered: the devices of the launch.
        task: the task to train on, if it is known.

    Raises:
        ValueError: names all wrong settings that do not depend on each other, and says what to do.
    """
    refusals = Refusals()
    with refusals:
        _check_combinations(s, task)
    with refusals:
        check_rollout(s.rollout, s.groups_per_step, s.trainer.data_ranks)
    with refusals:
        s.buffer.window_for(s.groups_per_step)
    with refusals:
        _check_updates(s)
    with refusals:
        check_trackers(s.track)
    with refusals:
        _check_devices(s, offered)
        _check_environment(offered)
    prompts = _check_here(s, offered, task, refusals)
    refusals.raise_all()  # before the model, which may have to be downloaded
    model = resolve_model(s.model)
    _check_generation(s, offered, model, prompts, refusals)
    with refusals:
        check_trained(model, s.trainer)
    with refusals:
        _check_memory(s, model, offered)
    refusals.raise_all()
    _check_output(s.output)  # creates it
    return model


def prepare_engine(s: RunSettings, offered: Devices, task: Task | None = None) -> tuple[GeneratorSettings, ModelConfig]:
    """The settings of a single engine without a run, with automatic values resolved, and the model's config.

    Only checks that concern this engine's rollouts are made: not those of trainer ranks and other replicas.

    Args:
        offered: the devices of this machine.
        task: the task to roll out, if it is known.

    Raises:
        ValueError: names the setting and says what to do.
    """
    s = replace(s, generator=replace(s.generator, replicas=1), rollout=replace(s.rollout, workers=1))
    refusals = Refusals()
    with refusals:
        _check_combinations(s, task)
    with refusals:
        check_rollout(s.rollout, s.groups_per_step, data_ranks=1)
    with refusals:
        offered.check(s.generator.tp, "one generator replica")
        _check_environment(offered)
    prompts = _check_here(s, offered, task, refusals)
    refusals.raise_all()
    model, sides = resolve_model(s.model), engine_sides(s)
    _check_generation(s, offered, model, prompts, refusals)
    with refusals:
        check_gpu_memory(model, sides, offered)
    refusals.raise_all()
    return resolve(s, offered, model, sides).with_patience().generator, model


def resolve(s: S, offered: Devices, model: ModelConfig | None = None, sides: Sides | None = None) -> S:
    """The settings with automatic values resolved for these devices.

    Args:
        model: None leaves values that depend on the model unresolved.
        sides: the settings for which memory is planned; None uses those of the run.
    """
    sides = sides or memory_sides(s)
    on_gpu = offered.kind == "cuda"
    requests = s.generator.running_requests(on_gpu)
    limit_s = s.generator.start_limit_s(on_gpu, 0 if model is None else model_bytes(model))
    fraction, tokens = s.generator.memory_fraction, s.generator.max_total_tokens
    if model is not None and offered.memory:
        plan = plan_memory(model, sides, offered.memory)
        fraction = plan.memory_fraction
        if sides.colocate:
            tokens = plan.cache_tokens
    resolved = replace(
        s.generator,
        max_running_requests=requests,
        start_deadline_s=limit_s,
        memory_fraction=fraction,
        max_total_tokens=tokens,
    )
    return replace(s, generator=resolved, weights=s.transfers)


def memory_sides(s: RunSettings) -> Sides:
    """The settings that determine how much memory a run takes."""
    return Sides(s.trainer, s.generator, s.transfers, s.colocate)


def engine_sides(s: RunSettings) -> Sides:
    """The same for a single engine without a run. It receives no versions, so it is planned with ``shared_memory``, for
    which a replica reserves no memory."""
    episode = TrainerSettings(tokens_per_microbatch=s.trainer.tokens_per_microbatch)
    return Sides(episode, replace(s.generator, replicas=1), TransferSettings("shared_memory"), trained=False)


def _check_environment(offered: Devices) -> None:
    check_driver(torch.version.cuda, torch.cuda.is_available(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if offered.kind == "cuda":
        check_environment()


def _check_here(s: RunSettings, offered: Devices, task: Task | None, refusals: Refusals) -> list[str]:
    """Refuse what does not work here with any model, and a task that cannot work; returns prompts of the task."""
    prompts: list[str] = []
    with refusals:
        check_processes(s.rollout, os.cpu_count() or 1)
    with refusals:
        check_attention(s.generator, offered.kind == "cuda")
    with refusals:
        prompts += () if task is None else task.check()
    return prompts


def _check_generation(
    s: RunSettings, offered: Devices, model: ModelConfig, prompts: list[str], refusals: Refusals
) -> None:
    """Refuse a model that cannot be served here, or prompts for which it has no room."""
    on_gpu = offered.kind == "cuda"
    with refusals:
        check_folder(model)
    with refusals:
        check_served(model, s.generator, on_gpu)
    with refusals:
        if not on_gpu:
            check_cache(model, s.generator, memory_limit())
    with refusals:
        check_context(model, s.generator)
        limits = episode_limits(s, model, on_gpu)
        check_lengths(s.rollout, limits)
        _check_prompts(s, FolderTokenizer(model), limits, prompts)


def _check_memory(s: RunSettings, model: ModelConfig, offered: Devices) -> None:
    """Refuse settings that do not fit the memory of the GPUs, or of this machine."""
    check_gpu_memory(model, memory_sides(s), offered)
    if offered.kind == "cpu":
        per_process = resource.getrlimit(resource.RLIMIT_AS)[0]
        # On several hosts, the generators may be on others.
        engines = cpu_weights(model, s.generator, s.trainer.lora) if offered.num_hosts == 1 else 0
        ranks, memory = min(s.trainer.ranks, offered.per_host), max(0, memory_limit() - engines)
        if per_process != resource.RLIM_INFINITY:  # `ulimit -v`
            memory = min(memory, ranks * per_process)
        check_cpu_trainer(model, s.trainer, s.transfers, memory, ranks, engines)


def _check_prompts(s: RunSettings, tokenizer: FolderTokenizer, limits: dict[str, int], prompts: list[str]) -> None:
    """Refuse prompts that do not fit within these limits."""
    if not prompts:
        return
    characters = max(limits.values()) * tokenizer.longest_token
    check_characters(prompts, characters)
    tokens = tokenizer.count([prompt[: characters + 1] for prompt in prompts])
    if tokens is not None:
        check_prompts(s.rollout, limits, tokens)


def episode_limits(s: RunSettings, config: ModelConfig, on_gpu: bool) -> dict[str, int]:
    """Maximum tokens of a sequence, prompts included, by the flag that sets each limit. The smallest of them is the
    ``episode_limit`` of workers and groups.

    One less with expert routes: a replica that resumes a lost one's request may generate one more token to report them.
    """
    limits = {"trainer.tokens-per-microbatch": s.trainer.tokens_per_microbatch}
    limits |= engine_limits(config, s.generator, on_gpu)
    return {name: tokens - s.trainer.keeps_expert_routes for name, tokens in limits.items()}


def normaliser_tokens(s: RunSettings) -> int:
    """Tokens per episode in the normaliser of the ``constant`` aggregation.

    By default those of one answer, not of the longest possible episode: gradients divided by the latter are so small
    that ``trainer.max_grad_norm`` never clips, and that AdamW's epsilon matters.
    """
    return s.trainer.loss.max_tokens or s.rollout.max_new_tokens


def _check_combinations(s: RunSettings, task: Task | None) -> None:
    refusals = Refusals()
    if s.rollout.min_p and s.generator.deterministic:
        refusals.add(
            "rollout.min-p cannot be used with GeneratorSettings(deterministic=True), which seeds all sampling"
        )
    if task is not None and task.held_out and s.held_out > (items := len(task.held_out_items())):
        refusals.add(
            f"held-out {s.held_out} exceeds the {items} held-out items of task {task.name}: lower it, or hold out more "
            "(task.held-out-size for a data set of reasoning-gym)"
        )
    if task is not None and task.part_of is None and task.success_reward is None:
        best = s.evaluation.best if re.search(r"/(accuracy|pass_at_)", s.evaluation.best) else ""
        if best or s.evaluation.pass_at:
            refusals.add(
                f"evaluation.{f'best {best}' if best else 'pass-at'}: task {task.name} does not define from which "
                "reward on an episode is a success: give it success_reward=1.0, for example, or leave the flag out"
            )
    if isinstance(task, Mixture) and task.groups_per_step not in (None, s.groups_per_step):
        refusals.add(
            f"task {task.name} was created with groups_per_step={task.groups_per_step}, and groups-per-step is "
            f"{s.groups_per_step}: its steps would not be those of the run. Pass groups_per_step=s.groups_per_step"
        )
    elif isinstance(task, Mixture) and task.items_by_step is not None:
        try:
            task.schedule.check_steps(s.steps - 1 + (s.buffer.max_policy_lag or 0))
        except ValueError as error:
            refusals.add(
                f"task {task.name}: {error}. Steps are 0 to {s.steps - 1} (steps), and groups of up to "
                "buffer.max-policy-lag later ones are started, too"
            )
    missing = [name for name in s.evaluation.sets if task is not None and name not in task.held_out]
    if missing and task is not None:
        existing = ", ".join(task.held_out) or "none"
        refusals.add(f"evaluation.sets {missing[0]}: task {task.name} has no such held-out set; it has {existing}")
    refusals.raise_all()


def _check_updates(s: RunSettings) -> None:
    if s.trainer.minibatches > s.groups_per_step:
        raise SettingsError(
            f"trainer.minibatches {s.trainer.minibatches} exceeds groups-per-step {s.groups_per_step}, but a group is "
            "never split among mini-batches: lower trainer.minibatches, or raise groups-per-step"
        )
    if s.trainer.profile_steps is not None and s.trainer.profile_steps[1] > s.steps:
        first, last = s.trainer.profile_steps
        raise SettingsError(
            f"trainer.profile-steps {first} {last}: the run has {s.steps} steps, and the trace is written after the "
            "last of these: choose earlier ones, or raise steps"
        )


def _check_devices(s: RunSettings, offered: Devices) -> None:
    needed = memory_sides(s).num_devices
    replicas = f"{s.generator.replicas} generator replicas" + (f" of {s.generator.tp}" if s.generator.tp > 1 else "")
    if s.colocate:
        offered.check(needed, f"{s.trainer.ranks} trainer ranks, which share devices with {replicas}")
    else:
        otherwise = "Or let trainer ranks and replicas share devices: --colocate."
        offered.check(needed, f"{s.trainer.ranks} trainer ranks + {replicas}", otherwise)
    check_hosts(s.trainer, offered.per_host)
    check_transport(s.transfers, offered, needed, s.colocate)


def check_transport(weights: TransferSettings, offered: Devices, needed: int, colocate: bool) -> None:
    """Refuse a transport that does not work on these devices.

    Args:
        needed: devices that trainer ranks and replicas take together, which are the first of ``offered``.
        colocate: whether trainer ranks and replicas share these devices.

    Raises:
        ValueError: names transports that work.
    """
    on_gpu, chosen = offered.kind == "cuda", weights.resolved_transport
    spans_hosts, shares_gpus = needed > offered.per_host, colocate and on_gpu
    working = [
        name
        for name in transports_on(on_gpu)
        if not (spans_hosts and TRANSPORTS[name].one_host) and not (shares_gpus and TRANSPORTS[name].nccl)
    ]
    omit = ", or omit it" if colocate and "shared_memory" in working else ""  # the default with colocate
    give = f"give weights.transport {' or '.join(working)}{omit}"
    if shares_gpus and any(t.nccl for t in weights.candidates):  # `auto`, too: it would try NCCL
        raise SettingsError(
            f"weights.transport {chosen} cannot be used with colocate: NCCL does not support two ranks on one GPU; "
            f"{give}"
        )
    if spans_hosts and all(t.one_host for t in weights.candidates):
        default = " (the default with colocate)" if colocate and chosen == "shared_memory" else ""
        raise SettingsError(
            f"weights.transport {chosen}{default} works on one host only, and the run needs {needed} devices, more "
            f"than the {offered.per_host} of one host: {give}"
        )
    if not on_gpu and all(t.gpu_only for t in weights.candidates):
        raise SettingsError(f"weights.transport {chosen} needs GPUs, and this run is on CPUs: {give}")


def _check_output(folder: Path) -> None:
    """Refuse an output folder in which no run folder can be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"output {folder} cannot be created ({reason}): choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise SettingsError(f"output {folder} is not writable: choose another folder")

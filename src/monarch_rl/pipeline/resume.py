"""Resuming a run: which one, whether the settings allow it, and resetting its folder to the checkpoint.

``--resume RUN`` names a run's folder; ``--resume auto`` takes the newest unfinished run of this recipe that no process
is running. A recipe that is restarted after a loss, by torchrun or by its supervisor, resumes automatically. torchrun
does not notify a recipe of a restart: it is recognised by the job's id, or by the process that starts the ranks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from monarch_rl.buffer.actor import SavedBuffer
from monarch_rl.checkpoint.folders import (
    GROUPS,
    Manifest,
    complete,
    finish_all,
    flush,
    go_back,
    newest_whole,
    read_checked,
    read_manifest,
    write_checked,
    write_whole,
)
from monarch_rl.checkpoint.journal import FOLDER as JOURNAL
from monarch_rl.checkpoint.journal import plans_of
from monarch_rl.errors import BrokenCheckpoint, SettingsError
from monarch_rl.model.folder import abbreviates, is_named
from monarch_rl.observe.lines import LineFile, read_rows, truncate
from monarch_rl.observe.pieces import truncate_pieces
from monarch_rl.observe.redact import redact_values
from monarch_rl.pipeline.checkpoints import FOLDER, versions_of_packages
from monarch_rl.pipeline.run_folder import (
    BEST,
    ROLLOUTS,
    SAVED,
    SETTINGS,
    STATE,
    launcher,
    new_folder,
    read_state,
    recipe_name,
    recorded,
)
from monarch_rl.pipeline.settings import RunSettings, to_record
from monarch_rl.runtime import folder_lock, supervisor
from monarch_rl.runtime.devices import launched_by_torchrun
from monarch_rl.runtime.restart import Ending, decide, newest_checkpoint
from monarch_rl.settings.ranges import Automatic, flattened
from monarch_rl.trainer.settings import SCHEDULE, lr_share

logger = logging.getLogger("monarch_rl")

S = TypeVar("S", bound=RunSettings)
RESUMES = "resumes.jsonl"
"""File in the run's folder with a line for each resume."""
BOUND = ("groups_per_step", "buffer.max_policy_lag", "buffer.window", "buffer.late", "buffer.replay")
"""Settings that determine the buffer's slots. If they change, the lag bound does not hold for the restored groups."""
TOTAL_STEPS = ("steps", "trainer.epochs", "trainer.minibatches")
"""Settings that determine the run's number of optimiser steps, on which a decay of the learning rate depends."""
MODEL = ("trainer.lora.rank", "trainer.lora.targets", "trainer.lora.alpha")
"""Settings that determine the trained tensors."""
SAMPLED = ("rollout.temperature", "rollout.keep_sampling_mask", "trainer.router_replay")
"""Settings that determine how the trainer computes log-probs of sampled tokens, and what groups bring along for it."""
NOT_COMPARED = ("resume", "output", "name")


@dataclass(frozen=True)
class Resumed:
    """The state that a run resumes from."""

    run: Path
    """The run's folder."""
    checkpoint: Path
    """The checkpoint's folder."""
    manifest: Manifest
    generation: int
    """Number of times the run was resumed, including this time. New versions belong to this generation."""
    journal_since: int = 0
    """The last generation that ran without a journal, 0 if none did. Journal records of earlier ones are ignored."""
    differences: tuple[str, ...] = ()
    """Changes of settings and packages since the checkpoint, one text each."""
    resample: bool = False
    """Whether they prevent that the checkpoint's complete groups are trained: these are restarted."""

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def warm_up_steps(self) -> int:
        """Supervised steps among the first versions that are no steps of the run."""
        return self.manifest.warm_up_steps or 0

    def buffer(self, columns: Iterable[str]) -> SavedBuffer:
        """The buffer's state, for a run whose stages fill ``columns``."""
        return SavedBuffer(self.checkpoint / GROUPS, self.generation, self.resample, frozenset(columns))

    def check_base_weights(self, found: Mapping[str, int]) -> None:
        """See :meth:`Manifest.check_base_weights`."""
        try:
            self.manifest.check_base_weights(found, self.checkpoint)
        except SettingsError as error:
            raise SettingsError(f"cannot resume: {error}") from None

    def __str__(self) -> str:
        step = self.version - self.warm_up_steps
        return f"Resumed after step {step} (resume {self.generation} of this run), from {self.checkpoint}"


def resolve_resume(settings: RunSettings) -> Resumed | None:
    """The state that this launch resumes from; None begins a new run.

    Raises:
        ValueError: the run to resume has no complete checkpoint, is still running, or cannot resume with these
            settings.
    """
    if os.environ.get("RANK", "0") != "0":  # only the controller resumes a run
        return None
    run = _run_to_resume(settings)
    if run is None:
        return None
    if not folder_lock.take(run):
        process = f"process {pid}" if (pid := read_state(run).get("pid")) else "an unknown process"
        raise SettingsError(f"resume {run}: the run is still running, in {process}; wait for its end, or end it")
    return open_run(run, settings)


def with_recorded_model(settings: S) -> S:
    """The settings with the model's full name from the run to resume, if they abbreviate it: a resume repeats the
    flags, maybe in another directory, or after the Hub's branch has moved. ``auto`` looks for the run later."""
    run = os.environ.get(supervisor.RESUMES, settings.resume)
    try:
        recorded = str(read_checked(Path(run or "") / SETTINGS)["model"])
    except (SettingsError, KeyError):  # resolve_resume() reports what is wrong with the run
        return settings
    return replace(settings, model=recorded) if run and abbreviates(settings.model, recorded) else settings


def keep_sizes(settings: S) -> S:
    """The settings with the numbers of trainer ranks and replicas of the run to resume, where they are not given.

    Raises:
        SettingsError: the run to resume has no complete checkpoint.
    """
    left = isinstance(settings.trainer.ranks, Automatic) or isinstance(settings.generator.replicas, Automatic)
    run = _run_to_resume(settings) if left and os.environ.get("RANK", "0") == "0" else None
    for checkpoint in reversed(complete(run / FOLDER).values()) if run is not None else ():
        with suppress(BrokenCheckpoint):  # reported when the run is opened
            saved = read_manifest(checkpoint).settings
            trainer, generator = settings.trainer, settings.generator
            if isinstance(trainer.ranks, Automatic):
                trainer = replace(trainer, ranks=saved["trainer"]["ranks"])
            if isinstance(generator.replicas, Automatic):
                generator = replace(generator, replicas=saved["generator"]["replicas"])
            return replace(settings, trainer=trainer, generator=generator)
    return settings


def _run_to_resume(settings: RunSettings) -> Path | None:
    """The folder of the run to resume, if any."""
    if (restarted := os.environ.get(supervisor.RESUMES)) is not None:
        return Path(restarted)
    if settings.resume is not None and settings.resume != "auto":
        folder = Path(settings.resume)
        if not complete(folder / FOLDER):
            raise SettingsError(
                f"resume {folder}: there is no checkpoint in {folder / FOLDER}; give the folder of a run"
            )
        return folder
    name = settings.name or recipe_name()
    runs = [path.parent for path in settings.output.glob(f"{name}-*/{STATE}")]
    runs = [run for run in runs if recorded(run).get("name", name) == name]  # not those of "a-b", if it is "a"
    runs.sort(key=_started)
    if settings.resume is None:
        return _run_of_this_job(runs) if launched_by_torchrun() else None
    unfinished = [run for run in runs if _unfinished(run)]
    return next((run for run in reversed(unfinished) if folder_lock.take(run)), None)  # locked ones are still running


def _run_of_this_job(runs: Sequence[Path]) -> Path | None:
    """The run of the same torchrun job or agent, if torchrun has restarted its ranks.

    Args:
        runs: runs of this recipe, the newest last.

    Raises:
        ValueError: the run has finished, or failed with an error that a restart would meet again.
    """
    # The restart count does not suffice: a joining machine restarts all ranks without one, and a new agent begins at 0.
    run = next((run for run in reversed(runs) if read_state(run).get("launcher") == launcher()), None)
    if run is None:
        return None
    state = read_state(run)
    ending = _ending_under_torchrun(state)
    decision = decide(ending, checkpoint=newest_checkpoint(run), cause=state["cause"])
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:  # it may be another job with the same id
        return run if decision.restart and folder_lock.take(run) else None
    if ending is not Ending.LOST:
        raise SettingsError(f"torchrun has restarted the run in {run} although it {decision.reason}")
    return run if decision.restart else None  # a run without a checkpoint starts over


def _ending_under_torchrun(state: Mapping[str, Any]) -> Ending:
    """How a run ended whose ``run.json`` is ``state``."""
    if state["state"] == "finished":
        return Ending.FINISHED
    # An interrupted run may be restarted: torchrun itself interrupts the ranks that it is about to restart. One that is
    # still "running" was killed.
    return Ending.FAILED if state["state"] == "failed" and not state["goes_on"] else Ending.LOST


def open_run(run: Path, settings: RunSettings) -> Resumed:
    """Read the newest complete checkpoint of a run.

    Raises:
        ValueError: the run cannot resume with these settings, or has no complete checkpoint; says why.
    """
    try:
        checkpoint, manifest = newest_whole(run / FOLDER)
    except BrokenCheckpoint as error:
        saved = f" from its saved model (--model {run / SAVED})" if (run / SAVED).is_dir() else ""
        raise SettingsError(
            f"resume {run}: {error}. No other checkpoint is left: copy the folder again, or begin a new run{saved}"
        ) from error
    before, after = redact_values(manifest.settings), to_record(settings)
    if is_named(after["model"], before["model"]):  # as version 0.1 recorded it
        before = before | {"model": after["model"]}
    differences = [f"{name} {old} -> {new}" for name, old, new in changes(before, after)]
    check_same(before, after, manifest.optimizer_steps, run)
    if resampling := _resampling(before, after):
        differences.append(f"complete groups are sampled anew, because of {' and '.join(resampling)}")
    if manifest.packages.get("monarch_rl", "").startswith("0.1."):
        _check_normaliser(before, settings)
    installed = versions_of_packages()
    differences += [
        f"{package} {version} -> {installed.get(package, 'none')}"
        for package, version in manifest.packages.items()
        if installed.get(package) != version
    ]
    resumes = _resumes(run)
    last = _last_generation(run, resumes)
    generation, since = last + 1, _last_without_journal(resumes, last)
    return Resumed(
        run.resolve(), checkpoint.resolve(), manifest, generation, since, tuple(differences), bool(resampling)
    )


def how_to_resume(run: Path) -> str:
    """A message for the user who interrupted a run."""
    if not complete(run / FOLDER):
        return "it has no checkpoint to resume from"
    return f"resume it with --resume {run}"


def take_folder(settings: RunSettings, resumed: Resumed | None) -> Path:
    """Lock the run's folder and return it: a new one with the settings, or the resumed run's, reset to its checkpoint.

    Raises OSError.
    """
    folder = new_folder(settings.output, settings.name) if resumed is None else resumed.run
    folder_lock.take(folder)
    if resumed is None:
        write_checked(folder / SETTINGS, to_record(settings))
    else:
        _reset_folder(resumed)
        _note_generation(resumed, journal=settings.journal.mib > 0)
        print("; ".join([str(resumed), *resumed.differences]))
    return folder


def note_settings(folder: Path, settings: RunSettings) -> None:
    """Write the settings of a resumed run, once it has restored its checkpoint with them. A failure is only logged:
    each checkpoint stores its settings, too."""
    record = json.loads(json.dumps(to_record(settings)))
    try:
        with suppress(SettingsError):  # a damaged file is replaced
            if read_checked(folder / SETTINGS) == record:
                return
        write_checked(folder / SETTINGS, record)
    except OSError as error:
        logger.error(
            "%s cannot be written (%s): it still has the settings before the resume",
            folder / SETTINGS,
            error.strerror or error,
        )


def _reset_folder(resumed: Resumed) -> None:
    """Truncate the run's files to their sizes at the checkpoint. This also frees space on a full disk."""
    go_back(resumed.run / FOLDER, resumed.version)
    finish_all(resumed.run)
    for name, nbytes in resumed.manifest.positions.items():
        if name.startswith(f"{ROLLOUTS}/"):
            truncate_pieces(resumed.run / ROLLOUTS, Path(name).name, nbytes)
        else:
            truncate(resumed.run / name, nbytes)
    try:  # a result from after the checkpoint would outrank new ones although its weights are gone
        (resumed.run / BEST).unlink(missing_ok=True)
        if resumed.manifest.best is not None:
            write_whole(resumed.run / BEST, json.dumps(asdict(resumed.manifest.best)) + "\n")
    except OSError as error:
        logger.error("%s cannot be written (%s)", resumed.run / BEST, error.strerror or error)


def _note_generation(resumed: Resumed, journal: bool) -> None:
    """Write the resume to disk durably. Raises OSError: without this line two attempts could have the same generation,
    and the versions and journals of one would be taken for those of the other."""
    note = LineFile(resumed.run / RESUMES)
    row: dict[str, Any] = {"time": time.time(), "generation": resumed.generation, "step": resumed.version}
    row |= {"checkpoint": resumed.checkpoint.name, "differences": resumed.differences}
    row["journal"] = journal
    try:
        if not note.append(json.dumps(row)):
            raise OSError(f"{note.path} cannot be written, and a run cannot resume without a line in it")
        note.position()
        flush(resumed.run)
    finally:
        note.close()


def check_same(before: dict[str, Any], after: dict[str, Any], optimizer_steps: int, run: Path) -> None:
    """Refuse changed settings with which a run cannot resume.

    The learning rate is a function of the optimiser step: another ``trainer.lr`` scales it from the checkpoint on. The
    schedule may change where that leaves the rate of the next step as it was, for example to a decay that begins later.

    Args:
        before: settings of the checkpoint.
        after: settings of the resumed run.
        optimizer_steps: optimiser steps of the checkpoint.
        run: the run's folder, for the message.

    Raises:
        SettingsError: names the flag and both values, and says what to do.
    """
    reasons = dict.fromkeys(BOUND, "the lag bound of the checkpoint's groups depends on it")
    shares = [lr_share(s["trainer"], optimizer_steps, _total_updates(s)) for s in (before, after)]
    if not math.isclose(*shares):
        schedule = (*(f"trainer.{name}" for name in SCHEDULE), *TOTAL_STEPS)
        jump = f"from {shares[0]:.3g} to {shares[1]:.3g} times trainer.lr"
        reasons |= dict.fromkeys(schedule, f"the learning-rate schedule depends on it: the rate would jump {jump}")
    reasons |= dict.fromkeys(MODEL, "the checkpoint's tensors depend on it")
    if after["trainer"]["reference"]:
        reasons["model"] = "the reference model is loaded from it"
    if after["trainer"]["critic"]["lr"] and not before["trainer"].get("critic", {}).get("lr"):
        reasons["trainer.critic.lr"] = "the checkpoint has no critic"
    if after["trainer"]["lora"]["rank"]:
        reasons["model"] = "the checkpoint has LoRA weights only, which belong to the old model"
    for name, old, new in changes(before, after):
        if name in reasons:
            flag = name.replace("_", "-")
            raise SettingsError(
                f"cannot resume: --{flag} was {old} and is now {new}, but {reasons[name]}. Give the old value, or "
                f"begin a new run from its weights: python tools/export.py {run} OUT, then --model OUT without --resume"
            )


def _resampling(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Changed settings with which the checkpoint's complete groups cannot be trained: their log-probs are of another
    temperature, they lack masks or routes, or their episodes may be too long."""
    return [
        name
        for name, old, new in changes(before, after)
        if old is not None and (name in SAMPLED or (name == "trainer.tokens_per_microbatch" and new < old))
    ]


def _total_updates(settings: Mapping[str, Any]) -> int:
    """Optimiser steps of a whole run."""
    trainer = settings["trainer"]
    return int(settings["steps"] * trainer.get("epochs", 1) * trainer.get("minibatches", 1))


def _check_normaliser(before: dict[str, Any], settings: RunSettings) -> None:
    """Refuse a run of version 0.1 whose gradients would silently be scaled otherwise, which AdamW's restored moments
    would turn into very large steps."""
    loss, old = settings.trainer.loss, before["trainer"]
    if loss.aggregation == "constant" and not loss.max_tokens and not old["loss"].get("max_tokens"):
        raise SettingsError(
            "cannot resume: version 0.1 divided gradients by the longest possible episode, the smallest of "
            f"trainer.tokens-per-microbatch {old['tokens_per_microbatch']} and the limits of context and KV cache. "
            "Give that number as --trainer.loss.max-tokens, or begin a new run without --resume"
        )


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of each changed setting."""
    old, new = dict(flattened(before)), dict(flattened(after))
    for name in old | new:
        if name not in NOT_COMPARED and old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _unfinished(run: Path) -> bool:
    """Whether a run has not finished and has a checkpoint to resume from."""
    return read_state(run).get("state") != "finished" and bool(complete(run / FOLDER))


def _started(run: Path) -> float:
    """When the run was started or last resumed, as a file time."""
    return max((run / name).stat().st_mtime for name in (SETTINGS, RESUMES) if (run / name).exists())


def _last_generation(run: Path, resumes: Mapping[int, bool]) -> int:
    """The largest generation found in the resume lines, checkpoints and journal plans. Any of these may be lost."""
    found = [0, *resumes]
    for checkpoint in complete(run / FOLDER).values():
        with suppress(BrokenCheckpoint):
            found.append(read_manifest(checkpoint).generation)
    return max(found + plans_of(run / JOURNAL))


def _last_without_journal(resumes: Mapping[int, bool], last: int) -> int:
    """The last generation, up to ``last``, that ran without a journal, so that its steps differ from the journaled
    ones; 0 if none. One whose line is lost may have."""
    return max((generation for generation in range(1, last + 1) if not resumes.get(generation)), default=0)


def _resumes(run: Path) -> dict[int, bool]:
    """For each generation with a line in the run's file of resumes: whether it kept a journal. Logs damaged lines."""
    if not (run / RESUMES).is_file():
        return {}
    rows, damage = read_rows(run / RESUMES)
    for problem in damage:
        logger.warning("%s: steps from before that resume are not replayed from the journal", problem)
    return {row["generation"]: row.get("journal") is True for row in rows if isinstance(row.get("generation"), int)}

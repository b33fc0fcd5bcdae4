"""Going on with a run: which one, whether these settings can, and its folder as the checkpoint knows it.

``--resume RUN`` names a run's folder, ``--resume auto`` takes the newest of this recipe that has not finished and that
no process works at. A recipe that is started again after a loss, by torchrun or by the process that watches over it,
resumes by itself. torchrun does not say so to a recipe: it is known by the id of the job, or by the process that starts
its ranks.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monarch_rl.buffer.actor import SavedBuffer
from monarch_rl.checkpoint.folders import (
    GROUPS,
    BrokenCheckpoint,
    Manifest,
    complete,
    finish_all,
    flush,
    go_back,
    newest_whole,
    read_manifest,
    write_whole,
)
from monarch_rl.checkpoint.journal import FOLDER as JOURNAL
from monarch_rl.checkpoint.journal import plans_of
from monarch_rl.observe.lines import LineFile, truncate
from monarch_rl.pipeline.checkpoints import FOLDER, versions_of_packages
from monarch_rl.pipeline.run_folder import BEST, SETTINGS, STATE, launcher, new_folder, read_state, recipe_name
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.runtime import folder_lock, supervisor
from monarch_rl.runtime.devices import launched_by_torchrun
from monarch_rl.settings.ranges import to_plain

logger = logging.getLogger("monarch_rl")

RESUMES = "resumes.jsonl"
"""File of the run's folder: each time that it was resumed."""
BOUND = ("groups_per_step", "buffer.max_policy_lag", "buffer.window", "buffer.late", "buffer.replay")
"""Settings by which slots were counted: with others the bound on the lag would not hold for the groups here."""
SCHEDULE = tuple(f"trainer.lr{of}" for of in ("", "_warmup_steps", "_decay_ratio", "_decay_type", "_min_factor"))
"""Settings of which the learning rates so far were made."""
MODEL = ("trainer.lora.rank", "trainer.lora.targets", "trainer.lora.alpha")
"""Settings that say which tensors there are."""
NOT_COMPARED = ("resume", "output")


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    run: Path
    """The run's folder."""
    checkpoint: Path
    manifest: Manifest
    generation: int
    """How often the run was resumed, this time included: the versions that it makes are of this generation."""
    journal_since: int = 0
    """What earlier generations have left in the journal does not count: a later one went on without it."""
    differences: tuple[str, ...] = ()
    """Between its settings and packages and those of before, a line each."""

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def buffer(self) -> SavedBuffer:
        return SavedBuffer(self.checkpoint / GROUPS, self.generation)

    def __str__(self) -> str:
        return f"Resumed after step {self.version} (resume {self.generation} of this run), from {self.checkpoint}"


def going_on(settings: RunSettings) -> Resumed | None:
    """What this launch goes on from; None begins a new run.

    Raises:
        ValueError: the run that is named has no checkpoint that is whole, still goes on elsewhere, or cannot go on with
            these settings.
    """
    if os.environ.get("RANK", "0") != "0":  # only the controller looks
        return None
    run = _wanted(settings)
    if run is None:
        return None
    if not folder_lock.take(run):
        pid = read_state(run).get("pid", "of which nothing is known")
        raise ValueError(
            f"resume {run}: the run still goes on, in process {pid}; it can be resumed when that has ended"
        )
    return open_run(run, settings)


def _wanted(settings: RunSettings) -> Path | None:
    """The folder of the run to go on with."""
    if (again := os.environ.get(supervisor.RESUMES)) is not None:
        return Path(again)
    if settings.resume is not None and settings.resume != "auto":
        folder = Path(settings.resume)
        if not complete(folder / FOLDER):
            raise ValueError(f"resume {folder}: there is no checkpoint in {folder / FOLDER}; give the folder of a run")
        return folder
    runs = [path.parent for path in settings.output.glob(f"{recipe_name()}-*/{STATE}")]
    runs.sort(key=_started)
    if settings.resume is None:
        return _run_of_this_job(runs) if launched_by_torchrun() else None
    unfinished = [run for run in runs if _unfinished(run)]
    return next((run for run in reversed(unfinished) if folder_lock.take(run)), None)  # others still go on


def _run_of_this_job(runs: Sequence[Path]) -> Path | None:
    """The run that torchrun started before, if it starts its ranks again: that of the same job, or of the same agent.

    Counts say little: a machine that joins starts all ranks again without one, and a new agent begins at 0.

    Args:
        runs: of this recipe, the newest last.

    Raises:
        ValueError: it has finished, or ended by a mistake.
    """
    run = next((run for run in reversed(runs) if read_state(run).get("launcher") == launcher()), None)
    if run is None:
        return None
    state = read_state(run)
    finished, mistake = state["state"] == "finished", state["state"] == "failed" and not state["goes_on"]
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:  # it may be another job by the same id
        return run if not mistake and _unfinished(run) and folder_lock.take(run) else None
    if finished or mistake:
        ended = "has finished" if finished else f"would end so again: {state['cause']}"
        raise ValueError(f"torchrun starts {run} again, which {ended}")
    return run if _unfinished(run) else None


def open_run(run: Path, settings: RunSettings) -> Resumed:
    """The newest whole checkpoint of a run.

    Raises:
        ValueError: it cannot go on with these settings, or no checkpoint is whole; says why.
    """
    try:
        checkpoint, manifest = newest_whole(run / FOLDER)
    except BrokenCheckpoint as error:
        raise ValueError(f"resume {run}: {error}") from error
    before = manifest.settings
    differences = [f"{name} {old} -> {new}" for name, old, new in changes(before, to_plain(settings))]
    check_same(before, to_plain(settings))
    installed = versions_of_packages()
    differences += [
        f"{package} {version} -> {installed.get(package, 'none')}"
        for package, version in manifest.packages.items()
        if installed.get(package) != version
    ]
    resumes = _resumes(run)
    generation, since = _last_generation(run, resumes) + 1, _last_without_journal(resumes)
    return Resumed(run.resolve(), checkpoint.resolve(), manifest, generation, since, tuple(differences))


def how_to_resume(run: Path) -> str:
    """What to tell who has interrupted a run."""
    if not complete(run / FOLDER):
        return "it has no checkpoint to go on from"
    return f"--resume {run} goes on with it"


def take_folder(settings: RunSettings, resumed: Resumed | None) -> Path:
    """The run's folder: a new one with its settings, or that of the run that goes on, as its checkpoint knows it.

    Raises OSError.
    """
    folder = new_folder(settings.output) if resumed is None else resumed.run
    folder_lock.take(folder)
    if resumed is None:
        write_whole(folder / SETTINGS, _text(settings))
    else:
        _cut_back(resumed)
        _note_generation(resumed, journal=settings.journal.mib > 0)
        print("; ".join([str(resumed), *resumed.differences]))
    return folder


def note_settings(folder: Path, settings: RunSettings) -> None:
    """Write the settings of a run that goes on, once they have proved to fit its checkpoint. A disk that refuses them
    costs no run: each checkpoint has its own."""
    try:
        if (folder / SETTINGS).read_text() != _text(settings):
            write_whole(folder / SETTINGS, _text(settings))
    except OSError as error:
        logger.error("%s cannot be written (%s): it is that of before", folder / SETTINGS, error.strerror or error)


def _text(settings: RunSettings) -> str:
    return json.dumps(to_plain(settings), indent=2)


def _cut_back(resumed: Resumed) -> None:
    """Cut the run's files off behind the checkpoint. This also makes room on a disk that is full."""
    go_back(resumed.run / FOLDER, resumed.version)
    finish_all(resumed.run)
    for name, nbytes in resumed.manifest.positions.items():
        truncate(resumed.run / name, nbytes)
    try:  # a result of weights that are no more would be the best of all that come
        (resumed.run / BEST).unlink(missing_ok=True)
        if resumed.manifest.best is not None:
            write_whole(resumed.run / BEST, json.dumps(asdict(resumed.manifest.best)) + "\n")
    except OSError as error:
        logger.error("%s cannot be written (%s)", resumed.run / BEST, error.strerror or error)


def _note_generation(resumed: Resumed, journal: bool) -> None:
    """Have the disk hold that the run is resumed. Raises OSError: without that two attempts would have the same number,
    and versions and journals of one would be taken for those of the other."""
    note = LineFile(resumed.run / RESUMES)
    row: dict[str, Any] = {"time": time.time(), "generation": resumed.generation, "step": resumed.version}
    row |= {"checkpoint": resumed.checkpoint.name, "differences": resumed.differences}
    row["journal"] = journal
    try:
        if not note.append(json.dumps(row)):
            raise OSError(f"{note.path} cannot be written: a run does not go on without this line")
        note.position()
        flush(resumed.run)
    finally:
        note.close()


def check_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Refuse settings that a resumed run cannot have. Raises ValueError with the setting, and what it was."""
    schedule = list(SCHEDULE)
    if before["trainer"]["lr_min_factor"] != 1:
        schedule += ["steps", "trainer.epochs", "trainer.minibatches"]
    reasons = dict.fromkeys(BOUND, "the bound on the lag was counted with the former")
    reasons |= dict.fromkeys(schedule, "the schedule of the learning rate was made with the former")
    reasons |= dict.fromkeys(MODEL, "the checkpoint's tensors are of the former")
    if after["trainer"]["reference"]:
        reasons["model"] = "the reference is read from it"
    if after["trainer"]["critic"]["lr"] and not before["trainer"].get("critic", {}).get("lr"):
        reasons["trainer.critic.lr"] = "the checkpoint has no critic"
    if after["trainer"]["lora"]["rank"]:
        reasons["model"] = "the checkpoint has LoRA's weights alone"
    for name, old, new in changes(before, after):
        if name in reasons:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag} {new} cannot go on with this run: it was {old}, and {reasons[name]}")


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of the settings that differ."""
    old, new = dict(_flat(before)), dict(_flat(after))
    for name in old | new:
        if name not in NOT_COMPARED and old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _unfinished(run: Path) -> bool:
    """Whether there is something to go on with."""
    return read_state(run).get("state") != "finished" and bool(complete(run / FOLDER))


def _started(run: Path) -> float:
    """When it was begun or resumed last."""
    return max((run / name).stat().st_mtime for name in (SETTINGS, RESUMES) if (run / name).exists())


def _last_generation(run: Path, resumes: Mapping[int, bool]) -> int:
    """The largest of which anything is known: a line, a checkpoint, a plan of the journal. Any of them may be lost."""
    known = [0, *resumes]
    for checkpoint in complete(run / FOLDER).values():
        with suppress(BrokenCheckpoint):
            known.append(read_manifest(checkpoint).generation)
    return max(known + plans_of(run / JOURNAL))


def _last_without_journal(resumes: Mapping[int, bool]) -> int:
    """The last generation that was resumed without the journal, and so made other steps than it has; 0 if none was."""
    return max((generation for generation, journal in resumes.items() if not journal), default=0)


def _resumes(run: Path) -> dict[int, bool]:
    """The generations of which there is a line, and whether they kept a journal."""
    found = {}
    with suppress(FileNotFoundError):
        for line in (run / RESUMES).read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                found[int(row["generation"])] = bool(row.get("journal", True))
    return found

"""Replays the updates of a run from its journal, without engines or rollouts.

    python tools/replay.py runs/grpo-20260101-120000 --from 100 --to 120
    python tools/replay.py RUN --from 100 --to 120 --objective recipes/mine.py:my_loss
    python tools/replay.py RUN --open 117

Prints for each step whether the weights after it are identical to the run's, bit for bit, on every trainer rank, and
loss, gradient norm, KL and clipped share next to the run's. With another objective, the same batches give different
updates, each starting from the weights of the previous one. `--open` shows the episodes of a step, token by token, as
its update saw them. Needs a run with `--journal.mib` above 0 (docs/journal.md). With the run's own objective, the exit
code is 1 if weights differ, and 2 if the journal has no checksums to compare with.
"""

from __future__ import annotations

import argparse
import runpy
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from monarch_rl.checkpoint.journal import FOLDER, JournalReader, plans_of
from monarch_rl.offline.program import run_program
from monarch_rl.offline.replay import (
    OpenedEpisode,
    ReplayedStep,
    ReplayJob,
    compared,
    generation_of,
    replay,
    starting_point,
)
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.trainer.plan import read_plan


def objective_of(name: str, plan: Any) -> ByValue[Any]:
    """The objective called ``name``, with its default parameters, or the function ``FILE:FUNCTION``. Raises ValueError
    if it does not exist, or is incompatible with the run's loss settings."""
    from monarch_rl.algorithms.objectives import Objective
    from monarch_rl.trainer.objective import loss_function, supervised

    path, _, function = name.rpartition(":")
    if name == "supervised":
        return ByValue(supervised, "the objective supervised")
    if not path:
        objective = Objective.defaults_of(name)
        return ByValue(loss_function(objective, plan.settings.loss), f"the objective {name}")
    found = runpy.run_path(path, run_name="replayed").get(function)
    if not callable(found):
        raise ValueError(f"{path} has no function {function}")
    return ByValue(found, f"the objective {name}")


def job_of(run: Path, first: int | None, last: int | None, objective: str, opened: int | None) -> tuple[ReplayJob, int]:
    """The job for these arguments, and the first step to show."""
    journal = run / FOLDER
    read_plan(journal, max(plans_of(journal), default=0))  # first: that of another version says which one to use
    reader = JournalReader(journal, 0)
    if opened is not None and first is None:
        first = last = opened
    known = reader.versions
    first = first or (known[0] + 1 if known else 1)
    last = last or (known[-1] + 1 if known else 1)
    start, checkpoint, steps = starting_point(run, first)
    generation = generation_of(journal, reader, start, last)
    own = objective_of(objective, read_plan(journal, generation)) if objective else None
    return ReplayJob(journal, start, last, checkpoint, steps, own, generation, opened), first


def show_opened(episodes: list[OpenedEpisode], model: Path, console: Console) -> None:
    """Print episodes token by token: text, advantage, ratio and lag."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    for episode in episodes:
        title = f"group {episode.group}, episode {episode.place}: reward {episode.reward:g}, {episode.finish_reason}"
        console.rule(Text(title), align="left")
        console.print(Text(tokenizer.decode(episode.prompt), style="dim"), soft_wrap=True)
        console.print(Text(f"{'token':24}{'advantage':>12}{'ratio':>10}{'lag':>5}", style="bold"))
        rows = zip(episode.token_ids, episode.advantages, episode.ratios, episode.lags, strict=True)
        for token, advantage, ratio, lag in rows:
            style = "" if 0.5 <= ratio <= 2 else "red"
            console.print(Text(f"{tokenizer.decode([token])!r:24}{advantage:12.4f}{ratio:10.4f}{lag:5}", style=style))


def sizes(journal: Path) -> str:
    """The size of a journal, compared with only token IDs (int32) and log-probs (float32)."""
    tokens = trained = written = 0
    damage: list[str] = []
    folders = sorted(journal.glob("rank*"))
    for folder in folders:
        reader = JournalReader(journal, int(folder.name.removeprefix("rank")))
        written += reader.nbytes
        damage += reader.damage
        for version in reader.versions:
            for episode in chain(*reader.batch(version).deserialize()):
                tokens, trained = tokens + episode.num_tokens, trained + episode.num_trainable
    if not tokens:
        reason = "; ".join(damage) or "run with --journal.mib above 0"
        raise ValueError(f"{journal} contains no batch: {reason}")
    alone = 4 * tokens + 4 * trained
    return (
        f"{tokens:,} tokens, {trained:,} of them trained, of {len(folders)} ranks: {written / tokens:.2f} bytes each, "
        f"{written / alone:.2f} times token ids and log-probs alone"
    )


def verdict(steps: list[ReplayedStep]) -> str:
    """The result of the comparison, in one sentence."""
    known = [step for step in steps if step.equal is not None]
    if not known:
        return "nothing was compared: the journal has no checksums of the weights after these steps"
    equal = sum(bool(step.equal) for step in known)
    first = next((f"; the first difference is at step {step.step}" for step in known if not step.equal), "")
    return f"the weights after {equal} of {len(known)} steps are identical to the run's, bit for bit{first}"


def exit_code(steps: list[ReplayedStep]) -> int:
    """0 if all compared weights are equal, 1 if not, 2 if none could be compared."""
    known = [step.equal for step in steps if step.equal is not None]
    return 0 if known and all(known) else 1 if known else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--from", dest="first", type=int, help="first step to show (default: the first in the journal)")
    parser.add_argument("--to", dest="last", type=int, help="last step (default: the last in the journal)")
    parser.add_argument(
        "--objective", default="", help="objective (such as gspo) or FILE:FUNCTION, instead of the run's"
    )
    parser.add_argument("--open", dest="opened", type=int, help="step whose episodes are shown")
    parser.add_argument("--bytes", action="store_true", help="only print the size of the journal")
    own = parser.parse_args()
    if own.bytes:
        print(sizes(own.run / FOLDER))
        return 0
    job, first = job_of(own.run, own.first, own.last, own.objective, own.opened)
    steps, opened = replay(job)
    shown = [step for step in steps if step.step >= first]
    print(compared(shown))
    console = Console()
    if own.opened is not None:
        show_opened(opened, read_plan(job.journal, job.generation).model, console)
    if own.objective:
        return 0
    print(verdict(shown))
    return exit_code(shown)


if __name__ == "__main__":
    run_program(main)

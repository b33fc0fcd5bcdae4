"""Folders of runs, written as a run writes them (docs/run_folder.md), so that the page can be tested without one."""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.observe.pieces import PieceLog

METRICS = (
    "reward/mean", "reward/sums/mean", "reward/sums/score", "reward/all_right_share", "reward/all_wrong_share",
    "length/mean", "length/max", "length/cut_share", "trainer/entropy", "trainer/grad_norm",
    "trainer/mismatch_k3_on_policy", "trainer/mismatch_k3_all", "trainer/kl_reference", "trainer/loss",
    "trainer/clipped", "lag/mean", "time/step_s", "trainer/idle_share", "weights/swap_ms", "tokens_per_second",
)  # fmt: skip
BOUND = 1 << 40


def write_run(
    folder: Path,
    *,
    steps: int = 50,
    groups: int = 3,
    state: str = "finished",
    evaluate_every: int = 10,
    seed: int = 0,
    lr: float = 1e-6,
) -> Path:
    """Write a run of format 1: metrics, episodes of all kinds with tokens, spans, failures and a log.

    Args:
        folder: created.
        steps: number of steps.
        groups: trained groups of two episodes each.
        state: ``running``, ``finished``, ``failed`` or ``interrupted``.
        evaluate_every: steps between evaluations.
        seed: of its values.
        lr: a setting that is shown.
    """
    folder.mkdir(parents=True)
    values = random.Random(seed)
    _write_lines(folder / "metrics.jsonl", _metrics(steps, evaluate_every, values))
    ended = None if state == "running" else 1_000.0 + steps
    run = {
        "format": 1, "name": folder.name, "state": state, "cause": "", "goes_on": False, "pid": 1, "time": 1_000.0,
        "launcher": [1, 1.0], "command": ["python", "recipes/grpo.py"], "recipe": {"path": "grpo.py", "sha256": "0"},
        "version": "0.2.0", "git": {"commit": "0123abc", "dirty": False}, "python": "3.11", "steps": steps,
        "packages": {"torch": "2.9"}, "started": 1_000.0, "ended": ended, "held_out": None,
        "hosts": [{"name": "a", "cores": 2, "memory_gib": 8, "os": "Linux", "gpus": [], "driver": None}],
        "attempts": [{"started": 1_000.0, "command": ["python"], "resumed_from": None}],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    settings = {"crc32": 1, "steps": steps, "trainer": {"lr": lr}, "rollout": {"group_size": 2}}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "recipe.py").write_text("print('a recipe')\n")
    (folder / "console.log").write_text("2026-11-28 21:14:03.123 | controller | \x1b[1mstep 1\x1b[0m\n")
    _write_lines(folder / "failures.jsonl", [{"time": 1_003.0, "who": "rollout worker 1", "cause": "killed"}])
    for group in range(groups):
        episodes = [episode(group, place, ["one ", "two"], reward=float(place)) for place in range(2)]
        tokens = [trained(group, place, 2, step=group + 1) for place in range(2)]
        add_episodes(folder, episodes, tokens)
    failure = {"reason": "tool failed", "place": "a.py:3", "report": "Traceback ...\nKeyError: 'x'"}
    add_episodes(
        folder,
        [
            episode(1_000, 0, ["lost"], kind="failed")
            | {"reward": None, "failure": failure | {"infrastructure": False}},
            episode(1_001, 0, ["late"], kind="dropped") | {"dropped": "too old"},
            episode(-1, 0, ["held"], kind="held_out") | {"held_out": "sums", "sample": 0, "version": [0, 0]},
        ],
    )
    log = PieceLog(folder / "timeline", "spans", BOUND)
    for step in range(min(steps, 100)):
        for lane, on in (("trainer rank 0", "buffer"), ("replica 0", "requests")):
            at = 1_000.0 + step
            middle = at + 0.2 + 0.6 * values.random()
            span = {"lane": lane, "step": step}
            log.append(
                json.dumps(span | {"kind": "work", "what": "update", "on": "", "from": at, "to": middle}),
                json.dumps(span | {"kind": "wait", "what": "batch", "on": on, "from": middle, "to": at + 1}),
            )
    log.close()
    return folder


def _metrics(steps: int, evaluate_every: int, values: random.Random) -> Iterable[dict[str, Any]]:
    for step in range(steps + 1):
        if step:
            row: dict[str, Any] = {name: math.sin(step / 3_000) ** 2 / 3 + values.random() / 9 for name in METRICS}
            row["reward/equal_groups_share"] = row["reward/all_right_share"] + row["reward/all_wrong_share"]
            yield row | {
                "step": step,
                "seconds": float(step),
                "trainer/tokens": 100.0,
                "buffer/trained": 4.0 * step,
                "dropped/late": float(step // 7),
                "wasted/late_tokens": float(step),
            }
        if step % evaluate_every == 0:
            accuracy = {"held_out/accuracy": 0.5, "held_out/accuracy_low": 0.4, "held_out/accuracy_high": 0.6}
            yield {"step": step, "seconds": float(step)} | accuracy


def episode(
    group: int, place: int, texts: list[str] | list[bytes], kind: str = "train", reward: float = 1.0
) -> dict[str, Any]:
    """A line of the episodes' log with one turn.

    Args:
        group, place: id of the group and place in it.
        texts: text of each sampled token. Bytes need not be whole characters.
        kind: ``train`` has tokens; or ``dropped``, ``failed``, ``held_out``.
        reward: of the episode.
    """
    pieces = [text.encode() if isinstance(text, str) else text for text in texts]
    sampled = b"".join(pieces).decode(errors="replace")
    turn: dict[str, Any] = {"read": "What is it?", "sampled": sampled, "reward": None, "tokens": len(pieces)}
    turn |= {"seconds": 0.5, "replica": 0}
    if kind == "train":
        count = len(pieces)
        turn["ids"] = encoded(np.arange(count), "<i4")
        turn["text_ends"] = encoded(np.cumsum([len(piece) for piece in pieces]), "<u4")
        turn["logprobs"] = encoded(np.linspace(-3, -0.1, count), "<f4")
        turn["token_versions"] = encoded(np.minimum(np.arange(count) // 2, max(group, 0)), "<i4")
    return {
        "kind": kind, "group": group, "attempt": 0, "episode": place, "rollout": place, "seat": "", "fork": None,
        "task": "sums", "task_index": group % 2, "item": {"question": "What is it?"},
        "messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": sampled}],
        "prompt": "What is it?", "turns": [turn], "reward": reward, "parts": {"score": reward}, "info": {},
        "finish_reason": "stop", "tokens": len(pieces), "versions": [[max(group, 0), len(pieces)]],
        "worker": "rollout worker 0", "began": 1_000.0, "ended": 1_001.0, "generate_s": 0.5, "tool_s": 0.0,
        "score_s": 0.1,
    }  # fmt: skip


def trained(group: int, place: int, count: int, step: int = 1) -> dict[str, Any]:
    """A line of the tokens' log, of a sequence with ``count`` sampled tokens."""
    numbers = np.linspace(0, 1, count)
    arrays = {
        "trainer_logprobs": -3 + 2.8 * numbers,
        "new_logprobs": -2.9 + 2.8 * numbers,
        "entropies": numbers,
        "advantages": numbers - 0.5,
        "weights": numbers,
    }
    line = {"step": step, "group": group, "attempt": 0, "episode": place, "advantage": place - 0.5}
    flags = {"flags": encoded(np.arange(count) % 16, "u1")}
    return line | {name: encoded(values, "<f4") for name, values in arrays.items()} | flags


def add_episodes(folder: Path, episodes: list[dict[str, Any]], tokens: list[dict[str, Any]] | None = None) -> None:
    """Append lines to a run's logs of episodes and of trained tokens."""
    for stem, rows in (("episodes", episodes), ("tokens", tokens or [])):
        log = PieceLog(folder / "rollouts", stem, BOUND)
        assert not rows or log.append(*map(json.dumps, rows))
        log.close()


def encoded(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)

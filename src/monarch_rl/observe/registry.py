"""Every metric that a run may log, once: name, unit, meaning, and how the console shows it.

The table of docs/metrics.md is made from this list (``python tools/metrics_table.py``), the console takes its columns
from it, and ``Metrics.log`` refuses names that are not in it. Long because it is a list of texts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

GroupName = Literal["learning", "agreement", "speed", "weights", "buffer", "losses"]

GROUPS: dict[GroupName, str] = {
    "learning": "Learning",
    "agreement": "Engine against trainer",
    "speed": "Speed",
    "weights": "Weights",
    "buffer": "Buffer",
    "losses": "Losses and waste",
}
"""The groups of metrics in their order, with their headings in the documentation."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or all those whose names match a pattern."""

    name: str
    """``*`` stands for any text, slashes included."""
    unit: str
    """Empty for a plain number."""
    meaning: str
    group: GroupName
    heading: str = ""
    """Of the console's column; empty is not shown. Metrics with one heading share a column, divided by a slash."""
    form: str = ""
    """How the console formats a value, for ``str.format``."""


OBJECTIVE = "trainer/*"
"""The pattern for what an objective returns beside the metrics that have an entry of their own."""

METRICS = (
    # -- learning ---------------------------------------------------------------------------------------------
    Metric("reward/mean", "reward", "Over the episodes of the batch trained.", "learning", "reward", "{:.3f}"),
    Metric("reward/std", "reward", "Standard deviation over the episodes of the batch.", "learning"),
    Metric(
        "length/mean", "tokens", "Drawn tokens of an episode, mean over the batch.", "learning", "length", "{:,.1f}"
    ),
    Metric("length/max", "tokens", "Drawn tokens of the longest episode of the batch.", "learning"),
    Metric(
        "length/cut_share",
        "share",
        "Episodes that ended because they reached a limit of tokens (finish reason `length`). If it rises, answers "
        "outgrow `--rollout.max-new-tokens`.",
        "learning",
        "cut",
        "{:.0%}",
    ),
    Metric(
        "held_out/accuracy",
        "share",
        "Held-out items with the full reward, played greedily, before and after training.",
        "learning",
        "held-out",
        "{:.1%}",
    ),
    Metric("held_out/reward", "reward", "Mean reward of the held-out items.", "learning"),
    Metric("held_out/failed", "items", "Held-out items lost; they count as reward 0.", "learning"),
    Metric("trainer/entropy", "nats", "Of the trainer's policy, mean over tokens.", "learning", "entropy", "{:.2f}"),
    Metric("trainer/grad_norm", "", "Norm of the gradient before clipping.", "learning", "grad norm", "{:.3g}"),
    Metric("trainer/loss", "", "Sum over the batch of the weighted loss of each token.", "learning"),
    Metric("trainer/lr", "", "Learning rate of the step.", "learning"),
    Metric("trainer/logprob", "nats", "Log-probability of the tokens drawn, mean.", "learning"),
    Metric("trainer/tokens", "tokens", "Trainable tokens of the batch.", "learning"),
    Metric(
        "reward/equal_groups_share",
        "share",
        "Groups whose episodes all got the same reward: they teach nothing.",
        "learning",
    ),
    Metric(
        "reward/all_right_share",
        "share",
        "Groups whose episodes all got the full reward (at least 1): the prompt is too easy.",
        "learning",
    ),
    Metric(
        "reward/all_wrong_share",
        "share",
        "Groups whose episodes all got no reward (at most 0): the prompt is too hard.",
        "learning",
    ),
    Metric(
        "reward/*/mean", "reward", "Mean reward of a task's episodes in the batch: `reward/<task>/mean`.", "learning"
    ),
    Metric(
        "reward/*/*",
        "reward",
        "Mean of a named part of the reward, over the task's episodes that have it: `reward/<task>/<part>`. Do not "
        "name a part `mean`.",
        "learning",
    ),
    Metric(
        "advantage/std",
        "",
        "Standard deviation of the advantages over the episodes of the batch: 0 teaches nothing.",
        "learning",
    ),
    Metric("trainer/clipped", "share", "Tokens outside the clip range.", "learning"),
    Metric("trainer/importance_weight", "", "Mean of the truncated importance weights.", "learning"),
    # -- agreement --------------------------------------------------------------------------------------------
    Metric(
        "trainer/mismatch_k3_on_policy",
        "nats",
        "k3 estimate of KL(engine, trainer) over tokens drawn under the very version that is updated: how differently "
        "the two compute, and what "
        "[`--generator.in-flight continue` leaves behind](weights.md#what-continue-leaves-behind).",
        "agreement",
    ),
    Metric("trainer/mismatch_k3_all", "nats", "The same over all tokens: staleness is in it.", "agreement"),
    Metric(
        "trainer/logprob_difference_*",
        "nats",
        "Quantiles (`p50`, `p99`, `max`) of abs(trainer - engine) of log-probs over tokens of the version that is "
        "updated, right within a factor of 1.33. Missing where a batch has none.",
        "agreement",
    ),
    Metric(
        "trainer/ratio_outside",
        "share",
        "Tokens whose ratio trainer / engine is not in [0.5, 2]; staleness is in it.",
        "agreement",
    ),
    Metric(
        "trainer/kept_mass",
        "share",
        "Probability of the kept set that a token was drawn from, by the trainer's policy, mean; 1 where nothing is "
        "cut off ([moe.md](moe.md)).",
        "agreement",
    ),
    Metric(
        "trainer/routes_differ",
        "share",
        "With `trainer.router-replay` `compare` or `replay`: the engine's choices of experts that the trainer's own "
        "router would not make, over all tokens of the batch.",
        "agreement",
    ),
    Metric("trainer/routes_differ_*", "share", "The same by layer.", "agreement"),
    Metric("trainer/on_policy_share", "share", "Tokens drawn under the version that is updated.", "agreement"),
    Metric(
        "trainer/masked_nonfinite",
        "tokens",
        "Left out because the engine's log-prob was not finite (if the trainer's is not, the update fails).",
        "agreement",
    ),
    # -- speed ------------------------------------------------------------------------------------------------
    Metric(
        "lag/mean",
        "versions",
        "Over the trainable tokens of the batch: version updated minus version that drew the token.",
        "speed",
        "lag",
        "{:.2f}",
    ),
    Metric("lag/max", "versions", "The largest lag of a trainable token.", "speed", "lag", "{:.0f}"),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "Drawn by all replicas, over the time since the step before.",
        "speed",
        "tokens/s",
        "{:,.0f}",
    ),
    Metric(
        "trainer/idle_share",
        "share",
        "Part of that time in which trainer ranks neither computed a step nor copied a snapshot.",
        "speed",
        "idle",
        "{:.0%}",
    ),
    Metric(
        "generator/idle_share",
        "share",
        "Part of that time in which a replica had nothing to decode, or stood still for a commit; mean over replicas.",
        "speed",
        "idle",
        "{:.0%}",
    ),
    Metric(
        "weights/swap_ms",
        "ms",
        "How long decoding stood still for the newest served version; the slowest replica.",
        "speed",
        "swap ms",
        "{:.1f}",
    ),
    Metric(
        "generator/running",
        "requests",
        "In a replica while it had any, mean over time and replicas: few make decoding expensive.",
        "speed",
    ),
    Metric("generator/replicas", "replicas", "That are not lost.", "speed"),
    Metric("time/step_s", "s", "Between steps.", "speed"),
    Metric("trainer/wait_s", "s", "In which the trainer waited for the batch.", "speed"),
    Metric("trainer/step_s", "s", "In which the trainer packed and computed.", "speed"),
    Metric(
        "trainer/padding",
        "share",
        "Computed positions that were padding: only a rank without episodes pads, with one token.",
        "speed",
    ),
    Metric("trainer/imbalance", "share", "Rank-time lost to unequal micro-batches.", "speed"),
    Metric(
        "loop_lag/*_max_ms",
        "ms",
        "How late event loops of `trainer`, `generator`, `rollout`, `buffer` and the `controller` turned since the "
        "step before, over all processes of the kind: whoever calls them waits as long. Above 1 s the process is named "
        "in the log, at most once a minute.",
        "speed",
    ),
    Metric("loop_lag/*_p99_ms", "ms", "The same, 99th percentile.", "speed"),
    # -- weights ----------------------------------------------------------------------------------------------
    Metric(
        "weights/verify_share",
        "share",
        "Part of `weights/swap_ms` that computed checksums; the replica with the largest part.",
        "weights",
    ),
    Metric("weights/transfer_ms", "ms", "The transfer, while decoding goes on.", "weights"),
    Metric("weights/snapshot_ms", "ms", "The trainer's local copy.", "weights"),
    Metric(
        "weights/sent_share",
        "share",
        "Bytes that a replica received for the version / bytes of a version: below 1 with `--weights.delta`.",
        "weights",
    ),
    Metric("weights/served_version", "", "Newest version served when the step ended.", "weights"),
    # -- buffer -----------------------------------------------------------------------------------------------
    Metric("buffer/admitted", "groups", "Started so far.", "buffer"),
    Metric("buffer/trained", "groups", "Trained so far.", "buffer"),
    Metric("buffer/playing", "groups", "That are being played when the step ends.", "buffer"),
    Metric("buffer/complete", "groups", "That wait to be trained when the step ends.", "buffer"),
    Metric("buffer/mib", "MiB", "Of groups that are complete or in training, or have room reserved.", "buffer"),
    Metric(
        "buffer/order_waits",
        "batches",
        "So far, that waited although enough groups were complete, because a slow one was due first "
        "([buffer.md](buffer.md)).",
        "buffer",
    ),
    Metric("buffer/order_wait_s", "s", "Of those waits, so far.", "buffer"),
    # -- losses -----------------------------------------------------------------------------------------------
    Metric("dropped/*", "groups, episodes", "Groups dropped, and episodes lost, by reason, so far.", "losses"),
    Metric(
        "wasted/tokens",
        "tokens",
        "Drawn and not trained, so far: of dropped groups, failed episodes, tokens masked for their lag. Not counted: "
        "what a lost worker or replica had drawn and nobody received, and what is in the buffer when the run ends.",
        "losses",
    ),
    Metric(
        "wasted/seconds",
        "device-seconds",
        "Those tokens' share of the generators: wasted tokens x (device-seconds in which replicas had requests and no "
        "commit / tokens drawn), both since the first step. A wasted token costs what the average token costs.",
        "losses",
    ),
    Metric("wasted/*_tokens", "tokens", "`wasted/tokens` by the buffer's reasons.", "losses"),
    Metric("recovery/lost", "processes", "Generators and rollout workers lost so far.", "losses"),
    Metric("recovery/returned", "processes", "Returns of those that took their place, so far.", "losses"),
    # -- researchers' own: last, because it matches all of the trainer's --------------------------------------
    Metric(OBJECTIVE, "", "What an objective of your own returns: its mean over trainable tokens.", "learning"),
)
"""In the order of the documentation and of the console's columns."""


@functools.cache
def find(name: str) -> Metric | None:
    """The entry of a metric: the one of this very name, or else the first whose pattern matches."""
    by_name = {metric.name: metric for metric in METRICS}
    return by_name.get(name) or next((metric for metric in METRICS if fnmatchcase(name, metric.name)), None)


def full_name(name: str) -> str:
    """The name under which a trainer rank's figure is logged: its own if it is registered, else under ``trainer/``."""
    return name if find(name) is not None else OBJECTIVE.replace("*", name)


def check_names(names: list[str]) -> None:
    """Raise ValueError, with their names, if metrics are not in the registry."""
    unknown = [name for name in names if find(name) is None]
    if unknown:
        raise ValueError(
            f"metrics that are not in monarch_rl/observe/registry.py: {', '.join(unknown)}; add them there "
            f"(an objective's own are logged as {OBJECTIVE} without an entry)"
        )


def table() -> str:
    """The registry as a Markdown table for each group."""
    lines: list[str] = []
    for group, title in GROUPS.items():
        lines += [f"### {title}", "", "| metric | unit | console | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{metric.name}` | {metric.unit} | {metric.heading} | {metric.meaning} |"
            for metric in METRICS
            if metric.group == group
        ]
        lines.append("")
    return "\n".join(lines)

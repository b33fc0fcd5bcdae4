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
    "losses": "Lost and wasted",
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
    Metric("reward/mean", "reward", "Mean reward over the episodes of the batch.", "learning", "reward", "{:.3f}"),
    Metric("reward/std", "reward", "Standard deviation of the reward over the episodes of the batch.", "learning"),
    Metric(
        "length/mean", "tokens", "Drawn tokens of an episode; mean over the batch.", "learning", "length", "{:,.1f}"
    ),
    Metric("length/max", "tokens", "Drawn tokens of the longest episode of the batch.", "learning"),
    Metric(
        "length/cut_share",
        "share",
        "Share of episodes that ended because they reached a limit of tokens (finish reason `length` or `context`). "
        "If it rises, answers outgrow `--rollout.max-new-tokens`, or conversations the context.",
        "learning",
        "cut",
        "{:.0%}",
    ),
    Metric(
        "length/full_contexts",
        "episodes",
        "Episodes so far that ended because their context was full (finish reason `context`); they are trained.",
        "learning",
    ),
    Metric(
        "held_out/accuracy",
        "share",
        "Share of held-out items that got the full reward. They are played greedily, before and after training, and "
        "every `--evaluate-every` steps.",
        "learning",
        "held-out",
        "{:.1%}",
    ),
    Metric("held_out/reward", "reward", "Mean reward of the held-out items.", "learning"),
    Metric("held_out/failed", "items", "Held-out items whose episode failed; they count as reward 0.", "learning"),
    Metric(
        "held_out/*",
        "as above",
        "`held_out/<name>/accuracy`, `/reward`, `/failed`: the same of a held-out set that is evaluated by its name.",
        "learning",
    ),
    Metric(
        "trainer/entropy", "nats", "Entropy of the trainer's policy; mean over tokens.", "learning", "entropy", "{:.2f}"
    ),
    Metric("trainer/grad_norm", "", "Norm of the gradient before clipping.", "learning", "grad norm", "{:.3g}"),
    Metric("trainer/loss", "", "Sum over the batch of the weighted loss of each token.", "learning"),
    Metric("trainer/lr", "", "Learning rate of the step.", "learning"),
    Metric("trainer/logprob", "nats", "Log-probability of the tokens drawn; mean over tokens.", "learning"),
    Metric("trainer/tokens", "tokens", "Trainable tokens of the batch.", "learning"),
    Metric(
        "reward/equal_groups_share",
        "share",
        "Share of groups whose episodes all got the same reward: they teach nothing.",
        "learning",
    ),
    Metric(
        "reward/all_right_share",
        "share",
        "Share of groups whose episodes all got the full reward (at least 1): the prompt is too easy.",
        "learning",
    ),
    Metric(
        "reward/all_wrong_share",
        "share",
        "Share of groups whose episodes all got no reward (at most 0): the prompt is too hard.",
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
    Metric("trainer/clipped", "share", "Share of tokens whose ratio is outside the clip range.", "learning"),
    Metric("trainer/importance_weight", "", "Mean of the truncated importance weights.", "learning"),
    # -- agreement --------------------------------------------------------------------------------------------
    Metric(
        "trainer/mismatch_k3_on_policy",
        "nats",
        "k3 estimate of KL(engine, trainer) over tokens drawn under the version that is updated: how differently the "
        "two compute, and what "
        "[`--generator.in-flight continue` leaves behind](weights.md#what-continue-leaves-behind).",
        "agreement",
    ),
    Metric("trainer/mismatch_k3_all", "nats", "The k3 estimate over all tokens: staleness is in it.", "agreement"),
    Metric(
        "trainer/logprob_difference_*",
        "nats",
        "Quantiles (`p50`, `p99`, `max`) of abs(trainer - engine) of log-probs, over tokens drawn under the version "
        "that is updated; accurate within a factor of 1.33. Missing where a batch has no such token.",
        "agreement",
    ),
    Metric(
        "trainer/ratio_outside",
        "share",
        "Share of tokens whose ratio trainer / engine is not in [0.5, 2]; staleness is in it.",
        "agreement",
    ),
    Metric(
        "trainer/kept_mass",
        "share",
        "Probability that the trainer's policy gives to the kept set of a token; mean over tokens. It is 1 where "
        "nothing is cut off ([moe.md](moe.md)).",
        "agreement",
    ),
    Metric(
        "trainer/routes_differ",
        "share",
        "Share of the engine's choices of experts that the trainer's own router would not make, over all tokens of the "
        "batch. Only with `trainer.router-replay` `compare` or `replay`.",
        "agreement",
    ),
    Metric("trainer/routes_differ_*", "share", "`trainer/routes_differ` of one layer.", "agreement"),
    Metric("trainer/on_policy_share", "share", "Share of tokens drawn under the version that is updated.", "agreement"),
    Metric(
        "trainer/masked_nonfinite",
        "tokens",
        "Tokens left out because the engine's log-prob was not finite (if the trainer's is not, the update fails).",
        "agreement",
    ),
    # -- speed ------------------------------------------------------------------------------------------------
    Metric(
        "lag/mean",
        "versions",
        "Lag of a trainable token: the version that is updated minus the version that drew it; mean over the batch.",
        "speed",
        "lag",
        "{:.2f}",
    ),
    Metric("lag/max", "versions", "Largest lag of a trainable token of the batch.", "speed", "lag", "{:.0f}"),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "Tokens drawn by all replicas, over the time since the previous step.",
        "speed",
        "tokens/s",
        "{:,.0f}",
    ),
    Metric(
        "trainer/idle_share",
        "share",
        "Share of the time since the previous step in which trainer ranks neither computed a step nor copied a "
        "snapshot.",
        "speed",
        "idle",
        "{:.0%}",
    ),
    Metric(
        "generator/idle_share",
        "share",
        "Share of the time since the previous step in which a replica had nothing to decode, or stood still for a "
        "commit; mean over replicas.",
        "speed",
        "idle",
        "{:.0%}",
    ),
    Metric(
        "weights/swap_ms",
        "ms",
        "How long decoding stood still for the newest served version, on the slowest replica.",
        "speed",
        "swap ms",
        "{:.1f}",
    ),
    Metric(
        "generator/running",
        "requests",
        "Requests in a replica while it has any; mean over time and replicas. Few requests make decoding expensive.",
        "speed",
    ),
    Metric("generator/replicas", "replicas", "Replicas that are in use (not lost).", "speed"),
    Metric("time/step_s", "s", "Time from the end of one step to the end of the next.", "speed"),
    Metric("trainer/wait_s", "s", "Time that the trainer waited for the batch.", "speed"),
    Metric("trainer/step_s", "s", "Time that the trainer packed and computed.", "speed"),
    Metric(
        "trainer/padding",
        "share",
        "Share of computed positions that were padding: only a rank without episodes pads, with one token.",
        "speed",
    ),
    Metric(
        "trainer/computed_share",
        "share",
        "Tokens that the trainer computed, over those that it would compute if episodes shared none: what episodes of "
        "a group have in common is computed once in each micro-batch. Padding and the last token of an episode, which "
        "is only a target, count on neither side; 1 means that nothing is shared.",
        "speed",
    ),
    Metric("trainer/imbalance", "share", "Share of the ranks' time that is lost to unequal micro-batches.", "speed"),
    Metric(
        "loop_lag/*_max_ms",
        "ms",
        "Longest delay of an event loop since the previous step, over all processes of a kind (`trainer`, `generator`, "
        "`rollout`, `buffer`, `controller`): a caller of the process waits that long. Above 1 s the process is named "
        "in the log, at most once a minute.",
        "speed",
    ),
    Metric(
        "loop_lag/*_p99_ms",
        "ms",
        "99th percentile of the delays of event loops since the previous step, over all processes of a kind.",
        "speed",
    ),
    # -- weights ----------------------------------------------------------------------------------------------
    Metric(
        "weights/verify_share",
        "share",
        "Share of `weights/swap_ms` in which checksums were computed, on the replica with the largest share.",
        "weights",
    ),
    Metric("weights/transfer_ms", "ms", "Time of the transfer of a version; decoding goes on meanwhile.", "weights"),
    Metric("weights/snapshot_ms", "ms", "Time of the trainer's local copy of a version.", "weights"),
    Metric(
        "weights/sent_share",
        "share",
        "Bytes that a replica received for the version / bytes of the version: below 1 with `--weights.delta`.",
        "weights",
    ),
    Metric("weights/served_version", "", "Newest version that was served when the step ended.", "weights"),
    # -- buffer -----------------------------------------------------------------------------------------------
    Metric("buffer/admitted", "groups", "Groups started so far.", "buffer"),
    Metric("buffer/trained", "groups", "Groups trained so far.", "buffer"),
    Metric("buffer/playing", "groups", "Groups that are being played when the step ends.", "buffer"),
    Metric("buffer/complete", "groups", "Groups that wait to be trained when the step ends.", "buffer"),
    Metric(
        "buffer/mib",
        "MiB",
        "Size of the groups that are complete or in training, and of the room reserved for groups on their way.",
        "buffer",
    ),
    Metric(
        "buffer/order_waits",
        "batches",
        "Batches so far that waited for a slow group that was due first, although enough groups were complete "
        "([buffer.md](buffer.md)).",
        "buffer",
    ),
    Metric("buffer/order_wait_s", "s", "Sum of the waits in `buffer/order_waits` so far.", "buffer"),
    # -- losses -----------------------------------------------------------------------------------------------
    Metric(
        "dropped/*",
        "groups, episodes",
        "Groups dropped so far, and episodes failed so far (`dropped/episode ...`), by reason.",
        "losses",
    ),
    Metric(
        "wasted/tokens",
        "tokens",
        "Tokens drawn and not trained so far: those of dropped groups, of failed episodes, and those masked for their "
        "lag. Not counted: what a lost worker or replica had drawn and nobody received, and what is in the buffer when "
        "the run ends.",
        "losses",
    ),
    Metric(
        "wasted/seconds",
        "device-seconds",
        "Device-seconds of the generators that `wasted/tokens` cost: wasted tokens x (device-seconds in which replicas "
        "had requests and no commit / tokens drawn), both since the first step. A wasted token counts as much as "
        "the average token.",
        "losses",
    ),
    Metric("wasted/*_tokens", "tokens", "The part of `wasted/tokens` that has one of the buffer's reasons.", "losses"),
    Metric("recovery/lost", "processes", "Generators and rollout workers lost so far.", "losses"),
    Metric("recovery/returned", "processes", "Lost generators and rollout workers replaced so far.", "losses"),
    # -- researchers' own: last, because it matches all of the trainer's --------------------------------------
    Metric(OBJECTIVE, "", "A figure that an objective of your own returns; mean over trainable tokens.", "learning"),
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

"""Every metric that a run may log, once: name, unit, meaning, and how the console shows it.

The table of docs/metrics.md is made from this list (``python tools/metrics_table.py``), the console takes its columns
from it, and ``Metrics.log`` refuses names that are not in it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

GroupName = Literal["learning", "agreement", "speed", "weights", "buffer", "losses", "checkpoints"]

GROUPS: dict[GroupName, str] = {
    "learning": "Learning",
    "agreement": "Engine against trainer",
    "speed": "Speed",
    "weights": "Weights",
    "buffer": "Buffer",
    "losses": "Lost and wasted",
    "checkpoints": "Checkpoints",
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
        "Share of held-out episodes that got the full reward (pass@1). They are played before and after training, and "
        "every `--evaluate-every` steps; greedily unless `--evaluation.temperature` is set.",
        "learning",
        "held-out",
        "{:.1%}",
    ),
    Metric(
        "held_out/accuracy_*",
        "share",
        "`_low`, `_high`: its 95 % interval. Wilson's where an item has one episode, else a bootstrap over items.",
        "learning",
    ),
    Metric(
        "held_out/pass_at_*",
        "share",
        "`held_out/pass_at_<k>`: probability that one of k episodes of an item gets the full reward, by the unbiased "
        "estimate of arXiv:2107.03374, mean over items (`--evaluation.samples`, `--evaluation.pass-at`); `_low`, "
        "`_high`: its 95 % interval.",
        "learning",
    ),
    Metric("held_out/reward", "reward", "Mean reward of the held-out episodes.", "learning"),
    Metric("held_out/failed", "episodes", "Held-out episodes that failed; they count as reward 0.", "learning"),
    Metric(
        "held_out/*_version",
        "",
        "`oldest_version`, `newest_version`: verified versions that drew tokens; one, without `--evaluation.share`.",
        "learning",
    ),
    Metric(
        "held_out/seat/*",
        "reward",
        "Mean reward of a seat's held-out sequences: `held_out/seat/<seat>`; of a named part of it, over those that "
        "have it: `held_out/seat/<seat>/<part>`. If items of several tasks were played, of each by itself: "
        "`held_out/<task>/seat/<seat>`.",
        "learning",
    ),
    Metric(
        "held_out/*",
        "as above",
        "`held_out/<name>/accuracy` and so on: the same of a held-out set that is evaluated by its name, "
        "or of each task if items of several were played (a mixture). `held_out/<part>`, after the names of set and "
        "task if there are any: mean of a named part of the reward, over the items that have it.",
        "learning",
    ),
    Metric(
        "trainer/entropy", "nats", "Entropy of the trainer's policy; mean over tokens.", "learning", "entropy", "{:.2f}"
    ),
    Metric(
        "trainer/grad_norm",
        "",
        "Norm of the gradient before clipping; mean over the updates of the batch.",
        "learning",
        "grad norm",
        "{:.3g}",
    ),
    Metric(
        "trainer/loss",
        "",
        "Sum of the weighted loss of each token, over the batch; with several updates a batch the mean over them.",
        "learning",
    ),
    Metric("trainer/lr", "", "Learning rate of the step, or of the last update of the batch.", "learning"),
    Metric(
        "trainer/optimizer_steps",
        "steps",
        "Optimiser steps so far: `--trainer.epochs` x `--trainer.minibatches` for each step of the run, one for a "
        "supervised step, none while a critic warms up.",
        "learning",
    ),
    Metric(
        "trainer/drift_k3",
        "nats",
        "k3 estimate of KL(policy at the start of the batch, policy that is updated), over the tokens of all "
        "updates of a batch: how far the policy moves within it. 0 with one update a batch.",
        "learning",
    ),
    Metric(
        "critic/loss",
        "",
        "Loss of the critic: half the squared error of its values, clipped; mean over tokens, and over the updates of "
        "the batch. Only with `--trainer.critic.lr`, like all of `critic/`.",
        "learning",
    ),
    Metric(
        "critic/explained_variance",
        "",
        "Of the differences between the returns of the batch's tokens, the share that the critic foresaw before it "
        "was updated: 1 is all of them; 0 or less, and `gae` gains nothing from it.",
        "learning",
    ),
    Metric(
        "critic/value",
        "reward",
        "What the critic expected, before each drawn token, that the sequence would still get; mean over tokens.",
        "learning",
    ),
    Metric(
        "critic/return",
        "reward",
        "What it should have expected: the advantage plus the value, before advantages are normalised; mean over "
        "tokens.",
        "learning",
    ),
    Metric(
        "critic/clipped",
        "share",
        "Share of tokens whose value had moved by more than `--trainer.critic.clip` towards its return, which learn no "
        "more from the batch.",
        "learning",
    ),
    Metric("critic/grad_norm", "", "Norm of the critic's gradient before clipping; mean over updates.", "learning"),
    Metric(
        "trainer/kl_reference",
        "nats",
        "The estimate of KL(policy, reference) that `--trainer.loss.kl-estimate` names; mean over tokens. Only with "
        "`--trainer.loss.kl-coefficient`.",
        "learning",
    ),
    Metric(
        "trainer/supervised_loss",
        "nats",
        "Cross-entropy of the answers of supervised rows (`run.supervised`, `run.mix`); mean over their tokens. "
        "`trainer/loss` has it with its share.",
        "learning",
    ),
    Metric("trainer/supervised_tokens", "tokens", "Tokens of those answers; `trainer/tokens` are without.", "learning"),
    Metric(
        "trainer/reverse_kl",
        "nats",
        "log policy - log teacher; mean over tokens: an estimate of KL(policy, teacher). Only with the objective "
        "`distillation`.",
        "learning",
    ),
    Metric(
        "trainer/top_k_kl",
        "nats",
        "The divergence that the objective `distillation` lowers with `--trainer.loss.teacher-top`; mean over tokens.",
        "learning",
    ),
    Metric("trainer/logprob", "nats", "Log-probability of the tokens drawn; mean over tokens.", "learning"),
    Metric("trainer/tokens", "tokens", "Trainable tokens of the batch.", "learning"),
    Metric(
        "reward/equal_groups_share",
        "share",
        "Share of groups whose episodes all got the same reward. Advantages within the group (`dr_grpo`, `grpo`, "
        "`rloo`, `max_rl`) learn nothing from them; others do, and so does distillation.",
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
        "reward/*/mean",
        "reward",
        "Mean reward of a task's episodes in the batch: `reward/<task>/mean`; of one of its seats: "
        "`reward/<task>/<seat>/mean`.",
        "learning",
    ),
    Metric(
        "reward/*/*",
        "reward",
        "Mean of a named part of the reward, over the task's episodes that have it: `reward/<task>/<part>`, or "
        "`reward/<task>/<seat>/<part>`. A part that has the name of another metric, such as `mean`, is refused "
        "([tasks.md](tasks.md#your-own-data-and-reward)).",
        "learning",
    ),
    Metric(
        "length/*/mean",
        "tokens",
        "Drawn tokens of a task's episode, mean over the batch: `length/<task>/mean`; of one of its seats: "
        "`length/<task>/<seat>/mean`.",
        "learning",
    ),
    Metric(
        "turn_reward/*",
        "reward",
        "Mean of the rewards that the turns of a task were given by themselves (process rewards): "
        "`turn_reward/<task>`, and of one of its seats: `turn_reward/<task>/<seat>`. A turn that several branches have "
        "counts once. Only where there are any.",
        "learning",
    ),
    Metric(
        "advantage/std",
        "",
        "Standard deviation of the advantages over the episodes of the batch, or over its drawn tokens where they have "
        "their own: 0 teaches nothing.",
        "learning",
    ),
    Metric(
        "trainer/clipped",
        "share",
        "Share of tokens that the policy loss limits: their ratio, or that of their sequence, is outside its range "
        "([algorithms.md](algorithms.md)).",
        "learning",
    ),
    Metric(
        "trainer/importance_weight",
        "",
        "Mean over tokens of the weights by which `--trainer.loss.corrections` multiply; 0 for what they drop.",
        "learning",
    ),
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
        "Tokens left out because a log-prob or a column of their episode was not finite.",
        "agreement",
    ),
    Metric(
        "trainer/masked_episodes",
        "episodes",
        "Episodes left out for that reason; each is named in the output.",
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
    Metric(
        "stage/*/seconds",
        "s",
        "Time that a group spent in a stage of `run.start(stages=...)`, by the stage's name; mean over the groups that "
        "passed it since the last step.",
        "speed",
    ),
    Metric(
        "stage/*/waited_s",
        "s",
        "Time that a group waited for its turn in the stage. If it grows, raise the stage's `concurrency`.",
        "speed",
    ),
    Metric(
        "generator/turn_cached_share",
        "share",
        "Of the prompt tokens of turns that continue a conversation, those that the prefix cache had; there if such "
        "turns were played in the step.",
        "speed",
    ),
    Metric(
        "generator/turn_reread_tokens",
        "tokens",
        "Prompt tokens of such turns in the step that were read though their conversation began under older weights: "
        "what is new in the turn, and what the cache has lost or, without `--generator.in-flight continue`, may not "
        "use.",
        "speed",
    ),
    Metric("time/step_s", "s", "Time from the end of one step to the end of the next.", "speed"),
    Metric("trainer/wait_s", "s", "Time that the trainer waited for the batch.", "speed"),
    Metric("trainer/step_s", "s", "Time that the trainer packed and computed.", "speed"),
    Metric(
        "trainer/reference_device_s",
        "device-seconds",
        "Seconds of the step in which trainer ranks computed log-probs of the reference model, of all ranks together. "
        "Only with `--trainer.reference`.",
        "speed",
    ),
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
        "buffer/replayed_share",
        "share",
        "Share of the batch's groups that an earlier batch had, too. Only with `--buffer.replay` above 1.",
        "buffer",
    ),
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
    # -- frozen models ----------------------------------------------------------------------------------------
    Metric(
        "frozen/*/requests",
        "requests",
        "Requests that engines of the frozen model of this name have answered.",
        "speed",
    ),
    Metric(
        "frozen/*/read_tokens", "tokens", "Tokens of their prompts, and of sequences that were read, so far.", "speed"
    ),
    Metric("frozen/*/drawn_tokens", "tokens", "Tokens of their answers so far.", "speed"),
    Metric(
        "frozen/*/version",
        "",
        "Version of the policy whose weights the frozen model has, with `run.frozen(..., snapshot_every=...)`; missing "
        "until it has taken over the first.",
        "learning",
    ),
    Metric(
        "frozen/*/refused_snapshots",
        "versions",
        "Versions of the policy so far that the frozen model did not take over, because the disk refused them.",
        "losses",
    ),
    Metric(
        "frozen/*/device_s",
        "device-seconds",
        "Seconds so far in which engines of the frozen model had requests, times the devices of each.",
        "speed",
    ),
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
    Metric("recovery/lost", "processes", "Generators, frozen engines and rollout workers lost so far.", "losses"),
    Metric(
        "recovery/returned",
        "processes",
        "Lost generators, frozen engines and rollout workers replaced so far.",
        "losses",
    ),
    # -- checkpoints ------------------------------------------------------------------------------------------
    Metric("checkpoint/step", "", "Step of the newest checkpoint that is whole.", "checkpoints"),
    Metric("checkpoint/copy_ms", "ms", "Time that the step paid for it: the copy of the slowest rank.", "checkpoints"),
    Metric("checkpoint/write_s", "s", "Time until it was whole, while training went on.", "checkpoints"),
    Metric("checkpoint/mib", "MiB", "Size of it.", "checkpoints"),
    Metric("checkpoint/failed", "checkpoints", "Checkpoints so far that the disk refused.", "checkpoints"),
    Metric("journal/lost", "records", "Records of the journal so far that all ranks could not write.", "checkpoints"),
    Metric(
        "checkpoint/lost_lines",
        "lines",
        "Lines of `metrics.jsonl` and `rollouts.jsonl` so far that the disk refused.",
        "checkpoints",
    ),
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

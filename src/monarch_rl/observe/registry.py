"""All metrics that a run may log: name, unit, meaning, and how the console shows them.

The tables in docs/metrics.md are generated from this list (``python tools/metrics_table.py``), the console takes its
columns from it, and ``Metrics.log`` refuses names that are not in it.
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
"""The groups of metrics, in order, with their headings in the documentation."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or all metrics whose names match a pattern."""

    name: str
    """``*`` matches any text, including slashes."""
    unit: str
    """Empty for a plain number."""
    meaning: str
    group: GroupName
    heading: str = ""
    """Heading of the console column; empty hides the metric. Metrics with the same heading share a column, separated by
    slashes, as do those that match a pattern."""
    form: str = ""
    """Format of a value in the console, for ``str.format``."""


OBJECTIVE = "trainer/*"
"""Pattern for metrics that an objective returns and that have no entry of their own."""

METRICS = (
    # -- learning ---------------------------------------------------------------------------------------------
    Metric("reward/mean", "reward", "Mean reward over the episodes of the batch.", "learning", "reward", "{:.3f}"),
    Metric("reward/std", "reward", "Standard deviation of the reward over the episodes of the batch.", "learning"),
    Metric(
        "length/mean", "tokens", "Sampled tokens per episode; mean over the batch.", "learning", "length", "{:,.1f}"
    ),
    Metric("length/max", "tokens", "Sampled tokens of the longest episode of the batch.", "learning"),
    Metric(
        "length/cut_share",
        "share",
        "Share of episodes that ended at a limit (finish reason `length`, `context` or `turns`). If it rises, answers "
        "outgrow `--rollout.max-new-tokens`, or conversations outgrow the context.",
        "learning",
        "cut",
        "{:.0%}",
    ),
    Metric(
        "length/full_contexts",
        "episodes",
        "Episodes so far that ended because their context was full (finish reason `context`). They are trained.",
        "learning",
    ),
    Metric(
        "length/turn_limits",
        "episodes",
        "Episodes so far that ended because they had `--rollout.max-turns` turns (finish reason `turns`). They are "
        "trained.",
        "learning",
    ),
    Metric(
        "length/without_turn",
        "episodes",
        "Episodes so far that ended before the policy's turn. They are neither trained nor compared with the others of "
        "their group, and `reward/mean` does not count them.",
        "learning",
    ),
    Metric(
        "held_out/accuracy",
        "share",
        "Share of held-out episodes that succeeded (pass@1): their reward is at least the task's `success_reward`. "
        "Missing if a task has none. Evaluated before and after training and every `--evaluate-every` steps, greedily "
        "unless `--evaluation.temperature` is set.",
        "learning",
        "held-out",
        "{:.1%}",
    ),
    Metric(
        "held_out/accuracy_*",
        "share",
        "`_low`, `_high`: 95 % interval of `held_out/accuracy`: Wilson's if items have one episode each, else a "
        "bootstrap over items.",
        "learning",
    ),
    Metric(
        "held_out/pass_at_*",
        "share",
        "`held_out/pass_at_<k>`: probability that at least one of k episodes of an item succeeds (unbiased "
        "estimator of arXiv:2107.03374); mean over items (`--evaluation.samples`, `--evaluation.pass-at`). `_low`, "
        "`_high`: its 95 % interval.",
        "learning",
    ),
    Metric(
        "held_out/reward",
        "reward",
        "Mean reward of the held-out episodes. On the console if there is no accuracy.",
        "learning",
        "held-out reward",
        "{:.3f}",
    ),
    Metric(
        "held_out/failed",
        "episodes",
        "Held-out episodes that failed, without those left out. They count as reward 0, or as the lowest reward of the "
        "evaluation if that is below 0, and not as a success.",
        "learning",
    ),
    Metric(
        "held_out/left_out",
        "episodes",
        "Held-out episodes that failed because of [infrastructure](episodes.md#failures): no other metric counts them.",
        "learning",
    ),
    Metric(
        "held_out/without_turn",
        "episodes",
        "Held-out episodes that ended before the policy's turn, such as a game that its opponent lost by the first "
        "move. Their rewards count.",
        "learning",
    ),
    Metric(
        "held_out/*_version",
        "",
        "`oldest_version`, `newest_version`: oldest and newest verified policy version that sampled tokens of the "
        "evaluation; equal without `--evaluation.share`.",
        "learning",
    ),
    Metric(
        "held_out/seat/*",
        "reward",
        "`held_out/seat/<seat>`: mean reward of a seat's held-out sequences. `held_out/seat/<seat>/<part>`: mean of a "
        "named part of the reward, over the sequences that have it. `held_out/<task>/seat/<seat>`: the same per task, "
        "if items of several tasks were evaluated.",
        "learning",
    ),
    Metric(
        "held_out/*",
        "as above",
        "`held_out/<name>/accuracy` and so on: the same for a named held-out set, or per task if items of several "
        "tasks were evaluated (a mixture). `held_out/<part>`, after the names of set and task if there are any: mean "
        "of a named part of the reward, over the items that have it.",
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
        "trainer/changed_share",
        "share",
        "Share of the weights that the step changed in the dtype in which they are served, among a sample of 1 %. At 0 "
        "the updates are too small for that dtype: generators go on sampling from the same policy.",
        "learning",
    ),
    Metric(
        "trainer/loss",
        "",
        "Sum over the batch of the weighted loss of each token; with several updates per batch, the mean over them.",
        "learning",
    ),
    Metric("trainer/lr", "", "Learning rate of the step, or of the last update of the batch.", "learning"),
    Metric(
        "trainer/optimizer_steps",
        "steps",
        "Optimizer steps so far: `--trainer.epochs` x `--trainer.minibatches` per step of the run, none while a "
        "critic warms up. Supervised steps before step 1 are not counted.",
        "learning",
    ),
    Metric(
        "trainer/drift_k3",
        "nats",
        "k3 estimate of KL(policy at the start of the batch, policy being updated), over the tokens of all updates of "
        "the batch: how far the policy moves within a batch. 0 with one update per batch.",
        "learning",
    ),
    Metric(
        "critic/loss",
        "",
        "Loss of the critic: half the squared error of its values, clipped; mean over tokens and over the updates of "
        "the batch. Like all of `critic/`, only with a critic (`recipes/ppo.py`).",
        "learning",
    ),
    Metric(
        "critic/explained_variance",
        "",
        "Share of the variance of the returns of the batch's tokens that the critic predicted before its update: 1 is "
        "perfect; at 0 or below, `gae` does not benefit from the critic.",
        "learning",
    ),
    Metric(
        "critic/value",
        "reward",
        "The critic's value before each sampled token: the return that it expects for the rest of the sequence; mean "
        "over tokens.",
        "learning",
    ),
    Metric(
        "critic/return",
        "reward",
        "Target of the critic's value: advantage plus value, before advantages are normalised; mean over tokens.",
        "learning",
    ),
    Metric(
        "critic/clipped",
        "share",
        "Share of tokens that no longer contribute to the critic's gradient, because their value has moved by more "
        "than `--trainer.critic.clip` of `recipes/ppo.py` towards the return.",
        "learning",
    ),
    Metric("critic/grad_norm", "", "Norm of the critic's gradient before clipping; mean over updates.", "learning"),
    Metric(
        "trainer/kl_reference",
        "nats",
        "Estimate of KL(policy, reference) selected by `--trainer.loss.kl-estimate`; mean over tokens. Only with "
        "`--trainer.loss.kl-coefficient`.",
        "learning",
        "KL",
        "{:.3g}",
    ),
    Metric(
        "trainer/supervised_loss",
        "nats",
        "Cross-entropy of the answers of supervised rows (`run.supervised`, `run.mix`); mean over their tokens. It is "
        "part of `trainer/loss`, weighted by its share.",
        "learning",
    ),
    Metric(
        "trainer/supervised_tokens",
        "tokens",
        "Tokens of the answers of supervised rows, which `trainer/tokens` does not include.",
        "learning",
    ),
    Metric(
        "trainer/reverse_kl",
        "nats",
        "Estimate of KL(policy, teacher): log policy - log teacher; mean over tokens. Only with the objective "
        "`distillation`.",
        "learning",
        "reverse KL",
        "{:.3g}",
    ),
    Metric(
        "trainer/top_k_kl",
        "nats",
        "The divergence that the objective `distillation` minimises with `--objective.top`; mean over tokens.",
        "learning",
        "top-k KL",
        "{:.3g}",
    ),
    Metric("trainer/logprob", "nats", "Log-probability of the sampled tokens; mean over tokens.", "learning"),
    Metric("trainer/tokens", "tokens", "Trainable tokens of the batch.", "learning"),
    Metric(
        "reward/equal_groups_share",
        "share",
        "Share of groups whose episodes all got the same reward. With advantages relative to the group (`dr_grpo`, "
        "`grpo`, `rloo`, `max_rl`) they have no effect; with other advantages and with distillation they do.",
        "learning",
    ),
    Metric(
        "reward/all_right_share",
        "share",
        "Share of groups whose episodes all succeeded (reward of at least the task's `success_reward`): the prompt is "
        "too easy. Like the next one, over groups of tasks that have a `success_reward`.",
        "learning",
    ),
    Metric(
        "reward/all_wrong_share",
        "share",
        "Share of groups of which no episode succeeded: the prompt is too hard.",
        "learning",
    ),
    Metric(
        "reward/*/mean",
        "reward",
        "`reward/<task>/mean`: mean reward of a task's episodes in the batch. `reward/<task>/<seat>/mean`: of one of "
        "its seats.",
        "learning",
    ),
    Metric(
        "reward/*/*",
        "reward",
        "`reward/<task>/<part>` or `reward/<task>/<seat>/<part>`: mean of a named part of the reward, over the task's "
        "episodes that have it. A part with the name of another metric, such as `mean`, is refused "
        "([tasks.md](tasks.md#your-own-data-and-reward)).",
        "learning",
    ),
    Metric(
        "length/*/mean",
        "tokens",
        "`length/<task>/mean`: sampled tokens per episode of a task; mean over the batch. `length/<task>/<seat>/mean`: "
        "of one of its seats.",
        "learning",
    ),
    Metric(
        "turn_reward/*",
        "reward",
        "`turn_reward/<task>`: mean of the rewards of a task's individual turns (process rewards). "
        "`turn_reward/<task>/<seat>`: of one of its seats. A turn shared by several branches counts once. Only if "
        "turns have rewards.",
        "learning",
        "turn reward",
        "{:.3f}",
    ),
    Metric(
        "groups/*",
        "groups",
        "`groups/<task>`: number of the batch's groups that are of this task; missing if there is none.",
        "learning",
    ),
    Metric(
        "advantage/std",
        "",
        "Standard deviation of the advantages over the episodes of the batch, or over its sampled tokens if advantages "
        "are per token. At 0 the batch has no learning signal.",
        "learning",
    ),
    Metric(
        "trainer/clipped",
        "share",
        "Share of tokens that the objective clips or drops: the ratio of the token, or of its sequence, is outside the "
        "clip range; `sapo`: less than half of the gradient is left; `dppo_tv`: the probability has moved too far; "
        "`decoupled`: also where the behaviour weight is above its cap ([algorithms.md](algorithms.md#objectives)).",
        "learning",
    ),
    Metric(
        "trainer/importance_weight",
        "",
        "Importance weight of `--trainer.loss.corrections`, 0 for tokens that they drop; mean over tokens.",
        "learning",
    ),
    # -- agreement --------------------------------------------------------------------------------------------
    Metric(
        "trainer/mismatch_k3_on_policy",
        "nats",
        "k3 estimate of KL(engine, trainer) over tokens sampled by the version being updated: the numerical difference "
        "of the two, and what "
        "[`--generator.in-flight continue` leaves behind](weights.md#what-continue-leaves-behind). "
        "Missing if the batch has no such token.",
        "agreement",
    ),
    Metric("trainer/mismatch_k3_all", "nats", "The k3 estimate over all tokens; includes staleness.", "agreement"),
    Metric(
        "trainer/logprob_difference_*",
        "nats",
        "Quantiles (`p50`, `p99`, `max`) of abs(trainer - engine) of log-probs, over tokens sampled by the version "
        "being updated; accurate within a factor of 1.33. Missing if the batch has no such token.",
        "agreement",
    ),
    Metric(
        "trainer/ratio_outside",
        "share",
        "Share of tokens whose probability ratio trainer / engine is not in [0.5, 2]; includes staleness.",
        "agreement",
    ),
    Metric(
        "trainer/kept_mass",
        "share",
        "Probability mass that the trainer's policy gives to a token's sampling mask; mean over tokens. 1 if sampling "
        "is not truncated ([moe.md](moe.md)).",
        "agreement",
    ),
    Metric(
        "trainer/routes_differ",
        "share",
        "Share of the engine's expert choices that the trainer's own router would not make, over all tokens of the "
        "batch. Only with `trainer.router-replay` `compare` or `replay`.",
        "agreement",
    ),
    Metric("trainer/routes_differ_*", "share", "`trainer/routes_differ` of one layer.", "agreement"),
    Metric("trainer/on_policy_share", "share", "Share of tokens sampled by the version being updated.", "agreement"),
    Metric(
        "trainer/masked_nonfinite",
        "tokens",
        "Tokens masked because a log-prob or a column of their episode was not finite.",
        "agreement",
    ),
    Metric(
        "trainer/masked_episodes",
        "episodes",
        "Episodes masked for the same reason; each is named in the output.",
        "agreement",
    ),
    # -- speed ------------------------------------------------------------------------------------------------
    Metric(
        "lag/mean",
        "versions",
        "Policy lag of a trainable token: version being updated - version that sampled the token; mean over the batch.",
        "speed",
        "lag",
        "{:.2f}",
    ),
    Metric("lag/max", "versions", "Largest policy lag of a trainable token of the batch.", "speed", "lag", "{:.0f}"),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "Tokens per second sampled by all replicas since the previous step.",
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
        "Share of the time since the previous step in which a replica had nothing to decode, or was paused for a "
        "commit; mean over replicas.",
        "speed",
        "idle",
        "{:.0%}",
    ),
    Metric(
        "weights/swap_ms",
        "ms",
        "Decoding pause for the newest served version, on the slowest replica.",
        "speed",
        "swap ms",
        "{:.1f}",
    ),
    Metric(
        "generator/running",
        "requests",
        "Requests in a replica while it has any; mean over time and replicas. Decoding few requests is inefficient.",
        "speed",
    ),
    Metric("generator/replicas", "replicas", "Replicas in use (not lost).", "speed"),
    Metric(
        "stage/*/seconds",
        "s",
        "Time that a group spent in a stage of `run.start(stages=...)`, by the stage's name; mean over the groups that "
        "completed the stage since the last step.",
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
        "Share of the prompt tokens of turns that continue a conversation that were in the prefix cache. Only if the "
        "step had such turns.",
        "speed",
    ),
    Metric(
        "generator/turn_reread_tokens",
        "tokens",
        "Prompt tokens of such turns in the step that were not in the prefix cache, in conversations that began under "
        "older weights: new tokens of the turn, and tokens that the cache has lost or, without "
        "`--generator.in-flight continue`, must not reuse.",
        "speed",
    ),
    Metric("time/step_s", "s", "Time from the end of one step to the end of the next.", "speed"),
    Metric("trainer/wait_s", "s", "Time that the trainer waited for the batch.", "speed"),
    Metric("trainer/step_s", "s", "Time in which the trainer packed and computed.", "speed"),
    Metric(
        "trainer/reference_device_s",
        "device-seconds",
        "Time of the step in which trainer ranks computed log-probs of the reference model, summed over ranks. Only "
        "with `--trainer.reference`.",
        "speed",
    ),
    Metric(
        "trainer/padding",
        "share",
        "Share of computed positions that were padding. Only a rank without episodes pads, with one token.",
        "speed",
    ),
    Metric(
        "trainer/computed_share",
        "share",
        "Tokens that the trainer computed / tokens without prefix sharing: a prefix that episodes of a group share is "
        "computed once per micro-batch. 1 means that nothing is shared. Not counted: padding, and the last token of an "
        "episode, which is only a target.",
        "speed",
    ),
    Metric("trainer/imbalance", "share", "Share of the ranks' time lost to unequal micro-batches.", "speed"),
    Metric(
        "loop_lag/*_max_ms",
        "ms",
        "Longest delay of an event loop since the previous step, over all processes of a kind (`trainer`, `generator`, "
        "`rollout`, `buffer`, `controller`). Callers of the process wait that long. From 1 s the process is named in "
        "the log, at most once per minute.",
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
    Metric("weights/transfer_ms", "ms", "Duration of the transfer of a version. Decoding continues.", "weights"),
    Metric("weights/snapshot_ms", "ms", "Duration of the trainer's local copy of a version.", "weights"),
    Metric(
        "weights/sent_share",
        "share",
        "Bytes that a replica received for the version / bytes of the version. Below 1 with `--weights.delta`.",
        "weights",
    ),
    Metric("weights/served_version", "", "Newest version that was served when the step ended.", "weights"),
    # -- buffer -----------------------------------------------------------------------------------------------
    Metric("buffer/admitted", "groups", "Groups started so far.", "buffer"),
    Metric("buffer/trained", "groups", "Groups trained so far.", "buffer"),
    Metric(
        "data/epochs",
        "",
        "Items that groups were started for / training rows of the task, if it repeats a known number of them.",
        "buffer",
    ),
    Metric("buffer/playing", "groups", "Groups in rollout when the step ends.", "buffer"),
    Metric("buffer/complete", "groups", "Groups waiting to be trained when the step ends.", "buffer"),
    Metric(
        "buffer/replayed_share",
        "share",
        "Share of the batch's groups that were in an earlier batch, too. Only with `--buffer.replay` above 1.",
        "buffer",
    ),
    Metric(
        "buffer/mib",
        "MiB",
        "Size of the groups that are complete or in training, plus the space reserved for groups being submitted.",
        "buffer",
    ),
    Metric(
        "buffer/order_waits",
        "batches",
        "Batches so far that waited for a slow group that was due first, although enough groups were complete "
        "([buffer.md](buffer.md)).",
        "buffer",
    ),
    Metric("buffer/order_wait_s", "s", "Total duration of the waits in `buffer/order_waits` so far.", "buffer"),
    # -- frozen models ----------------------------------------------------------------------------------------
    Metric(
        "frozen/*/requests",
        "requests",
        "Requests that engines of the frozen model of this name have answered so far.",
        "speed",
    ),
    Metric(
        "frozen/*/read_tokens",
        "tokens",
        "Tokens that the frozen model has read so far: prompts, and sequences whose log-probs or rewards it computed.",
        "speed",
    ),
    Metric("frozen/*/drawn_tokens", "tokens", "Tokens that the frozen model has generated so far.", "speed"),
    Metric(
        "frozen/*/version",
        "",
        "Policy version whose weights the frozen model has, with `run.frozen(..., snapshot_every=...)`. Missing until "
        "it has loaded the first snapshot.",
        "learning",
    ),
    Metric(
        "frozen/*/refused_snapshots",
        "versions",
        "Policy versions so far that the frozen model did not load, because the snapshot could not be written to disk.",
        "losses",
    ),
    Metric(
        "frozen/*/device_s",
        "device-seconds",
        "Seconds so far in which engines of the frozen model had requests, times the number of devices per engine.",
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
        "Tokens sampled but not trained so far: tokens of dropped groups and failed episodes, and tokens masked for "
        "their lag. Not counted: tokens lost with a worker or replica, and tokens in the buffer when the run ends.",
        "losses",
    ),
    Metric(
        "wasted/seconds",
        "device-seconds",
        "Generator device-seconds spent on `wasted/tokens`: wasted tokens x (device-seconds in which replicas had "
        "requests and no commit / sampled tokens), both since the first step. A wasted token costs as much as the "
        "average token.",
        "losses",
    ),
    Metric("wasted/*_tokens", "tokens", "The part of `wasted/tokens` with one of the buffer's reasons.", "losses"),
    Metric("recovery/lost", "processes", "Generators, frozen engines and rollout workers lost so far.", "losses"),
    Metric(
        "recovery/returned",
        "processes",
        "Lost generators, frozen engines and rollout workers replaced so far.",
        "losses",
    ),
    Metric(
        "recovery/infrastructure_failures",
        "share",
        "Share of the episodes since the last step that failed because of [infrastructure](episodes.md#failures). They "
        "are left out of their groups.",
        "losses",
    ),
    # -- checkpoints ------------------------------------------------------------------------------------------
    Metric("checkpoint/step", "", "Step of the newest complete checkpoint.", "checkpoints"),
    Metric(
        "checkpoint/copy_ms",
        "ms",
        "Time that the newest complete checkpoint added to its step: the slowest rank's copy.",
        "checkpoints",
    ),
    Metric(
        "checkpoint/write_s",
        "s",
        "Time until that checkpoint was complete. Training continues meanwhile.",
        "checkpoints",
    ),
    Metric("checkpoint/mib", "MiB", "Size of that checkpoint.", "checkpoints"),
    Metric("checkpoint/failed", "checkpoints", "Checkpoints so far that could not be written to disk.", "checkpoints"),
    Metric(
        "journal/lost", "records", "Journal records so far that could not be written, over all ranks.", "checkpoints"
    ),
    Metric(
        "checkpoint/lost_lines",
        "lines",
        "Lines of `metrics.jsonl`, `rollouts/` and the timeline so far that were not written to disk.",
        "checkpoints",
    ),
    Metric(
        "record/cpu_s",
        "s",
        "CPU time since the last step that was spent on `rollouts/`, by all processes except trainer ranks, and on "
        "`timeline/`, by all. Without the requests for rows and spans.",
        "speed",
    ),
    Metric("trainer/record_cpu_s", "s", "CPU time that trainer rank 0 spent on records of tokens.", "speed"),
    Metric(
        "record/skipped",
        "episodes",
        "Failed episodes, and those of groups that workers dropped, that are not in `rollouts/` because many of their "
        "kind are; so far.",
        "losses",
    ),
    # -- custom objectives: last, because the pattern matches all metrics of the trainer ----------------------
    Metric(
        OBJECTIVE,
        "",
        "A metric that a custom objective returns; mean over trainable tokens. The console shows it under its name.",
        "learning",
    ),
)
"""In the order of the documentation and of the console's columns."""


@functools.cache
def find(name: str) -> Metric | None:
    """The entry of a metric: the one with exactly this name, or else the first whose pattern matches; None if none."""
    by_name = {metric.name: metric for metric in METRICS}
    return by_name.get(name) or next((metric for metric in METRICS if fnmatchcase(name, metric.name)), None)


def full_name(name: str) -> str:
    """The name under which a trainer rank's metric is logged: ``name`` if it is registered, else under ``trainer/``."""
    return name if find(name) is not None else OBJECTIVE.replace("*", name)


def check_names(names: list[str]) -> None:
    """Raise ValueError if metrics are not in the registry; the message lists them."""
    unknown = [name for name in names if find(name) is None]
    if unknown:
        raise ValueError(
            f"metrics without an entry in monarch_rl/observe/registry.py: {', '.join(unknown)}; add them there "
            f"(metrics of a custom objective need none: they are logged as {OBJECTIVE})"
        )


def table() -> str:
    """The registry as Markdown tables, one per group."""
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

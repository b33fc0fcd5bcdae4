"""The buffer's settings. docs/buffer.md describes the benefit and cost of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from monarch_rl.errors import SettingsError
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import CheckedSettings, Range


@dataclass(frozen=True)
class BufferSettings(CheckedSettings, flags="buffer"):
    """How far generation may run ahead, in which order groups are trained, and what is not trained."""

    max_policy_lag: Annotated[int | None, Range(0, 10_000, "0 is synchronous")] = 2
    """Maximum versions that a trained token may be behind. 0 is synchronous; more keeps the devices busier. None is a
    stream: the lag is unbounded."""
    window: Annotated[int | Literal["auto", "greedy"], Range(0, 1_000_000)] = "auto"
    """Groups admitted later that may be trained before a slow one; each costs a slot. `auto`: a quarter of a batch per
    version of lag above 1 (benchmarks/buffer_window.py); `greedy`: unlimited, only with late drop or mask, or in a
    stream."""
    replay: Annotated[int, Range(1, 10_000, "1 is once")] = 1
    """Batches that a group may be in, within the lag bound. 1: each group is trained once. N needs fewer rollouts per
    step, on older tokens, and leaves N times fewer slots, so generators become idle earlier."""
    late: Literal["wait", "drop", "mask"] = "wait"
    """What happens to a group slower than the lag bound allows. `wait`: the trainer waits for it; `drop`: it is
    dropped; `mask`: its tokens above the bound are not trained. `drop` and `mask` train fewer long answers than were
    generated."""
    reject_lag: Annotated[int | None, Range(0, 10_000)] = None
    """Reject groups or tokens with a larger lag than this; must be below max-policy-lag. None rejects nothing."""
    reject: NotAFlag[Literal["drop", "mask"]] = "mask"
    """What reject-lag excludes: `drop`: the whole group; `mask`: only its stale tokens."""
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal, and generate others instead (dynamic sampling, DAPO, arXiv:2503.14476).
    Meant for advantages within the group, where such groups carry no signal. With `reinforce_pp`, `seat_baselines` and
    `gae` they do carry signal, and the run warns. Refused where no reward is read (distillation)."""
    max_filtered: NotAFlag[Annotated[int, Range(1, 1_000_000)]] = 10
    """Maximum groups that drop-equal-rewards may drop per step, in batches (10 in DAPO's own code). Further groups are
    trained, so that a solved task does not stop the run."""
    partial: NotAFlag[Literal["train", "drop"]] = "train"
    """What happens to a group with failed episodes. `train`: train the others, if at least two are left; `drop`: drop
    the group."""
    max_mib: NotAFlag[Annotated[int, Range(1, 2**30)]] = 4096
    """MiB of complete groups that the buffer holds; workers hold the rest. 4096 holds 30,000 episodes of 16,000 tokens
    each. Groups of the next batch always fit."""

    def contradictions(self) -> Iterator[str]:
        if self.max_policy_lag is None and self.late != "wait":
            yield f"buffer.late {self.late} needs a lag bound: set buffer.max-policy-lag"
        if self.late != "wait" and isinstance(self.window, int):
            yield (
                f"buffer.late {self.late} has no effect: with buffer.window {self.window} no group ever exceeds the "
                "lag bound. Remove buffer.window, or set buffer.late wait"
            )
        if self.max_policy_lag is not None and self.late == "wait" and self.window == "greedy":
            yield (
                "buffer.window greedy breaks the lag bound: set buffer.late drop or mask, or a number for buffer.window"
            )
        bound = self.max_policy_lag
        if bound is not None and self.replay > bound + 1:
            yield (
                f"buffer.replay {self.replay}: a group is too old after max-policy-lag + 1 = {bound + 1} batches. Set "
                f"it to at most {bound + 1}, or increase max-policy-lag"
            )
        if self.reject_lag is not None and bound is not None and self.reject_lag >= bound:
            yield (
                f"buffer.reject-lag {self.reject_lag} rejects nothing: it must be below max-policy-lag "
                f"{self.max_policy_lag}"
            )

    def window_for(self, groups_per_step: int) -> int | None:
        """How many later groups may be trained before a group; None: unlimited.

        Raises:
            ValueError: the window leaves fewer slots than a batch has groups.
        """
        if self.window == "greedy" or self.late != "wait":
            return None
        if self.max_policy_lag is None:
            return None if self.window == "auto" else self.window
        largest = (self.max_policy_lag + 1 - self.replay) * groups_per_step
        if self.window == "auto":
            return max(0, largest - groups_per_step) // 4
        if self.window > largest:
            raise SettingsError(
                f"buffer.window {self.window} leaves less than a batch of slots: at most max-policy-lag "
                f"{self.max_policy_lag}{f' + 1 - replay {self.replay}' if self.replay > 1 else ''} x groups-per-step "
                f"{groups_per_step} = {largest}"
            )
        return self.window

    def slots_for(self, groups_per_step: int) -> int | None:
        """Maximum groups in flight, from admission to publishing; None: unlimited. Raises ValueError as
        :meth:`window_for` does."""
        if self.max_policy_lag is None:
            return None
        uses = (self.max_policy_lag + 1) * groups_per_step - (self.window_for(groups_per_step) or 0)
        return -(-uses // self.replay)

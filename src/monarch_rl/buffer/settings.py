"""The user's settings of the buffer. docs/buffer.md says what each of them gives and costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from monarch_rl.settings.ranges import CheckedSettings, Range


@dataclass(frozen=True)
class BufferSettings(CheckedSettings, flags="buffer"):
    """How far generation may run ahead, in which order groups are trained, and what is left out."""

    max_policy_lag: Annotated[int | None, Range(0, 10_000, "0 is synchronous")] = 2
    """Versions that a trained token may be behind; 0 is synchronous, more keeps the devices busier. None is a stream:
    nothing bounds the lag."""
    window: Annotated[int | Literal["auto", "greedy"], Range(0, 1_000_000)] = "auto"
    """Groups admitted later that may be trained before a slow one; each costs a slot. `auto`: a quarter of a batch for
    each version of lag above 1 (benchmarks/buffer_window.py); `greedy`: any number, with late drop or mask, or in a
    stream."""
    replay: Annotated[int, Range(1, 10_000, "1 is once")] = 1
    """Batches that a group may be in, as long as the bound on the lag allows. 1: each is trained once. More need fewer
    rollouts for a step, on tokens that are older; there are as many times fewer slots, so generators stand still
    earlier."""
    late: Literal["wait", "drop", "mask"] = "wait"
    """What becomes of a group slower than the bound: `wait`: the trainer waits for it; `drop`: it is dropped;
    `mask`: its tokens above the bound are not trained. The last two train fewer long answers than were generated."""
    reject_lag: Annotated[int | None, Range(0, 10_000)] = None
    """Leave out what would be trained with a larger lag than this; below max-policy-lag. None leaves out nothing."""
    reject: Literal["drop", "mask"] = "mask"
    """What reject-lag leaves out: the whole group, or its stale tokens."""
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal, and play others (dynamic sampling, DAPO, arXiv:2503.14476). For
    advantages within the group, to which they teach nothing: with `reinforce_pp`, `seat_baselines` and `gae` they would
    teach, and it warns; where no reward is read (distillation) it is refused."""
    max_filtered: Annotated[int, Range(1, 1_000_000)] = 10
    """Batches' worth of groups that drop-equal-rewards may drop for one batch (10 in DAPO's own code). Further groups
    are trained, so that a task that is solved does not stop the run."""
    partial: Literal["train", "drop"] = "train"
    """What becomes of a group of which some episodes failed: trained if two others are left, or dropped."""
    max_mib: Annotated[int, Range(1, 2**30)] = 4096
    """MiB of complete groups that the buffer holds; workers keep the others. 4096 holds 30,000 episodes of 16,000
    tokens each; no batch ever waits for room."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_policy_lag is None and self.late != "wait":
            raise ValueError(f"buffer.late {self.late} has no bound to act on: give a max-policy-lag")
        if self.late != "wait" and isinstance(self.window, int):
            raise ValueError(
                f"buffer.late {self.late} has nothing to act on: with a window of {self.window} no group is ever above "
                "the bound. Leave buffer.window out, or say late wait"
            )
        if self.max_policy_lag is not None and self.late == "wait" and self.window == "greedy":
            raise ValueError("buffer.window greedy breaks the bound: say buffer.late drop or mask, or give a number")
        bound = self.max_policy_lag
        if bound is not None and self.replay > bound + 1:
            raise ValueError(
                f"buffer.replay {self.replay}: a group is too old after max-policy-lag + 1 = {bound + 1} batches. Give "
                f"at most {bound + 1}, or a larger max-policy-lag"
            )
        if self.reject_lag is not None and bound is not None and self.reject_lag >= bound:
            raise ValueError(
                f"buffer.reject-lag {self.reject_lag} leaves out nothing: it must be below max-policy-lag "
                f"{self.max_policy_lag}"
            )

    def window_for(self, groups_per_step: int) -> int | None:
        """Groups that may overtake another one; None is any number.

        Raises:
            ValueError: the window leaves no slots for a batch.
        """
        if self.window == "greedy" or self.late != "wait":
            return None
        if self.max_policy_lag is None:
            return None if self.window == "auto" else self.window
        room = (self.max_policy_lag + 1 - self.replay) * groups_per_step
        if self.window == "auto":
            return max(0, room - groups_per_step) // 4
        if self.window > room:
            raise ValueError(
                f"buffer.window {self.window} leaves less than a batch of slots: at most max-policy-lag "
                f"{self.max_policy_lag}{f' + 1 - replay {self.replay}' if self.replay > 1 else ''} x groups-per-step "
                f"{groups_per_step} = {room}"
            )
        return self.window

    def slots_for(self, groups_per_step: int) -> int | None:
        """Groups that may be under way at a time; None is any number. Raises ValueError as :meth:`window_for`."""
        if self.max_policy_lag is None:
            return None
        uses = (self.max_policy_lag + 1) * groups_per_step - (self.window_for(groups_per_step) or 0)
        return -(-uses // self.replay)

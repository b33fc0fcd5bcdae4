"""The state that a trainer rank writes to a checkpoint, and how it resumes from one."""

from __future__ import annotations

import io
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from monarch_rl.checkpoint.folders import TRAINER, FileSum, Staged, file_sum
from monarch_rl.checkpoint.tensors import StagedTensors, checkpoint_group, names, read, renewed_group
from monarch_rl.errors import CannotWrite, NotFinite
from monarch_rl.runtime.deadlines import disk_limit_s
from monarch_rl.trainer.shards import not_finite_part

if TYPE_CHECKING:  # a process that only reads manifests must not import torchtitan before platform.prepare()
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

    from monarch_rl.trainer.critic import Critic
    from monarch_rl.trainer.model import ShardedModel

REMEMBERED = "functions.{rank}.pt"
"""Each rank's file with the state of its advantage and objective."""
_MODEL, _OPTIMIZER, _CRITIC, _CRITIC_OPTIMIZER = "model.", "optimizer.", "critic.", "critic_optimizer."
"""Prefixes of tensor names."""

ROWS_TAKEN = "supervised rows"
"""Key in that state: how many supervised rows were trained."""


class TrainerCheckpoint:
    """The checkpoint of one rank: trained weights in fp32, optimiser state, learning-rate schedule, random states, and
    a critic's weights and optimiser state.

    With LoRA only LoRA's weights are stored: the base weights are in the model's folder. All ranks call each method
    together.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizers: OptimizersContainer,
        schedulers: LRSchedulersContainer,
        device: torch.device,
        critic: Critic | None = None,
    ) -> None:
        self._model, self._optimizers, self._schedulers, self._device = model, optimizers, schedulers, device
        self._critic = critic
        modules = [model.module] + ([] if critic is None else [critic.model.module])
        nbytes = 3 * sum(4 * parameter.numel() for module in modules for parameter in module.parameters())
        self._limit_s = disk_limit_s(nbytes)
        self.group = checkpoint_group(self._limit_s)
        """Process group for agreeing on writes; :meth:`stage` may replace it."""
        self.supervised_steps = 0
        """Optimizer steps of this process outside of the schedule."""
        self._staged = StagedTensors(device)
        self._version, self._counted = 0, self._updates()
        self._noted = self._remembered = NOTHING
        """State of the functions after the last complete update, and the staged copy of it."""
        self._random = f"random.{dist.get_rank()}"

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy so far, without supervised ones."""
        return int(self._schedulers.state_dict()["last_epoch"])

    @property
    def version(self) -> int:
        """The version of the last :meth:`note`."""
        return self._version

    def _updates(self) -> tuple[int, int, int]:
        """Optimizer steps so far of the policy, in and outside of the schedule, and of the critic."""
        return self.optimizer_steps, self.supervised_steps, 0 if self._critic is None else self._critic.updates

    def note(self, version: int, remembered: Mapping[str, Any]) -> None:
        """Record that the weights are those of ``version``: every update of its batch is done.

        :meth:`stage` copies ``remembered`` as given here, even if a later update has called the functions and failed
        before it changed a weight.

        Args:
            remembered: state of this rank's advantage and objective.
        """
        self._version, self._counted = version, self._updates()
        self._noted = _saved(remembered) if remembered else NOTHING

    def stage(self, new_group: bool = False) -> Staged:
        """Copy the state to host memory.

        Args:
            new_group: replace :attr:`group`, because the last write failed on some rank: a group in which one rank has
                waited in vain for another is unusable. The same on all ranks.

        Raises:
            RuntimeError: an update was interrupted, so the weights are not a complete version.
        """
        started = time.perf_counter()
        if new_group:  # before anything that may raise on some ranks only
            self.group = renewed_group(self.group, self._limit_s)
        if self._updates() != self._counted:
            raise RuntimeError(
                f"the update of version {self._version} was interrupted: no checkpoint can be made of its weights"
            )
        self._staged.stage(self._trained() | self._random_states())
        self._remembered = self._noted
        return Staged(self._version, self.optimizer_steps, time.perf_counter() - started)

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> list[FileSum]:
        """Write the staged copy to the checkpoint's folder; returns this rank's files. All ranks call it together, on a
        separate thread.

        Args:
            group: the value of :attr:`group` when the write was requested; the write may have waited for a disk since.
                None: the current value.

        Raises:
            CannotWrite: on all ranks, if a rank could not write, or has a non-finite weight, from which no run could
                resume.
        """
        group = group or self.group
        if group is not self.group:
            raise CannotWrite(f"writing {folder} was given up while the disk of trainer rank {dist.get_rank()} stalled")
        files = self._staged.write(folder / TRAINER, folder, group, _check_finite)
        path = folder / TRAINER / REMEMBERED.format(rank=dist.get_rank())
        with path.open("wb") as file:
            file.write(self._remembered)
            file.flush()
            os.fsync(file.fileno())
        return [*files, file_sum(folder, path)]

    def restore(self, folder: Path, optimizer_steps: int) -> dict[str, Any]:
        """Resume from a checkpoint. All ranks call it together; their number may differ from when it was written.

        Returns:
            The state of this rank's advantage and objective (rank 0's, if this rank did not exist then).

        Raises:
            ValueError: the checkpoint is of another model or optimiser.
        """
        from torchtitan.components.optimizer.utils import init_optim_state

        saved = names(folder / TRAINER)
        critic = [] if self._critic is None else list(self._critic.optimizers)
        for optimizers, kind in ((self._optimizers, _OPTIMIZER), (critic, _CRITIC_OPTIMIZER)):
            if any(name.startswith(kind) for name in saved):  # an optimiser has no state before its first step
                for optimizer in optimizers:
                    init_optim_state(optimizer)
        # A rank that did not exist then, or is on another kind of device, keeps its initial random states.
        states = {name: state for name, state in self._random_states().items() if name in saved}
        read(self._trained() | states, folder / TRAINER, self.group)
        self._set_random_states(states)
        self._go_to(optimizer_steps)
        path = folder / TRAINER / REMEMBERED.format(rank=dist.get_rank())
        if not path.exists():
            path = folder / TRAINER / REMEMBERED.format(rank=0)
        # Safe to unpickle: the manifest's checksum shows that this program wrote the file.
        remembered: dict[str, Any] = torch.load(path, weights_only=False)
        return remembered

    def reschedule(self, schedulers: LRSchedulersContainer) -> None:
        """Follow another schedule, which has the same optimisers, from the current optimiser step on."""
        steps, self._schedulers = self.optimizer_steps, schedulers
        self._go_to(steps)

    def _go_to(self, optimizer_steps: int) -> None:
        with warnings.catch_warnings():  # torch warns about reading a learning rate without making a step
            warnings.simplefilter("ignore")
            self._schedulers.load_state_dict({"last_epoch": optimizer_steps})
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            for parameters, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                parameters["lr"] = lr

    def restore_weights(self, folder: Path) -> None:
        """Load only the weights of a checkpoint. All ranks call it together.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        read(self._weights(), folder / TRAINER, self.group)

    def _weights(self) -> dict[str, torch.Tensor]:
        return _weights_of(self._model, _MODEL)

    def _trained(self) -> dict[str, torch.Tensor]:
        """All tensors that updates change."""
        own = self._weights() | _optimizer_states(self._optimizers, _OPTIMIZER)
        if self._critic is None:
            return own
        critic = _weights_of(self._critic.model, _CRITIC) | _optimizer_states(
            self._critic.optimizers, _CRITIC_OPTIMIZER
        )
        return own | critic

    def _random_states(self) -> dict[str, torch.Tensor]:
        states = {f"{self._random}.cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states[f"{self._random}.cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _set_random_states(self, states: dict[str, torch.Tensor]) -> None:
        for name, state in states.items():
            if name.endswith(".cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self._device)


def _saved(remembered: Mapping[str, Any]) -> bytes:
    """A serialized copy, because the functions continue to change their state."""
    buffer = io.BytesIO()
    torch.save(dict(remembered), buffer)
    return buffer.getvalue()


NOTHING = _saved({})
"""State of functions that remember nothing, as most do: it is not serialised again after every step."""


def _weights_of(model: ShardedModel, kind: str) -> dict[str, torch.Tensor]:
    return {f"{kind}{name}": value for name, value in model.trained_state().items()}


def _optimizer_states(optimizers: OptimizersContainer, kind: str) -> dict[str, torch.Tensor]:
    """Optimizer state by names of parameter and state; empty before the first step."""
    return {
        f"{kind}{name}.{key}": value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for key, value in optimizer.state[parameter].items()
    }


def _check_finite(name: str, value: torch.Tensor) -> None:
    reason = not_finite_part(value) if name.startswith((_MODEL, _CRITIC)) else None
    if reason is not None:
        raise NotFinite(f"{name.removeprefix(_MODEL)} {reason}")

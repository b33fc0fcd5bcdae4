"""monarch_rl: asynchronous reinforcement learning of language models on Monarch, torchtitan and SGLang.

Recipes import from here alone: `from monarch_rl import Run, RunSettings, launch`. docs/api.md lists these names. They
are public: a release that changes one says so in its changelog. Everything else may change at any time. Each name is
imported when it is first used, because some take seconds: importing this package loads nothing heavy.

Start reading in `recipes/grpo.py`, then `monarch_rl.pipeline`.
"""

import sys
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

import monarch_rl.runtime  # noqa: F401  (sets what Monarch reads when it is imported, so it comes first)
from monarch_rl.moved import name_moved_modules

if TYPE_CHECKING:  # for mypy and "go to definition"; a test compares it with the table
    from monarch_rl.algorithms.advantages import BySeat as BySeat
    from monarch_rl.algorithms.advantages import SeatBaselines as SeatBaselines
    from monarch_rl.algorithms.advantages import dr_grpo as dr_grpo
    from monarch_rl.algorithms.advantages import gae as gae
    from monarch_rl.algorithms.advantages import grpo as grpo
    from monarch_rl.algorithms.advantages import max_rl as max_rl
    from monarch_rl.algorithms.advantages import overlong_penalty as overlong_penalty
    from monarch_rl.algorithms.advantages import reinforce_pp as reinforce_pp
    from monarch_rl.algorithms.advantages import rloo as rloo
    from monarch_rl.algorithms.functions import entropy_gradient as entropy_gradient
    from monarch_rl.algorithms.functions import needs as needs
    from monarch_rl.algorithms.functions import of_batch as of_batch
    from monarch_rl.algorithms.functions import other_tokens as other_tokens
    from monarch_rl.algorithms.group_view import GroupView as GroupView
    from monarch_rl.algorithms.group_view import PerToken as PerToken
    from monarch_rl.algorithms.group_view import PerTurn as PerTurn
    from monarch_rl.algorithms.objectives import CISPO as CISPO
    from monarch_rl.algorithms.objectives import DPPO as DPPO
    from monarch_rl.algorithms.objectives import GSPO as GSPO
    from monarch_rl.algorithms.objectives import OPSM as OPSM
    from monarch_rl.algorithms.objectives import SAPO as SAPO
    from monarch_rl.algorithms.objectives import TIS as TIS
    from monarch_rl.algorithms.objectives import DecoupledPPO as DecoupledPPO
    from monarch_rl.algorithms.objectives import Distillation as Distillation
    from monarch_rl.algorithms.objectives import IcePop as IcePop
    from monarch_rl.algorithms.objectives import Objective as Objective
    from monarch_rl.algorithms.objectives import PolicyGradient as PolicyGradient
    from monarch_rl.algorithms.objectives import PPOClip as PPOClip
    from monarch_rl.algorithms.objectives import SequenceMask as SequenceMask
    from monarch_rl.buffer.settings import BufferSettings as BufferSettings
    from monarch_rl.checkpoint.journal import JournalSettings as JournalSettings
    from monarch_rl.checkpoint.settings import CheckpointSettings as CheckpointSettings
    from monarch_rl.generator.frozen import FrozenSettings as FrozenSettings
    from monarch_rl.generator.settings import GeneratorSettings as GeneratorSettings
    from monarch_rl.model.lora import LoraSettings as LoraSettings
    from monarch_rl.model.messages import Message as Message
    from monarch_rl.model.messages import ToolCall as ToolCall
    from monarch_rl.model.messages import assistant as assistant
    from monarch_rl.model.messages import system as system
    from monarch_rl.model.messages import tool as tool
    from monarch_rl.model.messages import user as user
    from monarch_rl.pipeline.recovery import RecoverySettings as RecoverySettings
    from monarch_rl.pipeline.run import Run as Run
    from monarch_rl.pipeline.run import launch as launch
    from monarch_rl.pipeline.settings import RunSettings as RunSettings
    from monarch_rl.rollout.evaluation import EvaluationSettings as EvaluationSettings
    from monarch_rl.rollout.frozen import FrozenModel as FrozenModel
    from monarch_rl.rollout.remote_judge import RemoteJudge as RemoteJudge
    from monarch_rl.rollout.run_tools import run_tools as run_tools
    from monarch_rl.rollout.settings import RolloutSettings as RolloutSettings
    from monarch_rl.rollout.stages import DropGroup as DropGroup
    from monarch_rl.rollout.stages import Stage as Stage
    from monarch_rl.rollout.teachers import reference as reference
    from monarch_rl.rollout.teachers import teacher as teacher
    from monarch_rl.settings.cli import cli as cli
    from monarch_rl.settings.ranges import Range as Range
    from monarch_rl.tasks.environment import Environment as Environment
    from monarch_rl.tasks.mathematics import MathReward as MathReward
    from monarch_rl.tasks.mixture import Mixture as Mixture
    from monarch_rl.tasks.openenv import OpenEnv as OpenEnv
    from monarch_rl.tasks.pivot import resampled as resampled
    from monarch_rl.tasks.questions import Questions as Questions
    from monarch_rl.tasks.reasoning_gym import ReasoningGym as ReasoningGym
    from monarch_rl.tasks.reasoning_gym import TaskSettings as TaskSettings
    from monarch_rl.tasks.rows import data_set as data_set
    from monarch_rl.tasks.rows import jsonl as jsonl
    from monarch_rl.tasks.rows import parquet as parquet
    from monarch_rl.tasks.sandbox import Sandbox as Sandbox
    from monarch_rl.tasks.task import Outcome as Outcome
    from monarch_rl.tasks.task import Policy as Policy
    from monarch_rl.tasks.task import Reply as Reply
    from monarch_rl.tasks.task import Task as Task
    from monarch_rl.tasks.textarena import TextArena as TextArena
    from monarch_rl.tasks.verifiers import Verifiers as Verifiers
    from monarch_rl.trainer.batch import MicroBatch as MicroBatch
    from monarch_rl.trainer.loss_settings import CriticSettings as CriticSettings
    from monarch_rl.trainer.loss_settings import LossSettings as LossSettings
    from monarch_rl.trainer.objective import supervised as supervised
    from monarch_rl.trainer.settings import TrainerSettings as TrainerSettings
    from monarch_rl.trainer.token_logprobs import TokenLogprobs as TokenLogprobs
    from monarch_rl.weights.transport import TransferSettings as TransferSettings

_NAMES = {
    "monarch_rl.algorithms.advantages": "BySeat SeatBaselines dr_grpo gae grpo max_rl overlong_penalty reinforce_pp "
    "rloo",
    "monarch_rl.algorithms.functions": "entropy_gradient needs of_batch other_tokens",
    "monarch_rl.algorithms.group_view": "GroupView PerToken PerTurn",
    "monarch_rl.algorithms.objectives": "CISPO DPPO GSPO OPSM SAPO TIS DecoupledPPO Distillation IcePop Objective "
    "PPOClip PolicyGradient SequenceMask",
    "monarch_rl.buffer.settings": "BufferSettings",
    "monarch_rl.checkpoint.journal": "JournalSettings",
    "monarch_rl.checkpoint.settings": "CheckpointSettings",
    "monarch_rl.generator.frozen": "FrozenSettings",
    "monarch_rl.generator.settings": "GeneratorSettings",
    "monarch_rl.model.lora": "LoraSettings",
    "monarch_rl.model.messages": "Message ToolCall assistant system tool user",
    "monarch_rl.pipeline.run": "Run launch",
    "monarch_rl.pipeline.settings": "RunSettings",
    "monarch_rl.pipeline.recovery": "RecoverySettings",
    "monarch_rl.rollout.evaluation": "EvaluationSettings",
    "monarch_rl.rollout.frozen": "FrozenModel",
    "monarch_rl.rollout.remote_judge": "RemoteJudge",
    "monarch_rl.rollout.run_tools": "run_tools",
    "monarch_rl.rollout.settings": "RolloutSettings",
    "monarch_rl.rollout.stages": "DropGroup Stage",
    "monarch_rl.rollout.teachers": "reference teacher",
    "monarch_rl.settings.cli": "cli",
    "monarch_rl.settings.ranges": "Range",
    "monarch_rl.tasks.environment": "Environment",
    "monarch_rl.tasks.mathematics": "MathReward",
    "monarch_rl.tasks.mixture": "Mixture",
    "monarch_rl.tasks.openenv": "OpenEnv",
    "monarch_rl.tasks.pivot": "resampled",
    "monarch_rl.tasks.questions": "Questions",
    "monarch_rl.tasks.reasoning_gym": "ReasoningGym TaskSettings",
    "monarch_rl.tasks.rows": "data_set jsonl parquet",
    "monarch_rl.tasks.sandbox": "Sandbox",
    "monarch_rl.tasks.task": "Outcome Policy Reply Task",
    "monarch_rl.tasks.textarena": "TextArena",
    "monarch_rl.tasks.verifiers": "Verifiers",
    "monarch_rl.trainer.batch": "MicroBatch",
    "monarch_rl.trainer.loss_settings": "CriticSettings LossSettings",
    "monarch_rl.trainer.objective": "supervised",
    "monarch_rl.trainer.settings": "TrainerSettings",
    "monarch_rl.trainer.token_logprobs": "TokenLogprobs",
    "monarch_rl.weights.transport": "TransferSettings",
}
"""By module: the public names that it defines."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605

name_moved_modules()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"monarch_rl has no public name {name!r}: docs/api.md lists them", name=name)
    if _asked_by_script_that_launches():
        import_module("monarch_rl.pipeline.preloads").start_host_early()
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def _asked_by_script_that_launches() -> bool:
    """Whether the program's script asks for a name, uses ``launch``, and is run for more than its help."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "__main__" or "__file__" not in frame.f_globals:
        return False  # a module, a notebook or a console
    return "launch" in frame.f_code.co_names and not {"-h", "--help"}.intersection(sys.argv)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Modules that 0.2 has moved: importing one raises an ImportError that names the new one. To be removed in 0.3."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "monarch_rl.algorithms.aggregation": "monarch_rl.algorithms.losses",
    "monarch_rl.algorithms.branch_means": "monarch_rl.algorithms.returns",
    "monarch_rl.algorithms.composition": "monarch_rl.algorithms.losses",
    "monarch_rl.algorithms.corrections": "monarch_rl.algorithms.losses",
    "monarch_rl.algorithms.kl": "monarch_rl.algorithms.losses",
    "monarch_rl.algorithms.padding": "monarch_rl.algorithms.packing",
    "monarch_rl.algorithms.registry": "monarch_rl.algorithms.functions",
    "monarch_rl.algorithms.seats": "monarch_rl.algorithms.advantages",
    "monarch_rl.algorithms.sequences": "monarch_rl.algorithms.losses",
    "monarch_rl.algorithms.shaping": "monarch_rl.algorithms.advantages",
    "monarch_rl.buffer.budget": "monarch_rl.buffer.core",
    "monarch_rl.buffer.order": "monarch_rl.buffer.groups",
    "monarch_rl.buffer.report": "monarch_rl.buffer.actor",
    "monarch_rl.buffer.rules": "monarch_rl.buffer.core",
    "monarch_rl.buffer.state_file": "monarch_rl.buffer.actor",
    "monarch_rl.checkpoint.records": "monarch_rl.checkpoint.journal",
    "monarch_rl.checkpoint.replacing": "monarch_rl.checkpoint.folders",
    "monarch_rl.checkpoint.staged": "monarch_rl.checkpoint.folders",
    "monarch_rl.checkpoint.values": "monarch_rl.checkpoint.journal",
    "monarch_rl.episode.packed": "monarch_rl.episode.serialization",
    "monarch_rl.episode.reading": "monarch_rl.episode.sampling",
    "monarch_rl.episode.reward_parts": "monarch_rl.episode.episode",
    "monarch_rl.episode.ticket": "monarch_rl.episode.episode",
    "monarch_rl.generator.answers": "monarch_rl.generator.requests",
    "monarch_rl.generator.clock": "monarch_rl.generator.requests",
    "monarch_rl.generator.copy_plan": "monarch_rl.generator.load_staged",
    "monarch_rl.generator.cpu_admission": "monarch_rl.generator.cpu.admission",
    "monarch_rl.generator.cpu_attention": "monarch_rl.generator.cpu.attention",
    "monarch_rl.generator.cpu_cache": "monarch_rl.generator.cpu.prefix_cache",
    "monarch_rl.generator.cpu_draw": "monarch_rl.generator.cpu.install",
    "monarch_rl.generator.cpu_forward": "monarch_rl.generator.cpu.forward",
    "monarch_rl.generator.cpu_gloo": "monarch_rl.generator.cpu.install",
    "monarch_rl.generator.cpu_patch": "monarch_rl.generator.patch",
    "monarch_rl.generator.cpu_platform": "monarch_rl.generator.cpu.platform",
    "monarch_rl.generator.cpu_results": "monarch_rl.generator.cpu.results",
    "monarch_rl.generator.cpu_speed": "monarch_rl.generator.cpu.install",
    "monarch_rl.generator.flag_names": "monarch_rl.generator.settings",
    "monarch_rl.generator.messages": "monarch_rl.generator.connection",
    "monarch_rl.generator.pending_step": "monarch_rl.generator.scheduler_process",
    "monarch_rl.generator.replica": "monarch_rl.generator.actor",
    "monarch_rl.generator.request_format": "monarch_rl.generator.requests",
    "monarch_rl.generator.scheduler_files": "monarch_rl.generator.scheduler_process",
    "monarch_rl.generator.scheduler_requests": "monarch_rl.generator.requests",
    "monarch_rl.generator.trace_copies": "monarch_rl.generator.load_staged",
    "monarch_rl.model.check": "monarch_rl.model.tensors",
    "monarch_rl.model.same_tokenizer": "monarch_rl.model.tokens",
    "monarch_rl.model.tool_calls": "monarch_rl.model.reply_reader",
    "monarch_rl.pipeline.actors": "monarch_rl.pipeline.start",
    "monarch_rl.pipeline.delivery": "monarch_rl.pipeline.publishing",
    "monarch_rl.pipeline.exporting": "monarch_rl.offline.export",
    "monarch_rl.pipeline.frozen_meter": "monarch_rl.pipeline.observer",
    "monarch_rl.pipeline.joint_calls": "monarch_rl.pipeline.publishing",
    "monarch_rl.pipeline.keeping": "monarch_rl.pipeline.warm_restart",
    "monarch_rl.pipeline.kept_checkpoints": "monarch_rl.pipeline.checkpoints",
    "monarch_rl.pipeline.lost_processes": "monarch_rl.pipeline.recovery",
    "monarch_rl.pipeline.made_again": "monarch_rl.pipeline.replayed_steps",
    "monarch_rl.pipeline.meeting": "monarch_rl.pipeline.publishing",
    "monarch_rl.pipeline.parity": "monarch_rl.offline.parity",
    "monarch_rl.pipeline.parts": "monarch_rl.pipeline.components",
    "monarch_rl.pipeline.program": "monarch_rl.offline.program",
    "monarch_rl.pipeline.recipes": "monarch_rl.offline.recipes",
    "monarch_rl.pipeline.replay": "monarch_rl.offline.replay",
    "monarch_rl.pipeline.replicas": "monarch_rl.pipeline.publishing",
    "monarch_rl.pipeline.standalone": "monarch_rl.offline.play",
    "monarch_rl.pipeline.supervised": "monarch_rl.pipeline.run",
    "monarch_rl.rollout.admissions": "monarch_rl.rollout.submit",
    "monarch_rl.rollout.group_rewards": "monarch_rl.rollout.stages",
    "monarch_rl.rollout.hand_in": "monarch_rl.rollout.submit",
    "monarch_rl.rollout.items": "monarch_rl.rollout.play",
    "monarch_rl.rollout.outbox": "monarch_rl.rollout.submit",
    "monarch_rl.rollout.outside": "monarch_rl.rollout.episode_clock",
    "monarch_rl.rollout.own_time": "monarch_rl.rollout.episode_clock",
    "monarch_rl.rollout.pieces": "monarch_rl.rollout.branches",
    "monarch_rl.rollout.scorer_output": "monarch_rl.rollout.scoring",
    "monarch_rl.rollout.scoring_calls": "monarch_rl.rollout.scoring",
    "monarch_rl.rollout.scoring_failed": "monarch_rl.rollout.episode_failed",
    "monarch_rl.rollout.seeds": "monarch_rl.rollout.policy",
    "monarch_rl.rollout.stops": "monarch_rl.rollout.policy",
    "monarch_rl.rollout.turn_rewards": "monarch_rl.rollout.policy",
    "monarch_rl.rollout.turn_sampling": "monarch_rl.rollout.policy",
    "monarch_rl.runtime.client_threads": "monarch_rl.runtime.process",
    "monarch_rl.runtime.deadline_clock": "monarch_rl.runtime.deadlines",
    "monarch_rl.runtime.disk_work": "monarch_rl.runtime.deadlines",
    "monarch_rl.runtime.distributed": "monarch_rl.runtime.cluster",
    "monarch_rl.runtime.fork_client": "monarch_rl.runtime.forking.fork_client",
    "monarch_rl.runtime.fork_context": "monarch_rl.runtime.forking.fork_context",
    "monarch_rl.runtime.fork_server": "monarch_rl.runtime.forking.fork_server",
    "monarch_rl.runtime.heap": "monarch_rl.runtime.process",
    "monarch_rl.runtime.lazy_compile": "monarch_rl.runtime.forking.lazy_compile",
    "monarch_rl.runtime.lifetime": "monarch_rl.runtime.process",
    "monarch_rl.runtime.meshes": "monarch_rl.runtime.endpoint",
    "monarch_rl.runtime.monarch_client": "monarch_rl.runtime.cluster",
    "monarch_rl.runtime.preloading": "monarch_rl.runtime.forking.preloading",
    "monarch_rl.runtime.presence": "monarch_rl.runtime.wait_registry",
    "monarch_rl.runtime.process_poller": "monarch_rl.watch.process_poller",
    "monarch_rl.runtime.resilient": "monarch_rl.runtime.lasting_calls",
    "monarch_rl.runtime.stall": "monarch_rl.watch.stall",
    "monarch_rl.runtime.store": "monarch_rl.runtime.network",
    "monarch_rl.runtime.titles": "monarch_rl.runtime.process",
    "monarch_rl.runtime.watch": "monarch_rl.watch.watch",
    "monarch_rl.tasks.coroutines": "monarch_rl.tasks.task",
    "monarch_rl.tasks.seeds": "monarch_rl.tasks.orders",
    "monarch_rl.trainer.batch_metrics": "monarch_rl.trainer.metrics",
    "monarch_rl.trainer.checksums": "monarch_rl.trainer.step_journal",
    "monarch_rl.trainer.critic_settings": "monarch_rl.trainer.loss_settings",
    "monarch_rl.trainer.deterministic": "monarch_rl.trainer.platform",
    "monarch_rl.trainer.drawn_rows": "monarch_rl.trainer.batch",
    "monarch_rl.trainer.finite_episodes": "monarch_rl.trainer.finite",
    "monarch_rl.trainer.gqa": "monarch_rl.trainer.families",
    "monarch_rl.trainer.grouped_mm": "monarch_rl.trainer.moe",
    "monarch_rl.trainer.layout": "monarch_rl.trainer.batch",
    "monarch_rl.trainer.mla": "monarch_rl.trainer.families",
    "monarch_rl.trainer.not_finite": "monarch_rl.trainer.finite",
    "monarch_rl.trainer.reduction": "monarch_rl.trainer.metrics",
    "monarch_rl.trainer.value_columns": "monarch_rl.trainer.step",
    "monarch_rl.trainer.vocabulary": "monarch_rl.trainer.token_logprobs",
    "monarch_rl.weights.changes": "monarch_rl.weights.delta",
    "monarch_rl.weights.finite": "monarch_rl.weights.checksum",
    "monarch_rl.weights.runs": "monarch_rl.weights.blocks",
    "monarch_rl.weights.transfers": "monarch_rl.weights.broadcast_group",
}
"""Old to new; CHANGELOG.md has the same table."""


class _MovedModules(MetaPathFinder):
    """Asked for what no other finder has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MOVED:
            raise ImportError(f"{fullname} has moved: import from {MOVED[fullname]}", name=fullname)
        return None


def name_moved_modules() -> None:
    """Have imports of moved modules fail with the name of the new one."""
    sys.meta_path.append(_MovedModules())

"""Modules that 0.2 has moved: importing one raises an ImportError that names the new one. To be removed in 0.3."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "algorithms.aggregation": "algorithms.losses",
    "algorithms.branch_means": "algorithms.returns",
    "algorithms.composition": "algorithms.losses",
    "algorithms.corrections": "algorithms.losses",
    "algorithms.kl": "algorithms.losses",
    "algorithms.padding": "algorithms.packing",
    "algorithms.registry": "algorithms.functions",
    "algorithms.seats": "algorithms.advantages",
    "algorithms.sequences": "algorithms.losses",
    "algorithms.shaping": "algorithms.advantages",
    "buffer.budget": "buffer.core",
    "buffer.order": "buffer.groups",
    "buffer.report": "buffer.actor",
    "buffer.rules": "buffer.core",
    "buffer.state_file": "buffer.actor",
    "checkpoint.records": "checkpoint.journal",
    "checkpoint.replacing": "checkpoint.folders",
    "checkpoint.staged": "checkpoint.folders",
    "checkpoint.values": "checkpoint.journal",
    "episode.packed": "episode.serialization",
    "episode.reading": "episode.sampling",
    "episode.reward_parts": "episode.episode",
    "episode.ticket": "episode.episode",
    "generator.answers": "generator.requests",
    "generator.clock": "generator.requests",
    "generator.copy_plan": "generator.load_staged",
    "generator.cpu_admission": "generator.cpu.admission",
    "generator.cpu_attention": "generator.cpu.attention",
    "generator.cpu_cache": "generator.cpu.prefix_cache",
    "generator.cpu_draw": "generator.cpu.install",
    "generator.cpu_forward": "generator.cpu.forward",
    "generator.cpu_gloo": "generator.cpu.install",
    "generator.cpu_patch": "generator.patch",
    "generator.cpu_platform": "generator.cpu.platform",
    "generator.cpu_results": "generator.cpu.results",
    "generator.cpu_speed": "generator.cpu.install",
    "generator.flag_names": "generator.settings",
    "generator.messages": "generator.connection",
    "generator.pending_step": "generator.scheduler_process",
    "generator.replica": "generator.actor",
    "generator.request_format": "generator.requests",
    "generator.scheduler_files": "generator.scheduler_process",
    "generator.scheduler_requests": "generator.requests",
    "generator.trace_copies": "generator.load_staged",
    "model.check": "model.tensors",
    "model.same_tokenizer": "model.tokens",
    "model.tool_calls": "model.reply_reader",
    "pipeline.actors": "pipeline.start",
    "pipeline.delivery": "pipeline.publishing",
    "pipeline.exporting": "offline.export",
    "pipeline.frozen_meter": "pipeline.observer",
    "pipeline.joint_calls": "pipeline.publishing",
    "pipeline.keeping": "pipeline.warm_restart",
    "pipeline.kept_checkpoints": "pipeline.checkpoints",
    "pipeline.lost_processes": "pipeline.recovery",
    "pipeline.made_again": "pipeline.replayed_steps",
    "pipeline.meeting": "pipeline.publishing",
    "pipeline.parity": "offline.parity",
    "pipeline.parts": "pipeline.components",
    "pipeline.program": "offline.program",
    "pipeline.recipes": "offline.recipes",
    "pipeline.replay": "offline.replay",
    "pipeline.replicas": "pipeline.publishing",
    "pipeline.standalone": "offline.play",
    "pipeline.supervised": "pipeline.run",
    "rollout.admissions": "rollout.submit",
    "rollout.group_rewards": "rollout.stages",
    "rollout.hand_in": "rollout.submit",
    "rollout.items": "rollout.play",
    "rollout.outbox": "rollout.submit",
    "rollout.outside": "rollout.episode_clock",
    "rollout.own_time": "rollout.episode_clock",
    "rollout.pieces": "rollout.branches",
    "rollout.scorer_output": "rollout.scoring",
    "rollout.scoring_calls": "rollout.scoring",
    "rollout.scoring_failed": "rollout.episode_failed",
    "rollout.seeds": "rollout.policy",
    "rollout.stops": "rollout.policy",
    "rollout.turn_rewards": "rollout.policy",
    "rollout.turn_sampling": "rollout.policy",
    "runtime.client_threads": "runtime.process",
    "runtime.deadline_clock": "runtime.deadlines",
    "runtime.disk_work": "runtime.deadlines",
    "runtime.distributed": "runtime.cluster",
    "runtime.fork_client": "runtime.forking.fork_client",
    "runtime.fork_context": "runtime.forking.fork_context",
    "runtime.fork_server": "runtime.forking.fork_server",
    "runtime.heap": "runtime.process",
    "runtime.lazy_compile": "runtime.forking.lazy_compile",
    "runtime.lifetime": "runtime.process",
    "runtime.meshes": "runtime.endpoint",
    "runtime.monarch_client": "runtime.cluster",
    "runtime.preloading": "runtime.forking.preloading",
    "runtime.presence": "runtime.wait_registry",
    "runtime.process_poller": "watch.process_poller",
    "runtime.resilient": "runtime.lasting_calls",
    "runtime.stall": "watch.stall",
    "runtime.store": "runtime.network",
    "runtime.titles": "runtime.process",
    "runtime.watch": "watch.watch",
    "tasks.coroutines": "tasks.task",
    "tasks.seeds": "tasks.orders",
    "trainer.batch_metrics": "trainer.metrics",
    "trainer.checksums": "trainer.step_journal",
    "trainer.critic_settings": "trainer.loss_settings",
    "trainer.deterministic": "trainer.platform",
    "trainer.drawn_rows": "trainer.batch",
    "trainer.finite_episodes": "trainer.finite",
    "trainer.gqa": "trainer.families",
    "trainer.grouped_mm": "trainer.moe",
    "trainer.layout": "trainer.batch",
    "trainer.mla": "trainer.families",
    "trainer.not_finite": "trainer.finite",
    "trainer.reduction": "trainer.metrics",
    "trainer.value_columns": "trainer.step",
    "trainer.vocabulary": "trainer.token_logprobs",
    "weights.changes": "weights.delta",
    "weights.finite": "weights.checksum",
    "weights.runs": "weights.blocks",
    "weights.transfers": "weights.broadcast_group",
}
"""Old to new, without ``monarch_rl.``; CHANGELOG.md has the same table."""


class _MovedModules(MetaPathFinder):
    """Asked for what no other finder has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == "monarch_rl" and name in MOVED:
            raise ImportError(f"{fullname} has moved: import from monarch_rl.{MOVED[name]}", name=fullname)
        return None


def name_moved_modules() -> None:
    """Have imports of moved modules fail with the name of the new one."""
    sys.meta_path.append(_MovedModules())

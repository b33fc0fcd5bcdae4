"""Settings of TRL, verl and OpenRLHF, and the flags that take their place: newcomers often type one of them."""

from __future__ import annotations

TRL = {
    "learning_rate": "--trainer.lr",
    "warmup_steps": "--trainer.lr-warmup-steps",
    "warmup_ratio": "--trainer.lr-warmup-steps, a number of steps",
    "lr_scheduler_type": "--trainer.lr-min-factor (1 is constant) with --trainer.lr-decay-ratio",
    "max_grad_norm": "--trainer.max-grad-norm",
    "weight_decay": "--trainer.weight-decay",
    "gradient_checkpointing": "--trainer.activation-checkpoint",
    "bf16": "--trainer.compute-dtype",
    "torch_compile": "--trainer.compile",
    "max_steps": "--steps",
    "num_train_epochs": "--steps, a number of batches",
    "per_device_train_batch_size": (
        "--groups-per-step, which counts prompts, not completions; --trainer.tokens-per-microbatch bounds the memory"
    ),
    "gradient_accumulation_steps": "--trainer.tokens-per-microbatch, which divides a batch into micro-batches",
    "generation_batch_size": "--groups-per-step, which counts prompts, not completions",
    "num_generations": "--rollout.group-size",
    "num_iterations": "--trainer.epochs",
    "steps_per_generation": "--trainer.minibatches",
    "max_completion_length": "--rollout.max-new-tokens",
    "max_prompt_length": "--trainer.tokens-per-microbatch, which limits prompt and answer together; no prompt is cut",
    "temperature": "--rollout.temperature",
    "top_k": "--rollout.top-k, with --rollout.keep-sampling-mask",
    "top_p": "--rollout.top-p, with --rollout.top-k and --rollout.keep-sampling-mask",
    "min_p": "--rollout.min-p, with --rollout.top-k and --rollout.keep-sampling-mask",
    "chat_template_kwargs": "--rollout.chat-options",
    "beta": "--trainer.loss.kl-coefficient, with --trainer.reference",
    "epsilon": "--objective.clip-low, of --objective ppo_clip",
    "epsilon_high": "--objective.clip-high, of --objective ppo_clip",
    "delta": "--objective.dual-clip, of --objective ppo_clip",
    "loss_type": "--trainer.loss.aggregation, with --objective",
    "scale_rewards": "--trainer.loss.advantage: grpo divides by the standard deviation, dr_grpo does not",
    "importance_sampling_level": "--objective: gspo is the level of sequences",
    "vllm_importance_sampling_correction": "--trainer.loss.corrections",
    "vllm_importance_sampling_mode": "--trainer.loss.corrections",
    "vllm_gpu_memory_utilization": "--generator.memory-fraction",
    "vllm_tensor_parallel_size": "--generator.tp",
    "vllm_mode": "--colocate",
    "model_name_or_path": "--model",
    "lora_r": "--trainer.lora.rank",
    "lora_alpha": "--trainer.lora.alpha",
    "lora_target_modules": "--trainer.lora.targets",
    "seed": "--rollout.seed",
    "output_dir": "--output",
    "resume_from_checkpoint": "--resume",
    "save_steps": "--checkpoint.every-steps",
    "save_total_limit": "--checkpoint.keep",
    "eval_steps": "--evaluate-every",
    "eval_strategy": "--evaluate-every",
}
"""Settings of TRL's ``GRPOConfig`` and model options, to the flag here and a remark."""

VERL = {
    "actor_rollout_ref.model.path": "--model",
    "actor_rollout_ref.model.lora_rank": "--trainer.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "--trainer.lora.alpha",
    "actor_rollout_ref.model.target_modules": "--trainer.lora.targets",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "--trainer.activation-checkpoint",
    "actor_rollout_ref.rollout.n": "--rollout.group-size",
    "actor_rollout_ref.rollout.response_length": "--rollout.max-new-tokens",
    "actor_rollout_ref.rollout.temperature": "--rollout.temperature",
    "actor_rollout_ref.rollout.top_p": TRL["top_p"],
    "actor_rollout_ref.rollout.top_k": TRL["top_k"],
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "--generator.tp",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "--generator.memory-fraction",
    "actor_rollout_ref.rollout.max_num_seqs": "--generator.max-running-requests",
    "actor_rollout_ref.actor.optim.lr": "--trainer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "--trainer.lr-warmup-steps",
    "actor_rollout_ref.actor.optim.weight_decay": "--trainer.weight-decay",
    "actor_rollout_ref.actor.grad_clip": "--trainer.max-grad-norm",
    "actor_rollout_ref.actor.ppo_epochs": "--trainer.epochs",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "--trainer.minibatches, their number per batch, not their size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "--trainer.tokens-per-microbatch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "--trainer.tokens-per-microbatch",
    "actor_rollout_ref.actor.clip_ratio": TRL["epsilon"],
    "actor_rollout_ref.actor.clip_ratio_low": TRL["epsilon"],
    "actor_rollout_ref.actor.clip_ratio_high": TRL["epsilon_high"],
    "actor_rollout_ref.actor.clip_ratio_c": TRL["delta"],
    "actor_rollout_ref.actor.entropy_coeff": "--trainer.loss.entropy-coefficient",
    "actor_rollout_ref.actor.loss_agg_mode": "--trainer.loss.aggregation",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "--objective",
    "actor_rollout_ref.actor.use_kl_loss": "--trainer.loss.kl-coefficient, with --trainer.reference",
    "actor_rollout_ref.actor.kl_loss_coef": "--trainer.loss.kl-coefficient, with --trainer.reference",
    "actor_rollout_ref.actor.kl_loss_type": "--trainer.loss.kl-estimate",
    "algorithm.adv_estimator": "--trainer.loss.advantage",
    "algorithm.filter_groups.enable": "--buffer.drop-equal-rewards",
    "algorithm.norm_adv_by_std_in_grpo": TRL["scale_rewards"],
    "algorithm.use_kl_in_reward": "--trainer.loss.kl-in reward",
    "algorithm.kl_ctrl.kl_coef": "--trainer.loss.kl-coefficient, with --trainer.reference",
    "algorithm.rollout_correction.rollout_is": "--trainer.loss.corrections",
    "data.train_batch_size": "--groups-per-step",
    "data.gen_batch_size": "--groups-per-step",
    "data.max_response_length": "--rollout.max-new-tokens",
    "data.max_prompt_length": TRL["max_prompt_length"],
    "trainer.total_training_steps": "--steps",
    "trainer.total_epochs": "--steps, a number of batches",
    "trainer.save_freq": "--checkpoint.every-steps",
    "trainer.test_freq": "--evaluate-every",
    "trainer.max_actor_ckpt_to_keep": "--checkpoint.keep",
    "trainer.default_local_dir": "--output",
    "trainer.resume_mode": "--resume",
}
"""Keys of verl's configuration, to the flag here and a remark."""

ONLY_OF_VERL = ("actor_rollout_ref.", "algorithm.", "critic.", "custom_reward_function.", "data.", "reward_model.")
"""Beginnings of verl's keys. No flag here begins with them, but other keys of verl end like a key above:
``reward_model.enable``, ``custom_reward_function.path``."""

OPENRLHF = {
    "pretrain": "--model",
    "actor_learning_rate": "--trainer.lr",
    "critic_learning_rate": "--trainer.critic.lr, of recipes/ppo.py",
    "lr_warmup_ratio": TRL["warmup_ratio"],
    "max_norm": "--trainer.max-grad-norm",
    "rollout_batch_size": "--groups-per-step",
    "n_samples_per_prompt": "--rollout.group-size",
    "micro_train_batch_size": "--trainer.tokens-per-microbatch",
    "max_epochs": "--trainer.epochs",
    "num_episodes": "--steps, a number of batches",
    "generate_max_len": "--rollout.max-new-tokens",
    "prompt_max_len": TRL["max_prompt_length"],
    "init_kl_coef": "--trainer.loss.kl-coefficient, with --trainer.reference",
    "kl_estimator": "--trainer.loss.kl-estimate",
    "eps_clip": TRL["epsilon"],
    "eps_clip_low_high": "--objective.clip-low and --objective.clip-high, of --objective ppo_clip",
    "dual_clip": TRL["delta"],
    "entropy_loss_coef": "--trainer.loss.entropy-coefficient",
    "advantage_estimator": "--trainer.loss.advantage",
    "dynamic_filtering": "--buffer.drop-equal-rewards",
    "actor_num_gpus_per_node": "--trainer.ranks",
    "vllm_num_engines": "--generator.replicas",
    "colocate_all_models": "--colocate",
    "save_path": "--output",
    "ckpt_path": "--output",
    "load_checkpoint": "--resume",
    "max_ckpt_num": "--checkpoint.keep",
}
"""Options of OpenRLHF's ``train_ppo_ray`` that neither of these has, to the flag here and a remark."""


def hint(given: str) -> str | None:
    """The flag that takes the place of another project's setting; None if it is none.

    Args:
        given: the setting as it was given, ``trainer.learning-rate``: under any prefix, and with ``-`` or ``_``.
    """
    key = given.replace("-", "_")
    last = key.rpartition(".")[2]
    if "." in key and (flag := _of_verl(key)):
        return f"a setting of verl; here: {flag}"
    if key.startswith(ONLY_OF_VERL):  # its last part alone would name another setting
        return None
    for project, settings in (("TRL", TRL), ("OpenRLHF", OPENRLHF)):
        if last in settings:
            return f"a setting of {project}; here: {settings[last]}"
    if len(last) > 1 and (flag := _of_verl(last)):  # not `n`
        return f"a setting of verl; here: {flag}"
    return None


def _of_verl(end: str) -> str | None:
    """The flag for verl's keys that end with these parts, if it is the same for all."""
    flags = {flag for name, flag in VERL.items() if f".{name}".endswith(f".{end}")}
    return flags.pop() if len(flags) == 1 else None

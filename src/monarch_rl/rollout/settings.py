"""What a user sets about rollouts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range

logger = logging.getLogger("monarch_rl")

MIN_TEMPERATURE = 0.01
"""Below, nearly all draws are the most likely token; below 1e-6 SGLang makes them greedy."""
PROCESSES_PER_CORE = 16
"""Worker and scoring processes that a core may run. Not a resource: it bounds what a typing error can start."""
MAX_EPISODES = {"groups-per-step": 1_000_000, "rollout.concurrent-groups": 65_536}
"""Episodes of a step, and of a worker at one time, which is one process with a task for each. Not a resource: it bounds
what a typing error can ask for."""
GENERATE_S = 600.0
"""Seconds that a turn may take, however few tokens it may draw: its replica may be replaced meanwhile."""
SLOW_TOKENS_PER_S = 20.0
"""Tokens of one sequence that an engine draws in a second where that is slow: half of what a GPU draws of each of many
sequences of a large model."""
MIN_GENERATE_S = 5.0
"""A turn may wait for a commit of new weights, which takes seconds: a shorter deadline ends every run."""
SEQUENCES = 16
"""That an episode may become, if nothing else is said: two seats and eight branches. What is held for each group has to
have a bound (docs/buffer.md)."""
MAX_TOP_K = 2048
"""Half the ids of a kept set that SGLang returns (``sampling_mask_max_tokens``): ties at the edge make sets larger."""


@dataclass(frozen=True)
class RolloutSettings(CheckedSettings, flags="rollout"):
    """How episodes are played and scored."""

    workers: Annotated[int, Range(1, 100_000)] = 1
    """CPU processes that play episodes."""
    concurrent_groups: Annotated[int, Range(1, 1_000_000)] = 16
    """Groups that one worker plays at once. More than the buffer has slots brings nothing."""
    group_size: Annotated[int, Range(1, 1_000_000)] = 8
    """Episodes of one prompt, which are compared with each other (GRPO, arXiv:2402.03300, and most code use 8)."""
    max_sequences: Annotated[int | None, Range(1, 100_000_000)] = None
    """Sequences that a group may become, where episodes have seats or branches; each episode has an equal share. None
    is 16 an episode."""
    max_tokens: Annotated[int | None, Range(1, 2**31 - 1)] = None
    """Tokens that the sequences of a group may have together, prompts included; each episode has an equal share. None
    is `max_sequences` times those that one sequence may have."""
    max_new_tokens: Annotated[int, Range(1, 2**31 - 1)] = 64
    """Tokens of one turn; longer ones are cut."""
    temperature: Annotated[float, Range(0, 100)] = 1.0
    """Of training rollouts; held-out episodes have evaluation.temperature. 1 draws from the policy that is trained."""
    top_k: Annotated[int, Range(0, MAX_TOP_K, "0 is off")] = 0
    """Draw from the k most likely tokens only; 0 draws from all. At most 2048. `top_p` and `min_p` need it, because the
    engine returns kept sets only then; where the vocabulary is larger they act among these k."""
    top_p: Annotated[float, Range(0, 1, "1 is off", above=True)] = 1.0
    """Draw from the smallest set of the most likely tokens that together have this probability; 1 is off."""
    min_p: Annotated[float, Range(0, 0.999, "0 is off")] = 0.0
    """Draw from tokens with at least this share of the most likely one's probability; 0 is off. Not with `seed`."""
    keep_sampling_mask: bool = False
    """Keep the set that each token was drawn from, and train the policy within it (DeepSeek-V3.2's Keep Sampling Mask,
    arXiv:2512.02556). Truncated sampling needs it; where all tokens can be drawn it has no effect. Costs 4 bytes for
    each id of each set."""
    seed: Annotated[int | None, Range(0, 2**63 - 1)] = None
    """Makes draws repeatable for the same weights: each episode's seed derives from this one, from its group and from
    its place in it."""
    chat_options: str = "{}"
    """Variables of the model's chat template, as a JSON object: {"enable_thinking": false}. See docs/chat.md."""
    tool_parser: str = ""
    """SGLang's name of the format in which the model writes tool calls, such as hermes; empty: told by the template."""
    scorer_processes: Annotated[int, Range(1, 100_000)] = 1
    """Processes of each worker that compute scores."""
    score_deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 10.0
    """Seconds of one score; one that takes longer is killed and costs its episode."""
    episode_deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 300.0
    """Seconds that an episode's own code may take between two turns of the policy and after the last one, with its wait
    for a scoring process; a longer time costs the episode."""
    generate_deadline_s: Annotated[float | None, Range(0.1, FOREVER_S)] = None
    """Seconds of one turn of the policy; a longer one ends the run. None is 600, or what its tokens take at 20 a
    second, if that is more."""
    logged_groups: Annotated[int, Range(0, 1_000_000, "0 is none")] = 1
    """Groups of each step's batch that are written to rollouts.jsonl, drawn at random; 0 writes none. Costs a call of
    every trainer rank and worker, and decoding, once a step."""
    slot_deadline_s: Annotated[float, Range(30, FOREVER_S)] = 3600.0
    """Seconds that a worker may wait for a free slot of the buffer, or for room, that is, for the trainer; a longer
    wait ends the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_truncation()
        _ = self.template_options

    @property
    def template_options(self) -> dict[str, Any]:
        """``chat_options``. Raises ValueError if that is no JSON object."""
        return template_options(self.chat_options, self.flag("chat_options"))

    @property
    def generate_limit_s(self) -> float:
        """Seconds of one turn of the policy."""
        return self.generate_deadline_s or max(GENERATE_S, self.max_new_tokens / SLOW_TOKENS_PER_S)

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def bound(self, episode_limit: int | None = None) -> GroupBound:
        """What a group may hold.

        Args:
            episode_limit: tokens that one sequence may have; None is any number.
        """
        sequences = self.group_size * SEQUENCES if self.max_sequences is None else self.max_sequences
        tokens = self.max_tokens
        if tokens is None and episode_limit is not None:
            tokens = sequences * episode_limit
        return GroupBound(sequences, tokens)

    def _check_truncation(self) -> None:
        if self.top_k == 1:
            raise ValueError(f"rollout.top-k must be 0 (off) or 2 to {MAX_TOP_K}, got {self.top_k}")
        if self.truncated and not self.keep_sampling_mask:
            raise ValueError(
                "rollout.top-k, top-p or min-p cut tokens off, which the trainer's policy does not: drawn tokens have "
                "another probability there, so that the importance ratio compares two different distributions. Set "
                "rollout.keep-sampling-mask, so that both take the same set, or sample from all tokens"
            )
        if self.truncated and not self.top_k:
            raise ValueError(
                f"rollout.top-p and min-p need a rollout.top-k of 2 to {MAX_TOP_K} too: the engine returns kept sets "
                "only then"
            )
        if self.truncated and not self.temperature:
            raise ValueError("rollout.temperature 0 draws the most likely token: there is nothing to cut off")
        if self.min_p and self.seed is not None:
            raise ValueError(
                "rollout.min-p cannot be used with rollout.seed: the engine's seeded draw does not support it"
            )


def template_options(text: str, flag: str) -> dict[str, Any]:
    """The variables of a chat template in the JSON of a setting. Raises ValueError if that is no JSON object."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {text[:80]!r} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f'{flag} must be an object, such as {{"enable_thinking": false}}, got {options!r:.80}')
    return options


def check_rollout(settings: RolloutSettings, groups_per_step: int, trainer_ranks: int) -> None:
    """Refuse rollouts that cannot be trained on: groups without advantages, steps that ranks cannot share equally.

    Raises ValueError saying what to change.
    """
    if settings.group_size < 2:
        raise ValueError("rollout.group-size must be at least 2: advantages compare the episodes of a group")
    bounds = {"rollout.max-sequences": settings.max_sequences, "rollout.max-tokens": settings.max_tokens}
    for flag, most in bounds.items():
        if most is not None and most < settings.group_size:
            raise ValueError(
                f"{flag} {most} is less than one for each of the {settings.group_size} episodes of a group "
                "(rollout.group-size): raise it"
            )
    if settings.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"rollout.temperature must be above 0: greedy episodes of a group are all the same. Give at least "
            f"{MIN_TEMPERATURE}, got {settings.temperature}"
        )
    if settings.generate_limit_s < MIN_GENERATE_S:
        raise ValueError(
            f"rollout.generate-deadline-s must be at least {MIN_GENERATE_S:g}, got {settings.generate_limit_s:g}: a "
            "turn may wait for a commit of new weights"
        )
    for flag, groups in zip(MAX_EPISODES, (groups_per_step, settings.concurrent_groups), strict=True):
        if (episodes := groups * settings.group_size) > MAX_EPISODES[flag]:
            raise ValueError(
                f"{flag} {groups:,} x rollout.group-size {settings.group_size:,} = {episodes:,} episodes, which is "
                f"more than {MAX_EPISODES[flag]:,}: ask for fewer"
            )
    episodes = groups_per_step * settings.group_size
    if episodes % trainer_ranks:
        raise ValueError(
            f"{groups_per_step} groups x {settings.group_size} episodes = {episodes} episodes a step cannot be "
            f"shared equally by {trainer_ranks} trainer ranks: change groups-per-step or trainer.ranks"
        )


def check_lengths(settings: RolloutSettings, limits: dict[str, int]) -> None:
    """Refuse turns that cannot be drawn or trained whatever the prompt is.

    Args:
        limits: tokens that an episode may have, by the name of the setting that limits them.

    Raises ValueError saying which limit is too small.
    """
    drawn = settings.max_new_tokens
    for name, tokens in limits.items():
        if drawn >= tokens:
            raise ValueError(
                f"rollout.max-new-tokens {drawn} leaves no room for a prompt within {name}, which is {tokens}"
            )


def check_characters(prompts: Sequence[str], most: int) -> None:
    """Refuse prompts that are too long whatever their tokens are, before these are counted.

    Args:
        most: characters for which there is room within the largest limit.

    Raises ValueError saying how long they are.
    """
    shortest = min(map(len, prompts))
    if shortest > most:
        raise ValueError(
            f"the shortest of {len(prompts)} prompts has {shortest:,} characters, and there is room for {most:,} at "
            "most, even if all tokens were the tokenizer's longest: make them shorter (task.template, task.config)"
        )


def check_prompts(settings: RolloutSettings, limits: dict[str, int], prompts: Sequence[int]) -> None:
    """Refuse limits that leave no room for any of some prompts of the task, and warn if they do not for most.

    Args:
        limits: as for :func:`check_lengths`.
        prompts: tokens of some of the task's prompts; a chat template may add some.

    Raises ValueError saying which limit is too small, and by how much.
    """
    drawn, shortest = settings.max_new_tokens, min(prompts)
    for name, tokens in limits.items():
        asked = f"rollout.max-new-tokens {drawn} after a prompt of {shortest} tokens, the shortest of {len(prompts)}, "
        if drawn + shortest > tokens:
            raise ValueError(
                f"{asked}is more than {name}, which is {tokens}: raise that, draw fewer tokens, or make prompts shorter"
            )
        too_long = sum(drawn + prompt > tokens for prompt in prompts)
        if 2 * too_long > len(prompts):
            logger.warning(
                "%d of %d prompts leave no room for %d tokens within %s, which is %d: answers will be cut there",
                *(too_long, len(prompts), drawn, name, tokens),
            )


def check_processes(settings: RolloutSettings, cores: int) -> None:
    """Refuse more worker and scoring processes than a machine can start. Raises ValueError."""
    processes, most = settings.workers * (1 + settings.scorer_processes), PROCESSES_PER_CORE * cores
    if processes > most:
        raise ValueError(
            f"rollout.workers {settings.workers} with rollout.scorer-processes {settings.scorer_processes} each are "
            f"{processes} processes, and {cores} cores may run {most}: ask for fewer"
        )

"""Settings of rollouts, and their checks.

A check of one value is the ``Range`` of its field. A check of several fields of :class:`RolloutSettings` belongs to its
``contradictions``, unless only training needs it (:func:`check_rollout`). A check that needs other values, such as the
task's prompts or the number of data ranks, is one of the ``check_`` functions below, which ``check`` in
``pipeline/settings.py`` calls. One that reads the settings of several packages is in that module.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.errors import Refusals, SettingsError
from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range

logger = logging.getLogger("monarch_rl")

MIN_TEMPERATURE = 0.01
"""Below this, nearly all samples are the most likely token; below 1e-6 SGLang samples greedily."""
PROCESSES_PER_CORE = 16
"""Worker and scoring processes per core. Not a resource limit: it limits the effect of a typing error."""
MAX_EPISODES = {"groups-per-step": 1_000_000, "rollout.concurrent-groups": 65_536}
"""Maximum episodes per step, and at a time in a worker, which is one process with a task per episode. Not a resource
limit: it limits the effect of a typing error."""
GENERATE_S = 600.0
"""Minimum default of the deadline of a turn in seconds, even if it may have few tokens: its replica may have to be
replaced meanwhile."""
SLOW_TOKENS_PER_S = 20.0
"""Tokens per second and sequence of a slow engine: half of what a GPU generates for each of many sequences of a large
model."""
MIN_GENERATE_S = 5.0
"""Minimum deadline of a turn in seconds. A turn may wait for a commit of new weights, which takes seconds, so a shorter
deadline would end every run."""
SEQUENCES = 16
"""Default maximum of sequences per episode: two seats and eight branches. The memory per group needs a bound
(docs/buffer.md)."""
MAX_TOP_K = 2048
"""Half of the ids per sampling mask that SGLang returns (``sampling_mask_max_tokens``), because ties at the threshold
make masks larger."""


@dataclass(frozen=True)
class RolloutSettings(CheckedSettings, flags="rollout"):
    """How to run and score episodes."""

    workers: Annotated[int, Range(1, 100_000)] = 1
    """CPU processes that run episodes."""
    concurrent_groups: Annotated[int, Range(1, 1_000_000)] = 16
    """Groups that one worker runs at once. More groups in total than the buffer has slots have no effect."""
    group_size: Annotated[int, Range(1, 1_000_000)] = 8
    """Episodes per prompt, which are compared with each other (GRPO, arXiv:2402.03300; most code uses 8)."""
    max_sequences: NotAFlag[Annotated[int | None, Range(1, 100_000_000)]] = None
    """Maximum sequences of a group whose episodes have seats or branches; each episode has an equal share. None means
    16 per episode."""
    max_tokens: NotAFlag[Annotated[int | None, Range(1, 2**31 - 1)]] = None
    """Maximum total tokens of a group's sequences, prompts included; each episode has an equal share. None means
    `max_sequences` times the maximum tokens of one sequence."""
    max_new_tokens: Annotated[int, Range(1, 2**31 - 1)] = 64
    """Maximum tokens of one turn; longer turns are cut."""
    max_turns: Annotated[int | None, Range(1, 1_000_000)] = None
    """Maximum turns of the policy in a conversation; it then ends the episode as a full context does. None: an episode
    may go on until its context is full."""
    temperature: Annotated[float, Range(0, 100)] = 1.0
    """Temperature of training rollouts; held-out episodes use evaluation.temperature. 1 samples from the policy that is
    trained."""
    top_k: Annotated[int, Range(0, MAX_TOP_K, "0 is off")] = 0
    """Sample from the k most likely tokens only, at most 2048; 0 samples from all. `top_p` and `min_p` require it,
    because only then the engine returns sampling masks; in a larger vocabulary they select among these k."""
    top_p: Annotated[float, Range(0, 1, "1 is off", above=True)] = 1.0
    """Sample from the smallest set of most likely tokens whose total probability reaches this value; 1 is off."""
    min_p: Annotated[float, Range(0, 0.999, "0 is off")] = 0.0
    """Sample from tokens with at least this share of the most likely token's probability; 0 is off. Not with `seed`."""
    keep_sampling_mask: bool = False
    """Keep the set of tokens that each token was sampled from, and train the policy within it (DeepSeek-V3.2's Keep
    Sampling Mask, arXiv:2512.02556). Required for truncated sampling; without truncation it has no effect. Costs 4
    bytes per id in each set."""
    seed: Annotated[int | None, Range(0, 2**63 - 1)] = None
    """Makes sampling repeatable for the same weights: each episode's seed is derived from this one, its group and its
    index in the group."""
    chat_options: str = "{}"
    """Variables of the model's chat template, as a JSON object: {"enable_thinking": false}. See docs/chat.md."""
    tool_parser: str = ""
    """SGLang's name of the format of the model's tool calls, such as hermes; empty detects it from the chat
    template."""
    allow_control_tokens: bool = False
    """Encode the text of a control token in a message, such as <|im_end|>, as that token, as transformers does. Without
    it, such text is text: only the chat template writes control tokens. Applies to judges and supervised rows, too."""
    scorer_processes: Annotated[int, Range(1, 100_000)] = 1
    """Processes of each worker that compute scores."""
    score_deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 10.0
    """Deadline in seconds of one score; one that takes longer is killed and costs its episode."""
    episode_deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 300.0
    """Seconds that an episode's own code may take between two turns of the policy and after the last one, including its
    wait for a scoring process; exceeding it costs the episode."""
    generate_deadline_s: NotAFlag[Annotated[float | None, Range(0.1, FOREVER_S)]] = None
    """Deadline in seconds of one turn of the policy; exceeding it ends the run. None means 600, or the time for
    `max_new_tokens` at 20 per second, if that is more."""
    logged_groups: Annotated[int, Range(0, 1_000_000, "0 is none")] = 1
    """Groups of each `groups_per_step` that are written to `rollouts/` with all their tokens, chosen at random; 0
    writes none. Costs one call to every trainer rank per step, and decoding. Failed and dropped episodes are written
    besides."""
    log_mib: Annotated[int, Range(1, 2**30)] = 2048
    """Maximum MiB of `rollouts/`, half of it for episodes and half for the trainer's values per token; the oldest are
    deleted, except the beginning."""
    slot_deadline_s: NotAFlag[Annotated[float, Range(30, FOREVER_S)]] = 3600.0
    """Seconds that a worker may wait for a free slot or free space in the buffer, that is, for the trainer; exceeding
    it ends the run."""

    def contradictions(self) -> Iterator[str]:
        yield from self._check_truncation()
        try:
            _ = self.template_options
        except SettingsError as error:
            yield str(error)

    @property
    def template_options(self) -> dict[str, Any]:
        """``chat_options`` as a dictionary. Raises ValueError if it is not a JSON object."""
        return template_options(self.chat_options, self.flag("chat_options"))

    @property
    def generate_limit_s(self) -> float:
        """Deadline in seconds of one turn of the policy."""
        return self.generate_deadline_s or max(GENERATE_S, self.max_new_tokens / SLOW_TOKENS_PER_S)

    @property
    def truncated(self) -> bool:
        """Whether top-k, top-p or min-p excludes some tokens from sampling."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def bound(self, episode_limit: int | None = None) -> GroupBound:
        """Bound on the sequences and tokens of a group.

        Args:
            episode_limit: maximum tokens of a sequence, prompts included; None means no limit.
        """
        sequences = self.group_size * SEQUENCES if self.max_sequences is None else self.max_sequences
        tokens = self.max_tokens
        if tokens is None and episode_limit is not None:
            tokens = sequences * episode_limit
        return GroupBound(sequences, tokens)

    def _check_truncation(self) -> Iterator[str]:
        if self.top_k == 1:
            yield f"rollout.top-k must be 0 (off) or 2 to {MAX_TOP_K}, got {self.top_k}"
        if self.truncated and not self.keep_sampling_mask:
            yield (
                "rollout.top-k, top-p or min-p sample from a part of the vocabulary, but the trainer computes "
                "probabilities over all of it: the importance ratio would compare two different distributions. Set "
                "rollout.keep-sampling-mask, so that both use the same set of tokens, or sample from all tokens"
            )
        if self.truncated and not self.top_k:
            yield (
                f"rollout.top-p and min-p also need a rollout.top-k of 2 to {MAX_TOP_K}: only then the engine returns "
                "sampling masks"
            )
        if self.truncated and not self.temperature:
            yield (
                "rollout.temperature 0 always samples the most likely token: rollout.top-k, top-p and min-p have no "
                "effect, leave them off"
            )
        if self.min_p and self.seed is not None:
            yield "rollout.min-p cannot be used with rollout.seed: the engine's seeded sampling does not support it"


def template_options(text: str, flag: str) -> dict[str, Any]:
    """The variables of a chat template, from a JSON setting. Raises ValueError if ``text`` is not a JSON object."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{flag} {text[:80]!r} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise SettingsError(f'{flag} must be a JSON object, such as {{"enable_thinking": false}}, got {options!r:.80}')
    return options


def check_rollout(settings: RolloutSettings, groups_per_step: int, data_ranks: int) -> None:
    """Check that rollouts can be trained on: groups have advantages, and ranks can share a step equally.

    Args:
        data_ranks: shares that a step is divided into: ``TrainerSettings.data_ranks``.

    Raises ValueError saying what to change, for all that is wrong.
    """
    refusals = Refusals()
    if settings.group_size < 2:
        refusals.add("rollout.group-size must be at least 2: advantages compare the episodes of a group")
    bounds = {"rollout.max_sequences": settings.max_sequences, "rollout.max_tokens": settings.max_tokens}
    for flag, most in bounds.items():
        if most is not None and most < settings.group_size:
            refusals.add(
                f"{flag} {most} is less than rollout.group-size {settings.group_size}, and each episode of a group "
                f"needs at least one: raise {flag}"
            )
    if settings.temperature < MIN_TEMPERATURE:
        refusals.add(
            f"rollout.temperature must be at least {MIN_TEMPERATURE}, got {settings.temperature}: greedy episodes of a "
            "group are all the same"
        )
    if settings.generate_limit_s < MIN_GENERATE_S:
        refusals.add(
            f"{settings.flag('generate_deadline_s')} must be at least {MIN_GENERATE_S:g}, got "
            f"{settings.generate_limit_s:g}: a turn may wait for a commit of new weights"
        )
    for flag, groups in zip(MAX_EPISODES, (groups_per_step, settings.concurrent_groups), strict=True):
        if (episodes := groups * settings.group_size) > MAX_EPISODES[flag]:
            refusals.add(
                f"{flag} {groups:,} x rollout.group-size {settings.group_size:,} = {episodes:,} episodes, which is "
                f"more than the limit of {MAX_EPISODES[flag]:,}: reduce one of them"
            )
    episodes = groups_per_step * settings.group_size
    if episodes % data_ranks:
        refusals.add(
            f"groups-per-step {groups_per_step} x rollout.group-size {settings.group_size} = {episodes} episodes, "
            f"which {data_ranks} data ranks (trainer.ranks / trainer.tp) cannot share equally: change one of these "
            "settings"
        )
    refusals.raise_all()


def check_lengths(settings: RolloutSettings, episode_limits: dict[str, int]) -> None:
    """Refuse turns that cannot be generated or trained with any prompt.

    Args:
        episode_limits: maximum tokens of a sequence, prompts included, by the name of the setting that limits them.

    Raises ValueError saying which limit is too small.
    """
    new_tokens = settings.max_new_tokens
    for name, tokens in episode_limits.items():
        if new_tokens >= tokens:
            raise SettingsError(
                f"rollout.max-new-tokens {new_tokens} leaves no room for a prompt within {name}, which is {tokens}: "
                f"reduce it, or raise {name}"
            )


def check_characters(prompts: Sequence[str], most: int) -> None:
    """Refuse prompts that are too long whatever the tokenizer makes of them, before their tokens are counted.

    Args:
        most: number of characters for which the largest limit has room.

    Raises ValueError saying how long they are.
    """
    shortest = min(map(len, prompts))
    if shortest > most:
        raise SettingsError(
            f"the shortest of {len(prompts)} prompts has {shortest:,} characters, and there is room for at most "
            f"{most:,}, even if all tokens were the tokenizer's longest: shorten the prompts "
            "(for a data set of reasoning-gym by task.template or task.config)"
        )


def check_prompts(settings: RolloutSettings, episode_limits: dict[str, int], prompts: Sequence[int]) -> None:
    """Refuse limits that leave no room for any of some prompts of the task, and warn if most of them do not fit.

    Args:
        episode_limits: as for :func:`check_lengths`.
        prompts: token counts of some of the task's prompts; a chat template may add some.

    Raises ValueError saying which limit is too small, and by how much.
    """
    new_tokens, shortest = settings.max_new_tokens, min(prompts)
    for name, tokens in episode_limits.items():
        if new_tokens + shortest > tokens:
            raise SettingsError(
                f"rollout.max-new-tokens {new_tokens} after a prompt of {shortest} tokens, the shortest of "
                f"{len(prompts)}, is more than {name}, which is {tokens}: raise {name}, reduce rollout.max-new-tokens, "
                "or shorten the prompts"
            )
        too_long = sum(new_tokens + prompt > tokens for prompt in prompts)
        if 2 * too_long > len(prompts):
            logger.warning(
                "%d of %d prompts leave no room for %d new tokens within %s, which is %d: their answers will be cut",
                too_long,
                len(prompts),
                new_tokens,
                name,
                tokens,
            )


def check_processes(settings: RolloutSettings, cores: int) -> None:
    """Refuse more worker and scoring processes than a machine can start. Raises ValueError."""
    processes, most = settings.workers * (1 + settings.scorer_processes), PROCESSES_PER_CORE * cores
    if processes > most:
        raise SettingsError(
            f"rollout.workers {settings.workers} with rollout.scorer-processes {settings.scorer_processes} each are "
            f"{processes} processes, and the limit for {cores} cores is {most}: reduce one of them"
        )

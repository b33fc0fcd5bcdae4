"""Compares the log-probs that engine and trainer compute for the same tokens.

    python tools/parity.py MODEL
    python tools/parity.py .cache/tiny-qwen3-moe --generator.dtype bfloat16 --plot parity.png
    python tools/parity.py MODEL --trainer-model OTHER        # compare two models of the same shape

A real engine, in its own process, generates sequences: sampled, sampled from truncated distributions, and greedily.
Then a real trainer, in its own processes, computes their log-probs. Prints the differences of the log-probs, how often
the most likely token is the same, and, for a mixture of experts, how often the trainer's routers choose other experts
and the differences of the log-probs with the engine's experts. The last lines are the verdict and all numbers in one
line of JSON. The exit code is 1 if the differences exceed the limits, and 2 if a side failed.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from monarch_rl.algorithms.mismatch import figures
from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.gpu import check_environment
from monarch_rl.generator.settings import GeneratorSettings, check_attention, check_served, resolve_dtype
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.folder import resolve_model
from monarch_rl.model.messages import user
from monarch_rl.model.tensors import check_folder
from monarch_rl.offline.parity import TOP, PromptSet, Reading, compare
from monarch_rl.offline.program import run_program
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource
from monarch_rl.trainer.settings import TrainerSettings, check_experts, check_tensor_parallel

RunMetrics = dict[str, float]


@dataclass(frozen=True)
class Limits:
    """Limits of the verdict; None means the default for the coarser of the two dtypes.

    float32 has a relative rounding error of 6e-8. Three layers differ by 2e-6 at p99
    (benchmarks/results/parity_dense_cpu.txt); 1e-4 leaves a margin for deep models, and 1e-8 is twice the corresponding
    k3, which is half the square.
    bfloat16 has a relative rounding error of 2e-3. Three layers differ by 0.03 at p99 with routes replayed, and have a
    k3 of 5e-5 (benchmarks/results/parity_moe_cpu.txt); 0.2 and 2e-3 leave a margin for deep models, whose k3 is of the
    order of 1e-3 in published runs (arXiv:2510.11370). A ratio of 2 is 0.7 nats, three times the limit of p99; the 1 %
    of tokens that p99 does not bound may exceed it.
    """

    p99: float | None = None
    """99th percentile of the |log-prob difference|, in nats. Default: float32 1e-4, bfloat16 0.2."""
    k3: float | None = None
    """Mean k3 estimate of the KL divergence, in nats per token. Default: float32 1e-8, bfloat16 2e-3."""
    outside: float | None = None
    """Share of tokens whose ratio is outside the bounds. Default: float32 0, bfloat16 0.01."""
    top_differs: float | None = None
    """Share of greedily generated tokens that are not the trainer's most likely ones. Default: float32 0.002, bfloat16
    0.05, because only near ties may differ."""
    routes_differ: float | None = None
    """Share of the engine's experts that the trainer's routers would not choose. Default: float32 0.002; bfloat16 0.15,
    because about 10 % are reported for 48 layers of 128 experts in bfloat16 (arXiv:2510.11370)."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value < 0:
                raise ValueError(f"limits.{limit.name.replace('_', '-')} must not be negative, got {value}")

    def of(self, dtype: str) -> RunMetrics:
        """All limits by name, with the defaults for ``dtype``."""
        default = DEFAULTS["float32" if dtype == "float32" else "bfloat16"]
        own = {name: value for name, value in asdict(self).items() if value is not None}
        return default | own


DEFAULTS: dict[str, RunMetrics] = {
    "float32": {"p99": 1e-4, "k3": 1e-8, "outside": 0.0, "top_differs": 0.002, "routes_differ": 0.002},
    "bfloat16": {"p99": 0.2, "k3": 2e-3, "outside": 0.01, "top_differs": 0.05, "routes_differ": 0.15},
}


@dataclass(frozen=True)
class Settings:
    """Compare the log-probs of engine and trainer for the same tokens (see the top of this file)."""

    model: Annotated[str, tyro.conf.Positional]
    """Hugging Face folder or Hub name."""
    trainer_model: str | None = None
    """Folder or Hub name of another model of the same shape for the trainer."""
    prompts: Literal["task", "random"] = "task"
    """`task`: questions of a task, through the model's tokenizer; `random`: random token IDs, without a tokenizer."""
    prompt_tokens: int = 16
    """Tokens per random prompt."""
    sequences: int = 64
    """Sequences per prompt set, each with its own prompt. End tokens are ignored: each sequence has
    `rollout.max-new-tokens` tokens."""
    seed: int = 0
    """Seed of random prompts; the seed of sampling is `generator.random-seed`."""
    ratio_low: float = 0.5
    """Tokens with a ratio trainer / engine below this, or above ratio-high, count as outside."""
    ratio_high: float = 2.0
    """See ratio-low. Recipes cap the importance weight at 2 (trainer.loss.corrections tis)."""
    deadline_s: float = 900.0
    """Deadline of each side in seconds, not including the engine's start."""
    plot: Path | None = None
    """PNG file to write."""
    limits: Limits = Limits()
    task: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings(top_k=50, top_p=0.95, keep_sampling_mask=True)
    """Temperature and length of the generated sequences, and the truncation of the truncated prompt set;
    `rollout.top-k 0` with `rollout.top-p 1` omits that set."""
    generator: GeneratorSettings = GeneratorSettings(replicas=1)
    trainer: TrainerSettings = TrainerSettings(ranks=1)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.ratio_low <= 1 <= self.ratio_high:
            raise ValueError(f"1 must lie between ratio-low and ratio-high, got {self.ratio_low} and {self.ratio_high}")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline-s must be positive, got {self.deadline_s}")
        if not self.rollout.temperature:
            raise ValueError("rollout.temperature must be above 0: a greedy set is always included")
        if self.trainer.router_replay != "off":
            raise ValueError(
                f"trainer.router-replay {self.trainer.router_replay}: leave it off, because this tool measures both"
            )
        if self.trainer.lora.rank:
            raise ValueError("trainer.lora.rank: adapters are not supported; export the model with the adapter merged")


# -- before any process starts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The checked models and settings of a comparison."""

    engine_model: Path
    trainer_model: Path
    config: ModelConfig
    prompt_sets: list[PromptSet]
    engine_dtype: str
    trainer_dtype: str

    @property
    def dtype(self) -> str:
        """The coarser of the two dtypes."""
        return "float32" if {self.engine_dtype, self.trainer_dtype} == {"float32"} else "bfloat16"


def prepare(s: Settings) -> Job:
    """Check models and settings. Raises ValueError if they cannot be compared."""
    config = resolve_model(s.model, tokenizer=s.prompts == "task")
    check_folder(config)
    check_served(config, s.generator, on_gpu := torch.cuda.is_available())
    check_attention(s.generator, on_gpu)
    if on_gpu:
        check_environment()
    check_experts(config, s.trainer)
    check_tensor_parallel(config, s.trainer.tp)
    other = config
    if s.trainer_model is not None:
        other = resolve_model(s.trainer_model, tokenizer=False)
        check_folder(other)
        check_same_shape(config, other)
    devices = torch.cuda.device_count()
    if devices and max(s.trainer.ranks, s.generator.tp) > devices:
        raise ValueError(
            f"trainer.ranks {s.trainer.ranks} and generator.tp {s.generator.tp} must be at most {devices}, the number "
            "of GPUs"
        )
    if s.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install -e ".[dev]"')
    prompts = random_prompts(s, config) if s.prompts == "random" else task_prompts(s, config.folder)
    longest = max(map(len, prompts)) + s.rollout.max_new_tokens
    for name, limit in (
        ("the model's max_position_embeddings", config.max_position_embeddings),
        ("generator.context-length", s.generator.context_length or longest),
        ("trainer.tokens-per-microbatch", s.trainer.tokens_per_microbatch),
    ):
        if longest > limit:
            raise ValueError(
                f"the longest sequence may have {longest} tokens, but {name} is {limit}: lower rollout.max-new-tokens "
                "or raise the limit"
            )
    dtypes = [resolve_dtype(dtype, devices > 0) for dtype in (s.generator.dtype, s.trainer.compute_dtype)]
    return Job(config.folder, other.folder, config, make_prompt_sets(s.rollout, prompts), *dtypes)


def check_same_shape(config: ModelConfig, other: ModelConfig) -> None:
    """Raise ValueError if tokens or routes of one model are meaningless to the other."""
    shapes = [
        (c.architecture.name, c.vocab_size, c.num_experts, c.num_experts_per_tok, list(c.sparse_layers))
        for c in (config, other)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "trainer-model must have the model's architecture, vocabulary and experts; (architecture, vocabulary, "
            f"experts, experts per token, layers with experts) are {shapes[0]} and {shapes[1]}"
        )


def random_prompts(s: Settings, config: ModelConfig) -> list[list[int]]:
    rng = np.random.default_rng(s.seed)
    return rng.integers(0, config.vocab_size, (s.sequences, s.prompt_tokens)).tolist()  # type: ignore[no-any-return]


def task_prompts(s: Settings, folder: Path) -> list[list[int]]:
    template, source = ChatTemplate(str(folder)), TaskSource(s.task, "train")
    return [template.opening([user(source.item(index).prompt)]) for index in range(s.sequences)]


def make_prompt_sets(r: RolloutSettings, prompts: list[list[int]]) -> list[PromptSet]:
    prompt_sets = [PromptSet("sampled", prompts, Sampling(r.max_new_tokens, r.temperature))]
    if r.truncated:
        truncated = Sampling(r.max_new_tokens, r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p)
        prompt_sets.append(PromptSet("truncated", prompts, truncated))
    return [*prompt_sets, PromptSet("greedy", prompts, Sampling(r.max_new_tokens, temperature=0.0))]


# -- differences and verdict ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """All measured differences between the two sides."""

    rows: dict[str, RunMetrics]
    """By prompt set and choice of experts: ``sampled``, ``sampled_replayed`` and so on; see :func:`figures`."""
    top_differs: RunMetrics
    """Share of greedily generated tokens that are not the trainer's most likely ones: ``own``, ``replayed``."""
    routes_differ: list[float]
    """Share of the engine's experts that the trainer would not choose, for each layer with experts; over the sampled
    set, including prompts."""
    tokens_rerouted: float
    """Share of tokens whose experts differ in any layer."""
    costs: RunMetrics
    """Bytes per token, and IDs in the sampling mask of a token from a truncated distribution."""

    @property
    def judged(self) -> dict[str, RunMetrics]:
        """The rows that the verdict uses: with the engine's experts if the model has experts, as in training."""
        replayed = {name: row for name, row in self.rows.items() if name.endswith("_replayed")}
        return replayed or self.rows


def measure(s: Settings, readings: dict[str, Reading]) -> Differences:
    rows: dict[str, RunMetrics] = {}
    for name, reading in readings.items():
        for label, logprobs in trainer_logprobs(name, reading).items():
            if name != "greedy":
                rows[label] = figures(logprobs, reading.engine, s.ratio_low, s.ratio_high)
    top = {
        label.removeprefix("greedy").strip("_") or "own": float((logprobs <= TOP).double().mean())
        for label, logprobs in trainer_logprobs("greedy", readings["greedy"]).items()
    }
    sampled, costs, routes_differ, rerouted = readings["sampled"], {}, [], 0.0
    if sampled.differing is not None:
        expert_routes = [
            episode.expert_routes for episode in sampled.group.episodes if episode.expert_routes is not None
        ]
        routes_differ = (sampled.differing.double().mean(0) / expert_routes[0].shape[2]).tolist()
        rerouted = float((sampled.differing > 0).any(1).double().mean())
        costs["route_bytes_per_token"] = sum(x.nbytes for x in expert_routes) / sum(map(len, expert_routes))
    if "truncated" in readings:
        sets = [episode.sampling_masks for episode in readings["truncated"].group.episodes]
        sampled_tokens = sum(episode.num_trainable for episode in readings["truncated"].group.episodes)
        costs["kept_ids_per_token"] = (
            sum(len(sampling_masks.ids) for sampling_masks in sets if sampling_masks is not None) / sampled_tokens
        )
        costs["mask_bytes_per_token"] = 4 + 4 * costs["kept_ids_per_token"]
    return Differences(rows, top, routes_differ, rerouted, costs)


def trainer_logprobs(name: str, reading: Reading) -> dict[str, torch.Tensor]:
    """By row name: log-probs with the trainer's own experts, and, if the model has experts, with the engine's."""
    replayed = {} if reading.replayed is None else {f"{name}_replayed": reading.replayed}
    return {name: reading.own} | replayed


def judge(differences: Differences, limits: RunMetrics) -> tuple[RunMetrics, list[str]]:
    """The judged numbers, by limit, and the names of the exceeded limits."""
    rows = differences.judged.values()
    worst = {name: max(row[name] for row in rows) for name in ("p99", "k3", "outside")}
    worst["top_differs"] = differences.top_differs.get("replayed", differences.top_differs["own"])
    if differences.routes_differ:
        worst["routes_differ"] = sum(differences.routes_differ) / len(differences.routes_differ)
    failed = [name for name, value in worst.items() if value > limits[name]]
    if any(row["nonfinite"] for row in differences.rows.values()):
        failed.append("nonfinite")
    return worst, failed


def sentence(job: Job, differences: Differences, limits: RunMetrics, worst: RunMetrics, failed: list[str]) -> str:
    listed = ", ".join(
        f"{name} {value:.2g} ({'ABOVE' if name in failed else 'limit'} {limits[name]:g})"
        for name, value in worst.items()
    )
    nonfinite = " and some log-probs are not finite" if "nonfinite" in failed else ""
    replayed = ", with the engine's experts replayed" if differences.routes_differ else ""
    return (
        f"{'FAIL' if failed else 'PASS'}: engine ({job.engine_dtype}) and trainer ({job.trainer_dtype}) "
        f"{'do not agree' if failed else 'agree'}{nonfinite}{replayed}: {listed}."
    )


def show(s: Settings, job: Job, differences: Differences) -> None:
    print(f"{'log-prob differences':22}{'tokens':>8}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name, row in differences.rows.items():
        print(f"{name:22}{row['tokens']:8.0f}" + "".join(f"{row[column]:10.2g}" for column in COLUMNS))
    print(f"outside: share of tokens whose ratio trainer / engine is not in [{s.ratio_low:g}, {s.ratio_high:g}]")
    for name, share in differences.top_differs.items():
        print(f"greedy tokens that are the trainer's most likely ({name} experts): {1 - share:.4%}")
    if differences.routes_differ:
        layers = zip(job.config.sparse_layers, differences.routes_differ, strict=True)
        print("experts that the trainer would not choose: " + ", ".join(f"layer {i}: {x:.3%}" for i, x in layers))
        print(f"tokens for which that is so in any layer: {differences.tokens_rerouted:.3%}")
    for name, value in differences.costs.items():
        print(f"{name.replace('_', ' ')}: {value:.1f}")


COLUMNS = ("mean", "p50", "p90", "p99", "p99_9", "max", "k3", "outside")


def draw_plot(path: Path, job: Job, differences: Differences, readings: dict[str, Reading]) -> None:
    """Plot the share of tokens above each difference, the log-probs of both sides, and differing routes by layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3 if differences.routes_differ else 2, figsize=(13, 4.2), layout="constrained")
    for name, reading in readings.items():
        for label, logprobs in trainer_logprobs(name, reading).items():
            if name == "greedy":
                continue
            sizes = (logprobs - reading.engine).abs().sort(descending=True).values.clamp(min=1e-8)
            panels[0].plot(sizes, torch.arange(1, len(sizes) + 1) / len(sizes), label=label.replace("_", ", "))
    panels[0].set(xscale="log", yscale="log", xlabel="|log-prob difference|, nats", ylabel="share of tokens beyond it")
    panels[0].legend(fontsize="small")
    sampled = readings["sampled"]
    panels[1].plot(sampled.engine, sampled.own, ".", markersize=3, label="own experts")
    if sampled.replayed is not None:
        panels[1].plot(sampled.engine, sampled.replayed, ".", markersize=2, label="the engine's experts")
        panels[1].legend(fontsize="small")
    panels[1].axline((0, 0), slope=1, color="grey", linewidth=0.5)
    panels[1].set(xlabel="engine's log-prob, sampled tokens", ylabel="trainer's")
    if differences.routes_differ:
        panels[2].bar([str(layer) for layer in job.config.sparse_layers], differences.routes_differ)
        panels[2].set(xlabel="layer", ylabel="share of experts not the trainer's")
        panels[2].set_ylim(bottom=0)
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.suptitle(f"{job.engine_model.name}: engine {job.engine_dtype}, trainer {job.trainer_dtype}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def rounded(value: Any) -> Any:
    """Round floats to 4 significant digits, including those in lists and dictionaries."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return {name: rounded(item) for name, item in value.items()} if isinstance(value, dict) else value


def main(s: Settings) -> int:
    job = prepare(s)
    limits = s.limits.of(job.dtype)
    readings = compare(
        job.engine_model,
        job.trainer_model,
        s.generator,
        s.trainer,
        job.prompt_sets,
        experts=bool(job.config.sparse_layers),
        deadline_s=s.deadline_s,
    )
    differences = measure(s, readings)
    worst, failed = judge(differences, limits)
    show(s, job, differences)
    if s.plot is not None:
        draw_plot(s.plot, job, differences, readings)
    print(sentence(job, differences, limits, worst, failed))
    report = asdict(differences) | {"verdict": "fail" if failed else "pass", "failed": failed, "limits": limits}
    report |= {"engine_dtype": job.engine_dtype, "trainer_dtype": job.trainer_dtype}
    print(json.dumps(rounded(report)), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    run_program(lambda: main(tyro.cli(Settings, description=__doc__)))

"""Part ``commits``: under load, each token is labelled with the version that sampled it.

Two sets of weights are committed alternately: the model's (even versions), and the same with a final norm of zeros (odd
versions), under which all tokens have equal probability. So the log-prob of a token shows which weights sampled it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.engine import Engine
from monarch_rl.weights.area import Area
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import Manifest, make_manifest
from tools.gpu_parts.common import Bench, Findings, make_model, model_shape, random_weights
from tools.gpu_parts.engines import DRAW_S, prompts, running_engine

COMMIT_S = 120.0
COMMITS = 12
EQUAL = 1e-4
"""Tolerance in nats around the log-prob of equal probabilities."""
CHANCE, FEW = 1e-5, 3
"""Share and number of the model's own tokens that may be within ``EQUAL`` by chance. Their log-probs spread over about
3 nats, and equal probabilities are 1.5 times that from the middle: there 4 % of the tokens lie in a nat, and 1e-5
within ``EQUAL``."""


class Versions:
    """The two sets of weights, each in its own area."""

    def __init__(self, bench: Bench) -> None:
        own = random_weights(bench, model_shape(bench))
        flat = own | {"model.norm.weight": torch.zeros_like(own["model.norm.weight"])}
        sizes = [(name, tuple(x.shape), x.dtype) for name, x in own.items()]
        self.manifest: Manifest = make_manifest(sizes, [[(name, 0, x.numel()) for name, x in own.items()]])
        self.areas, self.expected = [], []
        for weights in (own, flat):
            area = Area(self.manifest.nbytes, bench.device)
            for spec in self.manifest.tensors:
                spec.view(area.buffer).copy_(weights[spec.name])
            self.areas.append(area)
            self.expected.append(np.array([int(tensor_checksum(weights[name])) for name in self.manifest.names]))
        bench.synchronize()

    async def commit(self, engine: Engine) -> CommitReport:
        """Serve the other set of weights as the next version."""
        version = engine.requests.version + 1
        commit = engine.commit(version, self.manifest, self.areas[version % 2].handle, self.expected[version % 2])
        return await asyncio.wait_for(commit, COMMIT_S)


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    asyncio.run(_run(bench, found))


async def _run(bench: Bench, found: Findings) -> None:
    config = model_shape(bench)
    folder, versions = make_model(bench, config), Versions(bench)
    count, new_tokens = (64, 2000) if bench.on_gpu else (12, 300)
    async with running_engine(bench, found, folder) as engine:
        arrived = 0

        def on_part(part: Completion) -> None:
            nonlocal arrived
            arrived += len(part.token_ids)

        requests = [
            asyncio.ensure_future(engine.generate(prompt, Sampling(max_new_tokens=new_tokens), on_part))
            for prompt in prompts(config["vocab_size"], count, 16)
        ]
        reports = []
        async with asyncio.timeout(DRAW_S):
            for commit in range(1, COMMITS + 1):
                # Spread evenly over the load: by tokens sampled, not by time.
                while arrived < commit * count * new_tokens / (COMMITS + 2):
                    raise_failed(requests)
                    await asyncio.sleep(0.005)
                reports.append(await versions.commit(engine))
            completions = await asyncio.gather(*requests)
    judge(found, completions, config["vocab_size"])
    found.note(commits=len(reports), first_pause_ms=1e3 * reports[0].paused_seconds)
    later = reports[1:]
    for name in ("paused_seconds", "copy_seconds", "checksum_seconds", "messages_seconds"):
        median = statistics.median(getattr(report, name) for report in later)
        found.note(**{name.replace("_seconds", "_ms"): 1e3 * median})


def raise_failed(requests: Sequence[asyncio.Future[Completion]]) -> None:
    """Raise the error of the first failed request, if any: after it, the expected tokens would never arrive."""
    for request in requests:
        if request.done():
            request.result()


def judge(found: Findings, completions: list[Completion], vocabulary: int) -> None:
    """Count tokens whose log-prob does not match the weights of their version."""
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    versions = np.concatenate([completion.policy_versions for completion in completions])
    flat = np.abs(logprobs + np.log(vocabulary)) < EQUAL
    labelled_flat = versions % 2 == 1
    as_own, as_flat = int((flat & ~labelled_flat).sum()), int((~flat & labelled_flat).sum())
    found.note(tokens=len(flat), versions=len(np.unique(versions)), labelled_own=as_own, labelled_equal=as_flat)
    found.require(len(np.unique(versions)) > 2, "fewer than 3 versions sampled tokens")
    found.require(as_flat == 0, f"{as_flat} tokens are labelled with a version that did not sample them")
    for name, wrong in (("own", flat & ~labelled_flat), ("equal", ~flat & labelled_flat)):
        numbers, counts = np.unique(versions[wrong], return_counts=True)
        found.note(**{f"labelled_{name}_by_version": dict(zip(numbers.tolist(), counts.tolist(), strict=True))})
    by_chance = max(FEW, CHANCE * int((~labelled_flat).sum()))
    found.require(
        as_own <= by_chance, f"{as_own} tokens sampled with equal probabilities are labelled with the other version"
    )

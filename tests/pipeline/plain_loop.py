"""GRPO as a plain synchronous loop, on transformers and a bare SGLang engine: the reference for a run with lag 0.

    plain_loop.py MODEL_FOLDER SETTINGS_JSON OUTPUT_FILE

The engine lives in a child process, because SGLang patches transformers. Nothing of trainer, generator, buffer,
weights or pipeline is used: only the task, its scorer and the rule for seeds, which define the problem.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ENGINE_S = 600.0
"""Deadline for a start or an answer of the engine on a crowded machine; usually about 15 s and 1 s."""


def serve(model: str, pipe: Connection, parent: int) -> None:
    """Answer ``(state, prompts, seeds, max_new_tokens, end)`` with ``(ids, logprobs)``, sampled from ``state``."""
    from monarch_rl.runtime.process import die_with_parent

    die_with_parent(signal.SIGKILL, parent)  # a test that takes too long kills the loop, and must leave no engine

    import sglang
    from sglang.srt.managers import io_struct as io
    from sglang.srt.utils import MultiprocessingSerializer

    torch.set_num_threads(1)
    engine: Any = sglang.Engine(
        model_path=model,
        device="cpu",
        skip_tokenizer_init=True,
        dtype="float32",
        max_total_tokens=8192,
        mem_fraction_static=0.1,
        attention_backend="torch_native",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        log_level="error",
    )
    manager, wait = engine.tokenizer_manager, engine.loop.run_until_complete
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        state, prompts, seeds, max_new_tokens, end = request
        wait(manager.begin_weight_update(io.BeginWeightUpdateReqInput(), None))
        tensors = MultiprocessingSerializer.serialize(list(state.items()))
        load = io.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[tensors], flush_cache=True)
        success, message = wait(manager.update_weights_from_tensor(load, None))
        assert success, message
        wait(manager.end_weight_update(io.EndWeightUpdateReqInput(), None))
        common = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True}
        sampling = [{**common, "sampling_seed": seed} for seed in seeds]
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        sequences = []
        for answer in answers:
            ids, entries = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
            length = ids.index(end) + 1 if end in ids else len(ids)
            sequences.append((ids[:length], [entry[0] for entry in entries[:length]]))
        pipe.send(sequences)
    engine.shutdown()


def train(folder: Path, settings: dict[str, Any], generate: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the weights after all steps; ``generate`` sends a request to :func:`serve`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from monarch_rl.rollout.policy import episode_seed
    from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource, score

    task = TaskSettings(**settings["task"])
    source = TaskSource(task, "train")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    size, limit = settings["group_size"], settings["max_new_tokens"]
    group = 0
    for _ in range(settings["steps"]):
        items, prompts, seeds = [], [], []
        for _ in range(settings["groups_per_step"]):
            item = source.item(group)
            for i in range(size):
                items.append(item)
                prompts.append(tokenizer.encode(item.prompt))
                seeds.append(episode_seed(settings["seed"], group, i))
            group += 1
        sequences = generate(model.state_dict(), prompts, seeds, limit, tokenizer.eos_token_id)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in sequences]
        rewards = torch.tensor([score(task, item.entry, text).reward for item, text in zip(items, texts, strict=True)])
        advantages = (rewards.view(-1, size) - rewards.view(-1, size).mean(1, keepdim=True)).flatten()
        total = torch.zeros(())
        for prompt, (ids, behaviour), advantage in zip(prompts, sequences, advantages, strict=True):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            weight = torch.exp(logprobs.detach() - torch.tensor(behaviour)).clamp(max=2.0)
            total = total - (weight * advantage * logprobs).sum() / (len(sequences) * limit)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def main(model: str, settings: str, output: str) -> None:
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    engine = context.Process(target=serve, args=(model, there, os.getpid()))
    engine.start()

    def generate(state: dict[str, torch.Tensor], *request: Any) -> Any:
        named = {name: value.detach().clone() for name, value in state.items() if name != "lm_head.weight"}
        here.send((named, *request))
        assert here.poll(ENGINE_S), f"the engine did not answer within {ENGINE_S:g} s"
        return here.recv()

    assert here.poll(ENGINE_S) and here.recv() == "ready", f"the engine did not start within {ENGINE_S:g} s"
    trained = train(Path(model), json.loads(settings), generate)
    here.send(None)
    engine.join(60)
    save_file({name: value.contiguous() for name, value in trained.items() if name != "lm_head.weight"}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])

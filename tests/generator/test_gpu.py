"""The arguments of engines on GPUs, as SGLang's own ServerArgs resolve them on faked GPUs, and refused settings."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import socket
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_rl.generator.engine import Engine
from monarch_rl.generator.gpu import HARMFUL, Machine, check_driver, check_environment
from monarch_rl.generator.settings import GeneratorSettings, check_attention, engine_arguments
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.runtime.device_work import CAPTURE_S, COMPILATION_S, FIRST_S
from monarch_rl.runtime.network import MUST_AGREE, NO_DUMP, nccl_environment
from tests import patience

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
OTHERS = {
    "Qwen2": CONFIG | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "Mistral": CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
}
MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
GPUS = {"A100": ([8, 0], 80), "H100": ([9, 0], 80), "H200": ([9, 0], 141), "B200": ([10, 0], 180)}
"""Compute capability and GiB."""


@dataclass(frozen=True)
class Job:
    """An engine on a GPU."""

    gpu: str
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    settings: GeneratorSettings = GeneratorSettings()
    lora: LoraSettings = FULL_TRAINING
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments, as the engine adds them."""


JOBS: dict[str, Job] = {
    **{gpu: Job(gpu) for gpu in GPUS},
    **{name: Job("H100", config) for name, config in OTHERS.items()},
    "LoRA": Job("H100", lora=LoraSettings(rank=8)),
    "deterministic": Job("H100", settings=GeneratorSettings(deterministic=True)),
    "tensor parallel": Job("H100", settings=GeneratorSettings(tp=2)),
    "expert routes": Job("H100", MOE, extra={"enable_return_routed_experts": True}),
    "experts": Job("B200", MOE),
    "experts, SGLang's choice": Job("B200", MOE),
}
OURS = ("moe_runner_backend",)
"""Arguments that are left out of jobs whose values SGLang chooses."""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By job: the arguments that SGLang resolves. Takes some 20 CPU-seconds, so tests that use it are slow."""
    jobs = []
    for name, job in JOBS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(job.config))
        arguments = engine_arguments(str(folder), job.settings, 0, on_gpu=True, lora=job.lora) | job.extra
        if name.endswith("SGLang's choice"):
            arguments = {key: value for key, value in arguments.items() if key not in OURS}
        jobs.append({"capability": GPUS[job.gpu][0], "gib": GPUS[job.gpu][1], "arguments": arguments})
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    file = tmp_path_factory.mktemp("jobs") / "jobs.json"
    file.write_text(json.dumps(jobs))
    with file.open() as stdin:
        program = Path(__file__).with_name("resolve_on_gpu.py")
        done = patience.run(
            [sys.executable, program], seconds=500.0, stdin=stdin, env=os.environ | {"PYTHONPATH": path}
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(JOBS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_an_engine_on_a_gpu_runs_256_sequences_with_logits_in_float32(
    gpu: str, resolved: dict[str, dict[str, Any]]
) -> None:
    found = resolved[gpu]
    assert (found["dtype"], found["enable_fp32_lm_head"]) == ("bfloat16", True)
    assert found["max_running_requests"] == 256
    assert (found["decode_graphs"], found["decode_graph_batch"]) == ("full", 256), "each batch has its graph"
    assert found["attention_backend"] == {"A100": "flashinfer", "H100": "fa3", "H200": "fa3", "B200": "trtllm_mha"}[gpu]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_every_engine_on_a_gpu_launches_a_step_before_the_previous_one_ends(
    name: str, resolved: dict[str, dict[str, Any]]
) -> None:
    """By SGLang's overlap scheduler, on which the speed of a GPU depends, and with which commits are tested."""
    assert resolved[name]["disable_overlap_schedule"] is False
    assert resolved[name]["decode_graphs"] == "full"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_sglangs_watchdog_leaves_a_batch_more_time_than_the_runs_own(
    gpu: str, resolved: dict[str, dict[str, Any]]
) -> None:
    """It would end an engine that compiles a kernel."""
    assert resolved[gpu]["watchdog_timeout"] > max(COMPILATION_S, CAPTURE_S, FIRST_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_dense_models_are_served_like_a_qwen3(name: str, resolved: dict[str, dict[str, Any]]) -> None:
    assert resolved[name] == resolved["H100"]


@pytest.mark.slow
def test_experts_on_blackwell_keep_the_layout_that_commits_copy_to(resolved: dict[str, dict[str, Any]]) -> None:
    assert resolved["experts"]["moe_runner_backend"] == "triton"
    assert resolved["experts, SGLang's choice"]["moe_runner_backend"] == "flashinfer_trtllm"


def sglang_source(*path: str) -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.joinpath(*path).read_text()


def test_the_project_sets_the_nccl_variables_that_sglang_would_set() -> None:
    """SGLang overrides no set variable; ranks need not agree on the one that only decode-context parallelism needs."""
    source = sglang_source("srt", "entrypoints", "engine.py")
    source = source[source.index("def _set_envs_and_config") :]
    assert set(re.findall(r'os\.environ\["(NCCL_\w+)"\] = ', source)) == {*MUST_AGREE, "NCCL_GRAPH_MIXING_SUPPORT"}
    assert set(nccl_environment({})) == {*MUST_AGREE, *NO_DUMP}
    assert all(f'"{name}" not in os.environ' in source for name in MUST_AGREE)


def test_automatic_values_follow_the_device() -> None:
    settings = GeneratorSettings()
    assert (settings.running_requests(on_gpu=True), settings.running_requests(on_gpu=False)) == (256, 128)
    assert (settings.start_limit_s(on_gpu=True), settings.start_limit_s(on_gpu=False)) == (1200, 300)
    own = GeneratorSettings(max_running_requests=7, start_deadline_s=77)
    assert {own.running_requests(gpu) for gpu in (True, False)} == {7}
    assert {own.start_limit_s(gpu) for gpu in (True, False)} == {77}


@pytest.mark.parametrize("backend", ["auto", "fa3", "fa4", "flashinfer", "torch_native", "triton", "trtllm_mha"])
def test_float32_is_refused_on_a_gpu(backend: str) -> None:
    own: Any = {"attention_backend": backend}
    with pytest.raises(ValueError, match=r"generator\.dtype float32"):
        check_attention(GeneratorSettings(dtype="float32", **own), on_gpu=True)
    check_attention(GeneratorSettings(**own), on_gpu=True)
    check_attention(GeneratorSettings(dtype="float32"), on_gpu=False)


def test_sglang_still_calls_kernels_for_half_precision_in_its_norms() -> None:
    """Whatever the dtype is. If not, float32 may be served."""
    source = sglang_source("srt", "layers", "layernorm.py")
    plain = source[source.index("class RMSNorm(") :]
    plain = plain[plain.index("def forward_cuda") : plain.index("def forward_npu")]
    assert "        else:\n            result = rmsnorm(x, self.weight.data, self.variance_epsilon)\n" in plain
    assert (
        "fused_add_rmsnorm,\n        gemma_fused_add_rmsnorm,\n        gemma_rmsnorm,\n        rmsnorm,\n    )"
        in source
    )


# ---- the machine ---------------------------------------------------------------------------------------------


@pytest.fixture
def toolkit(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has all the tools that SGLang needs."""
    for name in ("cuda/bin/nvcc", "cuda/lib64/libcudart.so", "bin/ninja", "bin/c++"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho release {torch.version.cuda or '13.0'},\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")}


def test_a_machine_with_compilers_is_accepted(toolkit: dict[str, str]) -> None:
    check_environment(toolkit)
    on_path = toolkit["PATH"] + os.pathsep + toolkit["CUDA_HOME"] + "/bin"
    check_environment({"PATH": on_path})


@pytest.mark.parametrize(
    "change, missing",
    [
        ({"CUDA_HOME": "/nowhere"}, r"/nowhere/bin/nvcc;"),
        ({"CXX": "clang++-99"}, r"clang\+\+-99"),
        ({"CXX": "c++ -m64"}, r"c\+\+ -m64;.* CXX"),
        ({"PATH": "/nowhere"}, r"ninja .*c\+\+"),
    ],
)
def test_a_missing_compilation_tool_is_named(toolkit: dict[str, str], change: Any, missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        check_environment(toolkit | change)


def test_an_engine_is_refused_on_a_machine_that_lacks_compilers(
    toolkit: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine is checked when an engine starts there: the check on the first one proves nothing about others."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    problem = rf"\({re.escape(socket.gethostname())}\) .*nvcc"
    with pytest.raises(ValueError, match=problem):
        asyncio.run(Engine.start("no model", GeneratorSettings()))


def script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")


@pytest.mark.parametrize("where, there", [("cu13/lib", False), ("cu13/lib64", True)])
def test_an_nvcc_without_the_runtime_to_link_with_is_refused(
    where: str, there: bool, toolkit: dict[str, str], tmp_path: Path
) -> None:
    """As pip installs it: ``nvidia/cu13`` has bin/nvcc, and the runtime in lib under a name with a version."""
    home, nvcc = tmp_path / "cu13", tmp_path / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    Path(toolkit["CUDA_HOME"], "bin", "nvcc").rename(nvcc)
    (tmp_path / where).mkdir()
    (tmp_path / where / ("libcudart.so" if there else "libcudart.so.13")).touch()
    own = toolkit | {"CUDA_HOME": str(home)}
    if there:
        check_environment(own)
        return
    looked = re.escape(str(home / "lib64" / "libcudart.so"))
    with pytest.raises(ValueError, match=rf"\(looked for {looked};"):
        check_environment(own)


def test_a_runtime_that_the_linker_finds_is_accepted(toolkit: dict[str, str], tmp_path: Path) -> None:
    """As a distribution installs it: nvcc in /usr/bin, and the runtime where all libraries are."""
    library = tmp_path / "cuda" / "lib64" / "libcudart.so"
    library.rename(elsewhere := tmp_path / "libcudart.so")
    script(Path(toolkit["PATH"], "c++"), f'[ "$1" = -print-file-name=libcudart.so ] && echo {elsewhere}')
    check_environment(toolkit)
    script(Path(toolkit["PATH"], "c++"), "echo libcudart.so")  # a compiler's output for a file that it does not find
    with pytest.raises(ValueError, match="libcudart"):
        check_environment(toolkit)


NVCC = "echo 'Cuda compilation tools, release {release}, V{release}.93'"


@pytest.mark.parametrize(
    "capability, least, before",
    [
        ((8, 0), "12.0", "11.8"),
        ((9, 0), "12.0", "11.8"),
        ((10, 0), "12.8", "12.6"),
        ((10, 3), "12.9", "12.8"),
        ((11, 0), "13.0", "12.9"),
        ((12, 0), "12.8", "12.6"),
        ((12, 1), "12.9", "12.8"),
    ],
)
def test_an_nvcc_that_cannot_compile_for_the_gpu_is_refused(
    capability: tuple[int, int], least: str, before: str, toolkit: dict[str, str]
) -> None:
    nvcc = Path(toolkit["CUDA_HOME"], "bin", "nvcc")
    script(nvcc, NVCC.format(release=least))
    check_environment(toolkit, Machine("13.0", capability))
    script(nvcc, NVCC.format(release=before))
    gpu = re.escape(".".join(map(str, capability)))
    problem = rf"\b{gpu} .*\b{re.escape(least)} .*\b{re.escape(before)};"
    with pytest.raises(ValueError, match=problem):
        check_environment(toolkit, Machine("13.0", capability))


@pytest.mark.parametrize("text, why", [("echo 'nothing useful'", "nvcc .*none"), ("exit 3", r"nvcc .*exit status 3\.")])
def test_an_nvcc_that_prints_no_release_is_refused(toolkit: dict[str, str], text: str, why: str) -> None:
    script(Path(toolkit["CUDA_HOME"], "bin", "nvcc"), text)
    with pytest.raises(ValueError, match=why):
        check_environment(toolkit, Machine("13.0", (9, 0)))


@pytest.mark.parametrize("release, warned", [("12.8", True), ("13.2", False)])
def test_an_nvcc_of_another_cuda_version_is_accepted_with_a_warning(
    release: str, warned: bool, toolkit: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang compiles for the installed nvcc, and documents a toolkit for CUDA 12.8 with a torch for 13 as a case."""
    script(Path(toolkit["CUDA_HOME"], "bin", "nvcc"), NVCC.format(release=release))
    with caplog.at_level(logging.WARNING, "monarch_rl"):
        check_environment(toolkit, Machine("13.0", (9, 0)))
    named = ("CUDA 12.8", "13.0", "libcudart.so.12")
    assert [all(each in message for each in named) for message in caplog.messages] == [True] * warned


def test_sglang_still_compiles_for_the_installed_nvcc() -> None:
    """And links with the runtime next to it. If not, the checks above ask for the wrong thing."""
    arch = sglang_source("kernels", "jit", "utils", "arch.py")
    assert "_jit_cuda_version() >= (12, 9)" in arch
    toolchain = sglang_source("kernels", "jit", "utils", "compile", "toolchain.py")
    assert 'flags + [f"-L{cuda_home()}/lib64", "-lcudart"]' in toolchain


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_a_setting_of_sglang_that_corrupts_experts_is_refused(toolkit: dict[str, str], value: str) -> None:
    with pytest.raises(ValueError, match=HARMFUL):
        check_environment(toolkit | {HARMFUL: value})
    check_environment(toolkit | {HARMFUL: "0"})


def test_sglang_still_has_the_setting_that_corrupts() -> None:
    """If not, the check can go."""
    from sglang.srt.environ import envs

    assert getattr(envs, HARMFUL).get() is False


def driver(tmp_path: Path, version: str) -> Path:
    file = tmp_path / "version"
    file.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Apr 17 2024\nGCC version: 12\n")
    return file


def test_a_driver_that_is_too_old_is_no_reason_to_run_on_cpus(tmp_path: Path) -> None:
    old, new = driver(tmp_path, "550.54.15"), tmp_path / "new"
    new.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    with pytest.raises(ValueError, match=r"550\.54\.15\b.*13\.0\b.*\b580\b"):
        check_driver("13.0", available=False, visible=None, driver_file=old)
    with pytest.raises(ValueError, match=r"580\.65\.06"):
        check_driver("13.0", available=False, visible="0,1", driver_file=new)


def test_a_machine_without_gpus_or_with_hidden_ones_runs_on_cpus(tmp_path: Path) -> None:
    old = driver(tmp_path, "550.54.15")
    for hidden in ("", "-1"):
        check_driver("13.0", available=False, visible=hidden, driver_file=old)
    check_driver("13.0", available=True, visible=None, driver_file=old)
    check_driver(None, available=False, visible=None, driver_file=old)
    check_driver("13.0", available=False, visible=None, driver_file=tmp_path / "none")

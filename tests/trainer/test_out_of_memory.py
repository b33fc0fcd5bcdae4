"""A trainer rank that is out of memory: failed allocations of every kind are reported with the flags to lower."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from monarch_rl.errors import OutOfMemory
from monarch_rl.runtime.restart import Ending, ending_of
from monarch_rl.trainer.out_of_memory import naming_flags
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.token_logprobs import logprobs_of
from tests.forking import run_forked
from tests.model.configs import qwen3_values

VOCABULARY = 151_936


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(qwen3_values(vocab_size=VOCABULARY)))
    return tmp_path


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from monarch_rl.trainer.out_of_memory import naming_flags
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.token_logprobs import logprobs_of

used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
with naming_flags(TrainerSettings(ranks=1, logprob_chunk=4096), 3, Path(sys.argv[1])):
    logprobs_of(torch.empty(1024, 151_936), torch.zeros(1024, dtype=torch.long), None)
"""


def test_a_cpu_allocation_that_the_kernel_refuses_is_reported_with_the_flags(folder: Path) -> None:
    """In a process of its own, whose address space is limited to 1 GiB more than its imports took."""
    program = folder / "limited.py"
    program.write_text(LIMITED)
    done = run_forked("torch", [program, folder], seconds=300)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("monarch_rl.errors.OutOfMemory: trainer rank 3 is out of memory")
    assert "allocate" in last and "--trainer.logprob-chunk (now 4096:" in last and "151,936" in last
    assert "logprobs_of" in done.stderr, "the original traceback stays as the cause"


class FullDevice(TorchFunctionMode):
    """A device on which no tensor of more than ``most`` elements can be allocated, as torch reports it for GPUs."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has ...")
        return result


def test_a_full_device_is_reported_with_the_flags_that_are_not_set_yet(folder: Path) -> None:
    settings = TrainerSettings(ranks=1, activation_checkpoint="full", tokens_per_microbatch=512)
    logits = torch.zeros(4, 1000)
    with pytest.raises(OutOfMemory) as caught, naming_flags(settings, 0, folder), FullDevice(100):
        logprobs_of(logits, torch.zeros(4, dtype=torch.long), None)
    text = str(caught.value)
    assert "Tried to allocate 2.32 GiB" in text and "--trainer.tokens-per-microbatch (now 512" in text
    assert "activation-checkpoint" not in text and "--trainer.lora.rank" in text
    assert f"{24 * 512 * VOCABULARY / 2**30:.1f} GiB" in text, "a chunk has no more tokens than a micro-batch"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert ending_of(caught.value) is Ending.FAILED, "another attempt would need as much"


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("ncclUnhandledCudaError: ... Last error:\nFailed to CUDA calloc async 608 bytes"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("the objective ran out of memory slots"), False),
    ],
)
def test_only_failed_allocations_are_reported_as_such(folder: Path, error: Exception, memory: bool) -> None:
    with pytest.raises(OutOfMemory if memory else type(error)) as caught, naming_flags(TrainerSettings(), 0, folder):
        raise error
    assert memory or caught.value is error

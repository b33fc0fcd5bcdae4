"""Functions are compiled when they are called, not when they are defined."""

from __future__ import annotations

import sys

from tests.patience import run

PROGRAM = """
import sys, torch
from monarch_rl.runtime.forking.lazy_compile import compiled_on_first_call

original = torch.compile
with compiled_on_first_call():
    @torch.compile
    def plain(x):
        "Its text."
        return x + 1

    @torch.compile(backend="eager", dynamic=False)
    def with_options(x):
        return x * 2

    module = torch.compile(torch.nn.Identity(), backend="eager")
assert torch.compile is original
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler was imported"
assert plain.__doc__ == "Its text." and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)

frames = []
torch._dynamo.reset()
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
with compiled_on_first_call():
    counted = torch.compile(lambda x: x * 3, backend=counter)
x = torch.ones(3)
assert counter.frame_count == 0
assert torch.equal(counted(x), x * 3) and torch.equal(counted(x), x * 3)
assert counter.frame_count == 1, "compiled once, by the backend that was asked for"
assert torch.equal(with_options(x), x * 2)
outer = torch.compile(lambda x: with_options(x) + counted(x), backend="eager")
assert torch.equal(outer(x), x * 5)
"""


def test_functions_are_compiled_when_they_are_called() -> None:
    done = run([sys.executable, "-c", PROGRAM])
    assert done.returncode == 0, done.stderr

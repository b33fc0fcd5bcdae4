"""The lint of bare waits: code that it must report, and code that it must accept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import patience
from tools.lint_waits import lint

HEAD = "import asyncio, subprocess\nfrom monarch_rl.runtime.deadlines import within\n"

BAD = {
    "an endpoint": "async def f(a):\n    await a.stats.call_one()",
    "an endpoint of a mesh": "async def f(a):\n    return (await a.stats.call()).item()",
    "any member": "async def f(a):\n    await a.stats.choose()",
    "a channel": "async def f(c):\n    async for x in range(await c.recv()): ...",
    "a queue": "async def f(q):\n    await q.get()",
    "a full queue": "async def f(q):\n    await q.put(1)",
    "an event": "async def f():\n    await asyncio.Event().wait()",
    "a condition": "async def f(c):\n    async with c:\n        await c.wait_for(lambda: True)",
    "a future": "async def f(x):\n    await x",
    "a task in a list": "async def f(tasks):\n    await tasks.pop()",
    "a call by name": "async def f(a):\n    call = a.stats.call_one()\n    await call",
    "one assignment of two": "async def f(a):\n    c = within(1, a, 'x', on='y')\n    c = a.x.call()\n    await c",
    "gather": "async def f(a, b):\n    await asyncio.gather(a.x.call(), within(1, b.y.call(), 'b', on='b'))",
    "gather of a list": "async def f(actors):\n    await asyncio.gather(*[a.x.call_one() for a in actors])",
    "gather of a name": "async def f(actors):\n    c = [a.x.call_one() for a in actors]\n    await asyncio.gather(*c)",
    "shield": "async def f(task):\n    await asyncio.shield(task)",
    "asyncio.wait": "async def f(tasks):\n    await asyncio.wait(tasks)",
    "an exit stack": "async def f(stack, a):\n    await stack.enter_async_context(a.session())",
    "within without on": "async def f(a):\n    await within(1.0, a.x.call(), 'x')",
    "a timeout around something else": "async def f(a):\n    async with a.lock():\n        await a.x.call()",
    "a timeout outside the function": (
        "async def f(a):\n    async with asyncio.timeout(1):\n        async def g():\n            await a.x.call()\n"
    ),
    "a process": "def f(p):\n    p.wait()",
    "a thread": "def f(t):\n    t.join()",
    "an accept": "def f(s):\n    s.accept()",
    "a monarch future": "def f(x):\n    x.get()",
    "no context variable": "V = Future('v')\ndef f():\n    return V.get()",
    "a concurrent future": "def f(x):\n    return x.result()",
    "a command": "def f():\n    subprocess.run(['true'], check=True)",
    "a world": "def f(dist):\n    dist.init_process_group('gloo')",
    "a reason that says nothing": "async def f(a):\n    await a.x.call()  # waits:",
    "a reason of another line": "async def f(a):\n    # waits: for the next line\n    a = 1\n    await a.x.call()",
    "a reason in a string": "async def f(a):\n    await a.x.call('# waits: no comment')",
}

GOOD = {
    "within": "async def f(a):\n    await within(1.0, a.x.call(), 'x', on='a')",
    "within by name": "async def f(a):\n    call = within(1.0, a.x.call(), 'x', on='a')\n    await call",
    "gather of withins": (
        "async def f(all):\n    calls = [within(1, a.x.call(), 'x', on='a') for a in all]\n"
        "    await asyncio.gather(*calls)\n    await asyncio.gather(*[within(1, a, 'x', on='a') for a in all])"
    ),
    "a coroutine of ours": "async def f(a):\n    await g(a)\nasync def g(a):\n    await asyncio.sleep(1)",
    "an exit stack": (
        "async def f(stack):\n    await stack.enter_async_context(g())\n@asynccontextmanager\nasync def g():\n    yield"
    ),
    "a thread of this process": "async def f(g):\n    await asyncio.to_thread(g)",
    "a timeout": "async def f(a):\n    async with asyncio.timeout(1):\n        await a.x.call()",
    "wait_for": "async def f(q):\n    await asyncio.wait_for(q.get(), 1)",
    "asyncio.wait": "async def f(tasks):\n    await asyncio.wait(tasks, timeout=1)",
    "task.result": "async def f(task):\n    return task.result()",
    "dict.get and str.join": "def f(d):\n    return ', '.join(d.get('x'))",
    "a context variable": "V: ContextVar[int] = ContextVar('v')\ndef f():\n    return V.get()",
    "waits with a timeout": "def f(p, t, q):\n    p.wait(1)\n    t.join(timeout=1)\n    q.get(timeout=1)",
    "a command": "def f():\n    subprocess.run(['true'], timeout=1)",
    "a world": "def f(dist, t):\n    dist.init_process_group('gloo', timeout=t)\n    dist.all_reduce(0)",
    "a reason": "async def f(a):\n    await a.x.call()  # waits: as long as the run",
    "a reason above": "async def f(a):\n    # waits: as long as the run\n    await a.x.call()",
    "a reason within a statement": "async def f(a):\n    await a.x.call(\n        1,  # waits: the run\n    )",
}


@pytest.mark.parametrize("snippet", BAD.values(), ids=BAD.keys())
def test_a_bare_wait_is_found_once(snippet: str) -> None:
    (finding,) = lint({"a.py": HEAD + snippet})
    assert finding.path == "a.py" and 3 <= finding.line <= 2 + len(snippet.splitlines())


@pytest.mark.parametrize("snippet", GOOD.values(), ids=GOOD.keys())
def test_a_bounded_wait_is_left_alone(snippet: str) -> None:
    assert lint({"a.py": HEAD + snippet}) == []


def test_coroutines_are_resolved_across_files() -> None:
    files = {"a.py": "async def f(a):\n    await a.helped()", "b.py": "class B:\n    async def helped(self): ..."}
    assert lint(files) == []
    assert len(lint({"a.py": files["a.py"]})) == 1


def test_the_exit_code_reports_findings(tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).parents[2] / "tools" / "lint_waits.py", file := tmp_path / "bare.py"]
    file.write_text(GOOD["a reason"])
    assert patience.run(command).returncode == 0
    file.write_text(BAD["an endpoint"])
    done = patience.run(command)
    assert done.returncode == 1 and f"{file}:2: `await a.stats.call_one()` may last forever" in done.stdout

"""A recipe whose rewards do what scripts do: ``ordinary.py OUT`` writes them pickled, and what each does here."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextvars
import copy
import enum
import functools
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import alarm as set_alarm
from typing import Any

import anyio
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    import beside  # type: ignore[import-not-found]  # a module next to the recipe, which the test writes

LOCK, CONDITION, LOCAL = threading.RLock(), threading.Condition(), threading.local()
SEMAPHORE = asyncio.Semaphore(1)
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
CACHE: dict[str, float] = {}
logger = logging.getLogger("a recipe")


@dataclass
class Item:
    value: float


@dataclass(frozen=True, slots=True)
class Frozen:
    value: float


class Colour(enum.Enum):
    RED = 1.0


class Pair(typing.NamedTuple):
    first: float


class Parent:
    @functools.cached_property
    def value(self) -> float:
        return 1.0


class Child(Parent):
    def __init__(self) -> None:
        super().__init__()


Direction = typing.Literal["left", "right"]


@dataclass
class Typed:
    direction: Direction


def tool(direction: Direction, colour: Colour) -> Pair:
    """Do nothing."""
    return Pair(1.0)


@functools.lru_cache(maxsize=8)
def cached(value: float) -> float:
    return value + 1


cached_partial = functools.lru_cache(functools.partial(lambda value, more: value + more, more=1.0))


@functools.singledispatch
def kind(value: object) -> float:
    return 0.0


@kind.register
def _(value: int) -> float:
    return 2.0


def square(value: float) -> float:
    return value * value


def wrapped(value: float) -> Item:
    return Item(value)


def send(queue: Any) -> None:
    queue.put(Item(5.0))


def pool(method: str) -> float:
    with multiprocessing.get_context(method).Pool(1) as processes:
        return sum(item.value for item in processes.map(wrapped, [1.0, 2.0]))


FACTOR: float | None = None


def set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


def scaled(value: float) -> float:
    assert FACTOR is not None
    return FACTOR * value


REWARDS: dict[str, Callable[[float], float]] = {}


def registered(function: Callable[[float], float]) -> Callable[[float], float]:
    def doubled(value: float) -> float:
        return 2 * function(value)

    REWARDS[function.__name__] = doubled
    return doubled


@registered
def grade(value: float) -> float:
    return value + 1


def interrupt(number: int, frame: object) -> None:
    raise TimeoutError("late")


async def plain(value: float) -> float:
    await asyncio.sleep(0)
    async with SEMAPHORE:
        return value


# -- each of these works as in a script -------------------------------------------------------------------------------


def pool_by_default() -> float:
    with multiprocessing.Pool(1) as processes:
        return sum(processes.map(square, [1.0, 2.0]))


def pool_by_fork() -> float:
    return pool("fork")


def pool_by_spawn() -> float:
    return pool("spawn")


def pools_with_initializer() -> float:
    found = 0.0
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1, set_factor, (3.0,)) as processes:
            found += processes.apply(scaled, (2.0,))
    return found


def registry() -> float:
    return REWARDS["grade"](1.0)


def decorated_global() -> float:
    return grade(1.0)


def executor_of_processes() -> float:
    with concurrent.futures.ProcessPoolExecutor(1) as processes:
        return processes.submit(square, 3.0).result() + processes.submit(beside.half, beside.Mark(4.0)).result()


def process_and_queue() -> float:
    queue: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=send, args=(queue,))
    process.start()
    item = queue.get(timeout=600)
    process.join(600)
    return float(item.value)


def fork() -> float:
    if (pid := os.fork()) == 0:
        sys.exit(3)
    return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def programs() -> float:
    done = subprocess.run(["cat"], capture_output=True, timeout=600)  # without input it would wait
    return float(subprocess.check_output(["echo", "4"], timeout=600)) + len(done.stdout) + os.system("true")


def threads() -> float:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda value: value + 1, [1.0, 2.0]))


def event_loops() -> float:
    async def program() -> bytes:
        process = await asyncio.create_subprocess_exec("echo", "6", stdout=subprocess.PIPE)
        return (await process.communicate())[0]

    loop = asyncio.new_event_loop()
    try:
        return asyncio.run(plain(1.0)) + loop.run_until_complete(plain(2.0)) + float(asyncio.run(program()))
    finally:
        loop.close()


def alarm() -> float:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(600)
    except TimeoutError:
        return 1.0
    return 0.0


def pickling() -> float:
    things: Any = [Item(1.0), Frozen(1.0), Pair(1.0), Colour.RED, Child(), square, Item, copy.deepcopy(Item(2.0))]
    read = pickle.loads(pickle.dumps(things))
    assert read[3] is Colour.RED and read[5:7] == [square, Item]
    import __main__

    assert __main__.Item is Item
    return float(read[0].value + read[1].value + read[2].first + read[4].value + read[7].value)


def variables() -> float:
    LOCAL.value = 1.0
    with LOCK, CONDITION:
        CACHE["sum"] = LOCAL.value + VARIABLE.get() + cached(1.0) + cached_partial(1.0) + kind(3)
    return CACHE["sum"]


def sources() -> float:
    # So that it looks at all modules, also at those that it knows by another file: torch's import does.
    inspect.modulesbyfile.clear()  # type: ignore[attr-defined]
    inspect._filesbymodname["__main__"] = ""  # type: ignore[attr-defined]
    inspect.getframeinfo(sys._getframe())
    return len(inspect.getsource(square))


def type_hints() -> float:
    hints = typing.get_type_hints(tool)
    return len(hints) + float(typing.get_type_hints(Typed)["direction"] == hints["direction"])


def files() -> float:
    with tempfile.TemporaryDirectory() as folder, sqlite3.connect(":memory:") as database:
        Path(folder, "file").write_text("2")
        (one,) = database.execute("select 1.0").fetchone()
        return float(one) + float(Path(folder, "file").read_text()) + Path(__file__).exists()


def output() -> float:
    print("a reward prints")
    logging.basicConfig()
    logger.warning("a reward logs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return float(np.float32(0.5)) + (__name__ == "__main__")


async def episode_with_processes() -> float:
    with concurrent.futures.ProcessPoolExecutor(1) as processes:
        squared = await asyncio.get_running_loop().run_in_executor(processes, square, 3.0)
    return squared + await asyncio.to_thread(pool, "fork")


async def episode_with_programs() -> float:
    process = await asyncio.create_subprocess_exec("echo", "6", stdout=subprocess.PIPE)
    printed, _ = await process.communicate()
    return float(printed) + programs() + threads() + files() + await plain(1.0)


async def episode_with_variables() -> float:
    return variables() + pickling() + type_hints() + output()


# -- each of these is refused, or affects only its own score ----------------------------------------------------------


def exits() -> float:
    sys.exit("no reward")


def asks() -> float:
    return float(input("the reward? "))


def pickles_an_object_of_a_module_next_to_the_recipe() -> float:
    return float(pickle.loads(pickle.dumps(beside.Mark(2.0))).value)


def named_in_text(value: float) -> float:
    return value


def evaluates_text() -> float:
    return float(eval("named_in_text(1.0)"))


def leaves_an_alarm() -> float:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


def is_not_interrupted() -> float:
    time.sleep(0.5)
    return 1.0


def leads_a_group() -> float:
    return float(os.getpgrp() == os.getpid())


def tidies() -> float:
    atexit.register(Path(os.environ["TIDIED"]).touch)
    return 1.0


async def episode_asks() -> float:
    return asks()


async def handles_signals() -> float:
    signal.signal(signal.SIGALRM, interrupt)
    return 1.0


async def sets_an_alarm() -> float:
    set_alarm(0)  # which sets none
    set_alarm(1)
    return 1.0


async def sets_a_timer() -> float:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0.01, 1.0)
    return 1.0


async def episode_with_a_child_that_sets_an_alarm() -> float:
    """Ended by it, as in a script."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # `alarm` leaves a handler
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(60)
        os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    return float(os.WTERMSIG(status))


async def nests_event_loops() -> float:
    return asyncio.run(plain(1.0))


async def runs_its_own_event_loop() -> float:
    return asyncio.get_event_loop().run_until_complete(plain(1.0))


async def runs_a_new_event_loop() -> float:
    loop, coroutine = asyncio.new_event_loop(), plain(1.0)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        coroutine.close()
        loop.close()


async def runs_anyio() -> float:
    return anyio.run(plain, 1.0)


async def handles_signals_of_the_loop() -> float:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    return 1.0


async def leaves(status: int) -> float:
    sys.exit(status)


async def exits_in_a_task() -> float:
    return sum(await asyncio.gather(plain(1.0), leaves(3), plain(2.0)))


async def exits_in_a_group_of_tasks() -> float:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(leaves(3))
    return await task


WORKS: list[Callable[[], Any]] = [
    *(pool_by_default, pool_by_fork, pool_by_spawn, executor_of_processes, process_and_queue, fork, programs, threads),
    *(pools_with_initializer, registry, decorated_global),
    *(event_loops, alarm, pickling, sources, type_hints, variables, files, output),
    *(episode_with_processes, episode_with_programs, episode_with_variables),
    episode_with_a_child_that_sets_an_alarm,
]
OTHERS: list[Callable[[], Any]] = [
    *(
        exits,
        asks,
        evaluates_text,
        pickles_an_object_of_a_module_next_to_the_recipe,
        leaves_an_alarm,
        is_not_interrupted,
    ),
    *(leaves_an_alarm, is_not_interrupted),
    *(leads_a_group, tidies, episode_asks, handles_signals, sets_an_alarm, sets_a_timer),
    *(nests_event_loops, runs_its_own_event_loop, runs_a_new_event_loop, runs_anyio, handles_signals_of_the_loop),
    *(exits_in_a_task, exits_in_a_group_of_tasks),
]

if __name__ == "__main__":
    from monarch_rl.runtime.by_value import ByValue, register_modules

    register_modules()
    pickled = {function.__name__: ByValue(function).data for function in [*WORKS, *OTHERS]}
    Path(sys.argv[1]).write_bytes(pickle.dumps(pickled))
    rewards = {}
    for function in WORKS:
        reward = function()
        rewards[function.__name__] = asyncio.run(reward) if asyncio.iscoroutine(reward) else reward
    print(json.dumps(rewards))

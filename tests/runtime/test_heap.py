from __future__ import annotations

import sys

from tests.patience import run

SCRIPT = """
import gc, weakref
from monarch_rl.runtime.process import freeze_heap, thaw_heap

class Cycle:
    def __init__(self):
        self.me = self

def end_of(cycle):
    return weakref.ref(cycle)

gc.disable()
preloaded = Cycle()
shared = end_of(preloaded)
gc.freeze()
del preloaded
alive = Cycle()
garbage, frozen = end_of(Cycle()), end_of(alive)
freeze_heap()
collected_first = garbage() is None
del alive
later = end_of(Cycle())
gc.collect()
print(collected_first, frozen() is None, later() is None, len(gc.get_objects()) < gc.get_freeze_count())
freeze_heap()
print(shared() is None)
thaw_heap()
freeze_heap()
print(frozen() is None)
freeze_heap(collect_after=5000)
gc.enable()
young = [end_of(Cycle()) for _ in range(1000)]
print(young[0]() is None)
more = [end_of(Cycle()) for _ in range(8000)]
print(young[0]() is None)
"""


PRINTED = (
    "garbage",
    "frozen",
    "garbage later",
    "fewer objects are visited",
    "frozen by a fork server",
    "frozen, the second time",
    "garbage below the limit",
    "garbage above the limit",
)


def test_only_new_objects_are_collected_and_only_above_the_limit() -> None:
    done = run([sys.executable, "-c", SCRIPT])
    collected = dict(zip(PRINTED, done.stdout.split(), strict=True))
    not_collected = [name for name, answer in collected.items() if answer == "False"]
    assert not_collected == ["frozen", "frozen by a fork server", "garbage below the limit"]


LEFT = """
import atexit, gc, sys
from monarch_rl.runtime.process import freeze_heap, leave_heap

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("collected", flush=True)

if "leave" in sys.argv:
    leave_heap()
gc.disable()
atexit.register(print, "at exit", flush=True)
freeze_heap()
gc.enable()
cycle = Cycle()
"""


def test_a_process_that_leaves_its_heap_ends_without_collecting_it() -> None:
    """Exit handlers still run."""
    ended = {mode: run([sys.executable, "-c", LEFT, mode]) for mode in ("leave", "collect")}
    assert [done.returncode for done in ended.values()] == [0, 0]
    assert ended["collect"].stdout.split("\n") == ["at exit", "collected", ""]
    assert ended["leave"].stdout.split("\n") == ["at exit", ""] and not ended["leave"].stderr

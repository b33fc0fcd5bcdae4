from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from monarch_rl.runtime.heap import freeze_heap

class Cycle:
    def __init__(self):
        self.me = self

def end_of(cycle):
    return weakref.ref(cycle)

gc.disable()
kept = Cycle()
garbage, frozen = end_of(Cycle()), end_of(kept)
freeze_heap()
collected_first = garbage() is None
del kept
later = end_of(Cycle())
gc.collect()
print(collected_first, frozen() is None, later() is None, len(gc.get_objects()) < gc.get_freeze_count())
"""


def test_collections_look_only_at_what_is_made_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "False", "True", "True"]

"""A process does not finalise its interpreter before Monarch's threads have ended."""

from __future__ import annotations

import sys

import pytest

from tests.patience import run

LINGERS = """
import ctypes, sys, threading, time
from monarch_rl.runtime import process
from monarch_rl.runtime.process import end_quickly

named = threading.Event()

def linger():
    ctypes.CDLL(None).prctl(15, process.MONARCH_THREAD.encode())  # PR_SET_NAME
    named.set()
    time.sleep(1.0)
    print("ended", flush=True)

threading.Thread(target=linger, daemon=True).start()
named.wait(60)
print(process.monarch_threads(), flush=True)
if sys.argv[1] == "quickly":
    end_quickly(3)
sys.exit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("how", "output"), [("normally", "1\nended\n"), ("quickly", "1\n")])
def test_threads_of_monarch_end_before_the_interpreter(how: str, output: str) -> None:
    """A process that ends quickly skips finalisation, and does not wait."""
    done = run([sys.executable, "-c", LINGERS, how])
    assert (done.returncode, done.stdout) == (3, output), done.stderr

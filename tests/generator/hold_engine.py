"""A program that starts an engine, prints its processes, and waits to be ended by a signal.

python hold_engine.py FOLDER
"""

from __future__ import annotations

import asyncio
import sys


async def main() -> None:
    # Imported here, because the engine's process imports this file first.
    from monarch_rl.generator.engine import Engine
    from monarch_rl.generator.settings import GeneratorSettings

    engine = await Engine.start(sys.argv[1], GeneratorSettings(max_total_tokens=1024, start_deadline_s=500))
    print("ready", *engine.child_pids, flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())

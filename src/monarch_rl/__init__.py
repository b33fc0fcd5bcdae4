"""monarch_rl: reinforcement learning of language models, asynchronous, on Monarch, torchtitan and SGLang.

Start reading in `recipes/grpo.py`, then `monarch_rl.pipeline`. Importing this package loads nothing heavy.
"""

import monarch_rl.runtime  # noqa: F401  (sets what Monarch reads when it is imported, so it comes first)
from monarch_rl.moved import name_moved_modules

name_moved_modules()

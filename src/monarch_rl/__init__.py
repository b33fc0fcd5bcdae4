"""monarch_rl: reinforcement learning of language models, asynchronous, on Monarch, torchtitan and SGLang.

Start reading in `recipes/grpo.py`, then `monarch_rl.pipeline`. Importing this package loads nothing heavy.
"""

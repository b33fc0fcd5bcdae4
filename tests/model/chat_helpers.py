"""Small tokenizers with chat templates: published ones of Qwen3, Llama 3 and SmolLM2, and templates for the tests."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
TAGGED = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
"""A minimal template."""
WORDS = (
    "{% for m in messages %}{{ m['role'] | upper + ':' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""Without a single special token."""
FOLDED = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n' %}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + ns.system + m['content'] + ' [/INST]' }}{% set ns.system = '' %}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('roles are system, user, assistant') }}{% endif %}{% endfor %}"
)
"""The system message is part of the user message; no prompt opens a turn; tool messages are refused."""
SOURCES = {
    "qwen3": (TEMPLATES / "qwen3.jinja").read_text(),
    "llama3": (TEMPLATES / "llama3.jinja").read_text(),
    "smollm2": (TEMPLATES / "smollm2.jinja").read_text(),
    "tagged": TAGGED,
    "folded": FOLDED,
    "words": WORDS,
}
SPECIAL = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tagged": ["<|end|>", "<|start|>"],
    "folded": ["</s>", "[INST]", "[/INST]"],
    "words": ["</s>"],
}
"""Special tokens; the first one is the tokenizer's end token."""
ADDED_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Qwen3's added tokens that are not special."""
SPLIT = r"\s*[\r\n]+|\s+(?!\S)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""Splits into words, much as the tokenizers of Llama 3 and Qwen do."""
CORPUS = [
    "the answer is forty two",
    "assistant user system tool\n\n",
    "hm, hm: what a question\n",
    "1 + 2 = 3; éàü 你好 🙂",
]


def write_model(
    folder: Path, name: str, source: str | None = None, end: str | None = None, special: list[str] | None = None
) -> str:
    """A folder with a small byte-level BPE tokenizer, made in milliseconds, and a template.

    Args:
        name: model with these special tokens, and with this template if ``source`` is None; "" means neither.
        end: an additional end token in ``generation_config.json``.
        special: special tokens instead of those of ``name``.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = special or SPECIAL.get(name, ["</s>"])
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=1, initial_alphabet=sorted(alphabet), show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token=special[0])
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special[1:]])  # without names, as in Llama 3
    if name == "qwen3":
        tokenizer.add_tokens(ADDED_TOKENS)
    tokenizer.chat_template = SOURCES.get(name) if source is None else source
    tokenizer.save_pretrained(str(folder))
    if end is not None:
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [tokenizer.convert_tokens_to_ids(end), tokenizer.eos_token_id]})
        )
    return str(folder)

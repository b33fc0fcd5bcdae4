"""Keys in command lines, settings and recipes. The keys have the shapes of real ones, and open nothing."""

from __future__ import annotations

import json
import time
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from monarch_rl.observe.redact import REDACTED, mask, redact, redact_command, redact_line, redact_values, secrets_in
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.settings.ranges import to_plain

HEX = "0f3a9c51d27be8640f3a9c51d27be8640f3a9c51"
"""As a key of Weights & Biases, or a commit."""
ALNUM = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hI6"


@pytest.mark.parametrize(
    "key",
    [
        f"sk-{ALNUM}",
        f"sk-proj-{ALNUM}_x-{ALNUM}",
        f"sk-ant-api03-{ALNUM}-{ALNUM}AA",
        f"sk-or-v1-{HEX}",
        f"hf_{ALNUM}",
        f"ghp_{ALNUM}",
        f"github_pat_11{ALNUM}_{ALNUM}",
        f"glpat-{ALNUM[:20]}",
        "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE",
        f"AIza{ALNUM[:35]}",
        f"xoxb-123456789012-{ALNUM}",
        f"wandb_v1_{ALNUM}",
        f"eyJhbGciOiJIUzI1.eyJzdWIiOiIx.{ALNUM}",
    ],
)
def test_known_keys_are_removed_wherever_they_stand(key: str) -> None:
    assert redact(f"client({key!r})  # {key}.") == f"client('{REDACTED}')  # {REDACTED}."
    assert redact_command(["python", "grpo.py", f"--headers=x:{key}", key]) == [
        "python",
        "grpo.py",
        f"--headers=x:{REDACTED}",
        REDACTED,
    ]
    assert redact_values({"judge": {"urls": [f"http://host/?k={key}", 3]}}) == {
        "judge": {"urls": [f"http://host/?k={REDACTED}", 3]}
    }


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"WANDB_API_KEY={HEX} python grpo.py", f"WANDB_API_KEY={REDACTED} python grpo.py"),
        (f'wandb.login(key="{HEX}")', f'wandb.login(key="{REDACTED}")'),
        ('    password = "correct-horse"', f'    password = "{REDACTED}"'),
        ("{'api_key': 'abc', 'n': 1}", f"{{'api_key': '{REDACTED}', 'n': 1}}"),
        (f"MY_SECRET: '{HEX}'; PassPhrase='x'", f"MY_SECRET: '{REDACTED}'; PassPhrase='{REDACTED}'"),
        (f"openaiApiKey: '{HEX}'", f"openaiApiKey: '{REDACTED}'"),
        ("postgres://me:hunter2@host/db", f"postgres://{REDACTED}@host/db"),
        ("redis://:hunter2@host", f"redis://{REDACTED}@host"),
        ("Authorization: Bearer abcdef0123456789abcdef", f"Authorization: Bearer {REDACTED}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nrest", f"{REDACTED}\nrest"),
    ],
)
def test_values_of_names_that_tell_are_removed_from_a_text(text: str, left: str) -> None:
    assert redact(text) == left


@pytest.mark.parametrize(
    "text",
    [
        'api_key=os.environ["OPENAI_API_KEY"]',
        "token = tokenizer.encode(text)[0]",
        "api_key = load_the_key_of_the_judge_v2(settings)",
        'eos_token="<|im_end|>"; sort_key = "question"',
        'f"password={password} token={token}"; url = "https://host:8000/v1@2"',
        f"git checkout {HEX}; sha256={HEX}; revision: '{HEX}'",
        "/home/sk-user/runs/grpo-20261128-211403/checkpoints/step-000120",
        "org/sk-learn-tasks-v2 Qwen/Qwen3-30B-A3B-Instruct-2507 hf_hub_download('deepseek-ai/DeepSeek-V3')",
        "--trainer.tokens-per-microbatch=16384 --rollout.max-new-tokens 1000000000000000000",
        "keys = dict(monkey='an_animal_with_2_arms')",
    ],
)
def test_what_is_no_key_stays(text: str) -> None:
    assert redact(text) == text
    assert redact_command(text.split()) == text.split()


WORDS = ["step", "max_new_tokens", "sha256", "commit", "monkey", "reward/mean", "'ids'", '"tokens"', "Authorization"]
ORDINARY = st.one_of(
    st.text(st.characters(categories=("L", "P", "Z"), exclude_characters="=:@"), max_size=40),
    st.integers().map(str),
    st.floats().map(str),
    st.binary(min_size=20, max_size=32).map(bytes.hex),
    st.lists(st.integers(0, 200_000), max_size=40).map(
        lambda row: b64encode(np.array(row, np.int32).tobytes()).decode()
    ),
    st.lists(st.from_regex("[a-z0-9_.-]{1,12}", fullmatch=True), max_size=6).map(lambda parts: "/" + "/".join(parts)),
)
"""Words, numbers, hashes, token rows as in ``rollouts/``, and paths."""


@seed(0)
@settings(max_examples=40, database=None, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", "=", ": ", ":"]), ORDINARY), max_size=4))
def test_ordinary_output_stays(parts: list[tuple[str, str, str]]) -> None:
    text = ", ".join("".join(part) for part in parts)
    assert redact(text) == text
    assert redact_line(text, ["no such secret"], in_key=False) == (text, False)


def test_values_of_variables_that_are_keys_are_removed_wherever_they_stand() -> None:
    environment = {
        "JUDGE_API_KEY": "an unusual, short one",
        "HF_TOKEN": f"own-{ALNUM}",
        "DB_PASSWORD": 'q"u\u00e9\\',
        "MY_SECRET": "12345",
        "SSH_KEY": "/home/me/.ssh/id",
        "SORT_KEY": "question",
        "MODEL": f"qwen-{ALNUM}",
    }
    secrets = secrets_in(environment)
    assert secrets == [f"own-{ALNUM}", "an unusual, short one"]
    assert secrets_in({"SIGNING_PRIVATE_KEY": "the first line\nthe second\n==\n"}) == ["the first line", "the second"]
    for value in ("123456789:AAE-abc/Def+ghi=", "Zm9v/YmFyYmF6", "hf_abcdefghijKLMNOP"):
        assert secrets_in({"MY_TOKEN": value, "BOT_KEYS": value}) == [value]
    assert not secrets_in({"SSH_KEY": "~/.ssh/id_rsa1", "SORT_KEY": "two words", "MAX_TOKEN": "10000000"})
    secrets += secrets_in({"DB_PASSWORD": 'q"u\u00e9\\ 123'})
    text = f"MODEL=qwen-{ALNUM}; an unusual, short one: own-{ALNUM}, question"
    assert redact(text, secrets) == f"MODEL=qwen-{ALNUM}; {REDACTED}: {REDACTED}, question"
    row = {"sampled": f"I found {environment['DB_PASSWORD']} 123 and own-{ALNUM}!", "ids": "AAAA"}
    masked = json.loads(mask(json.dumps(row), secrets))
    assert masked == {"sampled": f"I found {'*' * 10} and {'*' * (4 + len(ALNUM))}!", "ids": "AAAA"}
    assert len(masked["sampled"].encode()) == len(row["sampled"].encode())
    nested = json.dumps({"arguments": json.dumps({"password": f"{environment['DB_PASSWORD']} 123"})})
    assert "u\\" not in mask(nested, secrets) and json.loads(json.loads(mask(nested, secrets))["arguments"])


def test_lines_of_a_private_key_are_removed_and_no_others() -> None:
    def left(lines: list[str]) -> list[str]:
        in_key, found = False, list[str]()
        for line in lines:
            text, in_key = redact_line(line, [], in_key)
            found.append(text)
        return found

    begin, end = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END OPENSSH PRIVATE KEY-----"
    assert left(["step", f"key: {begin}", "  aB3d+/=", f"  {end}", "step"]) == [
        "step",
        f"key: {REDACTED}",
        REDACTED,
        REDACTED,
        "step",
    ]
    assert left([begin, "aB3d", "interrupted: step 3", "step"]) == [REDACTED, REDACTED, "interrupted: step 3", "step"]
    assert left([f"{begin} aB3d {end} 1", "step"]) == [f"{REDACTED} 1", "step"]
    public = ["-----BEGIN PUBLIC KEY-----", "aB3d", "-----END PUBLIC KEY-----"]
    assert left(public) == public


def test_a_masked_line_stays_json() -> None:
    row = {"began": 1764123456.5, "sampled": "\nabcdefgh, 1764123456, \\nabcdefgh", "emoji": "\U0001f600 \u00e9"}
    masked = json.loads(mask(json.dumps(row), ["1764123456", "nabcdefgh"]))
    assert masked == row | {"sampled": f"\nabcdefgh, {'*' * 10}, \\{'*' * 9}"}


def test_flags_named_for_a_key_lose_their_value() -> None:
    given = ["grpo.py", "--judge.token", "x", "--api-key=y", "--my_password", "--steps", "3", "--no-key", "--seed=1"]
    left = ["grpo.py", "--judge.token", REDACTED, f"--api-key={REDACTED}", "--my_password", "--steps", "3"]
    assert redact_command(given) == [*left, "--no-key", "--seed=1"]


def test_settings_without_keys_stay_as_they_are() -> None:
    plain = to_plain(RunSettings())
    assert redact_values(plain) == plain
    assert redact_values({"token": HEX, "secret": "", "key": 5, "eos_token": "</s>"}) == {
        "token": REDACTED,
        "secret": "",
        "key": 5,
        "eos_token": "</s>",
    }


@pytest.mark.parametrize("part", ["DATA = 'a1", "a-", "a=", "x ", "key=a1", "sk-a-", "://a:b", "-eyJ"])
def test_long_texts_take_time_in_proportion(part: str) -> None:
    """A recipe may hold data; and while a pattern is looked for, no other thread of the controller runs."""

    def cpu_s(repeats: int) -> float:
        text = "eyJ key " + part[:-1] + part[-1] * repeats + part * repeats  # begins with what each search needs
        began = time.process_time()
        redact(text)
        return time.process_time() - began

    assert cpu_s(40_000) < 40 * cpu_s(5_000) + 0.1  # in proportion to the square it would be 64 times

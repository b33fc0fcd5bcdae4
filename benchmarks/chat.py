"""CPU time of a turn of a conversation in the process that runs the episode, without the engine, by part of a turn.

    python benchmarks/chat.py MODEL_FOLDER [--turns 8] [--conversations 50]

A conversation has a question, then answers of a user. Prints milliseconds of CPU time, medians over conversations: of
the opening, of the ids between turns (first and last), and of reading a turn.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.conversation import Conversation
from monarch_rl.model.messages import user

QUESTION = "What is {} plus the number of legs of a horse? Think, then answer with a number and nothing else."
ANSWER = "A horse has four legs, and {} plus four is what I have to say. "


def milliseconds(part: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time_ns()
    result = part()
    return (time.process_time_ns() - start) / 1e6, result


def measure(template: ChatTemplate, turns: int, conversations: int) -> dict[str, float]:
    """Return the median milliseconds of CPU time by part."""
    times: dict[str, list[float]] = {"opening": [], "first_between": [], "last_between": [], "reading": []}
    end = [template.stop_token_ids[0]]
    for index in range(conversations):
        conversation = Conversation(template)
        sampled = template.tokenizer.encode(ANSWER.format(index) * 4, add_special_tokens=False) + end
        for turn in range(turns):
            question = user(QUESTION.format(index * turns + turn))
            took, _ = milliseconds(lambda: conversation.add(question))  # noqa: B023  called at once
            if turn in (0, 1, turns - 1):
                times[{0: "opening", 1: "first_between"}.get(turn, "last_between")].append(took)
            took, _ = milliseconds(lambda: conversation.replied(sampled, "stop"))  # noqa: B023  called at once
            times["reading"].append(took)
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return medians | {"tokens": float(len(conversation.ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=8, help="turns of a conversation, 3 or more")
    parser.add_argument("--conversations", type=int, default=50)
    arguments = parser.parse_args()
    medians = measure(ChatTemplate(arguments.model), arguments.turns, arguments.conversations)
    for name, value in medians.items():
        print(f"{name:15} {value:10.3f}")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()

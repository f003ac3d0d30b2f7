"""An agent that knows nothing of tether: with OpenAI's client it lets a model guess a number from 1 to 7."""

import os
from typing import Any

from openai import OpenAI

MAX_GUESSES = 3


def play(row: dict[str, Any]) -> float:
    """Return 1 if the model has guessed the row's number, and 0 if it has no guess left."""
    client, secret = OpenAI(), int(row["ground_truth"])
    messages = list(row["prompt"])
    for _ in range(MAX_GUESSES):
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=1)
        guess = reply.choices[0].message.content or ""
        if guess == str(secret):
            return 1.0
        hint = "number" if not guess.isdecimal() else "higher" if int(guess) < secret else "lower"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0

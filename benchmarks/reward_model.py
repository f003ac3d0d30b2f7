"""How far is scoring by a reward model from its forward pass alone? python -m benchmarks.reward_model

Responses are written by the reward model's chat template, tokenized, packed and scored; that takes turns with the
forward pass over rows that are packed already, and with transformers' classifier over padded ones. The classifier is a
random Llama of eight layers, 256 wide, in float32.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.resumable import write_between
from benchmarks.speed.machine import machine_line
from benchmarks.speed.table import grid
from benchmarks.speed.timing import seconds, take_turns
from tests.tiny import save_tiny_reward_model, tiny_tokenizer
from tether.runtime.machine import set_threads
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.packing import MicroBatching
from tether.text.learning.scoring import ConversationReader, RewardModel, ScoreForward, ScoreOutputs, score_batch
from tether.text.models.critic import load_reward_model
from tether.text.rewards.outcome import Dialogue, RewardError, RewardRequest

BEGIN, END = "<!-- scoring:begin -->", "<!-- scoring:end -->"
PROMPTS, RESPONSES = 16, 8
WORDS = (20, 60)
"""Of a prompt, and most of a response."""
MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "max_position_embeddings": 2048}
RUNS = 5


def requests() -> list[RewardRequest]:
    """Responses of many lengths, several to each prompt."""
    noise, made = random.Random(0), list[RewardRequest]()

    def text(words: int) -> str:
        return " ".join("".join(noise.choices("abcdefgh", k=4)) for _ in range(words))

    for number in range(PROMPTS):
        prompt = text(WORDS[0])
        dialogue = Dialogue(({"role": "user", "content": prompt},), (number,), None)
        made += [
            RewardRequest("bench", text(noise.randrange(1, WORDS[1])), None, dialogue=dialogue)
            for _ in range(RESPONSES)
        ]
    return made


def measure(threads: int) -> list[str]:
    """Lines of the table."""
    set_threads(threads)
    asked, tokenizer = requests(), tiny_tokenizer()
    with TemporaryDirectory() as scratch:
        path = save_tiny_reward_model(Path(scratch), **MODEL)
        model = load_reward_model(path, dtype=torch.float32)
        peer = AutoModelForSequenceClassification.from_pretrained(path).eval()
    reader = ConversationReader(tokenizer, model.config.pad_token_id, model.config.vocab_size, 2048)
    engine: LocalEngine[ScoreOutputs] = LocalEngine(model, MicroBatching(max_tokens=4096))
    scorer = RewardModel(engine, reader)
    read = [reader.ids(request) for request in asked]
    ids = [row for row in read if not isinstance(row, RewardError)]
    assert len(ids) == len(asked)
    packed = score_batch(ids, [request.dialogue.prompt_ids for request in asked if request.dialogue])

    @torch.no_grad()
    def padded() -> None:
        for first in range(0, len(ids), 32):
            rows = tokenizer.pad({"input_ids": ids[first : first + 32]}, return_tensors="pt", padding_side="right")
            peer(**rows)

    medians = take_turns(
        {
            "whole": lambda _: seconds(lambda: scorer(asked)),
            "forward": lambda _: seconds(lambda: engine.infer(packed, ScoreForward())),
            "padded": lambda _: seconds(padded),
        },
        RUNS,
    )
    titles = {
        "whole": "scoring responses, whole",
        "forward": "the forward pass over packed rows",
        "padded": "transformers' classifier, padded rows of 32",
    }
    shown: list[Sequence[str]] = [
        (titles[side], f"{len(asked) / spent:.0f}", f"{medians['forward'] / spent:.2f}")
        for side, spent in medians.items()
    ]
    return grid(("", "rows a second", "of the forward pass"), shown)


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    given = parser.parse_args()
    lines = [*measure(given.threads), "", f"{machine_line()}; medians of {RUNS} runs that take turns."]
    print("\n".join(lines))
    if given.write:
        write_between(given.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()

"""Gain from keeping the cache of conversations: tokens per second with it and without.

    python -m benchmarks.turns
    python -m benchmarks.turns --write docs/reference/turns-inside.md

A random model of SmolLM2-135M's width with a third of its layers, in bfloat16 on one thread. One token in 32 ends a
turn, so that turns have about 32 tokens, and answers have 32. The clock is that of the processor, which other jobs on
the machine hold up less than they do the one on the wall.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.resumable import write_between
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

BEGIN, END = "<!-- kept:begin -->", "<!-- kept:end -->"
VOCABULARY, ROWS, PROMPT, TURN = 49152, 8, 192, 32
KEPT = {"kept": 65536, "prefilled again": 0}


class Answers:
    """Every turn is answered, until there have been enough."""

    def __init__(self, turns: int) -> None:
        self.turns, self.heard = turns, [0] * ROWS

    def submit_turn(self, row: int, token_ids: list[int]) -> None:
        self.heard[row] += 1

    def wait_reply(self, row: int, room: int) -> list[int] | None:
        return [7] * TURN if self.heard[row] < self.turns and room >= TURN else None


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def measure(turns: int, runs: int) -> dict[str, float]:
    """Tokens per second for each way, the two in turns; the median of the runs."""
    engines = {
        name: NativeEngine(model(), eos_token_ids=frozenset(range(0, VOCABULARY, TURN)), max_kept_tokens=kept)
        for name, kept in KEPT.items()
    }
    prompts = [[1 + (row * PROMPT + at) % 1000 for at in range(PROMPT)] for row in range(ROWS)]
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(runs + 1):
        for name, engine in engines.items():
            begun = time.process_time()
            batch = engine.generate(
                prompts, SamplingParams(4 * TURN * turns), NoiseKey(0, number), responder=Answers(turns)
            )
            if number:  # the first warms up
                found[name].append(int(batch.response_mask.sum()) / (time.process_time() - begun))
    return {name: sorted(speeds)[len(speeds) // 2] for name, speeds in found.items()}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| turns | tokens/s, kept | tokens/s, prefilled again | ratio |", "|---|---|---|---|"]
    for turns in arguments.turns:
        speeds = measure(turns, arguments.runs)
        kept, again = (speeds[name] for name in KEPT)
        lines.append(f"| {turns} | {kept:.0f} | {again:.0f} | {kept / again:.2f} |")
        print(lines[-1], flush=True)
    print(*lines, f"{platform.machine()}, one thread", sep="\n")
    if arguments.write:
        write_between(arguments.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()

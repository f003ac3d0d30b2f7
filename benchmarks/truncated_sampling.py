"""The cost of truncated sampling in the native engine, of recording its cut, and of replaying it in training.

    python -m benchmarks.truncated_sampling --model DIR [--rows 32] [--new-tokens 32] [--dtype float32]

Generation goes on for exactly `--new-tokens`, and its log-probs are then recomputed as before an update, without
gradient. Kinds of runs alternate, so that a busy machine disturbs all of them; medians are compared.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.speed.timing import seconds
from tether.batch import TrainBatch
from tether.text.data.prompts import render, tokenize
from tether.text.data.rows import Row
from tether.text.learning.losses import PolicyForward
from tether.text.models.load import load_causal_lm, load_tokenizer
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams


def sums(model: str, count: int) -> list[list[int]]:
    """Templated questions, so that the distributions are those of a model that knows what it is asked."""
    tokenizer = load_tokenizer(model)
    questions = (f"What is {3 * i} + {7 * i + 1}? Think step by step." for i in range(count))
    rows = [Row(({"role": "user", "content": q},), "", None, file="sums", number=i) for i, q in enumerate(questions)]
    return [ids.tolist() for ids in tokenize([render(row, tokenizer, None, {}) for row in rows], tokenizer)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a causal LM")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = load_causal_lm(args.model, dtype=getattr(torch, args.dtype))
    engine = NativeEngine(model, eos_token_ids=frozenset(), max_num_seqs=args.rows)
    policy = PolicyForward()
    prompts = sums(args.model, args.rows)
    length = args.new_tokens
    kinds = {
        "whole vocabulary": SamplingParams(length),
        "top_k=20, not recorded": SamplingParams(length, top_k=20, record_kept=False),
        "top_k=20": SamplingParams(length, top_k=20),
        "top_p=0.95, not recorded": SamplingParams(length, top_p=0.95, record_kept=False),
        "top_p=0.95": SamplingParams(length, top_p=0.95),
    }
    batches = {
        name: TrainBatch.assemble(engine.generate(prompts, sampling, NoiseKey(0, 0)), torch.zeros(args.rows))
        for name, sampling in kinds.items()
    }
    generating: dict[str, list[float]] = {name: [] for name in kinds}
    replaying: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.runs):
        for name, sampling in kinds.items():
            generating[name].append(seconds(lambda s=sampling: engine.generate(prompts, s, NoiseKey(0, 0))))
            with torch.no_grad():
                replaying[name].append(seconds(lambda n=name: policy(model, batches[n])))
    tokens = args.rows * length
    print(f"{args.rows} rows, {length} new tokens each, {args.dtype}")
    print(f"{args.threads} threads, medians of {args.runs} runs")
    print(f"{'':28}{'tokens/s':>10}{'log-probs s':>14}{'kept, mean':>12}{'bytes a token':>15}")
    for name, batch in batches.items():
        speed = tokens / statistics.median(generating[name])
        line = f"{name:28}{speed:10.1f}{statistics.median(replaying[name]):14.3f}"
        if batch.kept is not None:
            stored = batch.kept.count.nbytes + sum(row.nbytes for row in batch.kept.words)
            line += f"{batch.kept.count.double().mean():12.1f}{stored / tokens:15.1f}"
        print(line)


if __name__ == "__main__":
    main()

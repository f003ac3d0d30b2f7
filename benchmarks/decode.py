"""Decoding speed of the native engine beside transformers.generate, on the same prompts, in one run.

    python -m benchmarks.decode --model DIR [--rows 64] [--prompt-length 60] [--new-tokens 64] [--dtype bfloat16]

Both sample at temperature 1 from the whole vocabulary and go on for exactly `--new-tokens`. Runs alternate, so that a
busy machine disturbs both; medians are compared. The limit is what the model's matrix products alone would allow:
the time of its linear layers on `--rows` tokens, with nothing else in between.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from tether.rollout.native import NativeEngine
from tether.rollout.protocol import NoiseKey, SamplingParams


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ragged_prompts(rows: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(1, length - 10), length + 11, (rows,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def matrix_limit(model: PreTrainedModel, rows: int) -> float:
    """Tokens a second if a step were the model's linear layers and nothing else."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights}

    def products() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    with torch.inference_mode():
        return rows / min(seconds(products) for _ in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a causal LM")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-length", type=int, default=60, help="mean; lengths differ by up to 10")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true", help="also print where the time of one tether run goes")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    theirs.generation_config.eos_token_id = None
    engine = NativeEngine(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        eos_token_ids=frozenset(),
        max_num_seqs=args.rows,
        dtype=dtype,
    )
    prompts = ragged_prompts(args.rows, args.prompt_length, theirs.config.vocab_size)
    ids, mask = left_padded(prompts)
    sampling = SamplingParams(max_new_tokens=args.new_tokens)
    length = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens}

    def tether() -> object:
        return engine.generate(prompts, sampling, NoiseKey(seed=0, step=0))

    def transformers() -> object:
        return theirs.generate(ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **length)

    tether(), transformers()
    runs = [(seconds(tether), seconds(transformers)) for _ in range(args.runs)]
    tokens = args.rows * args.new_tokens
    ours, peer = (tokens / statistics.median(times) for times in zip(*runs, strict=True))
    print(f"{args.rows} rows, {args.prompt_length}-token prompts, {args.new_tokens} new tokens each")
    print(f"{args.dtype}, {args.threads} threads, medians of {args.runs} runs")
    print(f"tether native          {ours:8.1f} tokens/s  (prefill included)")
    print(f"transformers.generate  {peer:8.1f} tokens/s")
    print(f"ratio                  {ours / peer:8.2f}")
    print(f"matrix-product limit   {matrix_limit(theirs, args.rows):8.1f} tokens/s")
    if args.profile:
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            tether()
        print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()

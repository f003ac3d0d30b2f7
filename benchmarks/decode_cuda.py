"""Decoding speed on a GPU: the native engine with and without CUDA graphs beside transformers.generate.

Run: python -m benchmarks.decode_cuda

The weights are random, of the sizes of SmolLM2-135M and SmolLM2-1.7B: that changes no time and needs no download. Every
row has 100 prompt tokens and goes on for the same number of tokens; prefill is included. Each figure is of the second
call: the first compiles kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.kernels.cuda.backend import Cuda
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 100, 192
OF_TRANSFORMERS = 48  # of its tokens, which all take about the same time
SIZES = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "tie_word_embeddings": True},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
             "num_key_value_heads": 32, "tie_word_embeddings": True},
}  # fmt: skip
CASES = (("135M", 64), ("135M", 512), ("1.7B", 64), ("1.7B", 256))


def model_of(size: str) -> LlamaForCausalLM:
    """A model with random weights on the GPU, in bfloat16."""
    config = LlamaConfig(vocab_size=49152, max_position_embeddings=8192, dtype=torch.bfloat16, **SIZES[size])
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def milliseconds_per_token(call: Callable[[], object], tokens: int) -> float:
    """Of the second of two calls."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        spent = time.perf_counter() - start
    return spent / tokens * 1e3


def measured(size: str, rows: int) -> dict[str, float]:
    """Milliseconds for one token of all rows."""
    prompts = [[5 + row % 1000] * PROMPT_TOKENS for row in range(rows)]
    engine = NativeEngine(model_of(size), eos_token_ids=frozenset(), max_num_seqs=rows)

    def ours(captures: bool) -> float:
        Cuda.captures = captures
        sampling = SamplingParams(NEW_TOKENS)
        return milliseconds_per_token(lambda: engine.generate(prompts, sampling, NoiseKey(1, 1)), NEW_TOKENS)

    found = {"tether": ours(True), "tether without graphs": ours(False)}
    theirs, ids = model_of(size), torch.tensor(prompts, device="cuda")
    theirs.generation_config.eos_token_id = None
    length = {"max_new_tokens": OF_TRANSFORMERS, "min_new_tokens": OF_TRANSFORMERS, "do_sample": True, "top_k": 0}
    found["transformers.generate"] = milliseconds_per_token(
        lambda: theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **length), OF_TRANSFORMERS
    )
    return found


def main() -> None:
    """Print a table."""
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    print("| model | rows | | ms/token | tokens/s | time / tether's |\n|---|---|---|---|---|---|")
    for size, rows in CASES:
        found = measured(size, rows)
        for name, spent in found.items():
            ratio = spent / found["tether"]
            print(f"| {size} | {rows} | {name} | {spent:.2f} | {rows / spent * 1e3:.0f} | {ratio:.1f} |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

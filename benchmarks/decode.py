"""Decoding speed: the native engine beside transformers.generate and vLLM, on the same prompts, in turns.

All sample at temperature 1 from the whole vocabulary and go on for exactly so many tokens; prefill is included, and
every round has prompts of its own, so that no cache of an earlier one helps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from benchmarks.speed.machine import seconds_of_products
from benchmarks.speed.peers.processes import Skipped, Worker
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import seconds, take_turns
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

PROMPT_LENGTH = 60  # mean; lengths differ by up to 10
NEW_TOKENS = 64
SHARE_OF_PRODUCTS = 0.65
CASES = {64: (4.0, 2.5), 1: (2.0, 2.0)}
"""Rows -> how many times the speed of transformers.generate and of vLLM is the goal."""


def ragged_prompts(rows: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(PROMPT_LENGTH - 10, PROMPT_LENGTH + 11, (rows,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [R, W]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def start_vllm(setting: Setting) -> Worker:
    """vLLM's process; the same one for all tables."""
    arguments = [str(setting.model), str(setting.threads)]
    return setting.peers.start("vllm", "benchmarks.speed.peers.vllm_worker", arguments)


def by_transformers(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> object:
    """One call of ``generate`` that does not stop early."""
    ids, mask = left_padded(prompts)
    length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **length)


def measure(setting: Setting) -> Section:
    """64 rows, and one."""
    theirs = setting.plain_model()
    theirs.generation_config.eos_token_id = None
    ours = setting.our_model()
    engine = NativeEngine(ours, eos_token_ids=frozenset(), max_num_seqs=max(CASES))
    vocabulary = ours.config.get_text_config().vocab_size
    notes = []
    try:
        vllm: Worker | None = start_vllm(setting)
        assert vllm
        notes.append(f"vLLM {vllm.hello['version']} (loaded in {vllm.hello['seconds']:.0f} s, default settings).")
    except Skipped as why:
        vllm = None
        notes.append(f"vLLM left out: {why}.")
    rows_of_table, goals = [], []
    for rows, (over_transformers, over_vllm) in CASES.items():
        batches = [ragged_prompts(rows, vocabulary, seed=i) for i in range(setting.runs + 1)]
        sides: dict[str, Callable[[int], float]] = {
            "tether": lambda i, b=batches: seconds(
                lambda: engine.generate(b[i], SamplingParams(NEW_TOKENS), NoiseKey(seed=0, step=i))
            ),
            "transformers.generate": lambda i, b=batches: seconds(lambda: by_transformers(theirs, b[i], NEW_TOKENS)),
        }
        if vllm:
            sides["vLLM"] = lambda i, b=batches: float(
                vllm.ask(prompts=b[i], new_tokens=NEW_TOKENS, ignore_eos=True)["seconds"]
            )
        medians = take_turns(sides, setting.runs)
        tokens = rows * NEW_TOKENS
        bare = NEW_TOKENS * seconds_of_products(theirs, rows)
        roof = setting.roofline.generating(rows, rows * PROMPT_LENGTH, rows, NEW_TOKENS)
        for name, spent in medians.items():
            ratio = f"{spent / medians['tether']:.2f}"
            shares = [f"{bare / spent:.0%}", f"{roof / spent:.0%}"]
            rows_of_table.append([str(rows), name, f"{tokens / spent:.0f}", ratio, *shares])
        label = f"{rows} rows" if rows > 1 else "one row"
        goals.append(
            Goal(
                f"{label}: tether / transformers.generate",
                medians["transformers.generate"] / medians["tether"],
                over_transformers,
            )
        )
        if vllm:
            goals.append(Goal(f"{label}: tether / vLLM", medians["vLLM"] / medians["tether"], over_vllm))
        if rows > 1:
            goals.append(Goal(f"{label}: share of the limit", roof / medians["tether"], SHARE_OF_PRODUCTS))
    return Section(
        "Decoding",
        [
            f"Prompts of {PROMPT_LENGTH} tokens on average, {NEW_TOKENS} new tokens each, bfloat16, temperature 1,",
            "whole vocabulary; prefill included. *its products*: share of the time that the model's linear layers",
            "alone take for the new tokens, one after the other, on as many rows; *limit*: share of the time that the",
            "products of prompts and new tokens would take at the rate of a large product, or that reading the weights",
            "at every step takes at the speed of memory if that is longer.",
            *notes,
        ],
        ("rows", "", "tokens/s", "time / tether's", "its products", "limit"),
        rows_of_table,
        goals,
    )

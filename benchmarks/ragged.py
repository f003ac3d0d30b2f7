"""Generation that ends when the model says so: GSM8K prompts, responses of many lengths, beside vLLM.

Both sample their own responses at temperature 1, so tokens a second are compared and not seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.decode import start_vllm
from benchmarks.speed.peers.processes import Skipped
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import seconds, take_turns
from tether.text.sampling.engine import NativeEngine, eos_token_ids
from tether.text.sampling.protocol import NoiseKey, SamplingParams

GOAL = 1.5


def measure(setting: Setting) -> Section:
    """128 prompts of up to 256 new tokens; half of both with ``--quick``."""
    count, limit = (64, 128) if setting.quick else (128, 256)
    model = setting.our_model()
    engine = NativeEngine(model, eos_token_ids=eos_token_ids(model), max_num_seqs=count)
    tokens: dict[str, list[int]] = {"tether": [], "vLLM": []}

    def tether(number: int) -> float:
        prompts = setting.prompts(count, first=count * number)

        def run() -> None:
            batch = engine.generate(prompts, SamplingParams(limit), NoiseKey(seed=0, step=number))
            tokens["tether"].append(int(batch.response_length.sum()))

        spent = seconds(run)
        return spent / tokens["tether"][-1]

    sides: dict[str, Callable[[int], float]] = {"tether": tether}
    note = ""
    try:
        worker = start_vllm(setting)
    except Skipped as why:
        note = f"vLLM left out: {why}."
    else:

        def vllm(number: int) -> float:
            prompts = setting.prompts(count, first=count * number)
            answer = worker.ask(prompts=prompts, new_tokens=limit, ignore_eos=False)
            tokens["vLLM"].append(answer["tokens"])
            return float(answer["seconds"] / answer["tokens"])

        sides["vLLM"] = vllm
    medians = take_turns(sides, setting.runs)
    rows = [
        [
            name,
            f"{1 / spent:.0f}",
            f"{spent / medians['tether']:.2f}",
            f"{sum(tokens[name]) / len(tokens[name]) / count:.0f}",
        ]
        for name, spent in medians.items()
    ]
    goals = [Goal("tether / vLLM", medians["vLLM"] / medians["tether"], GOAL)] if "vLLM" in medians else []
    return Section(
        "Ragged generation",
        [f"{count} GSM8K prompts at once, up to {limit} new tokens, each ends at its end of sequence.", note],
        ("", "tokens/s", "time per token / tether's", "mean length"),
        rows,
        goals,
    )

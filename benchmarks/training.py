"""Training speed: one optimizer step of PPO's clipped loss on ragged GSM8K responses, log-probs included, in turns.

Sides: tether; a loop of transformers written by hand (`benchmarks/speed/plain_loop.py`); TRL's GRPOTrainer, handed the
same rows instead of sampling. The peers hold everything in bfloat16, which is faster than TRL's default of autocast;
tether updates float32 master weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.speed.peers.processes import Skipped, Worker
from benchmarks.speed.plain_loop import PlainLoop
from benchmarks.speed.rollouts import Updater, as_rows, sampled_batch
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import seconds, take_turns
from tether.batch import TrainBatch
from tether.text.learning.packing import row_sizes

NEW_TOKENS, MICRO_ROWS, MICRO_TOKENS = 64, 8, 4096
OVER_PEERS, SHARE = 2.0, 0.75
CASES = {"4 prompts x 8 responses": (4, 8), "32 prompts x 1 response": (32, 1)}
QUICK_CASES = {"2 prompts x 8 responses": (2, 8)}
"""Prompts and responses of each."""


def start_trl(setting: Setting, name: str, **job: object) -> Worker:
    """A TRL process for a job of `benchmarks.speed.peers.trl_worker`; there may be several."""
    common = {
        "model": str(setting.model),
        "threads": setting.threads,
        "prompts": setting.texts[:256],
        "samples": 8,
        "new_tokens": 64,
        "micro": None,
        "autocast": False,
        "checkpointing": False,
    }
    path = Path(tempfile.mkdtemp()) / "job.json"
    path.write_text(json.dumps(common | job))
    return setting.peers.start("trl", "benchmarks.speed.peers.trl_worker", [str(path)], name)


def token_counts(batch: TrainBatch) -> tuple[int, int, int]:
    """Tokens of all rows; tokens that have to be computed, a shared prompt once; response tokens."""
    sizes = row_sizes(batch)
    responses = sum(size.response_tokens for size in sizes)
    prompts = {size.prompt: size.prompt_tokens for size in sizes}
    return sum(size.tokens for size in sizes), sum(prompts.values()) + responses, responses


def measure(setting: Setting) -> Section:
    """Responses to shared prompts, as GRPO has them, and to as many prompts as responses."""
    updater = Updater(setting, MICRO_TOKENS)
    plain = PlainLoop(setting.plain_model(), MICRO_ROWS)
    table, goals, notes = [], [], []
    for label, (prompts, samples) in (QUICK_CASES if setting.quick else CASES).items():
        batch = sampled_batch(setting, prompts, samples, NEW_TOKENS)
        sides: dict[str, Callable[[int], float]] = {
            "tether": lambda _, b=batch: seconds(lambda: updater(b)),
            "plain loop": lambda _, b=batch: seconds(lambda: plain(b)),
        }
        try:
            trl = start_trl(setting, f"trl update {label}", rows=as_rows(batch), micro=MICRO_ROWS)
        except Skipped as why:
            notes.append(f"TRL left out: {why}.")
        else:
            notes.append(f"TRL {trl.hello['version']}.")
            sides["TRL"] = lambda _, worker=trl: float(worker.ask()["seconds"])
        medians = take_turns(sides, setting.runs, setting.steps_to_warm_up)
        setting.peers.stop()
        tokens, computed, responses = token_counts(batch)
        roof = setting.roofline
        least = roof.training(computed, responses)
        for name, spent in medians.items():
            share = f"{(least if name == 'tether' else roof.training(tokens, responses)) / spent:.0%}"
            table.append(
                [label, name, f"{spent:.2f}", f"{tokens / spent:.0f}", f"{spent / medians['tether']:.2f}", share]
            )
        for name in [name for name in medians if name != "tether"]:
            goals.append(Goal(f"{label}: tether / {name}", medians[name] / medians["tether"], OVER_PEERS))
        goals.append(Goal(f"{label}: share of the limit", least / medians["tether"], SHARE))
    return Section(
        "Training",
        [
            f"Responses of up to {NEW_TOKENS} tokens, one optimizer step. tokens/s counts prompt and response",
            "of every row. *limit*: share of the time that the matrix products of forward and backward would take at",
            "the rate of a large product; for tether of the tokens that it has to compute, where a prompt that rows",
            "share counts once.",
            *dict.fromkeys(notes),
        ],
        ("", "", "s", "tokens/s", "time / tether's", "limit"),
        table,
        goals,
    )

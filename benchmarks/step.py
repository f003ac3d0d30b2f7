"""A whole GRPO step beside TRL's GRPOTrainer.

Both sample 8 responses of exactly 64 tokens to each of some GSM8K prompts and take one optimizer step on them with the
clipped loss over tokens, lr 1e-6, no KL, no weight decay, gradients clipped to 1, and the same trivial reward.
"""

from __future__ import annotations

from statistics import median

from benchmarks.speed.peers.processes import Skipped
from benchmarks.speed.runs import (
    GRPO,
    NEW_TOKENS,
    SAMPLES,
    median_seconds,
    one_step,
    prompts_of_step,
    running,
    share_of_limit,
)
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import seconds, take_turns
from benchmarks.training import start_trl

OVER_TRL = 3.0
PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")


def measure(setting: Setting) -> Section:
    """4 prompts; 2 with ``--quick``."""
    table, goals, notes = [], [], []
    prompts, warm_up = prompts_of_step(setting), setting.steps_to_warm_up
    with running(setting, GRPO) as trainer:
        metrics: list[dict[str, float]] = []
        sides = {"tether": lambda _: seconds(lambda: metrics.append(one_step(trainer)))}
        sampling: list[float] = []
        try:
            trl = start_trl(setting, "trl step", samples=SAMPLES, responses=prompts * SAMPLES, new_tokens=NEW_TOKENS)
        except Skipped as why:
            notes.append(f"TRL left out: {why}.")
        else:

            def peer(_: int) -> float:
                answer = trl.ask()
                sampling.append(answer["sampling"])
                return float(answer["seconds"])

            notes.append(f"TRL {trl.hello['version']}, all in bfloat16.")
            sides["TRL"] = peer
        medians = take_turns(sides, setting.runs, warm_up)
        setting.peers.stop()
    metrics = metrics[warm_up:]
    spent = {phase: median_seconds(metrics, phase) for phase in PHASES if f"timing_s/{phase}" in metrics[0]}
    where = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in spent.items() if seconds >= 0.01)
    table.append(["tether", f"{medians['tether']:.2f}", f"{share_of_limit(setting, metrics):.0%}", where])
    if "TRL" in medians:
        generating = median(sampling[warm_up:])
        where = f"sampling and reward {generating:.2f}, update {medians['TRL'] - generating:.2f}"
        table.append(["TRL", f"{medians['TRL']:.2f}", "", where])
        goals.append(Goal("GRPO step: tether / TRL", medians["TRL"] / medians["tether"], OVER_TRL))
    return Section(
        "A GRPO step",
        [
            f"{prompts} GSM8K prompts x {SAMPLES} responses of {NEW_TOKENS} tokens, one optimizer step, bfloat16.",
            "*limit*: share of the time that the matrix products of the tokens that have to be computed (a prompt that",
            "rows share counts once) would take at the rate of a large product.",
            *notes,
        ],
        ("", "s", "limit", "where"),
        table,
        goals,
    )

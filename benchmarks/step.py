"""A whole GRPO step, sampled by tether's own engine and by a vLLM server, beside TRL's GRPOTrainer.

Both sample 8 responses of exactly 64 tokens to each of some GSM8K prompts and take one optimizer step on them with the
clipped loss over tokens, lr 1e-6, no KL, no weight decay, gradients clipped to 1, and the same trivial reward.
The side of vLLM is the same run of tether with ``rollout.name=vllm``: its own server, which gets the weights each step,
and is stopped while the others are measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import psutil

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
OURS, SERVED = "tether", "tether, sampling by vLLM"
VLLM = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2"]


def served_by_vllm(setting: Setting, runs: ExitStack, metrics: list[dict[str, float]]) -> Callable[[int], float]:
    """The side of vLLM; its server is stopped between steps, as it waits in a loop.

    Args:
        setting: of all sides.
        runs: closes it.
        metrics: gets those of its steps.

    Raises:
        Skipped: vLLM cannot be installed.
    """
    os.environ["TETHER_VLLM"] = str(setting.peers.environment("vllm").parent.parent)
    before = psutil.Process().children(recursive=True)
    trainer = runs.enter_context(running(setting, [*GRPO, *VLLM]))
    one_step(trainer)  # starts the server
    server = [process for process in psutil.Process().children(recursive=True) if process not in before]
    runs.callback(lambda: [process.resume() for process in server])

    def side(_: int) -> float:
        for process in server:
            process.resume()
        spent = seconds(lambda: metrics.append(one_step(trainer)))
        for process in server:
            process.suspend()
        return spent

    return side


def measure(setting: Setting) -> Section:
    """4 prompts; 2 with ``--quick``."""
    goals, notes = [], []
    prompts, warm_up = prompts_of_step(setting), setting.steps_to_warm_up
    metrics: dict[str, list[dict[str, float]]] = {OURS: []}
    sampling: list[float] = []

    with ExitStack() as runs:
        trainer = runs.enter_context(running(setting, GRPO))
        sides = {OURS: lambda _: seconds(lambda: metrics[OURS].append(one_step(trainer)))}
        try:
            sides[SERVED] = served_by_vllm(setting, runs, metrics.setdefault(SERVED, []))
        except Skipped as why:
            del metrics[SERVED]
            notes.append(f"vLLM left out: {why}.")
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
    table = []
    for name, steps in metrics.items():
        counted = steps[warm_up:]
        spent = {phase: median_seconds(counted, phase) for phase in PHASES if f"timing_s/{phase}" in counted[0]}
        where = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in spent.items() if seconds >= 0.01)
        share = f"{share_of_limit(setting, counted):.0%}"
        table.append([name, f"{medians[name]:.2f}", f"{medians[name] / medians[OURS]:.2f}", share, where])
    if "TRL" in medians:
        generating = median(sampling[warm_up:])
        ratio = medians["TRL"] / medians[OURS]
        where = f"sampling and reward {generating:.2f}, update {medians['TRL'] - generating:.2f}"
        table.append(["TRL", f"{medians['TRL']:.2f}", f"{ratio:.2f}", "", where])
        goals.append(Goal("GRPO step: tether / TRL", ratio, OVER_TRL))
    return Section(
        "A GRPO step",
        [
            f"{prompts} GSM8K prompts x {SAMPLES} responses of {NEW_TOKENS} tokens, one optimizer step, bfloat16.",
            "*limit*: share of the time that the matrix products of the tokens that have to be computed (a prompt that",
            "rows share counts once) would take at the rate of a large product.",
            *notes,
        ],
        ("", "s", "time / tether's", "limit", "where"),
        table,
        goals,
    )

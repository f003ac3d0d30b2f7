"""A whole training step: GRPO beside TRL's GRPOTrainer, and PPO with critic and reference, where each second goes.

Both sample 8 responses of exactly 64 tokens to each of 4 GSM8K prompts and take one optimizer step on them with the
clipped loss over tokens, lr 1e-6, no KL, no weight decay, gradients clipped to 1, and the same trivial reward.
"""

from __future__ import annotations

from statistics import median

from benchmarks.speed.peers.processes import Skipped
from benchmarks.speed.runs import GRPO, NEW_TOKENS, PPO, PROMPTS, SAMPLES, one_step, running
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import seconds, take_turns
from benchmarks.training import start_trl

OVER_TRL, PPO_SHARE = 3.0, 0.5
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")


def measure(setting: Setting) -> Section:
    """Both kinds of step."""
    table, goals, notes = [], [], []
    with running(setting, GRPO) as trainer:
        metrics: list[dict[str, float]] = []
        sides = {"tether": lambda _: seconds(lambda: metrics.append(one_step(trainer)))}
        sampling: list[float] = []
        try:
            rows = PROMPTS * SAMPLES
            trl = start_trl(setting, "trl step", samples=SAMPLES, responses=rows, new_tokens=NEW_TOKENS)
        except Skipped as why:
            notes.append(f"TRL left out: {why}.")
        else:

            def peer(_: int) -> float:
                answer = trl.ask()
                sampling.append(answer["sampling"])
                return float(answer["seconds"])

            notes.append(f"TRL {trl.hello['version']}, all in bfloat16.")
            sides["TRL"] = peer
        medians = take_turns(sides, setting.runs, setting.steps_to_warm_up)
        setting.peers.stop()
        table.append(_row(setting, "GRPO, tether", metrics[setting.steps_to_warm_up :]))
    if "TRL" in medians:
        generating = median(sampling[setting.steps_to_warm_up :])
        rest = medians["TRL"] - generating
        table.append(
            ["GRPO, TRL", f"{medians['TRL']:.2f}", "", f"sampling and reward {generating:.2f}, update {rest:.2f}"]
        )
        goals.append(Goal("GRPO step: tether / TRL", medians["TRL"] / medians["tether"], OVER_TRL))
    with running(setting, PPO) as trainer:
        warm_up = setting.steps_to_warm_up
        ppo = [one_step(trainer) for _ in range(warm_up + setting.runs)][warm_up:]
    table.append(_row(setting, "PPO, tether", ppo))
    goals.append(Goal("PPO step: share of the limit", _share(setting, ppo), PPO_SHARE))
    return Section(
        "A whole step",
        [
            f"{PROMPTS} GSM8K prompts x {SAMPLES} responses of {NEW_TOKENS} tokens, one optimizer step a model,",
            "bfloat16. PPO is with a critic, a reference and GAE. *limit*: the matrix products of the tokens that have",
            "to be computed (a prompt that rows share counts once) at the rate of a large product.",
            *notes,
        ],
        ("", "s", "limit", "where"),
        table,
        goals,
    )


def _row(setting: Setting, name: str, metrics: list[dict[str, float]]) -> list[str]:
    spent = {phase: _median(metrics, phase) for phase in PHASES if f"timing_s/{phase}" in metrics[0]}
    where = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in spent.items() if seconds >= 0.01)
    return [name, f"{_median(metrics, 'step'):.2f}", f"{_share(setting, metrics):.0%}", where]


def _share(setting: Setting, metrics: list[dict[str, float]]) -> float:
    """The time that the products of the step's phases would take, over the time of the step."""
    roof, responses = setting.roofline, PROMPTS * SAMPLES * NEW_TOKENS
    total = sum(step["perf/total_num_tokens"] for step in metrics) / len(metrics)
    computed = int((total - responses) / SAMPLES + responses)
    prompts = computed - responses
    parts = {
        "gen": roof.decoding(PROMPTS * SAMPLES, NEW_TOKENS) + roof.training(prompts, PROMPTS, passes=1),
        "old_log_prob": roof.training(computed, responses, passes=1),
        "ref": roof.training(computed, responses, passes=1),
        "values": roof.training(computed, 0, passes=1),
        "update_critic": roof.training(computed, 0),
        "update_actor": roof.training(computed, responses),
    }
    done = [phase for phase in parts if f"timing_s/{phase}" in metrics[0]]
    return sum(parts[phase] for phase in done) / _median(metrics, "step")


def _median(metrics: list[dict[str, float]], phase: str) -> float:
    return median(step[f"timing_s/{phase}"] for step in metrics)

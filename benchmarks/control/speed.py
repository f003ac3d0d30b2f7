"""Speed of whole trainings beside the fastest peer of each kind of task: the rows of one table.

    python -m benchmarks.control --speed --purejaxrl CLONE --write docs/evidence/control.md
    python -m benchmarks.control --speed --purejaxrl CLONE --seeds 1 --steps 2048 --results runs/smoke.jsonl  # a trial

PureJaxRL is in no package registry: CLONE is a clone of github.com/luchris429/purejaxrl, whose `ppo.py` runs unchanged.
A row that cannot run here says what it needs. The columns of steps are those per second of processor time, which other
jobs on the machine change little, and so is the ratio: its mean over seeds, and its range.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gymnasium import Env

from benchmarks.control.report import Runs
from benchmarks.control.tasks import LEARNING, TASKS, Task

MARKS = "<!-- speed:begin -->", "<!-- speed:end -->"
PEER_NAMES = {"purejaxrl": "PureJaxRL", "sb3": "Stable-Baselines3"}
_cartpole = replace(TASKS["CartPole-v1"], env_id="CartPole-v1", sides=("tether", "purejaxrl"), test_episodes=1)
_in_numba = replace(_cartpole, env_id="benchmarks/control/compiled_cartpole.py:CartPole", peers_env_id="CartPole-v1")
_sb3: dict[str, Any] = {"sides": ("tether", "sb3"), "test_episodes": 1}
_pong = replace(
    TASKS["CartPole-v1"],
    env_id="ale_py:PongNoFrameskip-v4",
    steps=10_240,
    clip=0.1,
    wrapper="benchmarks.control.speed:atari",
    policy_of_sb3="CnnPolicy",
    **_sb3,
)

SPEED = {
    "CartPole, 8 x 128": _cartpole,
    "CartPole, 512 x 128": replace(_cartpole, steps=20 * 512 * 128, num_envs=512, mini_batch=512 * 128 // 4),
    "CartPole in numba, 8 x 128": _in_numba,
    "CartPole in JAX, 8 x 128": replace(
        _in_numba,
        env_id="benchmarks/control/compiled_cartpole.py:JaxCartPole",
        env_type="jax",
        max_episode_steps=500,
    ),
    "Pendulum": replace(LEARNING["Pendulum-v1"], env_id="Pendulum-v1", **_sb3),
    "HalfCheetah": replace(TASKS["HalfCheetah-v5"], env_id="HalfCheetah-v5", steps=40_960, **_sb3),
    "Pong, CNN": _pong,
    "Pong, CNN in bfloat16": replace(_pong, dtype="bfloat16"),
}


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    title: str
    task: str
    """A key of `SPEED`."""
    needs: Mapping[str, str]
    """Module -> the extra of tether that installs it."""
    counts_compilation: bool = False
    """The peer's compilation counts as time of its training."""


ROWS = (
    Row("CartPole, 8 x 128, 4 epochs of 4 mini-batches", "CartPole, 8 x 128", {"jax": "jax"}),
    Row("the same, with the peer's compilation", "CartPole, 8 x 128", {"jax": "jax"}, counts_compilation=True),
    Row("CartPole in numba with a rollout of its own", "CartPole in numba, 8 x 128", {"jax": "jax"}),
    Row("CartPole in JAX", "CartPole in JAX, 8 x 128", {"jax": "jax"}),
    Row("CartPole, 512 x 128, 4 epochs of 4 mini-batches", "CartPole, 512 x 128", {"jax": "jax"}),
    Row("Pendulum, mini-batches of 64", "Pendulum", {"gymnasium": "gymnasium"}),
    Row("HalfCheetah, mini-batches of 64", "HalfCheetah", {"mujoco": "mujoco"}),
    Row("Atari's Pong, Nature-CNN, mini-batches of 256", "Pong, CNN", {"ale_py": "atari", "cv2": "atari"}),
    Row("the same, tether's CNN in bfloat16", "Pong, CNN in bfloat16", {"ale_py": "atari", "cv2": "atari"}),
)


def atari(env: Env[Any, Any]) -> Env[Any, Any]:
    """Show an Atari game as the field does: every fourth frame, 84 x 84 in grey, the last four of them."""
    # Imported here because this module is also imported under CleanRL's old gymnasium, without FrameStackObservation.
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    return FrameStackObservation(AtariPreprocessing(env), 4)


def what_is_missing(row: Row, purejaxrl: Path | None) -> str:
    """Return what a row needs to run here; empty if nothing."""
    if "purejaxrl" in SPEED[row.task].sides and purejaxrl is None:
        return "needs a clone of github.com/luchris429/purejaxrl: --purejaxrl FOLDER"
    extras = {extra for module, extra in row.needs.items() if importlib.util.find_spec(module) is None}
    return f"needs pip install -e '.[{','.join(extras)}]'" if extras else ""


def table(tasks: Mapping[str, Task], tables: Mapping[str, Runs], missing: Mapping[str, str]) -> str:
    """Return the table in Markdown.

    Args:
        tasks: key of `SPEED` -> the task as it ran.
        tables: key of `SPEED` -> the runs of each side, the same seeds on both.
        missing: title of a row -> what it needs; empty if it ran.
    """
    lines = ["| | steps | seeds | tether | peer | peer's | tether / peer |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        if missing[row.title] or row.task not in tables:
            lines.append(f"| {row.title} | | | | | | not run: {missing[row.title] or '--made-only'} |")
            continue
        task, speed = tasks[row.task], "cpu_sps_with_compilation" if row.counts_compilation else "cpu_sps"
        peer = task.sides[1]
        ours, speeds = tables[row.task]["tether"], [run[speed] for run in tables[row.task][peer]]
        ratios = [run["cpu_sps"] / theirs for run, theirs in zip(ours, speeds, strict=True)]
        shown = f"{fmean(ratios):.2f}" + (f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else "")
        mean = fmean(run["cpu_sps"] for run in ours)
        numbers = (f"{task.steps:,}", str(len(ratios)), f"{mean:,.0f}")
        cells = (row.title, *numbers, PEER_NAMES[peer], f"{fmean(speeds):,.0f}", shown)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

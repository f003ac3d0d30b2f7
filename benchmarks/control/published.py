"""Tasks whose returns others have published, and the table that has tether's beside theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean

from benchmarks.control.report import Runs, number, of_tests, of_training, with_spread
from benchmarks.control.tasks import TASKS, Task, short
from benchmarks.resumable import write_between

MARKS = "<!-- published:begin -->", "<!-- published:end -->"
POSITIONS = "benchmarks.control.positions:PositionsOnly"
T_OF_THREE = 4.303
"""Quantile 0.975 of Student's t with two degrees of freedom."""


@dataclass(frozen=True)
class Published:
    """A task, and what others report for PPO on it."""

    task: Task
    cleanrl: tuple[float, float] | None = None
    """Mean and standard deviation of three seeds, of the last episodes of training, by CleanRL's documentation."""
    zoo: float | None = None
    """Return of RL Baselines3 Zoo's one tuned agent in tests without noise, by its benchmark page."""
    note: str = ""


def _minigrid(steps: int) -> Task:
    return short(steps, 16, 128, 256, 4, 1e-3, 0.01, value_coeff=0.5)


_CLASSIC = short(500_000, 4, 128, 128, 4, 2.5e-4, 0.01, value_coeff=0.5, value_clip=0.2, schedule="linear")
"""The defaults of CleanRL's ``ppo.py``."""


def _mujoco(name: str) -> Task:
    """Return a task with the value clipping of CleanRL's ``ppo_continuous_action.py``."""
    return replace(TASKS[name], value_clip=0.2)


_HIDDEN = short(
    102_400,
    8,
    128,
    256,
    10,
    1e-3,
    0.0,
    gamma=0.98,
    lam=0.8,
    env_id="CartPole-v1",
    wrapper=POSITIONS,
    schedule="linear",
)

PUBLISHED = {
    "CartPole-v1": Published(_CLASSIC, (490.04, 6.12), 500),
    "Acrobot-v1": Published(_CLASSIC, (-86.36, 1.32), -73.5),
    "MountainCar-v0": Published(_CLASSIC, (-200, 0), note="negative control: the flag is never reached"),
    "Pendulum-v1": Published(short(100_352, 4, 1024, 64, 10, 1e-3, 0.0, gamma=0.9), zoo=-172.2, note="zoo: gSDE"),
    "LunarLander-v3": Published(
        short(1_000_000, 16, 1024, 64, 4, 3e-4, 0.01, gamma=0.999, lam=0.98),
        zoo=242.1,
        note="zoo: v2",
    ),
    "HalfCheetah-v5": Published(_mujoco("HalfCheetah-v5"), (2262.5, 1196.8), 5819, "theirs: v2 and v3"),
    "Hopper-v5": Published(_mujoco("Hopper-v5"), (2311.5, 441.0), 2410, "theirs: v2 and v3"),
    "Walker2d-v5": Published(_mujoco("Walker2d-v5"), (3312.3, 429.9), 3479, "theirs: v2 and v3"),
    "Ant-v5": Published(short(1_000_000, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True), zoo=1327, note="zoo: v3"),
    "CartPole, positions only, LSTM": Published(
        replace(_HIDDEN, lstm_dim=64, share_critic=False),
        zoo=500,
    ),
    "CartPole, positions only": Published(_HIDDEN, note="no memory: the control"),
    "MiniGrid-DoorKey-5x5-v0": Published(_minigrid(102_400), zoo=0.964),
    "MiniGrid-KeyCorridorS3R1-v0": Published(_minigrid(512_000), zoo=0.949),
    "MiniGrid-LockedRoom-v0": Published(_minigrid(204_800), zoo=0.0, note="negative control; zoo: 5,000,000 steps"),
}


def write_published(path: Path, tables: Mapping[str, Runs]) -> None:
    """Put tether's returns beside the published ones between the marks of a page.

    A mean is called "below" where it is less than the 95% interval of CleanRL's mean of three seeds.
    """
    rows = [
        "| | steps | seeds | tether, training | CleanRL, training | tether, tests | zoo, tests | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, sides in tables.items():
        published, runs = PUBLISHED[name], sides["tether"]
        training, cleanrl = of_training(runs), published.cleanrl
        theirs = f"{number(cleanrl[0])} ± {number(cleanrl[1])}" if cleanrl else ""
        below = cleanrl is not None and fmean(training) < cleanrl[0] - T_OF_THREE * cleanrl[1] / sqrt(3)
        cells = (
            name,
            f"{published.task.steps:,}",
            str(len(runs)),
            with_spread(training) + (" (below)" if below else ""),
            theirs,
            with_spread(of_tests(runs)),
            number(published.zoo) if published.zoo is not None else "",
            published.note,
        )
        rows.append(f"| {' | '.join(cells)} |")
    write_between(path, *MARKS, "\n".join(rows))

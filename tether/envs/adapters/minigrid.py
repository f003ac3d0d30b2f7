"""MiniGrid's environments: the success that they do not tell by themselves, and their view without copies of the grid.

`minigrid.minigrid_env.MiniGridEnv.gen_obs` copies the view up to five times, an object of Python for each of its cells,
which takes most of a step. `view` reads the same cells in place.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from tether.envs.gymnasium_types import Env, Info, Raw, Simulator, Stepped, Wrapper

EMPTY, OUTSIDE = (1, 0, 0), (2, 5, 0)
"""Encodings of an empty cell, and of the grey wall that MiniGrid shows outside of the grid."""


class SuccessByReward(Wrapper):
    """Says in the infos that a task is solved, which MiniGrid and BabyAI say by a reward above 0 only."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        inner: Simulator = env.unwrapped
        if _has_usual_view(type(inner)):
            inner.gen_obs = partial(_observe, inner)

    def step(self, action: Raw) -> Stepped:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, info | {"is_success": float(reward) > 0}


def view(env: Simulator) -> NDArray[np.uint8]:
    """The picture [size, size, 3] that ``MiniGridEnv.gen_obs`` makes: object, colour and state of each cell in sight.

    Args:
        env: a ``MiniGridEnv``.
    """
    size, grid = env.agent_view_size, env.grid
    width, height, cells = grid.width, grid.height, grid.grid
    x, y = (int(at) for at in env.agent_pos)
    seen: list[Simulator] = []
    opaque: list[bool] = []
    for dx, dy in _offsets(size, env.agent_dir):
        i, j = x + dx, y + dy
        cell: Simulator = cells[j * width + i] if 0 <= i < width and 0 <= j < height else OUTSIDE
        seen.append(cell)
        opaque.append(cell is OUTSIDE or (cell is not None and not cell.see_behind()))
    visible = [True] * size**2 if env.see_through_walls else _in_sight(size, opaque)
    seen[size // 2 * size + size - 1] = env.carrying
    picture = [
        (0, 0, 0) if not lit else EMPTY if cell is None else OUTSIDE if cell is OUTSIDE else cell.encode()
        for cell, lit in zip(seen, visible, strict=True)
    ]
    return np.array(picture, dtype=np.uint8).reshape(size, size, 3)


def _observe(env: Simulator) -> Info:
    return {"image": view(env), "direction": env.agent_dir, "mission": env.mission}


def _has_usual_view(kind: type) -> bool:
    """Whether a class leaves MiniGrid's view as it is."""
    base = next((base for base in kind.__mro__ if base.__name__ == "MiniGridEnv"), None)
    names = ("gen_obs", "gen_obs_grid", "get_view_exts")
    return base is not None and all(getattr(kind, name) is getattr(base, name) for name in names)


@cache
def _offsets(size: int, direction: int) -> list[tuple[int, int]]:
    """From the agent to each cell of its view: columns from left to right, each from the far end to the agent."""
    dx, dy = ((1, 0), (0, 1), (-1, 0), (0, -1))[direction]
    steps = [(size - 1 - row, column - size // 2) for column in range(size) for row in range(size)]
    return [(ahead * dx - right * dy, ahead * dy + right * dx) for ahead, right in steps]


def _in_sight(size: int, opaque: list[bool]) -> list[bool]:
    """Cells that light from the agent reaches: row by row away from it, to both sides and ahead, as MiniGrid has it."""
    lit = [False] * size**2
    lit[size // 2 * size + size - 1] = True
    for row in range(size - 1, -1, -1):
        for columns, side in ((range(size - 1), 1), (range(size - 1, 0, -1), -1)):
            for column in columns:
                at = column * size + row
                if lit[at] and not opaque[at]:
                    beside = at + side * size
                    lit[beside] = True
                    if row > 0:
                        lit[beside - 1] = lit[at - 1] = True
    return lit

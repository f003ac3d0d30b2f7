"""MiniGrid's environments: adds ``success`` to their infos, and computes the agent's view without copying the grid.

`minigrid.minigrid_env.MiniGridEnv.gen_obs` copies the view up to five times, with one Python object per cell, which
takes most of the time of a step. `view` reads the same cells in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from tether.control.envs.gymnasium_types import Env, Info, Raw, Simulator, Stepped, Wrapper

DARK, EMPTY, OUTSIDE = bytes((0, 0, 0)), bytes((1, 0, 0)), bytes((2, 5, 0))
"""Encodings of an invisible cell, of an empty cell, and of the grey wall that MiniGrid shows outside of the grid."""


class SuccessByReward(Wrapper):
    """Adds ``success`` to the infos: in MiniGrid and BabyAI a task is solved when the reward is positive."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        inner: Simulator = env.unwrapped
        if _has_usual_view(type(inner)):
            inner.gen_obs = partial(_observe, inner)

    def step(self, action: Raw) -> Stepped:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, info | {"is_success": float(reward) > 0}


def view(env: Simulator) -> NDArray[np.uint8]:
    """Return the image [size, size, 3] of ``MiniGridEnv.gen_obs``: object, colour and state of each visible cell."""
    size, grid = env.agent_view_size, env.grid
    x, y = (int(at) for at in env.agent_pos)
    around = _cells_around(size, int(env.agent_dir), grid.width, grid.height, x, y)
    seen: list[Simulator] = list(around([*grid.grid, OUTSIDE]))
    opaque = [cell is not None and (cell is OUTSIDE or not cell.see_behind()) for cell in seen]
    visible = bytes([1] * size**2) if env.see_through_walls else _in_sight(size, bytes(opaque))
    seen[size // 2 * size + size - 1] = env.carrying
    codes = [
        DARK if not lit else EMPTY if cell is None else OUTSIDE if cell is OUTSIDE else bytes(cell.encode())
        for cell, lit in zip(seen, visible, strict=True)
    ]
    return np.frombuffer(bytearray().join(codes), dtype=np.uint8).reshape(size, size, 3)


def _observe(env: Simulator) -> Info:
    return {"image": view(env), "direction": env.agent_dir, "mission": env.mission}


def _has_usual_view(kind: type) -> bool:
    """Whether a class does not override MiniGrid's view."""
    base = next((base for base in kind.__mro__ if base.__name__ == "MiniGridEnv"), None)
    names = ("gen_obs", "gen_obs_grid", "get_view_exts")
    return base is not None and all(getattr(kind, name) is getattr(base, name) for name in names)


@cache
def _cells_around(
    size: int, direction: int, width: int, height: int, x: int, y: int
) -> Callable[[list[Simulator]], tuple[Simulator, ...]]:
    """Return a function that selects the cells of a view from a list of the grid's cells and one outside cell.

    The selected cells are ordered in columns from left to right, each from the far end to the agent.
    """
    dx, dy = ((1, 0), (0, 1), (-1, 0), (0, -1))[direction]
    where = []
    for column in range(size):
        for row in range(size):
            ahead, right = size - 1 - row, column - size // 2
            i, j = x + ahead * dx - right * dy, y + ahead * dy + right * dx
            where.append(j * width + i if 0 <= i < width and 0 <= j < height else -1)
    return itemgetter(*where)


@lru_cache(maxsize=10_000)
def _in_sight(size: int, opaque: bytes) -> bytes:
    """Return the visible cells by MiniGrid's algorithm: light spreads from the agent sideways and ahead, row by row."""
    lit = bytearray(size**2)
    lit[size // 2 * size + size - 1] = True
    for row in range(size - 1, -1, -1):
        for columns, side in ((range(size - 1), 1), (range(size - 1, 0, -1), -1)):
            for column in columns:
                at = column * size + row
                if lit[at] and not opaque[at]:
                    neighbor = at + side * size
                    lit[neighbor] = True
                    if row > 0:
                        lit[neighbor - 1] = lit[at - 1] = True
    return bytes(lit)

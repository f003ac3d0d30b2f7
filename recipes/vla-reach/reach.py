"""Reach the disc that the text names: a picture of 32 x 32 pixels, a few words, two numbers to move by.

Registers ``Reach-v0``; `expert` plays it, looking behind the picture.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

COLORS = {"red": (230, 60, 60), "green": (60, 200, 80), "blue": (70, 90, 240)}
SIZE = 32
RADIUS, REACH = 0.09, 0.12
"""Of a disc, and the distance at which it is reached; the table is 1 x 1."""
SPEED = 0.1
"""A step of action 1."""
CELLS = (np.stack(np.meshgrid(np.arange(SIZE), np.arange(SIZE)), axis=-1) + 0.5) / SIZE


class Reach(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """Two discs of different colours lie on a table; a white dot is to be moved to the one that the text names.

    The reward is 1 for reaching it, and nothing else. Reaching the other one ends the episode, too.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
            "task": spaces.Text(11, charset="abcdefghijklmnopqrstuvwxyz "),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw two colours, and three places that are apart from each other."""
        super().reset(seed=seed)
        self.colors = self.np_random.permutation(list(COLORS))[:2].tolist()
        while True:
            places = self.np_random.uniform(0.1, 0.9, (3, 2))
            if min(np.linalg.norm(places[i] - places[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 0.35:
                break
        self.dot, self.target, self.other = places
        return self._obs(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the dot."""
        self.dot = np.clip(self.dot + SPEED * action, 0.0, 1.0)
        success = bool(np.linalg.norm(self.dot - self.target) < REACH)
        failed = bool(np.linalg.norm(self.dot - self.other) < REACH)
        return self._obs(), float(success), success or failed, False, {"is_success": success}

    def render(self) -> NDArray[np.uint8]:
        """The picture, eight times as large."""
        return self._picture().repeat(8, axis=0).repeat(8, axis=1)

    def _obs(self) -> dict[str, Any]:
        return {"image": self._picture(), "task": f"reach {self.colors[0]}"}

    def _picture(self) -> NDArray[np.uint8]:
        picture = np.full((SIZE, SIZE, 3), 25, dtype=np.uint8)
        places = (self.target, self.other, self.dot)
        shades = (*(COLORS[name] for name in self.colors), (255, 255, 255))
        for place, shade, radius in zip(places, shades, (RADIUS, RADIUS, RADIUS / 2), strict=True):
            picture[((CELLS - place) ** 2).sum(axis=-1) < radius**2] = shade
        return picture


def expert(env: gymnasium.Env[Any, Any], obs: dict[str, Any]) -> NDArray[np.float32]:
    """Straight to the disc."""
    reach: Any = env.unwrapped
    return np.clip((reach.target - reach.dot) / SPEED, -1, 1).astype(np.float32)


gymnasium.register("Reach-v0", entry_point=Reach, max_episode_steps=20)

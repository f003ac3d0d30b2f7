"""Reach the side of a disc that a word names: a picture of 32 x 32 pixels, where the dot is, the word; two numbers out.

Registers ``Reach-v0``; `expert` plays it, looking behind the picture.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SIDES = {"left": (-0.2, 0.0), "right": (0.2, 0.0), "above": (0.0, -0.2), "below": (0.0, 0.2)}
"""Word -> from the middle of the disc to the place; the table is 1 x 1."""
SIZE = 32
RADIUS, REACH = 0.1, 0.08
"""Of the disc, and the distance at which the place is reached."""
SPEED = 0.1
"""A step of action 1."""
CELLS = (np.stack(np.meshgrid(np.arange(SIZE), np.arange(SIZE)), axis=-1) + 0.5) / SIZE


class Reach(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """A disc lies on a table; a white dot is to be moved to its left, right, upper or lower side.

    The reward is 1 for reaching the place, which ends the episode, and nothing else.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
            "state": spaces.Box(-1, 1, (2,), np.float32),
            "task": spaces.Text(5),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a word, a disc, and a dot that is away from the place."""
        super().reset(seed=seed)
        self.word = str(self.np_random.choice(list(SIDES)))
        self.disc = self.np_random.uniform(0.3, 0.7, 2)
        self.place = self.disc + SIDES[self.word]
        while True:
            self.dot = self.np_random.uniform(0.0, 1.0, 2)
            if np.linalg.norm(self.dot - self.place) > 0.4:
                return self._obs(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the dot."""
        self.dot = np.clip(self.dot + SPEED * action, 0.0, 1.0)
        success = bool(np.linalg.norm(self.dot - self.place) < REACH)
        return self._obs(), float(success), success, False, {"is_success": success}

    def render(self) -> NDArray[np.uint8]:
        """The picture, eight times as large."""
        return self._picture().repeat(8, axis=0).repeat(8, axis=1)

    def _obs(self) -> dict[str, Any]:
        state = (2 * self.dot - 1).astype(np.float32)
        return {"image": self._picture(), "state": state, "task": self.word}

    def _picture(self) -> NDArray[np.uint8]:
        picture = np.full((SIZE, SIZE, 3), 25, dtype=np.uint8)
        for middle, shade, radius in ((self.disc, (230, 60, 60), RADIUS), (self.dot, (255, 255, 255), RADIUS / 2)):
            picture[((CELLS - middle) ** 2).sum(axis=-1) < radius**2] = shade
        return picture


def expert(env: gymnasium.Env[Any, Any], obs: dict[str, Any]) -> NDArray[np.float32]:
    """Straight to the place."""
    reach: Any = env.unwrapped
    return np.clip((reach.place - reach.dot) / SPEED, -1, 1).astype(np.float32)


gymnasium.register("Reach-v0", entry_point=Reach, max_episode_steps=20)

"""MetaWorld as a camera sees it: a picture, the numbers of the hand, and the task in words."""

from __future__ import annotations

import string

import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tether.envs.gymnasium_types import Arguments, Begun, Env, Info, Raw, Simulator, Stepped, Wrapper
from tether.observations import Array

HAND = 4
"""Entries at the beginning of MetaWorld's observation that are of the hand: its place, and how far it is open."""
SMOOTHING = (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION, mujoco.mjtRndFlag.mjRND_SKYBOX)
"""Not drawn: in software it takes ten times as long as everything else."""
LETTERS = string.ascii_lowercase + " "


class PictureObservations(Wrapper):
    """Shows a picture, the hand's numbers (``state``) and the ``task`` in place of MetaWorld's numbers.

    Where object and goal are has to be seen. Pictures are drawn by mujoco, which needs a display, or the environment
    variable ``MUJOCO_GL`` set to ``egl`` or ``osmesa``.

    Args:
        env: one of `tether.envs.adapters.metaworld.MetaWorldTasks`, wrapped or not.
        longest: bytes of the longest task.
        camera: the name of one of MetaWorld's, or where a free one stands: ``lookat`` (a place), ``distance`` from it,
            ``azimuth`` and ``elevation`` of its direction in degrees.
        picture_size: height and width.

    Raises:
        ValueError: there is no such camera.
    """

    def __init__(self, env: Env, longest: int, camera: str | Arguments = "corner2", picture_size: int = 64) -> None:
        super().__init__(env)
        tasks: Simulator = env.unwrapped
        self._tasks = tasks
        self._size = picture_size
        self._renderers: dict[int, mujoco.Renderer] = {}
        self._camera = named_camera(camera, tasks.simulator.model) if isinstance(camera, str) else free_camera(camera)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (picture_size, picture_size, 3), np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (HAND,), np.float32),
                "task": spaces.Text(longest, charset=LETTERS),
            }
        )

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Begun:
        """See `gymnasium.Env.reset`."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._seen(obs), info

    def step(self, action: Raw) -> Stepped:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._seen(obs), reward, terminated, truncated, info

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
        super().close()

    def _seen(self, obs: Array) -> dict[str, Raw]:
        return {"image": self._picture(), "state": obs[:HAND].astype(np.float32), "task": self._tasks.task}

    def _picture(self) -> NDArray[np.uint8]:
        simulator = self._tasks.simulator
        if id(simulator) not in self._renderers:  # each task has a model of its own, which `self.env` keeps
            self._renderers[id(simulator)] = _renderer(simulator.model, self._size)
        renderer = self._renderers[id(simulator)]
        renderer.update_scene(simulator.data, self._camera)
        picture: NDArray[np.uint8] = renderer.render()
        return picture


def named_camera(name: str, model: Simulator) -> str:
    """The name of a camera of a model.

    Raises:
        ValueError: it has none of that name.
    """
    names = [model.camera(number).name for number in range(model.ncam)]
    if name not in names:
        raise ValueError(f"init_params.camera: MetaWorld has no camera {name}. Use one of {', '.join(names)}.")
    return name


def free_camera(place: Arguments) -> mujoco.MjvCamera:
    """A camera of its own place.

    Raises:
        ValueError: an entry is none of a camera's.
    """
    camera = mujoco.MjvCamera()
    known = ("lookat", "distance", "azimuth", "elevation")
    for name, value in place.items():
        if name not in known:
            raise ValueError(f"init_params.camera: a camera has no {name}. Use {', '.join(known)}, or a name.")
        setattr(camera, name, value)
    return camera


def _renderer(model: Simulator, size: int) -> mujoco.Renderer:
    model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
    renderer = mujoco.Renderer(model, size, size)
    for flag in SMOOTHING:
        renderer.scene.flags[flag] = False
    return renderer

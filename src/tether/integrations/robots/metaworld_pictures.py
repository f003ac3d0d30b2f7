"""MetaWorld with image observations: a camera's image, the state of the hand and the task in words."""

from __future__ import annotations

import string
from collections.abc import Sequence

import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tether.control.envs.gymnasium_types import Arguments, Begun, Env, Info, Raw, Simulator, Stepped, Wrapper
from tether.observations import Array

HAND = 4
"""Leading entries of MetaWorld's observation that describe the hand: its position, and how far it is open."""
SMOOTHING = (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION, mujoco.mjtRndFlag.mjRND_SKYBOX)
"""Render flags that are disabled: in software rendering, they take ten times as long as everything else."""
LETTERS = string.ascii_letters + string.digits + " ,"


class PictureObservations(Wrapper):
    """Replaces MetaWorld's observation by an image, the state of the hand (``state``) and the ``task``.

    The positions of object and goal are visible in the image only. mujoco renders it, which requires a display, or the
    environment variable ``MUJOCO_GL`` set to ``egl`` or ``osmesa``.

    Args:
        env: a `tether.integrations.robots.metaworld.MetaWorldTasks`, possibly wrapped.
        instructions: the instructions of all tasks.
        camera: the name of a MetaWorld camera, or a free camera: ``lookat`` (a point), ``distance`` from it,
            ``azimuth`` and ``elevation`` in degrees.
        picture_size: height and width in pixels.
        camera_position: position of a named camera, instead of MetaWorld's.
        rotated: whether to rotate images by 180 degrees, because ``corner2`` is upside down.
        shadows: whether to draw shadows, reflections and smooth edges, as MetaWorld does.

    Raises:
        ValueError: there is no such camera, or a free camera has a position.
    """

    def __init__(
        self,
        env: Env,
        instructions: Sequence[str],
        camera: str | Arguments = "corner2",
        picture_size: int = 64,
        camera_position: Sequence[float] | None = None,
        rotated: bool = False,
        shadows: bool = False,
    ) -> None:
        super().__init__(env)
        tasks: Simulator = env.unwrapped
        self._tasks = tasks
        self._size, self._rotated, self._shadows = picture_size, rotated, shadows
        if camera_position is not None and not isinstance(camera, str):
            raise ValueError("init_params.camera_position: a free camera has a lookat. Leave one of the two out.")
        self._position = camera_position
        self._renderers: dict[int, mujoco.Renderer] = {}
        self._camera = named_camera(camera, tasks.simulator.model) if isinstance(camera, str) else free_camera(camera)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (picture_size, picture_size, 3), np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (HAND,), np.float32),
                "task": spaces.Text(max(map(len, instructions)), charset=LETTERS),
            }
        )

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Begun:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._seen(obs), info

    def step(self, action: Raw) -> Stepped:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._seen(obs), reward, terminated, truncated, info

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
        super().close()

    def _seen(self, obs: Array) -> dict[str, Raw]:
        return {"image": self._picture(), "state": obs[:HAND].astype(np.float32), "task": self._tasks.task}

    def _picture(self) -> NDArray[np.uint8]:
        simulator = self._tasks.simulator
        if id(simulator) not in self._renderers:  # each task has its own model, kept alive by `self.env`
            if self._position is not None:
                simulator.model.camera(self._camera).pos[:] = self._position
                mujoco.mj_camlight(simulator.model, simulator.data)  # updates the camera's pose for the current state
            self._renderers[id(simulator)] = _renderer(simulator.model, self._size, self._shadows)
        renderer = self._renderers[id(simulator)]
        renderer.update_scene(simulator.data, self._camera)
        picture: NDArray[np.uint8] = renderer.render()
        return np.ascontiguousarray(picture[::-1, ::-1]) if self._rotated else picture


def named_camera(name: str, model: Simulator) -> str:
    """Check the name of a camera and return it.

    Raises:
        ValueError: the model has no such camera.
    """
    names = [model.camera(index).name for index in range(model.ncam)]
    if name not in names:
        raise ValueError(f"init_params.camera: MetaWorld has no camera {name}. Use one of {', '.join(names)}.")
    return name


def free_camera(place: Arguments) -> mujoco.MjvCamera:
    """Return a free camera.

    Raises:
        ValueError: a camera has no such entry.
    """
    camera = mujoco.MjvCamera()
    fields = ("lookat", "distance", "azimuth", "elevation")
    for name, value in place.items():
        if name not in fields:
            raise ValueError(f"init_params.camera: a camera has no {name}. Use {', '.join(fields)}, or a name.")
        setattr(camera, name, value)
    return camera


def _renderer(model: Simulator, size: int, shadows: bool) -> mujoco.Renderer:
    if not shadows:
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
    renderer = mujoco.Renderer(model, size, size)
    for flag in () if shadows else SMOOTHING:
        renderer.scene.flags[flag] = False
    return renderer

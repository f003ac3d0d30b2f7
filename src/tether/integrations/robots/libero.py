"""LIBERO: manipulation by a Panda arm in robosuite, from benchmark start states, with success as the reward."""

from __future__ import annotations

from collections.abc import Mapping

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from libero.libero.benchmark import get_benchmark, get_benchmark_dict
from libero.libero.envs.env_wrapper import ControlEnv
from numpy.typing import NDArray

from tether.control.envs.gymnasium_types import Arguments, Env, Info, Raw
from tether.control.envs.make import EnvOptions
from tether.observations import Array

STATE = ("robot0_proprio-state", "object-state")
"""Entries of robosuite's observation that are concatenated to the state: robot (arm and gripper) and objects."""
DEFAULT_MAX_STEPS = 1000
"""Episode length if `max_episode_steps` is not set: LIBERO's own horizon."""
SETTLING_STEPS = 10
"""Idle steps after a start state is set, so that objects come to rest."""
IDLE_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)
"""An action that moves nothing and leaves the gripper open."""
Obs = NDArray[np.float32] | dict[str, Array]


class LiberoTask(gymnasium.Env[Raw, NDArray[np.float32]]):
    """A LIBERO task whose episodes start in a random state of the benchmark and end with success.

    The observation is the state [S]; with cameras it is a Dict with ``state`` and one upright uint8 picture [H, W, 3]
    per camera.

    Args:
        env: LIBERO's environment.
        start_states: K simulator states, [K, S].
        cameras: names of the cameras to observe.
    """

    def __init__(self, env: ControlEnv, start_states: Array, cameras: tuple[str, ...] = ()) -> None:
        self._env, self._starts, self._cameras = env, start_states, cameras
        self.action_space = spaces.Box(-1.0, 1.0, (len(IDLE_ACTION),), np.float32)
        first = self._seen(env.reset())
        self.observation_space = _space_of(first)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        super().reset(seed=seed)
        if seed is not None:
            self._env.seed(seed)
        self._env.reset()
        raw = self._env.set_init_state(self._starts[self.np_random.integers(len(self._starts))])
        for _ in range(SETTLING_STEPS):
            raw = self._env.step(IDLE_ACTION)[0]
        return self._seen(raw), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Obs, float, bool, bool, Info]:
        raw, reward, done, _ = self._env.step(action)  # LIBERO's `done` means success
        return self._seen(raw), float(reward), bool(done), False, {"success": bool(done)}

    def close(self) -> None:
        self._env.close()

    def _seen(self, raw: Mapping[str, Array]) -> Obs:
        state = np.concatenate([np.asarray(raw[name], dtype=np.float32).reshape(-1) for name in STATE])
        if not self._cameras:
            return state
        # OpenGL counts rows from the bottom.
        return {"state": state, **{name: np.ascontiguousarray(raw[f"{name}_image"][::-1]) for name in self._cameras}}


def make_env(options: EnvOptions, arguments: Arguments) -> Env:
    """Make one environment from an id ``suite/index``, such as ``libero_spatial/0``.

    Args:
        options: options of the environments.
        arguments: arguments of LIBERO's environment; ``cameras`` lists the cameras to observe, such as ``agentview``.

    Raises:
        ValueError: there is no such suite or task, or a video is requested.
    """
    suite, _, index = options.id.partition("/")
    if suite not in get_benchmark_dict():
        raise ValueError(
            f"{options.role}.id: LIBERO has no suite {suite}. Use suite/number with one of "
            f"{', '.join(get_benchmark_dict())}."
        )
    benchmark = get_benchmark(suite)()
    count = benchmark.get_num_tasks()
    if not (index.isdecimal() and int(index) < count):
        raise ValueError(
            f"{options.role}.id: {options.id} is none of the {count} tasks {suite}/0 to {suite}/{count - 1}."
        )
    env_kwargs = {name: value for name, value in arguments.items() if name not in ("cameras", "max_episode_steps")}
    if "render_mode" in env_kwargs:
        raise ValueError("env.eval.video_cfg.save_video: LIBERO shows no pictures for videos. Turn it off.")
    cameras = tuple(arguments.get("cameras", ()))
    env = ControlEnv(
        benchmark.get_task_bddl_file_path(int(index)),
        **{
            "use_camera_obs": bool(cameras),
            "has_offscreen_renderer": bool(cameras),
            # robosuite's `done` does not distinguish the time limit from an end, so `TimeLimit` truncates instead.
            "ignore_done": True,
            **({"camera_names": list(cameras)} if cameras else {}),
            **env_kwargs,
        },
    )
    task = LiberoTask(env, np.asarray(benchmark.get_task_init_states(int(index))), cameras)
    return TimeLimit(task, options.max_episode_steps or DEFAULT_MAX_STEPS)


def _space_of(seen: Obs) -> spaces.Space:
    if isinstance(seen, dict):
        return spaces.Dict({name: _space_of(value) for name, value in seen.items()})
    if seen.dtype == np.uint8:
        return spaces.Box(0, 255, seen.shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, seen.shape, np.float32)

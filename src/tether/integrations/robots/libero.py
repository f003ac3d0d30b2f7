"""LIBERO: manipulation with a Panda arm in robosuite, from the benchmark's start states, with success as the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
"""Entries of robosuite's observation whose concatenation is the state: robot (arm and gripper) and objects."""
DEFAULT_MAX_STEPS = 1000
"""Episode length if `max_episode_steps` is not set: LIBERO's horizon."""
SETTLING_STEPS = 10
"""Idle steps after a start state is set, so that objects come to rest."""
IDLE_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)
"""An action that moves nothing and leaves the gripper open."""
STATES = ("full", "hand")
NO_VIDEOS = (
    "env.eval.video_cfg.save_video: without a camera LIBERO shows no pictures. Add env.eval.init_params.cameras="
    "[agentview], or turn it off."
)
Obs = NDArray[np.float32] | dict[str, Raw]


@dataclass(frozen=True)
class LiberoView:
    """Options of observations."""

    cameras: tuple[str, ...] = ()
    """Names of the cameras to observe."""
    state: str = "full"
    """``full``: robot and objects. ``hand``: position, rotation (axis times angle) and both fingers, as in the datasets
    of published policies."""
    mirrored: bool = False
    """Whether to mirror images horizontally, as for published policies."""
    longest: int | None = None
    """Maximum bytes of an instruction; None: observations have no instruction."""
    letters: str = ""
    """All characters that occur in instructions."""


@dataclass(frozen=True)
class LiberoTask:
    """One task of a suite."""

    file: str
    start_states: Array
    """Simulator states, [K, S]."""
    instruction: str = ""


class LiberoTasks(gymnasium.Env[Raw, NDArray[np.float32]]):
    """Tasks of LIBERO; each episode has a random task and start state, and ends with success.

    All start states of all tasks are equally likely. The observation is the state [S]; with cameras or instructions it
    is a Dict with ``state``, one uint8 image [H, W, 3] per camera, and the instruction as ``task``.

    Args:
        tasks: the tasks.
        make: makes LIBERO's environment for a task's file. Only one exists at a time, since each has its own renderer.
        view: options of observations.
        settling_steps: idle steps at the start of an episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (Gymnasium's declaration)

    def __init__(
        self,
        tasks: Sequence[LiberoTask],
        make: Callable[[str], ControlEnv],
        view: LiberoView = LiberoView(),
        settling_steps: int = SETTLING_STEPS,
        render_mode: str | None = None,
    ) -> None:
        self._tasks, self._make, self._view, self._settling_steps = tasks, make, view, settling_steps
        self.render_mode = render_mode
        self._number = 0
        self._env = make(tasks[0].file)
        self._raw: Mapping[str, Array] = self._env.reset()
        self.action_space = spaces.Box(-1.0, 1.0, (len(IDLE_ACTION),), np.float32)
        self.observation_space = self._space_of(self._seen())

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        super().reset(seed=seed)
        counts = [len(task.start_states) for task in self._tasks]
        drawn = int(self.np_random.integers(sum(counts)))
        number = int(np.searchsorted(np.cumsum(counts), drawn, side="right"))
        if number != self._number:
            self._env.close()
            self._number, self._env = number, self._make(self._tasks[number].file)
        if seed is not None or len(self._tasks) > 1:  # a newly created environment has no seed
            self._env.seed(int(self.np_random.integers(2**31)) if len(self._tasks) > 1 else seed)
        self._env.reset()
        start = self._tasks[number].start_states[drawn - sum(counts[:number])]
        self._raw = self._env.set_init_state(start)
        for _ in range(self._settling_steps):
            self._raw = self._env.step(IDLE_ACTION)[0]
        return self._seen(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Obs, float, bool, bool, Info]:
        self._raw, reward, done, _ = self._env.step(action)  # LIBERO's `done` means success
        return self._seen(), float(reward), bool(done), False, {"success": bool(done)}

    def render(self) -> Raw:
        return self._picture(self._view.cameras[0])

    def close(self) -> None:
        self._env.close()

    def _picture(self, camera: str) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self._raw[f"{camera}_image"][::-1])  # OpenGL counts rows from the bottom

    def _seen(self) -> Obs:
        view, raw = self._view, self._raw
        if view.state == "hand":
            parts = [raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]]
        else:
            parts = [np.asarray(raw[name]).reshape(-1) for name in STATE]
        state = np.concatenate(parts).astype(np.float32)
        if not view.cameras and view.longest is None:
            return state
        pictures = {name: self._picture(name) for name in view.cameras}
        if view.mirrored:
            pictures = {name: np.ascontiguousarray(picture[:, ::-1]) for name, picture in pictures.items()}
        instruction = {} if view.longest is None else {"task": self._tasks[self._number].instruction}
        return {"state": state, **pictures, **instruction}

    def _space_of(self, seen: Obs) -> spaces.Space:
        if isinstance(seen, dict):
            return spaces.Dict({name: self._space_of(value) for name, value in seen.items()})
        if isinstance(seen, str):
            assert self._view.longest is not None
            return spaces.Text(self._view.longest, charset=self._view.letters)
        if seen.dtype == np.uint8:
            return spaces.Box(0, 255, seen.shape, np.uint8)
        return spaces.Box(-np.inf, np.inf, seen.shape, np.float32)


def axis_angle(quaternion: Array) -> Array:
    """Return the rotation of a quaternion (x, y, z, w) as its axis times its angle, [3]."""
    cosine = np.clip(quaternion[3], -1.0, 1.0)
    sine = np.sqrt(1.0 - cosine**2)
    return np.zeros(3) if sine == 0 else quaternion[:3] * (2.0 * np.arccos(cosine) / sine)


def make_env(options: EnvOptions, arguments: Arguments) -> Env:
    """Make one environment of a task (``libero_spatial/0``) or of all tasks of a suite (``libero_spatial``).

    Args:
        options: options of the environments.
        arguments: arguments of LIBERO's environment, and of this adapter: ``cameras``, ``state`` and ``mirrored`` of
            `LiberoView`, ``instruction`` (whether to include it as ``task``) and ``settling_steps``.

    Raises:
        ValueError: there is no such suite, task or state, or a video is requested without a camera.
    """
    suite, _, index = options.id.partition("/")
    if suite not in get_benchmark_dict():
        raise ValueError(
            f"{options.role}.id: LIBERO has no suite {suite}. Use suite/number, or suite for all of its tasks, with "
            f"one of {', '.join(get_benchmark_dict())}."
        )
    benchmark = get_benchmark(suite)()
    count = benchmark.get_num_tasks()
    if index and not (index.isdecimal() and int(index) < count):
        raise ValueError(
            f"{options.role}.id: {options.id} is none of the {count} tasks {suite}/0 to {suite}/{count - 1}."
        )
    env_kwargs = {name: value for name, value in arguments.items() if name != "max_episode_steps"}
    cameras, state = tuple(env_kwargs.pop("cameras", ())), env_kwargs.pop("state", "full")
    mirrored, instruction = env_kwargs.pop("mirrored", False), env_kwargs.pop("instruction", False)
    settling_steps, render_mode = env_kwargs.pop("settling_steps", SETTLING_STEPS), env_kwargs.pop("render_mode", None)
    if state not in STATES:
        raise ValueError(f"{options.role}.init_params.state is {state!r}. Use {' or '.join(STATES)}.")
    if render_mode and not cameras:
        raise ValueError(NO_VIDEOS)
    # All instructions of the suite, so that all of its tasks have the same space.
    texts = [str(benchmark.get_task(number).language) for number in range(count)] if instruction else []
    tasks = [
        LiberoTask(
            benchmark.get_task_bddl_file_path(number),
            np.asarray(benchmark.get_task_init_states(number)),
            texts[number] if instruction else "",
        )
        for number in ([int(index)] if index else range(count))
    ]
    view = LiberoView(
        cameras,
        state,
        mirrored,
        max(len(text.encode()) for text in texts) if instruction else None,
        "".join(sorted(set("".join(texts)))),
    )

    def make(file: str) -> ControlEnv:
        return ControlEnv(
            file,
            **{
                "use_camera_obs": bool(cameras),
                "has_offscreen_renderer": bool(cameras),
                # robosuite's `done` does not distinguish time limit and termination, so `TimeLimit` truncates instead.
                "ignore_done": True,
                **({"camera_names": list(cameras)} if cameras else {}),
                **env_kwargs,
            },
        )

    env = LiberoTasks(tasks, make, view, settling_steps, render_mode)
    return TimeLimit(env, options.max_episode_steps or DEFAULT_MAX_STEPS)

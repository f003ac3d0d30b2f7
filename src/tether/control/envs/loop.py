"""Gymnasium environments stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import gymnasium
import numpy as np
from numpy.typing import NDArray

from tether.control.envs.action_masks import refuse_unread_mask
from tether.control.envs.conversion import (
    FIX,
    ActionCodec,
    ObservationReader,
    convert_step,
    describe_value,
    is_standard_step,
    read_reset,
    success_of,
)
from tether.control.envs.gymnasium_types import Env, Info, Raw
from tether.control.envs.protocol import NO_SEED, EnvState, EnvStep, Floats, Saved
from tether.control.envs.state import EnvSnapshotter
from tether.observations import Array, Observation, copied, shapes


class SyncVectorEnv:
    """Steps N environments in a loop; the step that ends an episode begins the next one, unless `holds` is set.

    Gymnasium's loop adds copies and dictionaries of infos, which take as long as a step of a cheap environment. This
    one writes directly into its arrays.

    Args:
        id: name of the environment in error messages.
        make: makes one environment.
        num_envs: number of environments.
        ignore_terminations: only truncation ends an episode.
        holds: wait for `begin` after an episode (`ManualResetEnv`).
        ignore_masks: accept action masks in the infos that are not in the observations; otherwise `begin` refuses them.
        info_metrics: names of the numbers in an episode's last info to return as `EnvStep.info_values`.
    """

    def __init__(
        self,
        id: str,
        make: Callable[[], Env],
        num_envs: int,
        *,
        ignore_terminations: bool = False,
        holds: bool = False,
        ignore_masks: bool = False,
        info_metrics: Sequence[str] = (),
    ) -> None:
        self.id = id
        self.num_envs = num_envs
        self._envs: Sequence[Env] = [make() for _ in range(num_envs)]
        self._keeper = EnvSnapshotter(self._envs)
        self.spaces = self._envs[0].observation_space, self._envs[0].action_space
        self._read = ObservationReader(self.spaces[0], id)
        self._codec = ActionCodec.of(self.spaces[1], id)
        self._is_choice = isinstance(self.spaces[1], gymnasium.spaces.Discrete)
        self._ignore_terminations = ignore_terminations
        self._holds, self._ignore_masks, self._info_metrics = holds, ignore_masks, info_metrics
        self._waiting = np.full(num_envs, holds)
        self.actions = self._codec.spec
        self.layout = self._read.layout
        self._obs, self._final_obs = self._read.zeros(num_envs), self._read.zeros(num_envs)
        self._reward = np.zeros(num_envs, dtype=np.float32)
        self._terminated = np.zeros(num_envs, dtype=np.bool_)
        self._truncated = np.zeros(num_envs, dtype=np.bool_)
        self._success, self._had_success = np.zeros(num_envs, dtype=np.bool_), False
        self.seeds = np.full(num_envs, NO_SEED, dtype=np.int64)

    def reset(self, seed: int) -> Observation:
        return self.begin({i: seed + i for i in range(self.num_envs)})

    def begin(self, seeds: Mapping[int, int | None]) -> Observation:
        for i, seed in seeds.items():
            obs, info = read_reset(self._envs[i].reset(seed=seed), f"{self.id}, environment {i}")
            if info and not self._ignore_masks:
                refuse_unread_mask(info, self.layout, self.id)
            self._write(self._obs, i, obs)
            self._waiting[i] = False
            self.seeds[i] = NO_SEED if seed is None else seed
        return self._obs

    def step(self, actions: Array) -> EnvStep:
        decoded = self._codec.decode(actions)
        ended = has_success = False
        valid, metrics = None, dict[str, Floats]()
        if self._had_success:  # environments may report success in some steps only
            self._success[:] = False
        if self._holds and self._waiting.any():
            valid = ~self._waiting
            for row in (self._reward, self._terminated, self._truncated, self._success):
                row[self._waiting] = 0
        for i, action in enumerate(decoded.tolist() if self._is_choice else self._codec.rows(decoded)):
            if valid is not None and not valid[i]:
                continue
            env = self._envs[i]
            try:
                answer = env.step(action)
            except Exception as error:
                error.add_note(f"raised by environment {i} of the {self.num_envs} in its process")
                raise
            if not is_standard_step(answer):
                answer = convert_step(answer, f"{self.id}, environment {i}")
            obs, self._reward[i], terminated, truncated, info = answer
            if self._ignore_terminations:
                terminated = False
            self._terminated[i], self._truncated[i] = terminated, truncated
            success = success_of(info, f"{self.id}, environment {i}") if info else None
            if success is not None:
                has_success, self._success[i] = True, success
            if terminated or truncated:
                ended = True
                for name in self._info_metrics:
                    column = metrics.setdefault(name, np.full(self.num_envs, np.nan, dtype=np.float32))
                    column[i] = info_number(info, name, self.id)
                self._write(self._final_obs, i, obs)
                if self._holds:
                    self._waiting[i] = True
                else:
                    obs, _ = read_reset(env.reset(), f"{self.id}, environment {i}")
                    self.seeds[i] = NO_SEED
            self._write(self._obs, i, obs)
        self._had_success = has_success
        return EnvStep(
            self._obs,
            self._reward,
            self._terminated,
            self._truncated,
            final_obs=self._final_obs if ended else None,
            valid=valid,
            success=self._success if has_success else None,
            info_values=metrics or None,
        )

    def render(self) -> NDArray[np.uint8]:
        picture = self._envs[0].render()
        if isinstance(picture, np.ndarray) and picture.ndim == 3:
            return picture
        raise ValueError(f"{self.id}: it shows no picture (render_mode=rgb_array). Turn env.eval.video_cfg off.")

    def get_state(self) -> EnvState:
        data, left_out = self._keeper.get()
        return EnvState((copied(self._obs), self._waiting.copy(), data), left_out)

    def set_state(self, data: Saved) -> None:
        obs, waiting, envs = data
        if len(waiting) != self.num_envs:
            raise ValueError(f"saved of {len(waiting)} environments, now {self.num_envs}")
        if shapes(obs) != shapes(self._obs):
            raise ValueError(f"saved with the observations {shapes(obs)}, now {shapes(self._obs)}")
        self._keeper.set(envs)
        self._obs, self._waiting[:] = copied(obs), waiting
        self.seeds[:] = NO_SEED

    def close(self) -> None:
        with ExitStack() as all_of_them:  # closes all of them even if one raises
            for env in self._envs:
                all_of_them.callback(env.close)

    def _write(self, rows: Observation, i: int, obs: Raw) -> None:
        try:
            if not self._read.is_plain:
                self._read.write(obs, rows, i)
            elif len(obs) == self.layout[0].shape[0]:  # a fast path for the usual case
                rows[self.layout[0].name][i] = obs
            else:  # NumPy would broadcast some lengths
                raise ValueError("another length")
        except Exception as error:  # any error means that the observation is not in the space
            raise ValueError(
                f"{self.id}, environment {i}: the observation {describe_value(obs)} is not in "
                f"{self._envs[i].observation_space}. {FIX}"
            ) from error


def info_number(info: Info, name: str, env_id: str) -> float:
    """Return a number from the info of an episode's last step.

    Raises:
        ValueError: the number is missing or not finite.
    """
    fix = "Correct the name, or take it out."
    if name not in info:
        raise ValueError(
            f"env.train.info_metrics: {env_id} tells no {name!r} in the info of an episode's last step, but "
            f"{', '.join(map(repr, info)) or 'nothing'}. {fix}"
        )
    try:
        number = float(info[name])
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(f"env.train.info_metrics: {name!r} of {env_id} is {info[name]!r:.80}, no finite number. {fix}")
    return number

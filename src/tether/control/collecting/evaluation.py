"""Evaluation of a policy: plays episodes without noise."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np

from tether.batch import Episode
from tether.control.collecting.collector import (
    NOTHING_ALLOWED,
    EpisodeTracker,
    env_error_context,
    forbids_all_actions,
    invalid_data_message,
)
from tether.control.envs.protocol import Flags, VectorEnv, choices_of
from tether.control.policies.networks import Act
from tether.observations import ACTION_MASK, Array, Observation
from tether.runtime.interrupt import raise_if_interrupted

WARN_AFTER_STEPS = 20_000
"""Length of an episode at which a warning is shown: four times the longest time limit in Gymnasium."""
MAX_EPISODE_STEPS = 100_000
"""Length of an episode at which evaluation fails: nearly four times the longest episode of Atari."""


def evaluate(
    env: VectorEnv,
    act: Act,
    num_episodes: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    chunk: int = 1,
    watch: Callable[[], None] | None = None,
    state_width: int = 0,
) -> list[Episode]:
    """Play `num_episodes` episodes with the most likely actions and return them.

    Each environment contributes the same number of episodes, or one more: selecting those that end first would favour
    short ones.

    Args:
        env: the environments, which are reset first.
        act: the policy.
        num_episodes: number of episodes.
        seed: seed of the start states.
        progress: called with (finished episodes, total episodes).
        chunk: number of actions per decision.
        watch: called at the start and after each step.
        state_width: width of the policy's recurrent state, which is zero at the start of an episode.

    Raises:
        ValueError: a reward or an observation is not finite, a mask allows nothing, or an episode does not end; the
            message names environment and step.
        Interrupted: a signal requested the run to stop, and episodes do not end.
    """
    wanted = np.full(env.num_envs, num_episodes // env.num_envs)
    wanted[: num_episodes % env.num_envs] += 1
    tracker = EpisodeTracker(env.num_envs)
    episodes = list[Episode]()
    with env_error_context(env.id, 0):
        obs = env.reset(seed)
    state, fresh = np.zeros((env.num_envs, state_width), dtype=np.float32), np.ones(env.num_envs, dtype=np.bool_)
    _check(env.id, {}, obs, 0)
    if watch is not None:
        watch()
    done, last_end, warned = 0, time.monotonic(), False
    length = np.zeros(env.num_envs, dtype=np.int64)  # of the current episode, in environments that still need one
    while wanted.any():
        raise_if_interrupted(last_end, "no episode of the evaluation ended")
        state[fresh] = 0.0
        chosen, state = act(obs, None, state)
        stuck = _fully_masked(env, obs)
        if length.max() > WARN_AFTER_STEPS and not warned:
            warned = True
            warnings.warn(
                f"{env.id}: environment {length.argmax()} has not ended an episode of the evaluation in "
                f"{WARN_AFTER_STEPS} steps. Limit episodes with env.eval.max_episode_steps",
                RuntimeWarning,
                stacklevel=2,
            )
        if length.max() > MAX_EPISODE_STEPS:
            raise ValueError(
                f"{env.id}: environment {length.argmax()} has not ended an episode of the evaluation in "
                f"{MAX_EPISODE_STEPS} steps, so the evaluation would never end. Set env.eval.max_episode_steps, which "
                "truncates longer episodes"
            )
        for actions in np.split(chosen, chunk, axis=1):
            done += 1
            with env_error_context(env.id, done):
                step = env.step(actions)
            _check(env.id, {"the reward": step.reward}, step.obs, done)
            ended = step.terminated | step.truncated
            valid = np.ones_like(ended) if step.valid is None else step.valid
            if (stuck & valid).any():
                raise ValueError(invalid_data_message(env.id, NOTHING_ALLOWED, int(np.argmax(stuck & valid)), done - 1))
            fresh = (fresh & ~valid) | ended
            success = None if step.success is None else step.success[:, None]
            reported = {name: column[:, None] for name, column in (step.info_values or {}).items()}
            finished = tracker.add(step.reward[:, None], ended[:, None], valid[:, None], success, reported)
            length += valid
            for n, episode in zip(np.flatnonzero(ended & valid), finished, strict=True):
                length[n] = 0
                if wanted[n]:
                    wanted[n] -= 1
                    episodes.append(episode)
                    last_end = time.monotonic()
            length[wanted == 0] = 0
            if progress is not None and finished:
                progress(len(episodes), num_episodes)
            if watch is not None:
                watch()
        obs = step.obs
    return episodes


def _check(env_id: str, numbers: dict[str, Array], obs: Observation, step: int) -> None:
    fields = {f"the observation ({name})": array for name, array in obs.items() if array.dtype.kind == "f"}
    for name, array in (numbers | fields).items():
        if not (fine := np.isfinite(array)).all():
            at = np.argwhere(~fine)[0]
            raise ValueError(invalid_data_message(env_id, f"{name} is {array[tuple(at)]}", at[0], step))


def _fully_masked(env: VectorEnv, obs: Observation) -> Flags:
    """Return which masks allow nothing, which is valid only for environments that wait."""
    if ACTION_MASK in obs and (choices := choices_of(env.actions)):
        return forbids_all_actions(obs[ACTION_MASK], choices)
    return np.zeros(env.num_envs, dtype=np.bool_)

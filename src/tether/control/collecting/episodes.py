"""Episodes: their returns, lengths and successes, and statistics over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev

import numpy as np
import torch
from numpy.typing import NDArray

from tether.batch import Episode
from tether.observations import ACTION_MASK, Array
from tether.types import StateDict


class EpisodeTracker:
    """Splits sequences of steps into episodes, which may span several rollouts.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._reward = np.zeros(num_envs)
        self._length = np.zeros(num_envs, dtype=np.int64)
        self._success = np.zeros(num_envs, dtype=np.bool_)

    def state_dict(self) -> StateDict:
        """Return the state of the unfinished episodes."""
        return {name: torch.from_numpy(column) for name, column in vars(self).items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned."""
        for name, column in state.items():
            setattr(self, name, column.numpy().copy())

    def add(
        self,
        rewards: NDArray[np.float32],
        ended: NDArray[np.bool_],
        valid: NDArray[np.bool_],
        success: NDArray[np.bool_] | None,
        reported: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> tuple[Episode, ...]:
        """Add T steps of each environment, [N, T] each, and return the episodes that ended in them.

        `reported` has the columns of `EnvStep.told`. Episodes whose last step is not valid were lost and are not
        returned.
        """
        reward_so_far = np.cumsum(np.where(valid, rewards, 0.0), axis=1, dtype=np.float64) + self._reward[:, None]
        length_so_far = np.cumsum(valid, axis=1) + self._length[:, None]
        reward_before, length_before = np.zeros_like(self._reward), np.zeros_like(self._length)
        first = np.zeros_like(self._length)
        episodes = []
        for t, n in np.argwhere(ended.T).tolist():
            once = at_end = None
            if success is not None:
                once = bool(success[n, first[n] : t + 1].any() or self._success[n])
                at_end = bool(success[n, t])
            reward = float(reward_so_far[n, t] - reward_before[n])
            if valid[n, t]:
                info = {name: float(column[n, t]) for name, column in (reported or {}).items()}
                episodes.append(Episode(reward, int(length_so_far[n, t] - length_before[n]), once, at_end, info))
            reward_before[n], length_before[n] = reward_so_far[n, t], length_so_far[n, t]
            first[n], self._success[n] = t + 1, False
        self._reward = reward_so_far[:, -1] - reward_before
        self._length = length_so_far[:, -1] - length_before
        if success is not None:
            self._success |= np.array([success[n, first[n] :].any() for n in range(len(first))])
        return tuple(episodes)


class raised_at:  # a class, because a generator would cost as much as a step of a cheap environment
    """A context that adds a note to exceptions: which environments raised it, and at which step.

    Args:
        env_id: name of the environments.
        step: index of the step, from 1.
    """

    def __init__(self, env_id: str, step: int) -> None:
        self._where = env_id, step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            error.add_note(f"raised by {self._where[0]} at step {self._where[1]} of its environments")


def broken(env_id: str, what: str, index: int, step: int) -> str:
    """Return the error message for invalid data of environment `number`; step 0 is the first reset."""
    fix = "Fix the environment, or end its episodes before that."
    return f"{env_id}: {what} in environment {index} at step {step}. {fix}"


NOTHING_ALLOWED = f"{ACTION_MASK} allows none of the alternatives of a choice"


def allows_nothing(mask: Array, choices: Sequence[int]) -> NDArray[np.bool_]:
    """Return whether all alternatives of one of the choices are forbidden: [...] of a mask [..., sum(choices)]."""
    some = np.logical_or.reduceat(mask, np.cumsum((0, *choices[:-1])), axis=-1)
    return np.logical_not(some.all(axis=-1, keepdims=True))[..., 0]


def episode_metrics(episodes: Sequence[Episode], prefix: str, confidence: float | None = None) -> dict[str, float]:
    """Return means over episodes under RLinf's names; empty without episodes.

    Args:
        episodes: finished episodes.
        prefix: ``env`` or ``eval``.
        confidence: level of confidence intervals to add, which use the standard error for means and Wilson's formula
            (1927) for success rates. None: no intervals.
    """
    if not episodes:
        return {}
    columns = {
        "return": [episode.reward for episode in episodes],
        "episode_len": [float(episode.length) for episode in episodes],
        "reward": [episode.reward / episode.length for episode in episodes],
    }
    for name in ("success_once", "success_at_end"):
        values = [float(getattr(episode, name)) for episode in episodes if getattr(episode, name) is not None]
        if values:
            columns[name] = values
    for name in episodes[0].info:
        columns[f"info/{name}"] = [episode.info[name] for episode in episodes if name in episode.info]
    metrics = {f"{prefix}/{name}": fmean(values) for name, values in columns.items()}
    metrics[f"{prefix}/num_trajectories"] = float(len(episodes))
    if confidence is not None:
        for name, values in columns.items():
            interval = _share_interval if name.startswith("success") else _mean_interval
            low, high = interval(values, NormalDist().inv_cdf(0.5 + confidence / 2))
            metrics |= {f"{prefix}/{name}_low": low, f"{prefix}/{name}_high": high}
    return metrics


def _mean_interval(values: list[float], z: float) -> tuple[float, float]:
    mean = fmean(values)
    half = z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean - half, mean + half


def _share_interval(values: list[float], z: float) -> tuple[float, float]:
    share, count = fmean(values), len(values)
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)

"""Wrappers that a run has to continue exactly: each adds to the rewards what depends on a state of its own."""

import itertools
import random
import threading
from collections import deque

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers.utils import RunningMeanStd

SHARED = np.random.default_rng(7)


class Noisy(gymnasium.Wrapper):
    """Adds `extra()` to each reward."""

    def extra(self):
        raise NotImplementedError

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward) + 0.1 * self.extra(), terminated, truncated, info


class Astronomic(gymnasium.Wrapper):
    """Rewards that float32 holds, and not their squares."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, 1e38 * float(reward), terminated, truncated, info


class DrawsNumpy(Noisy):
    def extra(self):
        return np.random.normal()


class DrawsPython(Noisy):
    def extra(self):
        return random.gauss(0, 1)


class DrawsTorch(Noisy):
    def extra(self):
        return float(torch.randn(()))


class DrawsFromASharedGenerator(Noisy):
    def extra(self):
        return SHARED.normal()


class OwnGenerators(Noisy):
    def __init__(self, env):
        super().__init__(env)
        self._numpy, self._python, self._torch = np.random.default_rng(3), random.Random(3), torch.Generator()
        self._alias = self._numpy

    def extra(self):
        drawn = float(torch.rand((), generator=self._torch))
        return drawn + self._numpy.normal() + self._alias.normal() + self._python.random()


class RunningStatistics(gymnasium.ObservationWrapper):
    """Shows observations beside what was seen before."""

    def __init__(self, env):
        super().__init__(env)
        self._seen = RunningMeanStd(shape=env.observation_space.shape)

    def observation(self, observation):
        self._seen.update(observation[None])
        return ((observation - self._seen.mean) / np.sqrt(self._seen.var + 1e-8)).astype(np.float32)


class Counts(Noisy):
    """A curriculum over all episodes, a history, a total of all environments and a lambda."""

    total = 0

    def __init__(self, env):
        super().__init__(env)
        self._steps, self._last, self._scale = 0, deque(maxlen=5), lambda x: x / 50

    def extra(self):
        self._steps += 1
        Counts.total += 1
        self._last.append(self._steps * Counts.total % 7)
        return self._scale(self._steps) + sum(self._last)


def _counting():
    steps = 0

    def count(last=[0]):  # noqa: B006
        nonlocal steps
        steps, last[0] = steps + 1, steps
        return (steps + last[0]) % 11

    return count


class CountsInFunctions(Noisy):
    """Keeps its state in a closure and in a default argument, beside a generator of another function's."""

    def __init__(self, env):
        super().__init__(env)
        self._count = _counting()

    def extra(self, *, random=np.random.default_rng(5)):
        return self._count() / 5 + random.normal()


class RandomTheFirstTime(Noisy):
    """Begins with a state that no seed decides."""

    def __init__(self, env):
        super().__init__(env)
        self._random = np.random.default_rng(1)
        self._first_reset = True

    def reset(self, *, seed=None, options=None):
        if self._first_reset:
            self._offset, self._first_reset = self._random.normal(), False
        return self.env.reset(seed=seed, options=options)

    def extra(self):
        return self._offset + self._random.normal()


class GivesItsState(Noisy):
    """Holds what cannot be pickled, and says what is to be saved."""

    def __init__(self, env):
        super().__init__(env)
        self._lock, self._count = threading.Lock(), 0

    def extra(self):
        with self._lock:
            self._count += 1
        return self._count / 50

    def get_state(self):
        return {"count": self._count}

    def set_state(self, state):
        self._count = state["count"]


class CannotBeSaved(Noisy):
    """Counts by a generator of Python, which nothing can pickle."""

    def __init__(self, env):
        super().__init__(env)
        self._steps = (n for n in itertools.count())

    def extra(self):
        return next(self._steps) / 50


class ForgetsAtReset(CannotBeSaved):
    """The same, but its state is that of an episode."""

    def reset(self, *, seed=None, options=None):
        self._steps = (n for n in itertools.count())
        return self.env.reset(seed=seed, options=options)


class Holds(gymnasium.Env):
    """A task that holds its simulator as an attribute, as most tasks are written."""

    def __init__(self, id="InvertedDoublePendulum-v5"):
        self.sim = gymnasium.make(id)
        self.observation_space, self.action_space = self.sim.observation_space, self.sim.action_space

    def reset(self, *, seed=None, options=None):
        return self.sim.reset(seed=seed, options=options)

    def step(self, action):
        return self.sim.step(action)

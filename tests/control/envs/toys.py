"""Small environments whose right answers are known."""

import faulthandler
import os
import signal
import subprocess
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces


class Countdown(gymnasium.Env):
    """Gives the number of the step as a reward; ends by itself after `ends` steps. The observation is the step."""

    observation_space = spaces.Box(-1, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ends=10**6, poison_at=None, poison="reward"):
        self._ends, self._poison_at, self._poison, self._t = ends, poison_at, poison, 0

    def _obs(self):
        return np.array([self._t], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self._t += 1
        obs, reward = self._obs(), float(self._t)
        if self._t == self._poison_at:
            obs, reward = (obs, float("nan")) if self._poison == "reward" else (obs * np.inf, reward)
        return obs, reward, self._t >= self._ends, False, {"is_success": self._t == 2}


class Sleeps(Countdown):
    """Takes its time for each step, in short naps: a nap in which its process is stopped ends late."""

    def __init__(self, seconds):
        super().__init__()
        self._naps = round(100 * seconds)

    def step(self, action):
        for _ in range(self._naps):
            time.sleep(0.01)
        return super().step(action)


class Hangs(Countdown):
    """Hangs in its second step, or in the reset after it.

    Args:
        where: init, step, reset, or nowhere; "step, keeping the interpreter" lets no other thread run.
        once: a file; once it exists, nothing hangs.
        helper: starts a process.
        closed: a file that is written when the environment is closed.
    """

    def __init__(self, where, once=None, helper=False, closed=None):
        super().__init__(ends=2 if where == "reset" else 10**6)
        self._where, self._once, self._closed = where, once and Path(once), closed and Path(closed)
        self._steps = 2 if where == "init" else 0
        self._hang("init")
        self._helper = subprocess.Popen(["sleep", "60"], start_new_session=True) if helper else None

    def _hang(self, where):
        if self._where.startswith(where) and self._steps == 2 and not (self._once and self._once.exists()):
            if self._once:
                self._once.touch()
            while "keeping" in self._where:
                sum(range(10**9))
            time.sleep(600)

    def reset(self, *, seed=None, options=None):
        self._hang("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._steps += 1
        self._hang("step")
        return super().step(action)

    def close(self):
        if self._closed:
            self._closed.touch()
        if self._helper:
            self._helper.kill()
            self._helper.wait()


class Crashes(Countdown):
    """Its simulator ends the process that makes it."""

    def __init__(self):
        faulthandler.disable()  # else its report is in the output of the tests
        os.kill(os.getpid(), signal.SIGSEGV)


class Allowed(gymnasium.Env):
    """Shows nothing; of the choices that are allowed, the last one of each column is worth 1. The others are an error.

    Args:
        tells: the info holds the mask: always, but for the end of an episode; "once": at a reset only; False: never.
        cut: that end is a truncation.
    """

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.MultiDiscrete([4, 3])

    def __init__(self, tells=True, cut=False):
        self._tells, self._cut = tells, cut

    def _now(self, of):
        self._allowed = [self.np_random.permutation(n) < self.np_random.integers(1, n + 1) for n in (4, 3)]
        told = self._tells is True or self._tells == of
        return np.zeros(1, np.float32), {"action_mask": tuple(self._allowed)} if told else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._now("once")

    def step(self, action):
        assert all(allowed[choice] for allowed, choice in zip(self._allowed, action, strict=True)), "not allowed"
        reward = sum(choice == np.flatnonzero(a)[-1] for a, choice in zip(self._allowed, action, strict=True)) / 2
        self._t += 1
        if self._t == 4:
            return np.zeros(1, np.float32), reward, not self._cut, self._cut, {}
        obs, info = self._now("step")
        return obs, reward, False, False, info


class Identity(gymnasium.Env):
    """One step an episode: the reward counts the columns of the action that equal the observed target."""

    def __init__(self, space):
        self.action_space = space
        if isinstance(space, spaces.Box):
            self.observation_space = spaces.Box(-1, 1, space.shape, np.float32)
        else:
            self.observation_space = space

    def _draw(self):
        if isinstance(self.action_space, spaces.Box):
            self._target = self.np_random.uniform(-1, 1, self.action_space.shape).astype(np.float32)
        else:
            self.action_space.seed(int(self.np_random.integers(2**31)))
            self._target = self.action_space.sample()
        return self._target

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        if isinstance(self.action_space, spaces.Box):
            reward = 1.0 - float(np.abs(action - self._target).mean())
        else:
            reward = float(np.mean(np.asarray(action) == np.asarray(self._target)))
        return self._draw(), reward, True, False, {}


class Recite(gymnasium.Env):
    """Shows three bits once; the next three actions should be these bits, and nothing is seen meanwhile."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._bits, self._t = self.np_random.integers(2, size=3), 0
        return (2 * self._bits - 1).astype(np.float32), {}

    def step(self, action):
        reward = float(action == self._bits[self._t])
        self._t += 1
        return np.zeros(3, dtype=np.float32), reward, self._t == 3, False, {}


class Spot(gymnasium.Env):
    """One step an episode: a picture of 5 x 5 with one lit cell, whose column is the right action.

    With `shift` a number stands beside the picture, and the right action is so many columns further on.
    """

    action_space = spaces.Discrete(5)

    def __init__(self, channels_first=False, shift=False):
        self._first, self._shift = channels_first, shift
        picture = spaces.Box(0, 255, (3, 5, 5) if channels_first else (5, 5, 3), np.uint8)
        self.observation_space = spaces.Dict({"picture": picture, "shift": spaces.Discrete(3)}) if shift else picture

    def _draw(self):
        row, self._column, channel = self.np_random.integers([5, 5, 3])
        picture = self.np_random.integers(0, 60, (5, 5, 3), dtype=np.uint8)
        picture[row, self._column, channel] = 255
        picture = picture.transpose(2, 0, 1) if self._first else picture
        self._by = int(self.np_random.integers(3)) if self._shift else 0
        return {"picture": picture, "shift": self._by} if self._shift else picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        reward = float(action == (self._column + self._by) % 5)
        return self._draw(), reward, True, False, {}


class TMaze(gymnasium.Env):
    """A cue at the first step, and a fork at the last, where it says which way is right; nothing in between.

    At the fork both ways look the same, so without a memory nobody is right more than half of the time.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=5):
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._cue, self._t = int(self.np_random.integers(2)), 0
        return np.array([2 * self._cue - 1, 0], dtype=np.float32), {}

    def step(self, action):
        self._t += 1
        at_fork, done = self._t == self._length - 1, self._t == self._length
        return np.array([0, at_fork], dtype=np.float32), float(done and action == self._cue), done, False, {}


SPACES = {
    "discrete": spaces.Discrete(4, start=2),
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
}


def register():
    """Put them into Gymnasium's registry; a second call changes nothing."""
    if "tether/Countdown-v0" in gymnasium.registry:
        return
    gymnasium.register("tether/Countdown-v0", entry_point=Countdown, max_episode_steps=5)
    gymnasium.register("tether/Hangs-v0", entry_point=Hangs)
    gymnasium.register("tether/Crashes-v0", entry_point=Crashes)
    gymnasium.register("tether/Sleeps-v0", entry_point=Sleeps)
    gymnasium.register("tether/Recite-v0", entry_point=Recite)
    gymnasium.register("tether/Allowed-v0", entry_point=Allowed)
    gymnasium.register("tether/Spot-v0", entry_point=Spot)
    gymnasium.register("tether/TMaze-v0", entry_point=TMaze)
    for name, space in SPACES.items():
        gymnasium.register(f"tether/Identity-{name}-v0", entry_point=Identity, kwargs={"space": space})

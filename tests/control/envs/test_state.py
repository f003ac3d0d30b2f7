"""State outside the attributes of an environment: in closures, default arguments and attributes of functions."""

import dataclasses
import functools
import importlib.util
import itertools
import types
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from tests.control.envs import stateful, toys
from tether.control.envs.action_repeat import Repeated
from tether.control.envs.state import MOVED, EnvSnapshotter

HISTORY: list[float] = []


def drawing() -> Callable[[], float]:
    """A counter and a generator that live in cells alone."""
    count, random = 0, np.random.default_rng(1)

    def draw() -> float:
        nonlocal count
        count += 1
        return count + random.normal()

    return draw


def remembering(function: Callable[..., float]) -> Callable[..., float]:
    """A decorator with a memory, as of a running mean."""
    seen: list[float] = []

    @functools.wraps(function)
    def call(*args: object) -> float:
        seen.append(function(*args))
        return sum(seen)

    return call


def counted(step: float) -> float:
    counted.calls += 1
    return step + counted.calls


counted.calls = 0


class Env(gymnasium.Env):
    """Returns `number` as its reward."""

    def step(self, action: int) -> tuple[None, float, bool, bool, dict]:
        return None, float(self.number()), False, False, {}

    def number(self) -> float:
        raise NotImplementedError


class Closure(Env):
    def __init__(self) -> None:
        self._draw = drawing()

    def number(self) -> float:
        return self._draw()


class ClosureInAContainer(Env):
    def __init__(self) -> None:
        self._draws = {"reward": [functools.partial(drawing())]}

    def number(self) -> float:
        return self._draws["reward"][0]()


class ClosureOfAClosure(Env):
    def __init__(self) -> None:
        draw = drawing()
        self._draw = lambda: 2 * draw()

    def number(self) -> float:
        return self._draw()


class SharesWithItsClosure(Env):
    def __init__(self) -> None:
        self._seen = seen = [1.0]
        self._add = lambda: seen.append(seen[-1] * 2)

    def number(self) -> float:
        self._add()
        return sum(self._seen)


class SwapsClosures(Env):
    def __init__(self) -> None:
        self._now, self._next = drawing(), drawing()

    def number(self) -> float:
        self._now, self._next = self._next, self._now
        return self._now() + 100 * self._next()


class Default(Env):
    def number(
        self,
        seen: list[float] = [0.0],  # noqa: B006
        *,
        random: np.random.Generator = np.random.default_rng(2),
    ) -> float:
        seen.append(random.normal())
        return sum(seen)


class Decorated(Env):
    def __init__(self) -> None:
        self._steps = 0

    @remembering
    def number(self) -> float:
        self._steps += 1
        return self._steps


class StaticDefault(Env):
    @staticmethod
    def drawn(random: np.random.Generator = np.random.default_rng(3)) -> float:
        return random.normal()

    @property
    def twice(self, seen: list[float] = []) -> float:  # noqa: B006
        seen.append(1.0)
        return 2.0 * len(seen)

    def number(self) -> float:
        return self.drawn() + self.twice


class CountsInItsModule(Env):
    def number(self) -> float:
        return counted(1.0)


def local() -> Env:
    """An environment whose class reads variables of the function that makes it."""
    random = np.random.default_rng(4)

    class Local(Env):
        def number(self) -> float:
            return random.normal()

    return Local()


class Counter(EzPickle):
    """A simulator that is no environment, and pickles the arguments of its constructor."""

    def __init__(self, step: int = 1) -> None:
        EzPickle.__init__(self, step)
        self.count, self._step = 0, step

    def __call__(self) -> float:
        self.count += self._step
        return self.count


class Simulator(EzPickle, gymnasium.Env):
    """As MuJoCo's and Box2D's environments are: pickle keeps the arguments of its constructor."""

    def __init__(self, step: int = 1) -> None:
        EzPickle.__init__(self, step)
        self.count = Counter(step)

    def step(self, action: int) -> tuple[None, float, bool, bool, dict]:
        return None, self.count(), False, False, {}


class Holds(Env):
    def __init__(self) -> None:
        self.sim = Simulator()

    def number(self) -> float:
        return self.sim.step(0)[1]


class HoldsWrapped(Holds):
    def __init__(self) -> None:
        self.sim = gymnasium.Wrapper(gymnasium.Wrapper(Simulator(2)))


class HoldsDeeply(Env):
    """Two robots in a container of an object, one of which holds another environment."""

    def __init__(self) -> None:
        self.robots = types.SimpleNamespace(arms=[{"left": Simulator(3)}, Holds()])

    def number(self) -> float:
        left, right = self.robots.arms
        return left["left"].step(0)[1] + 100 * right.step(0)[1]


class HoldsInAClosure(Env):
    def __init__(self) -> None:
        sim = Simulator()
        self._step = lambda: sim.step(0)[1]

    def number(self) -> float:
        return self._step()


class HoldsOneOfTheClass(Holds):
    sim = Simulator()

    def __init__(self) -> None: ...


class HoldsWhatIsNoEnvironment(Env):
    def __init__(self) -> None:
        self.number = Counter()


HOLDERS = (Holds, HoldsWrapped, HoldsDeeply, HoldsInAClosure, HoldsOneOfTheClass, HoldsWhatIsNoEnvironment)

MAKERS = (
    Closure, ClosureInAContainer, ClosureOfAClosure, SharesWithItsClosure, SwapsClosures, Default, Decorated,
    StaticDefault, CountsInItsModule, local, *HOLDERS,
)  # fmt: skip


def rewards(env: gymnasium.Env, steps: int) -> list[float]:
    return [env.step(0)[1] for _ in range(steps)]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_state_of_functions_is_saved(make: Callable[[], Env]) -> None:
    """What functions of a class and a module keep, is kept for this process: so the same environment goes back, too."""
    env = gymnasium.Wrapper(make())
    keeper = EnvSnapshotter([env])
    rewards(env, 3)
    data, left_out = keeper.get()
    assert left_out == ()
    expected = rewards(env, 3)
    keeper.set(data)
    assert rewards(env, 3) == expected
    if make is not local:  # another class each time
        other = gymnasium.Wrapper(make())
        EnvSnapshotter([other]).set(data)
        assert rewards(other, 3) == expected
    assert len(set(expected)) > 1, "it would show"


class GeneratorInACell(Env):
    def __init__(self) -> None:
        steps = (n for n in itertools.count())
        self._next = lambda: next(steps)

    def number(self) -> float:
        return self._next()


class GeneratorByDefault(Env):
    def number(self, steps=(n for n in itertools.count())) -> float:
        return next(steps)


class GeneratorOfTheClass(Env):
    steps = (n for n in itertools.count())

    def number(self) -> float:
        return next(self.steps)


class NewClosures(Env):
    """Makes a function with variables of its own in each episode."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[None, dict]:
        self._draw = drawing()
        return None, {}

    def number(self) -> float:
        return self._draw()


class MakesItsSimulatorAnew(Holds):
    """Has another simulator in each episode."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[None, dict]:
        self.sim = Simulator()
        return None, {}


class GivesItsState(GeneratorInACell):
    """Says what is to be saved, so that nothing else of it has to be."""

    def get_state(self) -> int:
        return 7

    def set_state(self, state: int) -> None:
        steps = itertools.count(state)
        self._next = lambda: next(steps)


def test_an_environment_that_gives_its_state_is_not_looked_into() -> None:
    env = GivesItsState()
    keeper = EnvSnapshotter([env])
    data, left_out = keeper.get()
    assert left_out == ()
    keeper.set(data)
    assert rewards(env, 2) == [7.0, 8.0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (GeneratorInACell, "GeneratorInACell.__init__.<locals>.<lambda>.steps (cannot pickle 'generator' object)"),
        (GeneratorByDefault, "GeneratorByDefault.number.steps (cannot pickle 'generator' object)"),
        (GeneratorOfTheClass, "GeneratorOfTheClass.steps (cannot pickle 'generator' object)"),
        (MakesItsSimulatorAnew, "MakesItsSimulatorAnew.sim (Simulator was made after the environment and pickles its"),
        (NewClosures, "NewClosures._draw (drawing.<locals>.draw was made after the environment and has variables"),
    ],
)
def test_what_of_functions_cannot_be_saved_is_named(make: Callable[[], Env], named: str) -> None:
    env = make()
    keeper = EnvSnapshotter([env])
    env.reset()
    assert named in "; ".join(keeper.get()[1])


def test_functions_that_hold_constants_or_the_environment_itself_are_no_state() -> None:
    class Plain(Env):
        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[None, dict]:
            self._scaled = lambda: self._scale * self._value  # reads the environment, which is saved
            return None, {}

        def __init__(self) -> None:
            self._scale, self._value = 2.0, 0.0
            self.reset()

        def number(self, scale: float = 0.5) -> float:
            self._value += scale
            return self._scaled()

    env = Plain()
    keeper = EnvSnapshotter([env])
    env.reset()
    assert keeper.get()[1] == ()


def test_environments_of_others_have_nothing_new_to_name() -> None:
    for name in ("CartPole-v1", "Pendulum-v1", "MountainCar-v0"):
        env = gymnasium.make(name)
        keeper = EnvSnapshotter([env])
        env.reset(seed=1)
        env.step(env.action_space.sample())
        assert keeper.get()[1] == ()


def pettingzoo_tictactoe() -> gymnasium.Env:
    tictactoe = pytest.importorskip("pettingzoo.classic.tictactoe_v3")

    class Solo(Env):
        """Plays both sides in the first free field."""

        def __init__(self) -> None:
            self.sim = tictactoe.env()
            self.sim.reset()

        def number(self) -> float:
            _, _, terminated, _, _ = self.sim.last()
            if terminated:
                self.sim.reset()
            obs = self.sim.observe(self.sim.agent_selection)
            self.sim.step(int(np.flatnonzero(obs["action_mask"])[0]))
            return float(obs["observation"].sum())

    return Solo()


@pytest.mark.parametrize(
    ("module", "id", "named"),
    [("mujoco", "Hopper-v5", ""), ("Box2D", "LunarLander-v3", "LunarLander."), ("pettingzoo", "", "")],
)
def test_simulators_that_a_class_holds(module: str, id: str, named: str) -> None:
    """Exact where their parts can be pickled, else named."""
    pytest.importorskip(module)

    def take(env: gymnasium.Env, steps: int) -> list[float]:
        return [env.step(env.action_space.low if env.action_space.shape else 0)[1] for _ in range(steps)]

    env, other = (stateful.Holds(id) if id else pettingzoo_tictactoe() for _ in range(2))
    keepers = EnvSnapshotter([env]), EnvSnapshotter([other])
    if id:
        env.reset(seed=1)
    play = take if id else rewards
    play(env, 3)
    data, left_out = keepers[0].get()
    if named:
        assert named in "".join(left_out)
        return
    assert left_out == ()
    keepers[1].set(data)
    assert play(other, 3) == play(env, 3)


class Counting(toys.Countdown):
    def step(self, action: int) -> tuple[object, float, bool, bool, dict]:
        return *super().step(action)[:4], {"success": 0.0}


@pytest.mark.parametrize(("old", "is_read"), [("tether.envs", True), ("tether.elsewhere", False)])
def test_a_state_under_the_name_that_a_module_had_is_read(old: str, is_read: bool) -> None:
    """Modules of tether moved; a checkpoint of the release before names them as they were."""
    env, again = (Repeated(Counting(), 2) for _ in range(2))
    keeper = EnvSnapshotter([env])
    env.reset(seed=1)
    env.step(0)
    renamed = [dataclasses.replace(one, name=one.name.replace("tether.control.envs", old)) for one in keeper._owners]
    assert renamed != keeper._owners
    keeper._owners = renamed
    data, left_out = keeper.get()
    assert not left_out
    if is_read:
        EnvSnapshotter([again]).set(data)
        assert again.step(0)[1] == env.step(0)[1] == 3 + 4
    else:
        with pytest.raises(ValueError, match="saved of"):
            EnvSnapshotter([again]).set(data)


def test_modules_that_moved_are_where_the_table_says() -> None:
    assert all(importlib.util.find_spec(new) for new in MOVED.values())

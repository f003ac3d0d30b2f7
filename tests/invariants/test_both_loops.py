"""The promises of a run as a whole, for text and for control: resume, interrupts, validation, warm-up.

What the twins share is `tether.loop.loop`; what they do not is held to the same promises here.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

from tests.control.envs import stateful
from tests.runs.loops import Control, Loop, Text, assert_same_run, forget, results, train_apart, train_killed
from tests.runs.tiny_run import LIGHT, write_inputs
from tether.loop import checkpoint as checkpoint_module
from tether.loop import loop as loop_module
from tether.loop.parts import CriticWarmup

TOTAL = 4
UNTIL = "trainer.critic_warmup_until_explained_variance"
REACHED_AT_ONCE = f"{UNTIL}=-1e9"
SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1")
slow = pytest.mark.slow


@pytest.fixture(scope="module", params=["text", "control"])
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    if request.param == "control":
        return Control()
    return Text(write_inputs(tmp_path_factory.mktemp("inputs")), *LIGHT)


def short(loop: Loop, folder: Path, *more: str) -> list[str]:
    """Return the overrides of a run of `TOTAL` steps, tested and saved every second."""
    return loop.overrides(folder, f"trainer.total_training_steps={TOTAL}", *more)


Numbers = list[tuple[float, float, float]]


def draw(numbers: Numbers) -> Callable[[Any], None]:
    """Draws from the global generators, as a user's code may after each step."""

    def each_step(run: Any) -> None:
        numbers.append((random.random(), float(np.random.random()), float(torch.rand(()))))

    return each_step


def warnings_of(said: list[str]) -> Callable[[Any], None]:
    """Collects what a run warns of."""

    def before(run: Any) -> None:
        run.trainer.loggers.warn = said.append

    return before


@pytest.fixture(scope="module")
def whole(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers, list[str]]:
    """The folder of a run that is never stopped, what was drawn after each of its steps, and what it warned of."""
    folder, numbers, said = tmp_path_factory.mktemp("whole"), Numbers(), list[str]()
    loop.train(short(loop, folder, REACHED_AT_ONCE), each_step=draw(numbers), before=warnings_of(said))
    assert loop.tests(folder) == [2, 4]
    assert len(set(numbers)) == TOTAL
    return folder, numbers, said


Whole = tuple[Path, Numbers, list[str]]


def test_signals_change_nothing(loop: Loop, whole: Whole, tmp_path: Path) -> None:
    """After step 2 a checkpoint and a validation are due, after step 1 none is."""
    folder, expected, _ = whole
    numbers, resumed_from = Numbers(), []
    for stop in (1, 2, None):
        run = loop.train(short(loop, tmp_path, REACHED_AT_ONCE), until=stop, each_step=draw(numbers))
        resumed_from.append(run.resumed_from)
        assert max(results(tmp_path)) == stop or stop is None
        if stop == 2:
            assert loop.tests(tmp_path) == [], "it is made up for by the next process"
        forget(seed=len(numbers))
    assert resumed_from == [None, *(tmp_path / f"global_step_{stop}" for stop in (1, 2))]
    assert_same_run(folder, tmp_path, TOTAL)
    assert numbers == expected
    assert loop.tests(tmp_path) == [2, 4]


def test_a_lost_validation_and_lost_generators_would_show(
    loop: Loop, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    state = loop_module.Trainer.state
    monkeypatch.setattr(loop_module.Trainer, "state", lambda self: state(self) | {"validation_due": False})
    monkeypatch.setattr(checkpoint_module, "set_rng_state", lambda state: None)
    numbers, overrides = Numbers(), short(loop, tmp_path, REACHED_AT_ONCE)
    loop.train(overrides, until=2, each_step=draw(numbers))
    forget(seed=2)
    loop.train(overrides, each_step=draw(numbers))
    assert loop.tests(tmp_path) == [4]
    assert numbers[:2] == whole[1][:2]
    assert numbers[2:] != whole[1][2:]


def test_sparse_logs_change_nothing(tmp_path: Path) -> None:
    """A run may be stopped after a step that it does not log."""
    control, sparse = Control(), "trainer.log_freq=2"
    control.train(short(control, tmp_path / "whole", sparse))
    for stop in (1, 3, None):
        control.train(short(control, tmp_path / "parts", sparse), until=stop)
        forget(seed=0)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


def test_a_warm_up_that_never_ends_is_said_and_the_first_validation_comes_before_training(
    loop: Loop, tmp_path: Path
) -> None:
    """Where the validation is turned off there is none: `whole` has tested that."""
    said: list[str] = []
    settings = [*SHORT, f"{UNTIL}=0.999", "trainer.val_before_train=True"]
    loop.train(loop.overrides(tmp_path, *settings), before=warnings_of(said))
    (message,) = [message for message in said if "did not learn" in message]
    assert f"{UNTIL}=0.999" in message
    assert loop.tests(tmp_path) == [0]


def test_a_warm_up_that_ends_is_not_said(whole: Whole) -> None:
    assert not [message for message in whole[2] if "did not learn" in message]


def test_nothing_known_of_the_critic_ends_no_warm_up(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown is not 0, which would be above this threshold."""
    asked: list[float] = []
    observe = CriticWarmup.observe

    def record(self: CriticWarmup, step: int, explained: float) -> bool:
        asked.append(explained)
        return observe(self, step, explained)

    monkeypatch.setattr(CriticWarmup, "observe", record)
    if isinstance(loop, Text):
        monkeypatch.setattr("tether.text.learning.advantages.value_metrics", lambda batch: {})
    else:
        nothing = ["algorithm.filter_rewards=True", "algorithm.rewards_lower_bound=1e9"]
        episodes = ["env.train.auto_reset=False", "env.train.group_size=2", "algorithm.rewards_upper_bound=2e9"]
        loop = WithMore(nothing + episodes)
    said: list[str] = []
    loop.train(loop.overrides(tmp_path, *SHORT, f"{UNTIL}=-0.5"), before=warnings_of(said))
    assert asked == [-np.inf] * 2
    assert [message for message in said if "did not learn" in message]


class WithMore(Control):
    """Control with more options."""

    def __init__(self, more: list[str]) -> None:
        self._more = more

    def overrides(self, folder: Path, *more: str) -> list[str]:
        return super().overrides(folder, *self._more, *more)


STATEFUL = "tests.control.envs.stateful"
WRAPPERS = {
    "np.random": f"{STATEFUL}:DrawsNumpy",
    "random": f"{STATEFUL}:DrawsPython",
    "torch": f"{STATEFUL}:DrawsTorch",
    "a generator of the module": f"{STATEFUL}:DrawsFromASharedGenerator",
    "generators of its own": f"{STATEFUL}:OwnGenerators",
    "counts": f"{STATEFUL}:Counts",
    "counts in functions": f"{STATEFUL}:CountsInFunctions",
    "random the first time": f"{STATEFUL}:RandomTheFirstTime",
    "gives its state": f"{STATEFUL}:GivesItsState",
    "running statistics": f"{STATEFUL}:RunningStatistics",
    "forgets at reset": f"{STATEFUL}:ForgetsAtReset",
}
STEPS = {
    "here": ["env.train.vectorization=sync"],
    "processes": ["env.train.vectorization=subprocess", "env.train.num_workers=2"],
    "chunks": ["env.train.vectorization=sync", "policy.num_action_chunks=2"],
}


def wrapped(name: str) -> list[str]:
    return [f"env.train.wrappers=[{WRAPPERS[name]}]", f"env.eval.wrappers=[{WRAPPERS[name]}]"]


KILLED = [
    ("np.random", "processes"), ("random", "here"), ("torch", "chunks"), ("a generator of the module", "here"),
    ("generators of its own", "processes"), ("counts", "processes"), ("random the first time", "here"),
    ("gives its state", "chunks"), ("running statistics", "here"), ("forgets at reset", "processes"),
    ("counts in functions", "processes"),
]  # fmt: skip
STOPPED = [
    ("np.random", "here"), ("random", "processes"), ("torch", "processes"), ("a generator of the module", "processes"),
    ("generators of its own", "here"), ("counts", "chunks"), ("counts", "here"), ("random the first time", "processes"),
    ("gives its state", "processes"), ("running statistics", "processes"), ("counts in functions", "here"),
]  # fmt: skip
QUICK = [
    ("np.random", "processes"), ("forgets at reset", "processes"), ("counts", "here"), ("gives its state", "processes"),
]  # fmt: skip
"""A global generator, and a state that is pickled, given or lost; what else differs is for the slow tests."""


def slow_but_for_quick(cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in QUICK else slow) for case in cases]


@pytest.mark.parametrize(("name", "how"), slow_but_for_quick(KILLED))
def test_environments_with_state_are_killed_and_resume(name: str, how: str, tmp_path: Path) -> None:
    """kill -9 while training, saving and starting; each process finds the module's state as it is imported."""
    control = Control()
    more = [*wrapped(name), *STEPS[how], "trainer.total_training_steps=8"]
    train_apart(control, control.overrides(tmp_path / "whole", *more))
    train_killed(control, control.overrides(tmp_path / "killed", *more), tmp_path / "killed", kills=3, seed=len(name))
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 8)


@pytest.mark.parametrize(("name", "how"), slow_but_for_quick(STOPPED))
def test_environments_with_state_are_stopped_and_resume(name: str, how: str, tmp_path: Path) -> None:
    """By a signal, after a step for which no checkpoint was due."""
    control, more = Control(), [*wrapped(name), *STEPS[how]]
    train_apart(control, short(control, tmp_path / "whole", *more))
    train_apart(control, short(control, tmp_path / "parts", *more), until=3)
    train_apart(control, short(control, tmp_path / "parts", *more))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


OWN_CODE = [
    pytest.param(["env.train.total_num_envs=8"], id="vector code"),
    pytest.param(["env.train.id=Pendulum-v1"], id="a Box", marks=slow),
    pytest.param(["env.train.id=InvertedDoublePendulum-v5"], id="MuJoCo", marks=slow),
    pytest.param([f"env.train.id={stateful.__file__}:Holds"], id="MuJoCo, held by a class"),
]


@pytest.mark.parametrize("more", OWN_CODE)
def test_simulators_are_stopped_and_go_on(more: list[str], tmp_path: Path) -> None:
    if "Inverted" in str(more) or "Holds" in str(more):
        pytest.importorskip("mujoco")
    control, said = Control(), list[str]()
    control.train(short(control, tmp_path / "whole", *more), before=warnings_of(said))
    control.train(short(control, tmp_path / "parts", *more), until=3)
    forget(3)
    control.train(short(control, tmp_path / "parts", *more))
    assert not said
    assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


def test_a_state_that_cannot_be_saved_is_said_at_the_start(tmp_path: Path) -> None:
    control, said = Control(), list[str]()
    more = [f"env.train.wrappers=[{STATEFUL}:CannotBeSaved]"]
    control.train(control.overrides(tmp_path, *more), until=1, before=warnings_of(said))
    (message,) = said
    assert "CannotBeSaved._steps (cannot pickle 'generator' object)" in message
    assert "get_state() and set_state(state)" in message


def test_a_lost_state_of_an_environment_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether.control.envs.state import EnvSnapshotter

    control, more = Control(), [f"env.train.wrappers=[{WRAPPERS['generators of its own']}]", *STEPS["here"]]
    control.train(short(control, tmp_path / "whole", *more))
    control.train(short(control, tmp_path / "parts", *more), until=2)
    take_over = EnvSnapshotter.set

    def take_over_most(self: EnvSnapshotter, data: bytes) -> None:
        take_over(self, data)
        for wrapper in (owner.obj for owner in self._owners if owner.name == "OwnGenerators" and owner.is_layer):
            wrapper._python.seed(3)

    monkeypatch.setattr(EnvSnapshotter, "set", take_over_most)
    control.train(short(control, tmp_path / "parts", *more))
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


def test_other_environments_than_were_saved_start_afresh_with_a_warning(tmp_path: Path) -> None:
    control, said = Control(), list[str]()
    control.train(short(control, tmp_path), until=2)
    more = ["env.train.total_num_envs=8", "env.train.vectorization=sync"]
    run = control.build(short(control, tmp_path, *more))
    run.trainer.loggers.warn = said.append
    run.trainer.rollouts.load_checkpoint(tmp_path / "global_step_2")
    run.trainer.fit()
    run.close()
    assert ["env.train: not the environments that" in message for message in said] == [True, False]
    assert results(tmp_path).keys() == set(range(1, TOTAL + 1))


def test_a_limit_that_was_changed_acts_on_what_resumes(tmp_path: Path) -> None:
    """The arguments of an environment are those of the configuration, not of the checkpoint."""
    control = Control()
    settings = [*STEPS["here"], "trainer.test_freq=-1"]
    control.train(control.overrides(tmp_path, *settings), until=2)
    control.train(control.overrides(tmp_path, *settings, "env.train.max_episode_steps=7"))
    lengths = [metrics["env/episode_len"] for step, metrics in results(tmp_path).items() if step > 3]
    assert max(lengths) <= 7

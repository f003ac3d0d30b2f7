"""The promises of a run as a whole, for text and for control: resume, interrupts, validation, warm-up.

What the twins share is `tether.trainer.loop`; what they do not is held to the same promises here.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

from tests.trainer.loops import Control, Loop, Text, assert_same_run, forget, results, train_apart, train_killed
from tests.trainer.tiny_run import write_inputs
from tether.trainer import checkpoint as checkpoint_module
from tether.trainer import loop as loop_module
from tether.trainer.parts.critic_warmup import CriticWarmup

TOTAL = 6
UNTIL = "trainer.critic_warmup_until_explained_variance"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(params=["text", "control"])
def loop(request: pytest.FixtureRequest, inputs: Path) -> Loop:
    return Text(inputs) if request.param == "text" else Control()


def warnings_of(said: list[str]) -> Callable[[Any], None]:
    """Collects what a run warns of."""

    def before(run: Any) -> None:
        run.trainer.loggers.warn = said.append

    return before


@pytest.mark.parametrize("stop", [pytest.param(2, marks=slow), 3, pytest.param(4, marks=slow)])
def test_a_signal_changes_nothing(loop: Loop, stop: int, tmp_path: Path) -> None:
    """After step 3 no checkpoint is due; after steps 2 and 4 one is, and a validation."""
    loop.train(loop.overrides(tmp_path / "whole"))
    loop.train(loop.overrides(tmp_path / "parts"), until=stop)
    assert max(results(tmp_path / "parts")) == stop
    forget(stop)
    resumed = loop.train(loop.overrides(tmp_path / "parts"))
    assert resumed.resumed_from == tmp_path / "parts" / f"global_step_{stop}"
    assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


def test_several_signals_and_sparse_logs_change_nothing(loop: Loop, tmp_path: Path) -> None:
    more = [] if isinstance(loop, Text) else ["trainer.log_freq=4"]
    loop.train(loop.overrides(tmp_path / "whole", *more))
    for stop in (1, 2, 5):
        loop.train(loop.overrides(tmp_path / "parts", *more), until=stop)
        forget(stop)
    loop.train(loop.overrides(tmp_path / "parts", *more))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


def test_a_validation_that_was_due_is_made_up_for(loop: Loop, tmp_path: Path) -> None:
    loop.train(loop.overrides(tmp_path), until=2)
    assert loop.tests(tmp_path) == []
    loop.train(loop.overrides(tmp_path))
    assert loop.tests(tmp_path) == [2, 4, 6]


def test_a_forgotten_validation_would_show(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = loop_module.Trainer.state
    monkeypatch.setattr(loop_module.Trainer, "state", lambda self: state(self) | {"validation_due": False})
    loop.train(loop.overrides(tmp_path), until=2)
    loop.train(loop.overrides(tmp_path))
    assert loop.tests(tmp_path) == [4, 6]


def draws(loop: Loop, folder: Path) -> list[tuple[float, float, float]]:
    """Draws of a user's code from the global generators after each step of a run that is stopped once."""
    found: list[tuple[float, float, float]] = []

    def draw(run: Any) -> None:
        found.append((random.random(), float(np.random.random()), float(torch.rand(()))))

    whole = loop.train(loop.overrides(folder / "whole"), each_step=draw)
    straight, found[:] = [*found], []
    assert whole.trainer.step_number == TOTAL
    loop.train(loop.overrides(folder / "parts"), until=3, each_step=draw)
    forget(3)
    loop.train(loop.overrides(folder / "parts"), each_step=draw)
    assert len(straight) == len(found) == TOTAL
    return [*straight, *found]


def test_global_generators_are_restored(loop: Loop, tmp_path: Path) -> None:
    drawn = draws(loop, tmp_path)
    assert drawn[:TOTAL] == drawn[TOTAL:]
    assert len(set(drawn)) == TOTAL


def test_generators_that_are_not_restored_would_show(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "set_rng_state", lambda state: None)
    drawn = draws(loop, tmp_path)
    assert drawn[:3] == drawn[TOTAL : TOTAL + 3]
    assert drawn[3:TOTAL] != drawn[TOTAL + 3 :]


@pytest.mark.parametrize("before", [True, False])
def test_the_first_validation_can_be_turned_off(loop: Loop, before: bool, tmp_path: Path) -> None:
    loop.train(loop.overrides(tmp_path, f"trainer.val_before_train={before}"), until=1)
    assert loop.tests(tmp_path) == [0] * before


def test_a_warm_up_that_never_ends_is_said(loop: Loop, tmp_path: Path) -> None:
    said: list[str] = []
    loop.train(loop.overrides(tmp_path, f"{UNTIL}=0.999"), before=warnings_of(said))
    (message,) = [message for message in said if "did not learn" in message]
    assert f"{UNTIL}=0.999" in message


def test_a_warm_up_that_ends_is_not_said(loop: Loop, tmp_path: Path) -> None:
    said: list[str] = []
    loop.train(loop.overrides(tmp_path, f"{UNTIL}=-1e9"), before=warnings_of(said))
    assert not [message for message in said if "did not learn" in message]


def test_nothing_known_of_the_critic_ends_no_warm_up(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown is not 0, which would be above this threshold."""
    asked: list[float] = []
    is_over = CriticWarmup.is_over

    def record(self: CriticWarmup, step: int, explained: float) -> bool:
        asked.append(explained)
        return is_over(self, step, explained)

    monkeypatch.setattr(CriticWarmup, "is_over", record)
    if isinstance(loop, Text):
        monkeypatch.setattr("tether.assembly.advantages.value_metrics", lambda batch: {})
    else:
        nothing = ["algorithm.filter_rewards=True", "algorithm.rewards_lower_bound=1e9"]
        episodes = ["env.train.auto_reset=False", "env.train.group_size=2", "algorithm.rewards_upper_bound=2e9"]
        loop = WithMore(nothing + episodes)
    said: list[str] = []
    loop.train(loop.overrides(tmp_path, f"{UNTIL}=-0.5"), before=warnings_of(said))
    assert asked == [-np.inf] * TOTAL
    assert [message for message in said if "did not learn" in message]


class WithMore(Control):
    """Control with more options."""

    def __init__(self, more: list[str]) -> None:
        self._more = more

    def overrides(self, folder: Path, *more: str) -> list[str]:
        return super().overrides(folder, *self._more, *more)


STATEFUL = "tests.envs.stateful"
WRAPPERS = {
    "np.random": f"{STATEFUL}:DrawsNumpy",
    "random": f"{STATEFUL}:DrawsPython",
    "torch": f"{STATEFUL}:DrawsTorch",
    "a generator of the module": f"{STATEFUL}:DrawsFromASharedGenerator",
    "generators of its own": f"{STATEFUL}:OwnGenerators",
    "counts": f"{STATEFUL}:Counts",
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
]  # fmt: skip
STOPPED = [
    ("np.random", "here"), ("random", "processes"), ("torch", "processes"), ("a generator of the module", "processes"),
    ("generators of its own", "here"), ("counts", "chunks"), ("counts", "here"), ("random the first time", "processes"),
    ("gives its state", "processes"), ("running statistics", "processes"),
]  # fmt: skip
QUICK = ("np.random", "gives its state", "forgets at reset", "counts")
"""A global generator, a state that is given, pickled or lost: the other wrappers are tested with the slow tests."""


def slow_but_for_quick(cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case[0] in QUICK else slow) for case in cases]


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
    train_apart(control, control.overrides(tmp_path / "whole", *more))
    train_apart(control, control.overrides(tmp_path / "parts", *more), until=3)
    train_apart(control, control.overrides(tmp_path / "parts", *more))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


OWN_CODE = [
    pytest.param(["env.train.total_num_envs=8"], id="vector code"),
    pytest.param(["env.train.id=Pendulum-v1"], id="a Box"),
    pytest.param(["env.train.id=InvertedDoublePendulum-v5"], id="MuJoCo"),
]


@pytest.mark.parametrize("more", OWN_CODE)
def test_simulators_are_stopped_and_go_on(more: list[str], tmp_path: Path) -> None:
    if "MuJoCo" in str(more) or "Inverted" in str(more):
        pytest.importorskip("mujoco")
    control, said = Control(), list[str]()
    control.train(control.overrides(tmp_path / "whole", *more), before=warnings_of(said))
    control.train(control.overrides(tmp_path / "parts", *more), until=3)
    forget(3)
    control.train(control.overrides(tmp_path / "parts", *more))
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
    from tether.envs.state import EnvKeeper

    control, more = Control(), [f"env.train.wrappers=[{WRAPPERS['generators of its own']}]", *STEPS["here"]]
    control.train(control.overrides(tmp_path / "whole", *more))
    control.train(control.overrides(tmp_path / "parts", *more), until=2)
    take_over = EnvKeeper.set

    def take_over_most(self: EnvKeeper, data: bytes) -> None:
        take_over(self, data)
        for wrapper in (place.owner for place in self._places if place.name == "OwnGenerators" and place.is_layer):
            wrapper._python.seed(3)

    monkeypatch.setattr(EnvKeeper, "set", take_over_most)
    control.train(control.overrides(tmp_path / "parts", *more))
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


def test_other_environments_than_were_saved_start_afresh_with_a_warning(tmp_path: Path) -> None:
    control, said = Control(), list[str]()
    control.train(control.overrides(tmp_path), until=2)
    more = ["env.train.total_num_envs=8", "env.train.vectorization=sync"]
    run = control.build(control.overrides(tmp_path, *more))
    run.trainer.loggers.warn = said.append
    run.trainer.rollouts.restore(tmp_path / "global_step_2")
    run.trainer.fit()
    run.close()
    assert ["env.train: not the environments that" in message for message in said] == [True, False]
    assert results(tmp_path).keys() == set(range(1, TOTAL + 1))


def test_a_limit_that_was_changed_acts_on_what_resumes(tmp_path: Path) -> None:
    """The arguments of an environment are those of the configuration, not of the checkpoint."""
    control = Control()
    control.train(control.overrides(tmp_path, *STEPS["here"]), until=2)
    limit = ["env.train.max_episode_steps=7", "trainer.total_training_steps=12"]
    control.train(control.overrides(tmp_path, *STEPS["here"], *limit))
    lengths = [metrics["env/episode_len"] for step, metrics in results(tmp_path).items() if step > 4]
    assert max(lengths) <= 7

"""Worker processes: what becomes of the episodes of one that dies."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest

from tests.control.envs import toys
from tests.processes import runs
from tether.control.collecting.collector import EpisodeTracker
from tether.control.envs.make import EnvOptions, ResetPolicy, make_vector_env
from tether.control.envs.protocol import NO_SEED
from tether.control.envs.subprocesses import WorkerVectorEnv

ROOT = Path(__file__).resolve().parents[3]
NOTHING = np.zeros((3, 1), dtype=np.int64)


@pytest.fixture
def countdown():
    toys.register()
    made = []

    def make(id="tether/Countdown-v0", **more):
        options = EnvOptions(id, 3, vectorization="subprocess", num_workers=2, **more)
        made.append(make_vector_env(options))
        made[-1].reset(0)
        return made[-1]

    yield make
    for env in made:
        env.close()


def worker_of(env, number):
    """The process that steps the environments, below its guard."""
    (worker,) = psutil.Process(env._workers[number].process._guard).children()
    return worker


def kill(env, number):
    worker_of(env, number).kill()


def test_a_worker_that_dies_is_replaced_and_its_episodes_are_lost(countdown):
    env = countdown()
    for _ in range(2):
        env.step(NOTHING)
    kill(env, 1)
    with pytest.warns(RuntimeWarning, match=r"environments 1 to 2 was killed by SIGKILL.* is replaced"):
        step = env.step(NOTHING)
    assert step.valid.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, True, True]
    assert step.reward.tolist() == [3, 0, 0]
    assert step.obs["state"][:, 0].tolist() == [3, 0, 0]
    assert env.seeds.tolist() == [0, 4, 5]
    step = env.step(NOTHING)
    assert step.valid is None
    assert step.reward.tolist() == [4, 1, 1]
    env.step(NOTHING)
    assert env.seeds.tolist() == [NO_SEED, 4, 5]


def test_the_second_death_is_named(countdown):
    env = countdown()
    kill(env, 0)
    with pytest.warns(RuntimeWarning):
        env.step(NOTHING)
    kill(env, 0)
    with pytest.raises(
        RuntimeError, match=r"process of environments 0 to 0 failed twice\. First it was killed by SIGKILL"
    ):
        env.step(NOTHING)


def test_an_environment_that_raises_is_named(countdown):
    env = countdown()
    wrong = NOTHING + 7
    with pytest.warns(RuntimeWarning, match="AssertionError"):
        assert not env.step(wrong).valid.any()
    with pytest.raises(RuntimeError, match=r"failed twice\. First it raised AssertionError"):
        env.step(wrong)


@pytest.mark.parametrize(
    "where", [pytest.param("step", marks=pytest.mark.slow), "reset", "step, keeping the interpreter"]
)
def test_an_environment_that_hangs_is_replaced(countdown, where, tmp_path):
    """Two workers that hang cost one deadline."""
    once = tmp_path / "hung"
    env = countdown("tether/Hangs-v0", timeout=1.0, init_params={"where": where, "once": str(once)})
    begun = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"gave no answer within the deadline of 1 s, so it was killed\. It is rep"):
        steps = [env.step(NOTHING) for _ in range(3)]
    assert time.monotonic() - begun < 10
    assert sum(step.valid is not None and not step.valid.all() for step in steps) == 1
    assert steps[-1].valid is None


def test_an_environment_that_is_frozen_is_replaced(countdown):
    env = countdown(timeout=3.0)
    worker_of(env, 0).send_signal(signal.SIGSTOP)
    with pytest.warns(RuntimeWarning, match=r"environments 0 to 0 gave no answer"):
        assert env.step(NOTHING).valid.tolist() == [False, True, True]
    assert env.step(NOTHING).valid is None


def test_a_guard_that_is_killed_takes_its_environments_along(countdown):
    env = countdown()
    worker = worker_of(env, 0)
    psutil.Process(env._workers[0].process._guard).kill()
    end = time.monotonic() + 5
    while runs(worker):
        assert time.monotonic() < end
    with pytest.warns(RuntimeWarning, match=r"environments 0 to 0 and its guard were killed"):
        assert env.step(NOTHING).valid.tolist() == [False, True, True]


TRAINER = """
import numpy as np
from tests.control.envs import toys
from tether.control.envs.make import EnvOptions, make_vector_env
from tether.runtime import interrupt

toys.register()
interrupt.GRACE_SECONDS = 0.2
options = EnvOptions(
    "tether/Hangs-v0", 4, vectorization="subprocess", num_workers=4, init_params={"where": "step", "helper": True}
)
with interrupt.graceful_interrupt():
    env = make_vector_env(options)
    env.reset(0)
    env.step(np.zeros((4, 1), dtype=np.int64))
    print("steps", flush=True)
    env.step(np.zeros((4, 1), dtype=np.int64))
env.close()
"""


SLOW_INTERRUPT = pytest.param(signal.SIGINT, marks=pytest.mark.slow)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, SLOW_INTERRUPT])
def test_nothing_is_left_of_a_trainer_that_ends_while_environments_hang(number):
    """Four guards, four workers, and what the environments started."""
    pipe = subprocess.PIPE
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        assert trainer.stdout.readline() == "steps\n"
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert len(below) == 12
        trainer.send_signal(number)
        _, err = trainer.communicate(timeout=15)
    finally:
        trainer.kill()
        trainer.wait()
    assert (trainer.returncode == 0) == (number != signal.SIGKILL), err
    assert (f"{number.name}: a process gave no answer" in err) == (number != signal.SIGKILL)
    end = time.monotonic() + 5
    while left := list(filter(runs, below)):
        assert time.monotonic() < end, left
        time.sleep(0.02)


@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_environment_that_hangs_in_this_process_is_an_error(where):
    toys.register()
    env = make_vector_env(EnvOptions("tether/Hangs-v0", 2, timeout=0.5, init_params={"where": where}))
    env.reset(0)
    env.step(NOTHING[:2])
    with pytest.raises(RuntimeError, match=r"Hangs-v0 took more than env\.train\.timeout=0\.5 s .*=subprocess"):
        env.step(NOTHING[:2])
    env.close()


class ClosesBadly(toys.Countdown):
    closed = 0

    def __init__(self, how):
        super().__init__()
        self._how = how

    def close(self):
        type(self).closed += 1
        time.sleep(600 * (self._how == "hangs"))
        raise OSError("no such display")


@pytest.mark.parametrize(
    ("how", "says"), [("raises", "OSError: no such"), ("hangs", r"RuntimeError: .*timeout=0\.5 s .* to close")]
)
def test_an_environment_that_cannot_be_closed_is_a_warning(how, says, monkeypatch):
    monkeypatch.setattr(ClosesBadly, "closed", 0)
    if "tether/ClosesBadly-v0" not in gymnasium.registry:
        gymnasium.register("tether/ClosesBadly-v0", entry_point=ClosesBadly)
    env = make_vector_env(EnvOptions("tether/ClosesBadly-v0", 2, timeout=0.5, init_params={"how": how}))
    with pytest.warns(RuntimeWarning, match=f"ClosesBadly-v0 could not be closed. {says}"):
        env.close()
    assert ClosesBadly.closed == 2


def test_an_environment_that_exits_does_not_end_the_run_as_if_it_were_done(monkeypatch):
    toys.register()
    env = make_vector_env(EnvOptions("tether/Countdown-v0", 2))
    env.reset(0)
    monkeypatch.setattr(toys.Countdown, "step", lambda self, action: sys.exit(0))
    with pytest.raises(RuntimeError, match=r"Countdown-v0 asked Python to exit \(0\)"):
        env.step(NOTHING[:2])
    env.close()


@pytest.mark.parametrize("vectorization", ["sync", "subprocess"])
def test_an_environment_that_hangs_while_it_is_made_is_an_error(vectorization):
    toys.register()
    options = EnvOptions(
        "tether/Hangs-v0", 2, vectorization=vectorization, num_workers=1, timeout=0.5, init_params={"where": "init"}
    )
    with pytest.raises(RuntimeError, match=r"Hangs-v0 took more than env\.train\.timeout=0\.5 s to be made"):
        make_vector_env(options)


@pytest.mark.parametrize("number", [signal.SIGTERM, SLOW_INTERRUPT])
def test_a_signal_ends_an_environment_that_hangs_in_this_process(number):
    code = TRAINER.replace('vectorization="subprocess", num_workers=4, ', "")
    pipe = subprocess.PIPE
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        assert trainer.stdout.readline() == "steps\n"
        trainer.send_signal(number)
        _, err = trainer.communicate(timeout=15)
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 0, err
    assert f"{number.name}: a process gave no answer" in err


def test_time_in_which_the_trainer_stands_still_does_not_count():
    code = """
import numpy as np, time
from tests.control.envs import toys
from tether.control.envs.make import EnvOptions, make_vector_env
toys.register()
for how in ("sync", "subprocess"):
    options = EnvOptions("tether/Sleeps-v0", 1, vectorization=how, timeout=2, init_params={"seconds": 0.5})
    env = make_vector_env(options)
    env.reset(0)
    print("steps", flush=True)
    assert env.step(np.zeros((1, 1), dtype=np.int64)).valid is None
    env.close()
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            assert trainer.stdout.readline() == "steps\n"
            family = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children(recursive=True)]
            for process in family:
                process.suspend()
            time.sleep(3)
            for process in reversed(family):
                process.resume()
        assert trainer.wait(20) == 0
    finally:
        trainer.kill()
        trainer.wait()


def test_closing_lets_environments_close_themselves(countdown, tmp_path):
    env = countdown("tether/Hangs-v0", init_params={"where": "nowhere", "closed": str(tmp_path / "closed")})
    assert not (tmp_path / "closed").exists()
    env.close()
    assert (tmp_path / "closed").exists()


class Garbage:
    """In a cycle, which only the collector frees; ends any process in which that happens but its own."""

    def __init__(self):
        self.itself, self.owner = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            os._exit(3)


def test_processes_leave_the_garbage_of_their_owner_alone(countdown, monkeypatch):
    """A renderer, for example, can be freed in the process only that made it."""
    step = toys.Countdown.step
    monkeypatch.setattr(toys.Countdown, "step", lambda self, action: (gc.collect(), step(self, action))[1])
    gc.collect()
    gc.disable()
    try:
        Garbage()
        env = countdown()
        assert env.step(NOTHING).valid is None
    finally:
        gc.enable()


class Fork:
    """Keeps the collector busy in every copy of this process, before anything else can run there."""

    is_watched = False

    def __call__(self):
        if self.is_watched:
            self.kept = [[] for _ in range(10_000)]


after_fork = Fork()
os.register_at_fork(after_in_child=after_fork)


def test_garbage_is_left_alone_while_a_process_is_copied(countdown, monkeypatch):
    """Libraries have functions run in a copy before it can protect what it was given."""
    monkeypatch.setattr(after_fork, "is_watched", True)
    gc.collect()
    gc.disable()
    try:
        Garbage()
        gc.enable()
        env = countdown()
    finally:
        gc.enable()
    assert env.step(NOTHING).valid is None
    assert gc.isenabled()


def test_a_waiting_environment_comes_back_at_its_next_beginning(countdown):
    env = countdown(reset_policy=ResetPolicy(chunk=2))
    kill(env._env, 1)
    with pytest.warns(RuntimeWarning):
        assert env.step(NOTHING).valid.tolist() == [True, False, False]
    assert env.step(NOTHING).valid.tolist() == [True, False, False]
    assert env.step(NOTHING).reward.tolist() == [3, 1, 1]


def test_lost_episodes_are_not_counted():
    tracker = EpisodeTracker(2)
    rewards = np.ones((2, 2), dtype=np.float32)
    ended = np.array([[False, True], [False, False]])
    valid = np.array([[True, False], [True, True]])
    assert tracker.add(rewards, ended, valid, None) == ()
    (episode,) = tracker.add(rewards, np.array([[False, True], [False, False]]), np.ones((2, 2), dtype=bool), None)
    assert (episode.reward, episode.length) == (2.0, 2)


def test_what_cannot_be_made_is_said_here():
    with pytest.raises(ValueError, match=r"CartPole-v1 does not take its arguments"):
        make_vector_env(EnvOptions("CartPole-v1", 1, vectorization="subprocess", init_params={"gravity": 3}))


OWN = """
import os
from tests.control.envs.toys import Countdown, Crashes

def crashing():
    return Crashes()

def broken():
    raise LookupError("no level 3")

def makes():
    open("made", "a").write(f"{os.getpid()}\\n")
    return Countdown()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return lambda name: make_vector_env(EnvOptions(f"own.py:{name}", 2, vectorization="subprocess", num_workers=2))


def test_a_simulator_that_crashes_when_it_is_made_ends_its_process_only(own):
    toys.register()
    before = psutil.Process().children()  # of tests that ran earlier
    options = EnvOptions("tether/Crashes-v0", 2, vectorization="subprocess", num_workers=2)
    with pytest.raises(ValueError, match=r"Crashes-v0: the process of environments 0 to 0.*was killed by SIGSEGV"):
        make_vector_env(options)
    with pytest.raises(ValueError, match=r"own\.py:crashing: the process of environments 0 to 0.*SIGSEGV"):
        own("crashing")
    assert psutil.Process().children() == before


def test_processes_are_what_makes_environments(own):
    """Those of a function, too, which is tried in the first of them."""
    own("makes").close()
    made = Path("made").read_text().split()
    assert str(os.getpid()) not in made
    assert sorted(map(made.count, set(made))) == [1, 2]


@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_a_function_that_makes_none_is_said_as_in_this_process(own, capfd, monkeypatch, busy):
    """Also where this process asks so late that the other one could have ended meanwhile."""
    announced = WorkerVectorEnv._announced
    monkeypatch.setattr(WorkerVectorEnv, "_announced", lambda env: time.sleep(busy) or announced(env))
    said = []
    for vectorization in ("sync", "subprocess"):
        with pytest.raises(ValueError, match=r"broken: a call with no arguments.*LookupError: no level 3") as caught:
            make_vector_env(EnvOptions("own.py:broken", 2, vectorization=vectorization, num_workers=2))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "Traceback" not in capfd.readouterr().err

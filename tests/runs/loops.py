"""Both kinds of runs behind one interface, so that a promise is tested over both."""

import multiprocessing
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.forks import forking
from tests.runs.tiny_run import GAE, base_overrides, measured, same
from tether.checkpoints import load_state
from tether.checkpoints.store import TRACKER
from tether.config import load_config
from tether.control.build import build_control_run
from tether.metrics.loggers.jsonl import read_samples
from tether.text.build import build_run

ACTOR = "actor_rollout_ref.actor"


class Loop(ABC):
    """One kind of run."""

    tested: str
    """Beginning of the metrics of a validation."""

    @abstractmethod
    def overrides(self, folder: Path, *more: str) -> list[str]:
        """A run of six steps, tested and saved every second."""

    @abstractmethod
    def build(self, overrides: Sequence[str]) -> Any:
        """A run that has not begun."""

    def train(
        self,
        overrides: Sequence[str],
        until: int | None = None,
        each_step: Callable[[Any], None] = lambda run: None,
        before: Callable[[Any], None] = lambda run: None,
    ) -> Any:
        """Train in this process, until a signal is said to come after step `until`; returns the run."""
        run = self.build(overrides)

        def interrupted() -> bool:
            each_step(run)
            return until is not None and run.trainer.step_number >= until

        before(run)
        try:
            run.trainer.fit(interrupted)
        finally:
            run.close()
        return run

    def tests(self, folder: Path) -> list[int]:
        """Steps that were tested."""
        return [
            step for step, metrics in results(folder).items() if any(key.startswith(self.tested) for key in metrics)
        ]


class Text(Loop):
    """A language model that is trained with a critic."""

    tested = "val-core"

    def __init__(self, inputs: Path, *options: str) -> None:
        self._inputs, self._options = inputs, options

    def overrides(self, folder: Path, *more: str) -> list[str]:
        """See `Loop.overrides`."""
        schedule = ["trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=2"]
        return [*base_overrides(self._inputs, folder), *GAE, *schedule, *self._options, *more]

    def build(self, overrides: Sequence[str]) -> Any:
        """See `Loop.build`."""
        return build_run(load_config(None, overrides))


class Control(Loop):
    """A control policy in CartPole."""

    tested = "eval/"

    def overrides(self, folder: Path, *more: str) -> list[str]:
        """See `Loop.overrides`."""
        return [
            "env.train.id=CartPole-v1", "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16",
            "env.eval.num_episodes=3", "policy.normalize_observations=True", "policy.normalize_rewards=True",
            f"{ACTOR}.ppo_mini_batch_size=32", "trainer.logger=file", "trainer.log_freq=1", "trainer.num_threads=1",
            "trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=2",
            "trainer.val_before_train=False", f"trainer.default_local_dir={folder}", *more,
        ]  # fmt: skip

    def build(self, overrides: Sequence[str]) -> Any:
        """See `Loop.build`."""
        return build_control_run(load_config(None, overrides))


def results(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of a run that depend on nothing but its inputs."""
    found = {
        step: {key: value for key, value in metrics.items() if not key.startswith("perf/")}
        for step, metrics in measured(folder).items()
    }
    return {step: metrics for step, metrics in found.items() if metrics}  # of a save alone only its time is known


def contents(checkpoint: Path) -> dict[str, Any]:
    """Every weight and every state that a checkpoint holds."""
    weights = {str(path.relative_to(checkpoint)): load_file(path) for path in checkpoint.rglob("*.safetensors")}
    states = {path.name: load_state(path) for path in (checkpoint / "training").glob("*.pt")}
    assert weights
    assert {"trainer.pt"} < states.keys()
    return weights | states


def forget(seed: int) -> None:
    """Leave the global generators as a new process might have them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def assert_same_run(whole: Path, other: Path, last: int) -> None:
    """Two runs logged the same metrics and samples and ended in the same checkpoint, bit for bit."""
    assert results(whole).keys() == results(other).keys()
    for step, metrics in results(whole).items():
        assert same(metrics, results(other)[step]), step
    assert read_samples(whole) == read_samples(other)
    one, two = contents(whole / f"global_step_{last}"), contents(other / f"global_step_{last}")
    assert one.keys() == two.keys()
    for name in one:
        assert same(one[name], two[name]), name


MOMENTS = ("metrics.jsonl", ".writing_global_step_*", TRACKER, "global_step_*")
"""A process is killed shortly after one of these changes: while training, saving, pruning, or starting."""


def train_killed(loop: Loop, overrides: Sequence[str], directory: Path, kills: int, seed: int = 0) -> None:
    """Train in processes of which all but the last are killed, with SIGKILL, at random moments."""
    noise = random.Random(seed)
    for kill in range(kills):
        process = start(loop, overrides)
        wait_for_change(process, directory, MOMENTS[kill % len(MOMENTS)], time.time_ns())
        time.sleep(noise.uniform(0, 0.03))
        assert process.is_alive(), f"ended before kill {kill}"
        process.kill()
        process.join()
    train_apart(loop, overrides)


def train_apart(loop: Loop, overrides: Sequence[str], until: int | None = None) -> None:
    """Train in a process of its own, to the end or until a signal is said to come."""
    process = start(loop, overrides, until)
    process.join()
    assert process.exitcode == 0


def start(loop: Loop, overrides: Sequence[str], until: int | None = None) -> multiprocessing.Process:
    """Start to train in a process of its own."""
    process = forking().Process(target=loop.train, args=(overrides, until))
    process.start()
    return process  # type: ignore[return-value]  # a process all the same


def wait_for_change(process: multiprocessing.Process, directory: Path, pattern: str, since_ns: int) -> None:
    """Return once a file or folder of that name was made or changed, or the process ended."""
    while process.is_alive():
        for path in directory.glob(pattern):
            try:
                if path.stat().st_mtime_ns > since_ns:
                    return
            except FileNotFoundError:
                continue
        time.sleep(0.001)

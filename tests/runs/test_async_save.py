"""`trainer.async_save`: a checkpoint is written while training goes on, and is the one that would have been written."""

import errno
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from tests.runs.golden import Golden
from tests.runs.loops import Text, assert_same_run, train_apart, train_killed
from tests.runs.tiny_run import LIGHT, same, weights
from tether.checkpoints import CheckpointStore
from tether.checkpoints.store import DiskFull
from tether.config import load_config
from tether.loop.parts import Callbacks
from tether.text.build import Run, build_run

LATER = "trainer.async_save=True"


def test_each_checkpoint_is_that_of_a_run_which_waits(golden: Golden, tmp_path: Path) -> None:
    golden.train(tmp_path, LATER)
    for step in (2, 4):
        assert_same_run(golden.folder, tmp_path, step)


class SlowStore:
    """Holds back the completion of each checkpoint until it is told, or fails it."""

    def __init__(self, store: CheckpointStore, error: Exception | None = None) -> None:
        self.store, self.error, self.may = store, error, Event()
        self.begin, store.begin = store.begin, self.held

    def held(self, step: int, start: Callable[[Path], Callable[[], None]]) -> Callable[[], Path]:
        def rest(folder: Path) -> Callable[[], None]:
            write = start(folder)

            def wait() -> None:
                assert self.may.wait(100)
                if self.error:
                    raise self.error
                write()

            return wait

        return self.begin(step, rest)


class Watcher:
    def __init__(self, run: Run, slow: SlowStore) -> None:
        self.model, self.slow, self.seen = run.trainer.actor.engine.model, slow, []

    def on_step_end(self, step: int, _: object) -> None:
        self.seen.append((step, self.slow.store.latest()))
        if step == 1:
            self.weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        if step == 2:
            self.slow.may.set()

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert self.slow.store.latest() == path
        self.seen.append(step)


def watched(base: list[str], error: Exception | None = None) -> tuple[Run, Watcher]:
    run = build_run(load_config(None, [*base, *LIGHT, LATER, "trainer.save_freq=1"]))
    watcher = Watcher(run, SlowStore(run.trainer.persistence.store, error))
    run.trainer.callbacks = Callbacks([watcher])
    return run, watcher


def test_training_goes_on_while_a_checkpoint_is_written(base: list[str]) -> None:
    run, watcher = watched(base)
    try:
        run.trainer.fit()
    finally:
        run.close()
    assert watcher.seen[:3] == [(1, None), (2, None), 1]
    assert sorted(step for step in watcher.seen if isinstance(step, int)) == [1, 2, 3]
    assert run.trainer.saved_step == 3
    assert same(weights(run.directory / "global_step_1"), watcher.weights), "of step 1, and not of when it is written"


def test_a_full_disk_ends_the_run_once_it_is_heard_of(base: list[str]) -> None:
    run, watcher = watched(base, OSError(errno.ENOSPC, "No space left on device"))
    try:
        with pytest.raises(DiskFull, match=r"disk full while saving .*global_step_1: .*No checkpoint was saved before"):
            run.trainer.fit()
    finally:
        run.close()
    assert [step for step, _ in watcher.seen] == [1, 2]


@pytest.mark.parametrize("kills", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_while_it_is_written(kills: int, inputs: Path, tmp_path: Path) -> None:
    loop, total = Text(inputs), kills + 5
    more = [LATER, f"trainer.total_training_steps={total}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    train_apart(loop, loop.overrides(tmp_path / "whole", *more))
    train_killed(loop, loop.overrides(tmp_path / "killed", *more), tmp_path / "killed", kills)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", total)

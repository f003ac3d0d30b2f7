"""Callbacks hear of each step, evaluation and checkpoint, of text and control alike; one that raises loses no step."""

from pathlib import Path

import pytest

import tether
from tests.runs.golden import STEPS, Event, Golden, Notebook
from tests.runs.loops import Control, assert_same_run
from tether.loop.parts import Callbacks, CheckpointSaver, OnSaved
from tether.metrics.loggers.jsonl import read_metrics


def test_callbacks_hear_what_is_logged(golden: Golden) -> None:
    one, two = golden.notebooks
    pairs = [[("test", n), ("step", n), ("test", n + 1), ("step", n + 1), ("save", n + 1)] for n in (1, 3)]
    assert one.events == two.events == [("test", 0), *(event for pair in pairs for event in pair)]
    assert one.paths == [golden.folder / f"global_step_{step}" for step in (2, 4)]
    for step, logged in read_metrics(golden.folder).items():
        if step:
            assert one.metrics["step", step].items() <= logged.items()
            assert logged.keys() - one.metrics["step", step].keys() <= {"timing_s/save_checkpoint"}
    assert one.metrics["test", 4].items() <= one.metrics["step", 4].items()


@pytest.mark.parametrize(
    ("loop", "at"),
    [
        *(("control", at) for at in (("step", 1), ("test", 2), ("save", 2))),
        pytest.param("control", ("step", 2), marks=pytest.mark.slow),
        *(
            pytest.param("text", at, marks=pytest.mark.slow)
            for at in (("step", 1), ("step", 2), ("test", 2), ("save", 2))
        ),
    ],
    indirect=["loop"],
    ids=str,
)
def test_one_that_raises_loses_nothing(at: Event, golden: Golden, tmp_path: Path) -> None:
    """The run that resumes ends as one whose callbacks raise nothing, bit for bit."""
    with pytest.raises(KeyError, match="mine"):
        golden.train(tmp_path, callbacks=[Notebook(at)])
    assert (tmp_path / f"global_step_{at[1]}").is_dir()
    again = Notebook()
    golden.train(tmp_path, callbacks=[again])
    assert (("test", 2) in again.events) == (at == ("step", 1))
    assert_same_run(golden.folder, tmp_path, STEPS)


class Leaves:
    """Raises after the second step, or once the checkpoint of the first is written."""

    def __init__(self, error: type[BaseException], *, at_checkpoint: bool = False) -> None:
        self.error, self.at_checkpoint = error, at_checkpoint

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        if step == 2 and not self.at_checkpoint:
            raise self.error("enough")

    def on_checkpoint(self, step: int, path: Path) -> None:
        if step == 1 and self.at_checkpoint:
            raise self.error("enough")


def test_whatever_leaves_the_loop_saves_first(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    settings = ["trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.preflight=False"]
    for number, leaving in enumerate((Leaves(SystemExit), Leaves(KeyboardInterrupt), Leaves(OSError))):
        folder = tmp_path / str(number)
        with pytest.raises(leaving.error, match="enough"):
            tether.train(overrides=Control().overrides(folder, *settings), callbacks=[leaving])
        assert [path.name for path in folder.glob("global_step*")] == ["global_step_2"], leaving.error


class SlowDisk(CheckpointSaver):
    """Completes a checkpoint during the next step, unless somebody waits for it."""

    steps = 0

    def collect(self, on_saved: OnSaved, *, wait: bool) -> None:
        self.steps += not wait
        super().collect(on_saved, wait=wait or self.steps > 1)


def test_what_a_checkpoint_in_the_background_raises_loses_no_later_step(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    run = Control().build(Control().overrides(tmp_path, "trainer.save_freq=1", "trainer.test_freq=-1"))
    run.trainer.saver = SlowDisk(background=True)
    run.trainer.callbacks = Callbacks([Leaves(SystemExit, at_checkpoint=True)])
    try:
        with pytest.raises(SystemExit):
            run.trainer.fit()
    finally:
        run.close()
    assert (tmp_path / "global_step_2").is_dir()


def test_training_from_python_takes_callbacks(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    notebook = Notebook()
    tether.train(overrides=Control().overrides(tmp_path, "trainer.total_training_steps=1"), callbacks=[notebook])
    assert notebook.events == [("test", 1), ("step", 1), ("save", 1)]


class Misspelt:
    def on_step_ended(self, step: int, metrics: dict[str, float]) -> None: ...


class Short:
    def on_checkpoint(self, step: int) -> None: ...


class Other:
    on_step_end = None


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (Misspelt(), r"callbacks\[1\] \(Misspelt\): on_step_ended is never called. Did you mean on_step_end\?"),
        (Short(), r"on_checkpoint\(step: int\) -> None is called as on_checkpoint\(step, path\)"),
        (Other(), "has none of the methods on_step_end, on_evaluation, on_checkpoint"),
        (print, "has none of the methods"),
    ],
)
def test_what_is_no_callback_is_refused_at_once(one: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Callbacks([Notebook(), one])
    with pytest.raises(ValueError, match="callbacks"):
        tether.train(overrides=["env.train.id=Nothing-v0", f"trainer.default_local_dir={tmp_path}"], callbacks=[one])

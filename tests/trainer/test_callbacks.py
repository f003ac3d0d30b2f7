"""Callbacks are told each step, test and checkpoint, of text and control alike; one that raises loses no step."""

from pathlib import Path

import pytest

import tether
from tests.trainer.loops import Control, Loop, Text, assert_same_run
from tests.trainer.tiny_run import write_inputs
from tether.metrics.loggers.jsonl import read_metrics
from tether.trainer.callbacks import Callbacks

TOTAL = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(params=["text", "control"])
def loop(request: pytest.FixtureRequest, inputs: Path) -> Loop:
    if request.param == "control":
        pytest.importorskip("gymnasium")
        return Control()
    return Text(inputs)


class Notebook:
    """Writes down what it is told; raises at one moment."""

    def __init__(self, at: tuple[str, int] | None = None) -> None:
        self.told: list[tuple[str, int]] = []
        self.metrics: dict[tuple[str, int], dict[str, float]] = {}
        self.paths: list[Path] = []
        self.at = at

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._note("step", step, metrics)

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._note("test", step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert (path / "run.yaml").is_file()
        self.paths.append(path)
        self._note("save", step, {})

    def _note(self, what: str, step: int, metrics: dict[str, float]) -> None:
        self.told.append((what, step))
        self.metrics[what, step] = dict(metrics)
        metrics.clear()  # its own copy
        if self.at == (what, step):
            raise KeyError("mine")


def test_what_is_told_is_what_is_logged(loop: Loop, tmp_path: Path) -> None:
    one, two = Notebook(), Notebook()
    run = tether.train(overrides=loop.overrides(tmp_path, "trainer.val_before_train=True"), callbacks=[one, two])
    pairs = [[("step", n), ("test", n + 1), ("step", n + 1), ("save", n + 1)] for n in (1, 3, 5)]
    assert one.told == two.told == [("test", 0), *(event for pair in pairs for event in pair)]
    assert one.paths == [run.folder / f"global_step_{step}" for step in (2, 4, 6)]
    for step, logged in read_metrics(run.folder).items():
        if step:
            assert one.metrics["step", step].items() <= logged.items()
            assert logged.keys() - one.metrics["step", step].keys() <= {"timing_s/save_checkpoint"}
    assert one.metrics["test", 4].items() <= one.metrics["step", 4].items()


@pytest.mark.parametrize("at", [("step", 3), ("step", 4), ("test", 4), ("save", 4)], ids=str)
def test_one_that_raises_loses_nothing(loop: Loop, at: tuple[str, int], tmp_path: Path) -> None:
    """The run that resumes ends as one without callbacks, bit for bit."""
    tether.train(overrides=loop.overrides(tmp_path / "whole"))
    with pytest.raises(KeyError, match="mine"):
        tether.train(overrides=loop.overrides(tmp_path / "parts"), callbacks=[Notebook(at)])
    assert (tmp_path / "parts" / f"global_step_{at[1]}").is_dir()
    again = Notebook()
    tether.train(overrides=loop.overrides(tmp_path / "parts"), callbacks=[again])
    assert (("test", 4) in again.told) == (at == ("step", 3))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", TOTAL)


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

"""The plots are real PNG files with the right charts on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tether.metrics.loggers.jsonl import JsonlLogger
from tether.metrics.loggers.protocol import RunInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORE = ["critic/score/mean"]


def plot_run(runs: Path | list[Path], out: Path, **options: Any) -> Path:
    from tether.metrics import plot  # loads matplotlib

    return plot.plot_run(runs, out, **options)


def make_run(folder: Path, num_steps: int, offset: float = 0.0) -> Path:
    logger = JsonlLogger(RunInfo(folder, "p", "e", {}))
    logger.log(0, {"val-core/gsm8k/reward/mean@1": 0.1})
    for step in range(1, num_steps + 1):
        metrics = {
            "critic/score/mean": step / num_steps + offset,
            "actor/grad_norm": 1.0,
            "critic/vf_explained_var": -9.0,
        }
        metrics |= {"timing_s/gen": 3.0, "timing_s/adv": 1e-6, "timing_s/step": 4.0, "critic/vf_loss": float("nan")}
        logger.log(step, metrics)
    logger.log(num_steps, {"val-core/gsm8k/reward/mean@1": 0.8})
    logger.close()
    return folder


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    original = Figure.savefig

    def savefig(self: Figure, *args: object, **kwargs: object) -> None:
        saved.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def test_one_run(tmp_path: Path, figures: list[Figure]) -> None:
    from matplotlib.image import imread

    out = plot_run(make_run(tmp_path / "run", 40), tmp_path / "out.png")
    image = imread(out)
    assert image.shape[1] > 1000
    assert image.std() > 0.01, "something is drawn"
    titles = [axes.get_title("left") for axes in figures[0].axes]
    assert titles[:5] == [
        "Training score",
        "Validation score",
        "Explained variance of the critic",
        "Value loss",
        "Gradient norm",
    ]
    assert titles[5] == "Time of a step"
    score, validation = figures[0].axes[:2]
    thin, bold = score.lines
    assert np.allclose(thin.get_ydata(), np.arange(1, 41) / 40)
    assert np.allclose(bold.get_ydata()[10:-10], thin.get_ydata()[10:-10]), "a centred mean keeps a straight line"
    assert validation.lines[0].get_xydata().tolist() == [[0, 0.1], [40, 0.8]]
    assert figures[0].axes[2].get_ylim()[0] == -1, "early outliers are cut off"


def test_several_runs_have_their_mean_over_shared_steps(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [make_run(tmp_path / "a", 10), make_run(tmp_path / "b", 8, offset=0.5)]
    plot_run(runs, tmp_path / "out.png", keys=SCORE, mean=True, title="a model, a task")
    (axes,) = figures[0].axes
    assert figures[0].get_suptitle().strip() == "a model, a task"
    assert axes.get_title("left") == "Training score"
    *thin, bold = axes.lines
    assert [len(line.get_xdata()) for line in thin] == [10, 8]
    steps = np.arange(1, 9)
    assert bold.get_xdata().tolist() == steps.tolist()
    assert np.allclose(bold.get_ydata(), (steps / 10 + steps / 8 + 0.5) / 2)


@pytest.mark.filterwarnings("error")  # of a legend without a curve
def test_several_runs_without_mean_are_told_apart(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [make_run(tmp_path / "ppo" / "seed_1", 10), make_run(tmp_path / "grpo" / "seed_1", 8, offset=0.5)]
    plot_run(runs, tmp_path / "out.png", keys=SCORE)
    (axes,) = figures[0].axes
    first, second = axes.lines
    assert [len(first.get_xdata()), len(second.get_xdata())] == [10, 8]
    assert first.get_color() != second.get_color()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ppo/seed_1", "grpo/seed_1"]
    plot_run(runs, tmp_path / "all.png")
    (times,) = (axes for axes in figures[1].axes if axes.get_title("left") == "Time of a step")
    assert [set(line.get_ydata()) for line in times.lines] == [{4.0}, {4.0}]  # the whole step of each
    assert not times.collections  # no stack


@pytest.mark.parametrize(("values", "scale"), [((1.0, 2.0), "log"), ((1.0, 0.0), "linear"), ((1.0, -2.0), "linear")])
def test_a_chart_says_log_scale_only_where_it_is_one(
    values: tuple[float, float], scale: str, tmp_path: Path, figures: list[Figure]
) -> None:
    logger = JsonlLogger(RunInfo(tmp_path / "run", "p", "e", {}))
    for step, value in enumerate(values):
        logger.log(step, {"critic/vf_loss": value})
    logger.close()
    plot_run(tmp_path / "run", tmp_path / "out.png", keys=["critic/vf_loss"])
    (axes,) = figures[0].axes
    assert axes.get_yscale() == scale
    assert ("log scale" in axes.texts[0].get_text()) == (scale == "log")


def test_runs_in_simulators_are_drawn_over_environment_steps(tmp_path: Path, figures: list[Figure]) -> None:
    logger = JsonlLogger(RunInfo(tmp_path / "run", "p", "e", {}))
    logger.log(0, {"eval/return": 9.0})
    for step in (10, 20):
        logger.log(step, {"env/return": 1.0 * step, "perf/env_steps": 128.0 * step, "actor/entropy": 0.6})
    logger.close()
    plot_run(tmp_path / "run", tmp_path / "out.png")
    returns, entropy = figures[0].axes[:2]
    assert returns.get_xlabel() == "environment steps"
    training, test = (line.get_xydata().tolist() for line in returns.lines)
    assert training == [[1280, 10], [2560, 20]]
    assert test == [[0, 9]]
    assert entropy.texts[0].get_text() == "nats per action"
    plot_run(make_run(tmp_path / "text", 2), tmp_path / "out.png", keys=[*SCORE, "critic/vf_loss"])
    assert {axes.get_xlabel() for axes in figures[1].axes} - {""} == {"step"}


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    with pytest.raises(ValueError, match=r"Did you mean critic/score/mean\?"):
        plot_run(run, tmp_path / "out.png", keys=["critic/score/means"])
    with pytest.raises(ValueError, match=r"no metrics\.jsonl here"):
        plot_run(tmp_path, tmp_path / "out.png")
    with pytest.raises(ValueError, match=r"there/out\.png: cannot be written \(No such file or directory\)"):
        plot_run(run, tmp_path / "there" / "out.png", keys=SCORE)
    with pytest.raises(ValueError, match=r"out\.doc: cannot be written \(Format 'doc' is not supported"):
        plot_run(run, tmp_path / "out.doc", keys=SCORE)
    JsonlLogger(RunInfo(tmp_path / "new", "p", "e", {})).close()
    with pytest.raises(ValueError, match="no step was logged yet"):
        plot_run(tmp_path / "new", tmp_path / "out.png")


@pytest.mark.parametrize(("length", "window"), [(1, 1), (29, 1), (30, 3), (400, 23)])
def test_running_mean(length: int, window: int) -> None:
    from tether.metrics import plot

    assert plot._window(length) == window
    constant = np.full(length, 2.0)
    assert np.allclose(plot._running_mean(constant), constant), "ends are means too"

"""Runs of a benchmark that are kept in a file of JSON lines, so that it resumes; tables in pages; pictures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "recipes/quickstart/run.yaml"


def all_runs(
    make: Callable[..., Mapping[str, object]], asked: Sequence[Mapping[str, Any]], file: Path, *, made_only: bool
) -> list[dict[str, Any] | None]:
    """The results of runs, one after the other; those that the file has are taken from there.

    Args:
        make: does one, given what is asked for.
        asked: of each run; it names the run in the file.
        file: of runs that are done.
        made_only: make no new run; those that the file lacks are None.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    done = {_name(line["asked"]): line["result"] for line in map(json.loads, lines)}
    if kept := sum(_name(one) in done for one in asked):
        print(f"{kept} of {len(asked)} runs are from {file}; without it they are made again", file=sys.stderr)
    for one in asked:
        if _name(one) in done or made_only:
            continue
        result = done[_name(one)] = dict(make(**one))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as added:
            added.write(json.dumps({"asked": one, "result": result}) + "\n")
        print(f"done: {one}", file=sys.stderr, flush=True)
    return [done.get(_name(one)) for one in asked]


def arguments_of_runs(description: str | None, results: Path) -> argparse.ArgumentParser:
    """A parser with what benchmarks of several seeds share.

    Args:
        description: of the benchmark.
        results: file of runs that are done, where no other is named.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", type=Path, default=results, help="file of runs that are done")
    parser.add_argument("--made-only", action="store_true", help="make no new run, and show those of --results")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    parser.add_argument("--plot", type=Path, help="draw the curves to this PNG")
    return parser


def schedule(steps: int, seed: int, folder: Path) -> list[str]:
    """Overrides of a run of so many steps that is tested before the first and after the last, and saves nothing."""
    return [
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def fields(columns: int, width: float, height: float, **options: bool) -> tuple[Figure, Any]:
    """A figure and its axes side by side, made without a screen.

    Args:
        columns: axes.
        width: inches.
        height: inches.
        options: of matplotlib's `subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), **options)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, and forget it."""
    from matplotlib import pyplot

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_scores(curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], path: Path) -> None:
    """Draw scores of training batches over the steps: the mean of the seeds and their range.

    Args:
        curves: title of a field -> label of a line -> the scores of each seed.
        path: the PNG.
    """
    figure, axes = fields(len(curves), 4.4 * len(curves), 3.2, squeeze=False, sharey=True)
    for axis, (title, lines) in zip(axes[0], curves.items(), strict=True):
        for label, seeds in lines.items():
            at, points = range(1, len(seeds[0]) + 1), list(zip(*seeds, strict=True))
            (line,) = axis.plot(at, [fmean(point) for point in points], label=f"{label} ({len(seeds)} seeds)")
            low, high = ([pick(point) for point in points] for pick in (min, max))
            axis.fill_between(at, low, high, color=line.get_color(), alpha=0.2)
        axis.set(title=title, xlabel="step")
        axis.legend(loc="best", fontsize="small")
    axes[0][0].set_ylabel("score of the training batch")
    save_figure(figure, path)


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Put a table between two marks of a page.

    Raises:
        ValueError: the page has no such marks.
    """
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{page}: no {begin} ... {end} to write between")
    page.write_text(f"{text.split(begin)[0]}{begin}\n{table}\n{end}{text.split(end)[1]}", encoding="utf-8")


def _name(asked: Mapping[str, object]) -> str:
    return json.dumps(asked, sort_keys=True)

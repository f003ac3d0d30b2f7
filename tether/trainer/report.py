"""What a finished run shows: the score and some answers before and after, and what is where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tether.metrics.loggers.headline import validation_means
from tether.metrics.loggers.jsonl import METRICS_FILE, read_metrics, read_samples
from tether.training.checkpoint import CheckpointStore

SAMPLES_SHOWN = 3


def show_report(directory: Path, console: Console, command: str) -> None:
    """Print the summary of a run from the files in its folder.

    Args:
        directory: of the run.
        console: to print on.
        command: starts the run again, so that it goes on from the last checkpoint.
    """
    console.print(_scores(directory))
    samples = read_samples(directory)
    if len(samples) > 1:
        console.print(_samples(samples[min(samples)], samples[max(samples)]))
    checkpoint = CheckpointStore(directory).latest()
    console.print(f"logs        {directory / METRICS_FILE}   (curves: tether plot {directory})", soft_wrap=True)
    if checkpoint:
        console.print(f"checkpoint  {checkpoint}   (the policy: {checkpoint / 'actor'})", soft_wrap=True)
        console.print(f'try it      tether generate {checkpoint / "actor"} "your question"', soft_wrap=True)
        console.print(f"go on       {command}", soft_wrap=True)
    else:
        console.print("checkpoint  none saved; set trainer.save_freq")


def _scores(directory: Path) -> Table:
    tested = {step: validation_means(metrics) for step, metrics in read_metrics(directory).items()}
    tested = {step: means for step, means in tested.items() if means}
    table = Table(title="held-out score")
    if not tested:
        table.add_column("none: set data.val_files and trainer.test_freq")
        return table
    first, last = min(tested), max(tested)
    for column in ("", f"step {first}", f"step {last}", "change", "best"):
        table.add_column(column)
    for key, before in tested[first].items():
        after = tested[last].get(key, float("nan"))
        best = max(means.get(key, before) for means in tested.values())
        table.add_row(key, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", f"{best:.3f}")
    return table


def _samples(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    table = Table(title="the same prompts before and after", show_lines=True)
    for column in ("prompt (end)", "truth", "before", "after"):
        table.add_column(column)
    after_by_index = {sample["index"]: sample for sample in after}
    for sample in before[:SAMPLES_SHOWN]:
        later = after_by_index.get(sample["index"])
        if later:
            table.add_row(
                Text(_end(sample["prompt"])),
                str(sample["ground_truth"])[:40],
                Text(_answer(sample)),
                Text(_answer(later)),
            )
    return table


def _end(prompt: str, width: int = 120) -> str:
    return prompt.strip()[-width:]


def _answer(sample: dict[str, Any], width: int = 200) -> str:
    reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:g}"
    return f"{sample['response'].strip()[:width]}\n({reward})"

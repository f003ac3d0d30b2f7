"""The report at the end of a run: the score and some answers before and after, and where its files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tether.checkpoints.store import CheckpointStore
from tether.config import LoadedConfig, changes_since
from tether.metrics.loggers.headline import VALIDATION, validation_means
from tether.metrics.loggers.jsonl import METRICS_FILE, read_metrics, read_samples
from tether.runtime.terminal import Screen, shortened

SAMPLES_SHOWN = 3
PROMPT_TAIL = 120
RESPONSE_WIDTH = 200


def show_report(directory: Path, console: Screen, command: str) -> None:
    """Print the summary of a run from the files in its folder.

    Args:
        directory: of the run.
        console: to print on.
        command: starts the run again, which resumes from its last checkpoint.
    """
    console.print(_scores(directory))
    samples = read_samples(directory)
    if len(samples) > 1:
        console.print(_samples(samples[min(samples)], samples[max(samples)]))
    checkpoint = CheckpointStore(directory).last_saved()
    console.print(f"logs        {directory / METRICS_FILE}   (curves: tether plot {directory})", soft_wrap=True)
    if checkpoint:
        console.print(f"checkpoint  {checkpoint}   (the policy: {checkpoint / 'actor'})", soft_wrap=True)
        console.print(f'try it      tether generate {checkpoint / "actor"} "your question"', soft_wrap=True)
        console.print(f"resume      {command}", soft_wrap=True)
    else:
        console.print("checkpoint  none: this run is lost but for its logs. Set trainer.save_freq to keep the policy.")


def show_resumed(console: Screen, checkpoint: Path, loaded: LoadedConfig, step: int, total_steps: int) -> None:
    """Say where a run resumes, and which of its settings are not those of the checkpoint."""
    console.print(f"resuming from {checkpoint}, step {step} of {total_steps}", soft_wrap=True)
    for change in changes_since(checkpoint / "run.yaml", loaded):
        console.print(f"changed since that checkpoint: {change}", soft_wrap=True)


def _scores(directory: Path) -> Table:
    steps = read_metrics(directory)
    tested = {step: validation_means(metrics) for step, metrics in steps.items()}
    tested = {step: means for step, means in tested.items() if means}
    table = Table(title="held-out score")
    if not tested:
        table.add_column("none: set data.val_files and trainer.test_freq")
        return table
    first, last = min(tested), max(tested)
    for column in ("", "questions", f"step {first}", f"step {last}", "change", "best", "most frequent answer"):
        table.add_column(column)
    asked = steps[last]
    for key, before in tested[first].items():
        after = tested[last].get(key, float("nan"))
        best = max(means.get(key, before) for means in tested.values())
        source = key.removeprefix(VALIDATION).rsplit("/", 2)[0]
        distinct, majority = (asked.get(f"val-aux/{source}/{name}") for name in ("num_distinct", "majority_answer"))
        table.add_row(
            key,
            "" if distinct is None else f"{distinct:.0f} distinct",
            *(f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", f"{best:.3f}"),
            "" if majority is None else f"{majority:.3f}",
        )
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
                Text(sample["prompt"].strip()[-PROMPT_TAIL:]),
                str(sample["ground_truth"])[:40],
                Text(_answer(sample)),
                Text(_answer(later)),
            )
    return table


def _answer(sample: dict[str, Any]) -> str:
    reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:g}"
    return f"{shortened(sample['response'].strip(), RESPONSE_WIDTH)}\n({reward})"

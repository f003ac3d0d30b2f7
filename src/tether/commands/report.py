"""The report at the end of a run: scores, example answers before and after training, and the location of files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from rich.table import Table
from rich.text import Text

from tether.checkpoints import BEST, CheckpointStore
from tether.commands.result import TrainingResult
from tether.config import LoadedConfig, saved_values
from tether.control.build import fit_defaults
from tether.control.envs.config import SELF_RESETTING
from tether.loop.checkpoint import TRAINING
from tether.metrics.loggers import HELD_OUT_LOSS, METRICS_FILE, VALIDATION, read_metrics, read_samples, validation_means
from tether.runtime.terminal import Screen, shortened
from tether.types import JsonObject

EPISODES = (
    "eval/return",
    "eval/episode_len",
    "eval/success_once",
    "eval/success_at_end",
    "env/return",
    "env/success_once",
)
"""Metrics that are reported for a control run."""
AUXILIARY = {"questions": ("num_distinct", "{:.0f} distinct"), "most frequent answer": ("majority_answer", "{:.3f}")}
"""Column next to a held-out score -> its metric and format."""
SAMPLES_SHOWN = 3
PROMPT_TAIL = 120
RESPONSE_WIDTH = 200


def show_report(directory: Path, console: Screen, command: str) -> None:
    """Print the summary of a run from the files in its folder.

    Args:
        directory: folder of the run.
        console: output.
        command: command that resumes the run from its last checkpoint.
    """
    steps = read_metrics(directory)
    console.print(_scores(steps))
    samples = read_samples(directory)
    if len(samples) > 1:
        console.print(_samples(samples[min(samples)], samples[max(samples)]))
    speeds = [metrics["perf/sps"] for metrics in steps.values() if "perf/sps" in metrics]
    if speeds:
        console.print(f"speed       {median(speeds):,.0f} environment steps per second (median of the logged steps)")
    folder = shlex.quote(str(directory))
    console.print(f"logs        {directory / METRICS_FILE}   (curves: tether plot {folder})", soft_wrap=True)
    console.print(f"look at it  tether view {folder}", soft_wrap=True)
    if best := CheckpointStore(directory / BEST).last_saved():
        console.print(f"best test   {best}", soft_wrap=True)
    for line in next_commands(CheckpointStore(directory).last_saved(), command):
        console.print(line, soft_wrap=True)


def command_to_resume(command: str, loaded: LoadedConfig, step: int, total_steps: int) -> str:
    """Return the command that resumes a run which ended after `step`."""
    trainer = loaded.config.trainer
    if trainer.resume_mode != "auto":
        command = f"{_without(command, 'trainer.resume_mode')} trainer.resume_mode=auto '~trainer.resume_from_path'"
    if step == total_steps:  # the unchanged command would have no steps to run
        trainer = fit_defaults(loaded).config.trainer
        by_env_steps = trainer.total_training_steps is None and trainer.total_env_steps is not None
        name, done = ("total_env_steps", trainer.total_env_steps) if by_env_steps else ("total_training_steps", step)
        command = f"{_without(command, f'trainer.{name}')} trainer.{name}={2 * (done or 0)}"
    return command


def _without(command: str, key: str) -> str:
    """Remove the overrides of a key from a command line."""
    return shlex.join(word for word in shlex.split(command) if word.partition("=")[0].lstrip("+") != key)


def next_commands(checkpoint: Path | None, command: str) -> list[str]:
    """Return lines with the path of the last checkpoint and the commands that use it."""
    if checkpoint is None:
        return ["checkpoint  none saved: trainer.save_freq is 0. Set it to -1 to keep the last step's."]
    resume = [f"resume      {command}"] if (checkpoint / TRAINING).is_dir() else []  # otherwise it only has weights
    actor = checkpoint / "actor"
    folder = shlex.quote(str(checkpoint))
    if (actor / "config.json").is_file():
        adapter = checkpoint / "adapter"
        merged = f", merged; its adapter: {adapter}" if adapter.is_dir() else ""
        return [
            f"checkpoint  {checkpoint}   (the policy: {actor}{merged})",
            f'try it      tether generate {folder} "your question"',  # its run.yaml records whether remote code may run
            *resume,
        ]
    env_type = (saved_values(checkpoint / "run.yaml") or {}).get("env.eval.env_type")
    return [
        f"checkpoint  {checkpoint}",
        f"test it     tether eval {folder} env.eval.num_episodes=100",
        *([] if env_type in SELF_RESETTING else [f"watch it    tether play {folder}"]),
        *resume,
    ]


def how_it_stopped(result: TrainingResult) -> str:
    """Return a line about what stopped a run, and what running the same command again does."""
    after = f"after step {result.step} of {result.total_steps}"
    if result.stopped_by == "trainer.stop_at_score":
        return f"trainer.stop_at_score was reached {after}; raise it to continue"
    if result.collapsed:
        return (
            f"stopped by trainer.on_collapse {after}: the policy has collapsed. Resume from an earlier checkpoint "
            "(trainer.resume_mode=resume_path) with other settings; the command above continues with the same ones"
        )
    again = (
        "the command above resumes"
        if result.checkpoint
        else "no step was saved: the same command starts from the beginning"
    )
    return f"stopped by {result.stopped_by} {after}; {again}"


def _scores(steps: Mapping[int, Mapping[str, float]]) -> Table:
    """Return a table with the first, last and best value of every reported metric."""
    rows: dict[str, dict[int, float]] = {}
    for step, metrics in steps.items():
        for key in [*validation_means(metrics), *(key for key in (*EPISODES, HELD_OUT_LOSS) if key in metrics)]:
            rows.setdefault(key, {})[step] = metrics[key]
    table = Table(title="episodes" if rows.keys() & set(EPISODES) else "held-out score")
    if not rows:
        table.add_column("none: set trainer.test_freq, and data.val_files for a language model")
        return table
    context = {key: _auxiliary_cells(key, steps[max(series)]) for key, series in rows.items()}
    auxiliary = [name for name in AUXILIARY if any(cells.get(name) for cells in context.values())]
    ends = [
        f"step {indices.pop()}" if len(indices := {pick(series) for series in rows.values()}) == 1 else name
        for name, pick in (("first", min), ("last", max))
    ]
    columns = [*ends, "change", "best"]
    if all(len(series) == 1 for series in rows.values()):  # there is nothing to compare with
        columns = ends[:1]
    for column in ("", *columns, *auxiliary):
        table.add_column(column)
    for key, series in rows.items():
        first, last = series[min(series)], series[max(series)]
        best = min(series.values()) if key == HELD_OUT_LOSS else max(series.values())
        cells = [f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}", f"{best:.3f}"]
        table.add_row(key, *cells[: len(columns)], *(context[key][name] for name in auxiliary))
    return table


def _auxiliary_cells(key: str, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the cells of the `AUXILIARY` columns for a held-out score."""
    source = key.removeprefix(VALIDATION).rsplit("/", 2)[0]
    values = {name: metrics.get(f"val-aux/{source}/{aux}") for name, (aux, _) in AUXILIARY.items()}
    return {name: "" if value is None else AUXILIARY[name][1].format(value) for name, value in values.items()}


def _samples(before: list[JsonObject], after: list[JsonObject]) -> Table:
    table = Table(title="the same prompts before and after", show_lines=True)
    for column in ("prompt (end)", "truth", "before", "after"):
        table.add_column(column)
    after_by_index = {sample["index"]: sample for sample in after}
    for sample in before[:SAMPLES_SHOWN]:
        later, prompt = after_by_index.get(sample["index"]), sample["prompt"].strip()
        if later:
            table.add_row(
                Text(prompt if len(prompt) <= PROMPT_TAIL else f"…{prompt[-PROMPT_TAIL:]}"),
                str(sample["ground_truth"])[:40],
                Text(_answer(sample)),
                Text(_answer(later)),
            )
    return table


def _answer(sample: JsonObject) -> str:
    reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:g}"
    return f"{shortened(sample['response'].strip(), RESPONSE_WIDTH)}\n({reward})"

"""What the command line does with embodied runs: train, evaluate, play."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median

from rich.table import Table

from tether.assembly.control import build_control_run, build_evaluation, video_folder
from tether.checkpoints.store import CheckpointStore
from tether.commands.report import show_resumed
from tether.config import LoadedConfig
from tether.metrics.loggers.jsonl import METRICS_FILE, read_metrics
from tether.models.control.mlp_policy import load_policy
from tether.runtime.interrupt import graceful_interrupt
from tether.runtime.machine import set_threads
from tether.runtime.terminal import Screen
from tether.trainer.control.loop import POLICY

SHOWN = (
    "eval/return",
    "eval/episode_len",
    "eval/success_once",
    "eval/success_at_end",
    "env/return",
    "env/success_once",
)


def train(loaded: LoadedConfig, command: str) -> None:
    """Run to the end, or to a signal; then show what came of it.

    Args:
        loaded: the configuration.
        command: what the user typed: typed again, the run resumes.

    Raises:
        ValueError: unusable environments, or a checkpoint of other ones.
    """
    console = Screen()
    for note in loaded.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    run = build_control_run(loaded)
    trainer = run.trainer
    env = trainer.collector.env
    console.print(f"{env.id}: {env.num_envs} environments, observations {env.obs_dim}, actions {env.actions}")
    try:
        if run.resumed_from:
            show_resumed(console, run.resumed_from, loaded, trainer.step_number, trainer.schedule.total_steps)
        with graceful_interrupt() as interrupted:
            trainer.fit(interrupted)
    finally:
        run.close()
    if loaded.config.trainer.resume_mode != "auto":
        command += " trainer.resume_mode=auto '~trainer.resume_from_path'"
    _report(run.directory, console, command)
    if interrupted.signal:
        done, total = trainer.step_number, trainer.schedule.total_steps
        console.print(f"stopped by {interrupted.signal.name} after step {done} of {total}; the command above resumes")


def evaluate(checkpoint: Path, loaded: LoadedConfig, console: Screen) -> dict[str, float]:
    """Metrics of a checkpoint in the environments of ``env.eval``."""
    set_threads(loaded.config.trainer.num_threads)
    policy = load_policy(checkpoint / POLICY)
    with ExitStack() as envs, console.status("playing") as status:
        evaluation = build_evaluation(loaded.config, policy, envs)
        return evaluation.run(
            policy, checkpoint.name, lambda done, total: status.update(f"playing: {done} of {total} episodes")
        )


def play(checkpoint: Path, loaded: LoadedConfig, console: Screen) -> Path:
    """Evaluate a checkpoint, with ``env.eval.video_cfg.save_video`` on; prints the metrics, returns the video.

    Raises:
        ValueError: the environments show nothing, or what writes videos is not installed.
    """
    metrics = evaluate(checkpoint, loaded, console)
    for name in SHOWN:
        if name in metrics:
            console.print(f"{name:20} {metrics[name]:.2f}")
    return video_folder(loaded.config) / f"{checkpoint.name}.mp4"


def _report(directory: Path, console: Screen, command: str) -> None:
    """Print the summary of a run from the files in its folder."""
    steps = read_metrics(directory)
    table = Table(title="episodes")
    for column in ("", "first", "last", "change", "best"):
        table.add_column(column)
    for key in SHOWN:
        series = [metrics[key] for metrics in steps.values() if key in metrics]
        if series:
            first, last = series[0], series[-1]
            table.add_row(key, f"{first:.2f}", f"{last:.2f}", f"{last - first:+.2f}", f"{max(series):.2f}")
    console.print(table)
    speeds = [metrics["perf/sps"] for metrics in steps.values() if "perf/sps" in metrics]
    if speeds:
        console.print(f"speed       {median(speeds):,.0f} environment steps a second (median of the logged steps)")
    checkpoint = CheckpointStore(directory).last_saved()
    console.print(f"logs        {directory / METRICS_FILE}   (curves: tether plot {directory})", soft_wrap=True)
    if checkpoint:
        console.print(f"checkpoint  {checkpoint}", soft_wrap=True)
        console.print(f"test it     tether eval {checkpoint} env.eval.num_episodes=100", soft_wrap=True)
        console.print(f"watch it    tether play {checkpoint}", soft_wrap=True)
        console.print(f"resume      {command}", soft_wrap=True)
    else:
        console.print("checkpoint  none: this run is lost but for its logs. Set trainer.save_freq to keep the policy.")

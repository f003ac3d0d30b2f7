"""`tether rm`: the reward model on its own. Heavy modules are imported inside, so that help is instant."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

rm_app = typer.Typer(name="rm", help="The reward model on its own.", no_args_is_help=True)


@rm_app.callback()
def _group() -> None:
    """The reward model on its own."""


@rm_app.command()
def train(
    pairs: Annotated[list[str], typer.Argument(help="Files of pairs, .jsonl, .json or .parquet: chosen, rejected.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A causal LM, or a reward model to continue from.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the reward model goes; must not be there yet.")],
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate of AdamW; a cosine after a warm-up.")] = 1e-5,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of AdamW.")] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pairs.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs an optimizer step.")] = 64,
    micro_batch_size: Annotated[
        int, typer.Option(min=1, help="Pairs a forward and backward pass; never changes the result.")
    ] = 8,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and response; default: the model's positions.")
    ] = None,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of prompts to measure on.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of the held-out prompts and of the order.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Recompute activations in the backward pass: less memory, more time.")
    ] = False,
) -> None:
    """Train a reward model on pairs (Bradley-Terry), before a run takes it as reward_model.model.path.

    For example: tether rm train pairs.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --out rm
    """
    if out.exists():
        raise ValueError(f"--out={out}: is there already; name a folder that is not")
    from tether.assembly.reward_training import RewardTrainingOptions

    options = RewardTrainingOptions(
        lr=lr,
        weight_decay=weight_decay,
        epochs=epochs,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        max_length=max_length,
        held_out=held_out,
        seed=seed,
        device=device,
        gradient_checkpointing=gradient_checkpointing,
    )
    accuracy = train_reward_model(model, pairs, out, options)
    typer.echo(f"held-out accuracy: {accuracy[0]:.3f} before, {accuracy[-1]:.3f} after")
    typer.echo(f"start the run with reward_model.enable=True reward_model.model.path={out}")


def train_reward_model(model: str, pairs: list[str], out: Path, options: object) -> list[float]:
    """Train, and write a Hugging Face directory with the metrics beside it: whole, or not at all.

    Args:
        model: a causal LM or a reward model.
        pairs: files.
        out: does not exist yet.
        options: `tether.assembly.reward_training.RewardTrainingOptions`.

    Returns:
        Held-out accuracy before the first step and after each epoch.

    Raises:
        ValueError: unusable pairs, or a model that cannot be trained.
    """
    from rich.progress import Progress
    from transformers.utils.logging import disable_progress_bar

    from tether.assembly.reward_training import RewardTrainingOptions, build_reward_training
    from tether.metrics.loggers import RunInfo, build_loggers
    from tether.runtime.terminal import Screen
    from tether.trainer.text import ACCURACY

    assert isinstance(options, RewardTrainingOptions)
    disable_progress_bar()
    training = build_reward_training(model, pairs, options)
    screen, found = Screen(), list[float]()
    learned, apart, steps = len(training.learned), len(training.held_out), training.total_steps
    screen.print(f"{learned} pairs to learn from, {apart} held out, {steps} steps", soft_wrap=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        loggers = build_loggers(("file",), RunInfo(partial, "rm", out.name, asdict(options), total_steps=steps))
        try:
            with Progress(console=Screen(stderr=True), transient=True) as progress:
                bar = progress.add_task("training", total=steps)
                for step, metrics in training.run():
                    loggers.log(step, metrics)
                    found += [metrics[ACCURACY]] if ACCURACY in metrics else []
                    progress.update(bar, completed=step, description=f"held-out accuracy {found[-1]:.3f}")
        finally:
            loggers.close()
        training.learner.engine.save(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return found

"""`tether rm`: trains a reward model. Large modules are imported inside functions, so that help is instant."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.runtime.standard_streams import continue_without_output

if TYPE_CHECKING:
    from tether.integrations.reward_models.build import RewardTrainingOptions

_DATE = "the date of the first start"
"""Key of the date in the identity of a checkpoint; chat templates may contain the date."""

rm_app = typer.Typer(name="rm", help="Train a reward model.", no_args_is_help=True)


@rm_app.callback()
def _group() -> None:
    """Train a reward model."""


@rm_app.command()
def train(
    pairs: Annotated[list[str], typer.Argument(help="Files of pairs, .jsonl, .json or .parquet: chosen, rejected.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A causal LM, or a reward model to continue from.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder of the reward model.")],
    lr: Annotated[
        float, typer.Option(min=0, help="Peak learning rate of AdamW, with warm-up and cosine decay.")
    ] = 1e-5,
    weight_decay: Annotated[float, typer.Option(min=0, help="Weight decay of AdamW.")] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pairs.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs per optimizer step.")] = 64,
    micro_batch_size: Annotated[
        int, typer.Option(min=1, help="Pairs per forward and backward pass; never changes the result.")
    ] = 8,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of prompt and response; default: the model's number of positions."),
    ] = None,
    held_out: Annotated[float, typer.Option(max=0.9, help="Share of held-out prompts, above 0.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the held-out prompts and of the order of pairs.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Recompute activations in the backward pass: less memory, more time.")
    ] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
) -> None:
    """Train a reward model on pairs (Bradley-Terry), for a run with reward_model.model.path.

    The same command resumes an interrupted training from its last checkpoint.

    For example: tether rm train pairs.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --out rm
    """
    continue_without_output()
    _refuse_existing(out)
    from tether.integrations.reward_models.build import RewardTrainingOptions

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
    train_reward_model(model, pairs, out, options, save_every)
    typer.echo(f"start the run with reward_model.enable=True {shlex.quote(f'reward_model.model.path={out}')}")


def train_reward_model(
    model: str, pairs: list[str], out: Path, options: RewardTrainingOptions, save_every: int = 200
) -> list[float]:
    """Train a reward model, and write it with its metrics to a Hugging Face directory once it is complete.

    An interrupted training resumes from its last checkpoint, with a bitwise equal result.

    Args:
        model: a causal LM or a reward model.
        pairs: files of pairs.
        out: new folder of the reward model.
        options: options of the training.
        save_every: steps between checkpoints, which are in a hidden folder next to `out`.

    Returns:
        Held-out accuracy before the first step and after each epoch.

    Raises:
        ValueError: pairs are not usable, the model cannot be trained, an interrupted training had different arguments,
            or the model diverged.
    """
    from transformers.utils.logging import disable_progress_bar

    from tether.checkpoints import CheckpointStore, load_state, step_of
    from tether.integrations.reward_models.build import build_reward_training
    from tether.integrations.reward_models.trainer import ACCURACY, beats_chance, until_unusable
    from tether.loop.checkpoint import Persistence, check_saving
    from tether.metrics.loggers import RunInfo, build_loggers
    from tether.runtime.global_rng import set_rng_state
    from tether.runtime.run_lock import RunLock
    from tether.runtime.terminal import Screen, Waiting
    from tether.text.data.prompts import today

    disable_progress_bar()
    work, screen = out.with_name(f".{out.name}.training"), Screen()
    store = CheckpointStore(work, keep=1)
    moved, best = False, _Best(work)
    with RunLock(work, key="--out") as lock:
        try:
            _refuse_existing(out)
            identity = _identity(model, pairs, options)
            start = store.resolve("auto")
            day = _check_same(start, identity).get(_DATE, today()) if start else today()
            training = build_reward_training(model, pairs, options, start and start / "rm", day)
            engine, done = training.learner.engine, step_of(start) if start else 0
            if start:
                best.accuracies |= _accuracies(work)
                engine.load_state(start / "training" / "rm.pt")
                set_rng_state(load_state(start / "training" / "trainer.pt")["rng"])
                screen.print(f"resuming after step {done}, from {start}", soft_wrap=True)
            else:
                best.clear()
            check_saving(work, {"reward model": engine})
            num_learned, num_held_out, steps = len(training.learned), len(training.held_out), training.total_steps
            screen.print(f"{num_learned} pairs to learn from, {num_held_out} held out, {steps} steps", soft_wrap=True)
            persistence = Persistence(store, identity | {_DATE: day}, json.dumps(asdict(options), indent=2))
            info = RunInfo(work, "rm", out.name, asdict(options), total_steps=steps, resumed_step=done or None)
            loggers, accuracy = build_loggers(("file",), info), ""
            try:
                with Waiting("step", steps, screen, done) as waiting:
                    for step, metrics in until_unusable(training.run(done)):
                        loggers.log(step, metrics)
                        if ACCURACY in metrics:
                            accuracy = f"held-out accuracy:{metrics[ACCURACY]:.3f}"
                            best.offer(step, metrics[ACCURACY], engine.save)
                        waiting.show(step, accuracy)
                        if step and step % save_every == 0 and step < steps:
                            persistence.begin(
                                step,
                                lambda folder: engine.saving(folder / "rm", folder / "training" / "rm.pt", copy=False),
                                {},
                            )()
            finally:
                loggers.close()
            accuracies = _accuracies(work)
            best_step, folder = best.result()
            shutil.copy(work / "metrics.jsonl", folder)
            _move(folder, out)
            moved = True
        finally:
            if moved or (store.last_saved() is None and not best.is_complete):
                lock.remove_folder()
    before, best_accuracy = accuracies[0], accuracies[best_step]
    untrained = " (an untrained head gives both sides of a pair the same score)" if before == 0 else ""
    last = "" if best_step == steps else f", which is kept ({accuracies[steps]:.3f} after step {steps}, the last)"
    summary = f"held-out accuracy: {before:.3f} before{untrained}, {best_accuracy:.3f} after step {best_step}{last}"
    screen.print(summary, soft_wrap=True)
    if not beats_chance(best_accuracy, num_held_out):
        if beats_chance(1.0, num_held_out):
            problem = (
                f"the held-out accuracy is {best_accuracy:.3f} of {num_held_out} pairs, no better than chance (0.5): "
                "the model learned no preference that generalizes. Lower --lr, or give more pairs"
            )
        else:
            problem = (
                f"with only {num_held_out} held-out pairs, 100% accuracy is not distinguishable from chance. Raise "
                "--held-out, or give more pairs"
            )
        screen.print(f"warning: {problem}", style="yellow", soft_wrap=True)
    return list(accuracies.values())


class _Best:
    """Stores the weights with the best held-out accuracy after an epoch, in a folder named by their step.

    Args:
        work: folder of the training.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self.accuracies: dict[int, float] = {}

    def offer(self, step: int, accuracy: float, save: Callable[[Path], None]) -> None:
        """Save the weights of a step unless an earlier step was better; the untrained weights of step 0 are ignored."""
        self.accuracies[step] = accuracy
        before = self._folders()
        if step == 0 or any(other < step and self.accuracies[other] > accuracy for other in before):
            return
        partial = self._work / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        save(partial)
        shutil.rmtree(self._work / f"best-{step}", ignore_errors=True)
        partial.rename(self._work / f"best-{step}")
        for other, folder in before.items():
            if other != step:  # a later step is of the interrupted training, which repeats it
                shutil.rmtree(folder)

    def result(self) -> tuple[int, Path]:
        """Return the best step and its folder."""
        (best,) = self._folders().items()
        return best

    def clear(self) -> None:
        """Remove the folders of an interrupted training."""
        for folder in self._folders().values():
            shutil.rmtree(folder)

    @property
    def is_complete(self) -> bool:
        """Return whether a training is complete: the metrics, which are copied last, are in its folder."""
        return any(self._work.glob("best-*/metrics.jsonl"))

    def _folders(self) -> dict[int, Path]:
        return {int(folder.name.removeprefix("best-")): folder for folder in self._work.glob("best-*")}


def _accuracies(work: Path) -> dict[int, float]:
    """Return step -> logged held-out accuracy."""
    from tether.integrations.reward_models.trainer import ACCURACY
    from tether.metrics.loggers import read_metrics

    logged = sorted(read_metrics(work).items())
    return {step: metrics[ACCURACY] for step, metrics in logged if ACCURACY in metrics}


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ValueError(f"--out={out}: exists already; name a new folder")


def _move(folder: Path, out: Path) -> None:
    try:
        folder.rename(out)
    except OSError as error:
        raise ValueError(
            f"--out={out}: cannot be written ({error.strerror}): something created it during the training. The "
            f"trained model is in {folder}; move it to another place"
        ) from error


def _identity(model: str, pairs: list[str], options: RewardTrainingOptions) -> dict[str, str]:
    """Return option -> value for everything that affects the result."""
    from tether.checkpoints import sha256_of
    from tether.text.data.location import expand

    free = ("micro_batch_size", "gradient_checkpointing", "device")
    chosen = {f"--{key.replace('_', '-')}": str(value) for key, value in asdict(options).items() if key not in free}
    names = (Path(name) for spec in pairs for name in expand(spec))
    files = [file for file in names if file.is_file()]  # `load_pairs` reports missing ones
    hashes = {f"the file {path}": digest for path, digest in zip(files, sha256_of(files), strict=True)}
    return {"--model": model, "the files": " ".join(pairs)} | hashes | chosen


def _check_same(start: Path, identity: Mapping[str, str]) -> dict[str, str]:
    """Check that the arguments are those of an interrupted training, and return its identity."""
    from tether.runtime.disk import read_json

    previous: dict[str, str] = read_json(start / "identity.json", dict, "Delete the folder to begin again")
    if changed := [key for key in identity if previous.get(key) != identity[key]]:
        raise ValueError(
            f"{start.parent}: an interrupted training in this folder had another value of {', '.join(changed)}. Use "
            "the same to resume it, or delete the folder to begin again"
        )
    return previous

"""`tether rm`: the reward model on its own. Heavy modules are imported inside, so that help is instant."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.runtime.standard_streams import outlive_lost_output

if TYPE_CHECKING:
    from tether.assembly.reward_training import RewardTrainingOptions

_DATE = "the date of the first start"
"""Names it in a checkpoint: chat templates may write it."""

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
    held_out: Annotated[float, typer.Option(max=0.9, help="Share of prompts to measure on, above 0.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of the held-out prompts and of the order.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Recompute activations in the backward pass: less memory, more time.")
    ] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps from checkpoint to checkpoint.")] = 200,
) -> None:
    """Train a reward model on pairs (Bradley-Terry), before a run takes it as reward_model.model.path.

    Stopped, the same command goes on after the last checkpoint.

    For example: tether rm train pairs.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --out rm
    """
    outlive_lost_output()
    _refuse_existing(out)
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
    train_reward_model(model, pairs, out, options, save_every)
    typer.echo(f"start the run with reward_model.enable=True reward_model.model.path={out}")


def train_reward_model(
    model: str, pairs: list[str], out: Path, options: RewardTrainingOptions, save_every: int = 200
) -> list[float]:
    """Train, and write a Hugging Face directory with the metrics beside it: whole, or not at all.

    A stopped training resumes from its last checkpoint, bitwise as if it had not been stopped.

    Args:
        model: a causal LM or a reward model.
        pairs: files.
        out: does not exist yet.
        options: of the training.
        save_every: steps from checkpoint to checkpoint, in a hidden folder beside `out`.

    Returns:
        Held-out accuracy before the first step and after each epoch.

    Raises:
        ValueError: unusable pairs, a model that cannot be trained, a training that was stopped and had
            others, or one whose model became of no use.
    """
    from transformers.utils.logging import disable_progress_bar

    from tether.assembly.reward_training import build_reward_training
    from tether.checkpoints import CheckpointStore, load_state, step_of
    from tether.data.chat import today
    from tether.metrics.loggers import RunInfo, build_loggers
    from tether.runtime.global_rng import set_rng_state
    from tether.runtime.run_lock import RunLock
    from tether.runtime.terminal import Screen, Waiting
    from tether.trainer import Persistence, check_saving
    from tether.trainer.text import ACCURACY, beats_chance, until_unusable

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
                screen.print(f"goes on after step {done}, from {start}", soft_wrap=True)
            else:
                best.clear()
            check_saving(work, {"reward model": engine})
            learned, apart, steps = len(training.learned), len(training.held_out), training.total_steps
            screen.print(f"{learned} pairs to learn from, {apart} held out, {steps} steps", soft_wrap=True)
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
            found = _accuracies(work)
            kept, whole = best.kept()
            shutil.copy(work / "metrics.jsonl", whole)
            _move(whole, out)
            moved = True
        finally:
            if moved or (store.last_saved() is None and not best.is_whole):
                lock.remove_folder()
    untrained = " (an untrained head gives both sides of a pair the same score)" if found[0] == 0 else ""
    rest = "" if kept == steps else f", which is kept ({found[steps]:.3f} after step {steps}, the last)"
    said = f"held-out accuracy: {found[0]:.3f} before{untrained}, {found[kept]:.3f} after step {kept}{rest}"
    screen.print(said, soft_wrap=True)
    if not beats_chance(1.0, apart):
        warning = (
            f"warning: only {apart} pairs are held out, and coins may rank all of them right: they are too few to tell "
            "whether anything was learned. Raise --held-out, or give more pairs"
        )
        screen.print(warning, style="yellow", soft_wrap=True)
    elif not beats_chance(found[kept], apart):
        warning = (
            f"warning: the held-out accuracy is {found[kept]:.3f} of {apart} pairs, no better than chance (0.5): the "
            "model learned no preference that holds beyond its own pairs. Lower --lr, or give more pairs"
        )
        screen.print(warning, style="yellow", soft_wrap=True)
    return list(found.values())


class _Best:
    """The weights of the best held-out accuracy after an epoch, in a folder that is named by their step.

    Args:
        work: the folder of the training.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self.accuracies: dict[int, float] = {}

    def offer(self, step: int, accuracy: float, save: Callable[[Path], None]) -> None:
        """Keep the weights of a step, unless those of an earlier one are better; not of the first, untrained ones."""
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
            if other != step:  # a later one is of a training that was stopped, and comes again
                shutil.rmtree(folder)

    def kept(self) -> tuple[int, Path]:
        """The step, and its folder."""
        (found,) = self._folders().items()
        return found

    def clear(self) -> None:
        """Remove what a killed training left."""
        for folder in self._folders().values():
            shutil.rmtree(folder)

    @property
    def is_whole(self) -> bool:
        """Whether a training came to its end here: the metrics, which come last, are in a folder, too."""
        return any(self._work.glob("best-*/metrics.jsonl"))

    def _folders(self) -> dict[int, Path]:
        return {int(folder.name.removeprefix("best-")): folder for folder in self._work.glob("best-*")}


def _accuracies(work: Path) -> dict[int, float]:
    """Step -> held-out accuracy, as it was logged."""
    from tether.metrics.loggers import read_metrics
    from tether.trainer.text import ACCURACY

    logged = sorted(read_metrics(work).items())
    return {step: metrics[ACCURACY] for step, metrics in logged if ACCURACY in metrics}


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ValueError(f"--out={out}: is there already; name a folder that is not")


def _move(whole: Path, out: Path) -> None:
    try:
        whole.rename(out)
    except OSError as error:
        raise ValueError(
            f"--out={out}: cannot be written ({error.strerror}): something else came there during the training. The "
            f"trained model is in {whole}; move it to where it belongs"
        ) from error


def _identity(model: str, pairs: list[str], options: RewardTrainingOptions) -> dict[str, str]:
    """All that the result depends on, by option."""
    from tether.checkpoints import sha256_of
    from tether.data.location import expand

    free = ("micro_batch_size", "gradient_checkpointing", "device")
    chosen = {f"--{key.replace('_', '-')}": str(value) for key, value in asdict(options).items() if key not in free}
    names = (Path(name) for spec in pairs for name in expand(spec))
    files = [file for file in names if file.is_file()]  # `load_pairs` reports the others
    hashes = {f"the file {path}": found for path, found in zip(files, sha256_of(files), strict=True)}
    return {"--model": model, "the files": " ".join(pairs)} | hashes | chosen


def _check_same(start: Path, identity: Mapping[str, str]) -> dict[str, str]:
    """Return what identifies the training that was stopped; refuses a different one."""
    from tether.runtime.disk import read_json

    before: dict[str, str] = read_json(start / "identity.json", dict, "Delete the folder to begin again")
    if changed := [key for key in identity if before.get(key) != identity[key]]:
        raise ValueError(
            f"{start.parent}: a training was stopped here, and {', '.join(changed)} was not as it is now. Give the "
            "same to go on, or delete the folder to begin again"
        )
    return before

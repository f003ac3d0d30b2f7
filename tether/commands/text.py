"""What the command line does: train, evaluate, play, generate, pull."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tether.assembly.run import build_run
from tether.assembly.standalone import build_critic_pretraining, build_evaluator
from tether.checkpoints.store import step_of
from tether.commands.control import evaluate as evaluate_control
from tether.commands.control import play as play_control
from tether.commands.model import checkpoint_at
from tether.commands.report import show_report, show_resumed
from tether.config import LoadedConfig, load_config
from tether.metrics.loggers import build_loggers
from tether.metrics.loggers.protocol import RunInfo
from tether.models.language.model_path import resolve_model_path
from tether.rollout.protocol import NoiseKey
from tether.runtime.cache import cache_dir
from tether.runtime.interrupt import graceful_interrupt
from tether.runtime.run_lock import RunLock
from tether.runtime.terminal import Screen
from tether.trainer.text.critic_pretraining import EXPLAINED
from tether.trainer.text.evaluation import EvaluationResult
from tether.trainer.text.preflight import preflight


def train(loaded: LoadedConfig, command: str) -> None:
    """Run to the end, or to a signal; then show what came of it.

    Args:
        loaded: the configuration.
        command: what the user typed: typed again, the run resumes.

    Raises:
        ValueError: unusable inputs, or a preflight that refuses.
    """
    disable_progress_bar()  # transformers' own, which would appear at every checkpoint
    console = Screen()
    for note in loaded.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    run = build_run(loaded)
    try:
        trainer = run.trainer
        console.print(f"training prompts: {trainer.dataset.report}", soft_wrap=True)
        if trainer.evaluation:
            console.print(f"validation prompts: {trainer.evaluation.dataset.report}", soft_wrap=True)
        if run.resumed_from:
            show_resumed(console, run.resumed_from, loaded, trainer.step_number, trainer.schedule.total_steps)
        elif loaded.config.trainer.preflight:
            checked = preflight(trainer, trainer.actor.plan.mini_batch_rows, trainer.actor.plan.epochs)
            checked.show(console)
            if checked.refused:
                raise ValueError(
                    "preflight refuses the run; see above. trainer.preflight=False starts it all the same."
                )
        with graceful_interrupt() as interrupted:
            if loaded.config.trainer.val_only:
                trainer.loggers.log(trainer.step_number, trainer.evaluate())
            else:
                trainer.fit(interrupted)
    finally:
        run.close()
    if loaded.config.trainer.resume_mode != "auto":
        command += " trainer.resume_mode=auto '~trainer.resume_from_path'"
    if trainer.step_number == trainer.schedule.total_steps:  # the same command would find nothing left to do
        command += f" trainer.total_training_steps={2 * trainer.step_number}"
    show_report(run.directory, console, command)
    if interrupted.signal:
        done, total = trainer.step_number, trainer.schedule.total_steps
        console.print(f"stopped by {interrupted.signal.name} after step {done} of {total}; the command above resumes")


def evaluate(model: str, file: Path | None, overrides: Sequence[str]) -> None:
    """Score a model on held-out prompts or in its environments; prints the metrics and writes them to a file.

    Args:
        model: a checkpoint or the folder of a run, whose configuration counts; or a model that was not trained here.
        file: the configuration of the latter; None: the overrides are all of it.
        overrides: over the configuration.

    Raises:
        ValueError: no checkpoint, or unusable inputs.
        CheckpointDamaged: a file of the checkpoint is not what was saved.
    """
    disable_progress_bar()
    console = Screen()
    folder = Path(model)
    if not folder.is_dir() or (folder / "config.json").exists():
        # Without a file, what only training needs is filled in.
        trained_on = [] if file else ["data.train_files=unused"]
        quoted = model.replace("'", "\\'")
        loaded = load_config(file, [*trained_on, f"actor_rollout_ref.model.path='{quoted}'", *overrides])
        path = resolve_model_path(model, cache_dir())
        _show(_sampled(loaded, path, 0, console), Path(f"eval_{folder.name}.json"), console)
        return
    if file is not None:
        raise ValueError(f"{file}: {folder} was trained here and has its own configuration; give overrides of it only")
    checkpoint = checkpoint_at(folder)
    loaded = load_config(checkpoint / "run.yaml", overrides)
    out = checkpoint.parent / f"eval_{checkpoint.name}.json"  # not in it: its manifest lists every file
    if loaded.config.env.train.id is not None:
        _show(EvaluationResult(evaluate_control(checkpoint, loaded, console), []), out, console)
    else:
        _show(_sampled(loaded, checkpoint / "actor", step_of(checkpoint), console), out, console)


def _sampled(loaded: LoadedConfig, model: Path | str, step: int, console: Screen) -> EvaluationResult:
    evaluator, waiting = build_evaluator(loaded, model), console.status("sampling")
    with evaluator as (evaluation, collector), waiting as status:
        return evaluation.run(
            collector,
            NoiseKey(loaded.config.trainer.seed, step),
            lambda done, total: status.update(f"sampling: {done} of {total} responses"),
        )


def pretrain_critic(
    loaded: LoadedConfig, rollouts: Path | None, out: Path | None, *, epochs: int, held_out: float
) -> None:
    """Train a critic on stored rollouts and write it as a Hugging Face directory, with its metrics beside it.

    Args:
        loaded: the configuration of the run that the critic is for.
        rollouts: folder with the files of ``trainer.rollout_data_dir``; None: that folder.
        out: where the critic goes; None: ``pretrained_critic`` in the folder of the run.
        epochs: passes over the rollouts.
        held_out: share of the prompts that the critic is measured on.

    Raises:
        ValueError: no rollouts are named, or they are not usable.
    """
    disable_progress_bar()
    trainer = loaded.config.trainer
    folder = rollouts or (Path(trainer.rollout_data_dir) if trainer.rollout_data_dir else None)
    if folder is None:
        raise ValueError("name the stored rollouts: --rollouts FOLDER, or trainer.rollout_data_dir=FOLDER")
    out = out or Path(trainer.default_local_dir) / "pretrained_critic"
    console = Screen()
    with RunLock(out, key="--out"):
        pretraining, tokenizer = build_critic_pretraining(loaded.config, folder, epochs=epochs, held_out=held_out)
        learned, apart, total = len(pretraining.learned), len(pretraining.held_out), pretraining.total_steps
        console.print(f"{learned} responses to learn from, {apart} held out, {total} steps", soft_wrap=True)
        info = RunInfo(out, trainer.project_name, trainer.experiment_name, loaded.shown(), total_steps=total)
        loggers, explained = build_loggers(trainer.logger, info), []
        try:
            for step, metrics in pretraining.run():
                loggers.log(step, metrics)
                explained += [metrics[EXPLAINED]] if EXPLAINED in metrics else []
        finally:
            loggers.close()
        pretraining.learner.engine.save_model(out)
        tokenizer.save_pretrained(out)
    console.print(f"held-out explained variance: {explained[0]:.3f} before, {explained[-1]:.3f} after", soft_wrap=True)
    console.print(f"start the run with critic.model.path={out}", soft_wrap=True)


def play(checkpoint: Path, overrides: Sequence[str], episodes: int, folder: Path | None) -> None:
    """Record episodes of a control policy.

    Args:
        checkpoint: a global_step_N folder, or the folder of a run (its last one).
        overrides: of the run's configuration.
        episodes: how many.
        folder: where the video goes; None: as the configuration says.

    Raises:
        ValueError: it is no checkpoint of a control policy.
    """
    checkpoint = checkpoint_at(checkpoint)
    asked = [
        f"env.eval.num_episodes={episodes}",
        "env.eval.total_num_envs=1",
        "env.eval.video_cfg.save_video=True",
        *([] if folder is None else [f"env.eval.video_cfg.video_base_dir={folder}"]),
    ]
    loaded = load_config(checkpoint / "run.yaml", [*asked, *overrides])
    if loaded.config.env.train.id is None:
        raise ValueError(f"{checkpoint}: a language model; ask it with `tether generate {checkpoint}`")
    console = Screen()
    console.print(f"written to {play_control(checkpoint, loaded, console)}", soft_wrap=True)


def _show(result: EvaluationResult, out: Path, console: Screen) -> None:
    for name, value in result.metrics.items():
        console.print(f"{name:60} {value:.4f}", soft_wrap=True)
    out.write_text(json.dumps({"metrics": result.metrics, "samples": [vars(s) for s in result.samples]}, default=str))
    console.print(f"written to {out}", soft_wrap=True)

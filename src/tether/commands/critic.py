"""Pretraining of a critic on the stored rollouts of an earlier run."""

from __future__ import annotations

import shlex
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tether.config import LoadedConfig
from tether.loop.checkpoint import check_saving
from tether.metrics.loggers import RunInfo, build_loggers
from tether.runtime.run_lock import RunLock
from tether.runtime.terminal import Screen
from tether.text.learning.critic_pretraining import EXPLAINED
from tether.text.standalone import build_critic_pretraining


def pretrain_critic(
    loaded: LoadedConfig, rollouts: Path | None, out: Path | None, *, epochs: int, held_out: float
) -> None:
    """Train a critic on stored rollouts and write it to a Hugging Face directory, together with its metrics.

    Args:
        loaded: the configuration of the run that will use the critic.
        rollouts: folder with stored rollouts; None: ``trainer.rollout_data_dir``.
        out: folder of the critic; None: ``pretrained_critic`` in the folder of the run.
        epochs: passes over the rollouts.
        held_out: share of held-out prompts.

    Raises:
        ValueError: the configuration has no folder of rollouts, or the rollouts are unusable.
    """
    disable_progress_bar()
    trainer = loaded.config.trainer
    folder = rollouts or (Path(trainer.rollout_data_dir) if trainer.rollout_data_dir else None)
    if folder is None:
        raise ValueError("name the stored rollouts: --rollouts FOLDER, or trainer.rollout_data_dir=FOLDER")
    out = out or Path(trainer.default_local_dir) / "pretrained_critic"
    console = Screen()
    with RunLock(out, key="--out"):
        pretraining = build_critic_pretraining(loaded.config, folder, epochs=epochs, held_out=held_out)
        check_saving(out, {"critic": pretraining.learner.engine})
        num_learned, num_held_out, total = len(pretraining.learned), len(pretraining.held_out), pretraining.total_steps
        console.print(f"{num_learned} responses to learn from, {num_held_out} held out, {total} steps", soft_wrap=True)
        info = RunInfo(out, trainer.project_name, trainer.experiment_name, loaded.shown(), total_steps=total)
        loggers, explained = build_loggers(trainer.logger, info), []
        try:
            for step, metrics in pretraining.run():
                loggers.log(step, metrics)
                explained += [metrics[EXPLAINED]] if EXPLAINED in metrics else []
        finally:
            loggers.close()
        pretraining.learner.engine.save(out)
    console.print(f"held-out explained variance: {explained[0]:.3f} before, {explained[-1]:.3f} after", soft_wrap=True)
    console.print(f"start the run with {shlex.quote(f'critic.model.path={out}')}", soft_wrap=True)

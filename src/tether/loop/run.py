"""Components that text and control runs share; it does not import transformers, which control runs do not need."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from torch import nn

from tether.algorithms import TOKEN_SELECTIONS
from tether.checkpoints import BEST, CheckpointStore, forget_other_rollbacks, rollbacks_of, step_of
from tether.config import LoadedConfig, RunConfig, check_resumable, device_count
from tether.config.schema import ActorConfig, OptimConfig
from tether.loop.alarms import Alarms
from tether.loop.checkpoint import TRAINING, Persistence
from tether.loop.config import TrainerConfig
from tether.loop.engine import AnyLoss, OptimizerOptions
from tether.loop.loop import OnCollapse, Schedule, Trainer
from tether.loop.parts import BestEvaluation, CheckpointSaver, CriticWarmup, Ranks, Rollbacks, StepProfiler
from tether.loop.preflight import Preflight
from tether.metrics.loggers import Loggers, RunInfo, build_loggers
from tether.metrics.records import RecordFile

LossByStep = Callable[[int], tuple[AnyLoss, dict[str, float]]]


@dataclass(frozen=True)
class Run:
    """A trainer with its configuration and resources."""

    loaded: LoadedConfig
    """The configuration of the run, with all automatic values resolved."""
    trainer: Trainer
    directory: Path
    """Folder of checkpoints, logs and samples."""
    resumed_from: Path | None
    resources: ExitStack
    """Resources to close after the run: reward or environment processes, loggers, and the lock of the folder."""
    about: tuple[str, ...]
    """Lines that describe the data of the run to the user."""
    preflight: Callable[[], Preflight]
    """Checks a run before it begins."""

    def close(self) -> None:
        """End all processes, flush the loggers and release the lock of the folder."""
        self.resources.close()


def find_start(loaded: LoadedConfig) -> tuple[CheckpointStore, Path | None]:
    """Return the checkpoint store of a run, and the verified checkpoint to resume from (None: a new run).

    Raises:
        ValueError: the checkpoint does not exist, is damaged, has only weights, or was made with other model settings.
    """
    trainer = loaded.config.trainer
    store = CheckpointStore(Path(trainer.default_local_dir), keep=trainer.max_actor_ckpt_to_keep)
    resume_path = Path(trainer.resume_from_path) if trainer.resume_from_path else None
    checkpoint = store.resolve(trainer.resume_mode, resume_path)
    if checkpoint:
        if not (checkpoint / TRAINING).is_dir():
            raise ValueError(_weights_only_message(checkpoint, store.newest_before(step_of(checkpoint))))
        check_resumable(checkpoint / "run.yaml", loaded)
    return store, checkpoint


def _weights_only_message(checkpoint: Path, earlier: Path | None) -> str:
    """Return the message about a checkpoint without training state, naming an earlier complete one if there is any."""
    path = shlex.quote(f"trainer.resume_from_path={earlier}")
    model = shlex.quote(f"actor_rollout_ref.model.path={checkpoint}")
    resume = f"trainer.resume_mode=resume_path {path}: resumes from an earlier one; "
    return (
        f"{checkpoint}: has only weights, so no run can resume from it. {resume if earlier else ''}"
        f"{model} and another trainer.default_local_dir: a new run from these weights"
    )


def checkpoint_line(config: RunConfig, models: Iterable[nn.Module]) -> list[str]:
    """Return a line about the size of a checkpoint of these models, or no line if none is saved.

    Weights are stored in float32, and so are the two AdamW moments of trained weights.
    """
    trainer, folder = config.trainer, Path(config.trainer.default_local_dir)
    if trainer.save_freq == 0:
        return []
    parameters = [p for model in models for p in model.parameters()]
    weights = 4 * sum(p.numel() for p in parameters)
    needed = weights + 8 * sum(p.numel() for p in parameters if p.requires_grad)
    free = shutil.disk_usage(folder).free
    when = "after the last step" if trainer.save_freq == -1 else f"every {trainer.save_freq} steps"
    if needed < free:
        remedy = ""
    elif trainer.save_freq == -1 and weights < free:
        remedy = f", enough for the weights alone ({weights / 1e9:.1f} GB), from which no run can resume: make room"
    else:
        remedy = ", which is not enough: make room, or set trainer.save_freq=0 to save none"
    return [f"checkpoints: about {needed / 1e9:.1f} GB, {when}; {free / 1e9:.1f} GB are free{remedy}"]


def with_rollback_learning_rate(loaded: LoadedConfig, store: CheckpointStore, checkpoint: Path | None) -> LoadedConfig:
    """Return the configuration with the learning rate reduced by earlier rollbacks.

    Raises:
        ValueError: the record of rollbacks cannot be read.
    """
    done = len(rollbacks_of(store.root, checkpoint))
    if not done:
        return loaded
    rate = loaded.config.actor_rollout_ref.actor.optim.lr * loaded.config.trainer.rollback_lr_factor**done
    return loaded.with_values({"actor_rollout_ref.actor.optim.lr": rate}, f"{done} rollbacks")


class TrainerParts(TypedDict):
    """The fields of a `Trainer` that do not depend on the kind of policy."""

    critic_warmup: CriticWarmup
    best: BestEvaluation
    saver: CheckpointSaver
    on_collapse: OnCollapse
    rollbacks: Rollbacks | None
    alarms: Alarms
    schedule: Schedule
    persistence: Persistence
    loggers: Loggers


def begin_run(
    loaded: LoadedConfig,
    store: CheckpointStore,
    identity: dict[str, str],
    schedule: Schedule,
    checkpoint: Path | None,
    resources: ExitStack,
) -> TrainerParts:
    """Open the loggers of a run, and set aside checkpoints that are not ancestors of its start.

    After this call no check may refuse the run, because checkpoints have been moved.
    """
    actor, trainer = loaded.config.actor_rollout_ref.actor, loaded.config.trainer
    info = RunInfo(
        directory=store.root,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        config=loaded.shown(),
        total_steps=schedule.total_steps,
        resumed_step=step_of(checkpoint) if checkpoint else None,
    )
    loggers = build_loggers(trainer.logger, info)
    resources.callback(loggers.close)
    aside = None if trainer.resume_mode == "auto" or trainer.val_only else store.set_aside(checkpoint)
    done, rollbacks = rollbacks_of(store.root, checkpoint), None
    if not trainer.val_only:
        forget_other_rollbacks(store.root, done)
    if aside:
        loggers.warn(
            f"trainer.resume_mode={trainer.resume_mode}: the checkpoints of an earlier run in {store.root} are in "
            f"{aside} now. Delete that folder if nobody needs them."
        )
    persistence = Persistence(store, identity, loaded.to_yaml(), loaded.has_secrets)
    saver = CheckpointSaver(trainer.async_save)
    resources.callback(saver.close)
    if trainer.on_collapse == "rollback":
        rollbacks = Rollbacks(store, trainer.max_rollbacks, done, trainer.rollback_lr_factor)
    return TrainerParts(
        critic_warmup=CriticWarmup(trainer.critic_warmup, trainer.critic_warmup_until_explained_variance),
        best=_best_evaluation(trainer, persistence, checkpoint),
        saver=saver,
        on_collapse=trainer.on_collapse,
        rollbacks=rollbacks,
        alarms=Alarms(weight_decay=actor.optim.weight_decay, entropy_coeff=actor.entropy_coeff),
        schedule=schedule,
        persistence=persistence,
        loggers=loggers,
    )


def optimizer_options(optim: OptimConfig, total_steps: int) -> OptimizerOptions:
    """Return the options of a model's optimizer and schedule."""
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    schedule = optim.lr_scheduler_type if optim.lr_decay_style == "constant" else optim.lr_decay_style
    return OptimizerOptions(
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
        grad_clip=optim.clip_grad,
        schedule=schedule,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        min_lr=0.0 if schedule == "constant" else optim.min_lr,
        warmup_init=optim.lr_warmup_init,
        decay_steps=optim.lr_decay_steps,
        wsd_steps=optim.lr_wsd_decay_steps,
        wsd_style=optim.lr_wsd_decay_style,
    )


def _best_evaluation(trainer: TrainerConfig, persistence: Persistence, checkpoint: Path | None) -> BestEvaluation:
    """Return the component that keeps the checkpoint with the best evaluation.

    Args:
        trainer: section of the configuration.
        persistence: persistence of the run.
        checkpoint: the checkpoint that the run resumes from. A best checkpoint that is not one of its ancestors is set
            aside, because it belongs to a different run.
    """
    root = persistence.store.root
    store = CheckpointStore(root / BEST, keep=1)
    store.resolve("disable")
    if trainer.resume_mode != "auto" and not trainer.val_only:
        best, start = store.last_saved(), None
        if checkpoint is not None and checkpoint.parent.resolve() == root.resolve():
            start = best if best is not None and step_of(best) <= step_of(checkpoint) else None
        store.set_aside(start)
    return BestEvaluation(replace(persistence, store=store) if trainer.keep_best else None, trainer.stop_at_score)


def build_profiler(trainer: TrainerConfig, schedule: Schedule, ranks: Ranks | None) -> StepProfiler | None:
    """Return the profiler of selected steps; None if no step is profiled.

    Raises:
        ValueError: the run has no such step.
    """
    if not trainer.profile_steps:
        return None
    if (last := max(trainer.profile_steps)) > schedule.total_steps:
        raise ValueError(
            f"trainer.profile_steps: there is no step {last}, the run has {schedule.total_steps}. Name others."
        )
    return StepProfiler(trainer.profile_steps, Path(trainer.default_local_dir) / "profile", ranks)


def build_recorder(trainer: TrainerConfig, checkpoint: Path | None) -> RecordFile:
    """Return the file that records samples and episodes of a run for `tether view`."""
    resumed = step_of(checkpoint) if checkpoint else None
    return RecordFile(Path(trainer.default_local_dir), int(1e6 * trainer.record_mb), resumed)


def ranks_line(config: RunConfig) -> str:
    """Return a line for the user about the devices of the run."""
    return f"{device_count(config)} devices; up to {config.trainer.max_restarts} restarts when one is lost"


def policy_loss_options(actor: ActorConfig) -> dict[str, float | None]:
    """Return the keyword arguments that all policy losses accept."""
    return {
        "tau_pos": actor.tau_pos,
        "tau_neg": actor.tau_neg,
        "ppo_kl_coef": actor.policy_loss.ppo_kl_coef,
        "dro_beta": actor.policy_loss.dro_beta,
        "behave_weight_threshold": actor.policy_loss.behave_weight_threshold,
        "clip_ratio_low": actor.clip_ratio_low,
        "clip_ratio_high": actor.clip_ratio_high,
        "clip_ratio_c": actor.clip_ratio_c,
    }


def scheduled_loss(actor: ActorConfig, total_steps: int, make: Callable[[ActorConfig], AnyLoss]) -> LossByStep | None:
    """Return `Learner.loss_at` for a decaying clip range or entropy bonus; None if both are constant."""
    falls = {
        "clip_ratio_low": actor.clip_ratio_schedule == "linear",
        "clip_ratio_high": actor.clip_ratio_schedule == "linear",
        "entropy_coeff": actor.entropy_coeff_schedule == "linear",
    }

    def at(step: int) -> tuple[AnyLoss, dict[str, float]]:
        remaining = max(0.0, 1 - step / total_steps)
        now = {name: getattr(actor, name) * remaining for name, does in falls.items() if does}
        return make(actor.model_copy(update=now)), now

    return at if any(falls.values()) else None


def selection_options(actor: ActorConfig) -> dict[str, float]:
    """Return the keyword arguments of losses that select tokens across a mini-batch; empty for other losses."""
    loss = actor.policy_loss
    if loss.loss_mode not in TOKEN_SELECTIONS:
        return {}
    return {
        "clip_ratio_low": actor.clip_ratio_low,
        "clip_ratio_high": actor.clip_ratio_high,
        "clip_cov_ratio": loss.clip_cov_ratio,
        "clip_cov_lb": loss.clip_cov_lb,
        "clip_cov_ub": loss.clip_cov_ub,
        "kl_cov_ratio": loss.kl_cov_ratio,
        "m2_threshold": loss.m2_threshold,
    }

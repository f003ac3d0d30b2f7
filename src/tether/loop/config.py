"""`trainer`: length of the run, validation, checkpoints, logs, machine; `cluster` and `ray_kwargs`: several devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tether.config.schema.engine import ON_RANKS
from tether.config.schema.section import (
    EMBODIED,
    EMBODIED_TOO,
    ActsIf,
    Count,
    Inherits,
    Name,
    OffOrEvery,
    Options,
    OwnFunction,
    Positive,
    PositiveFraction,
    Refuses,
    Saves,
    Says,
    Section,
    Seed,
    Steps,
    as_strings,
)
from tether.runtime.threads import MAX_THREADS

LoggerName = Literal[
    "console", "file", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "vemlp_wandb", "clearml"
]  # fmt: skip
LATER = ("vemlp_wandb", "clearml")
HAS_TESTS = ActsIf("data.val_files", off=((),), other=EMBODIED)
TESTS = ActsIf("trainer.test_freq", off=(-1, 0), other=ActsIf("trainer.val_before_train", off=(False,), also=HAS_TESTS))
ROLLS_BACK = ActsIf("trainer.on_collapse", on=("rollback",))
Loggers = Annotated[tuple[LoggerName | OwnFunction, ...], BeforeValidator(as_strings)]


class TrainerConfig(Section):
    """Length of the run, validation, checkpoints, logs, machine."""

    total_epochs: Positive = 30
    """Passes over the training prompts."""
    total_training_steps: Annotated[Positive | None, EMBODIED_TOO] = None
    """Training steps; null: as many as total_epochs require."""
    total_env_steps: Annotated[Positive | None, EMBODIED] = None
    """Embodied runs: environment steps of the whole run, if total_training_steps is null."""
    log_freq: Annotated[Positive, EMBODIED] = 1
    """Embodied runs: log every N training steps, with statistics over all episodes that ended since the last log."""
    critic_warmup: Annotated[Count, EMBODIED_TOO] = 0
    """The policy learns from this step on, counted from 1; before it only the critic learns. 0, 1: from the start."""
    critic_warmup_until_explained_variance: Annotated[
        float | None, Field(lt=1), Says("a number below 1 or null"), EMBODIED_TOO
    ] = None
    """Train only the critic until it once explains this share of the returns' variance. (tether's own key.)"""
    seed: Annotated[Seed, EMBODIED_TOO] = 1
    """Seed of all randomness: order of prompts, sampling, initialisation, shuffling. (tether's own key.)"""
    project_name: Annotated[Name, EMBODIED_TOO] = "tether"
    """Group of runs, in logs and in the checkpoint path."""
    experiment_name: Annotated[Name, EMBODIED_TOO] = "gsm8k"
    """Name of the run, in logs and in the checkpoint path."""
    logger: Annotated[Loggers, Refuses(LATER, "this logger comes later"), EMBODIED_TOO] = ("console",)
    """Loggers of metrics, such as a jsonl file (file); FILE.py:NAME is your own class. (verl: console, wandb.)"""
    default_local_dir: Annotated[str, EMBODIED_TOO] = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of this run: checkpoints, logs, samples."""
    save_freq: Annotated[Saves, EMBODIED_TOO] = -1
    """Save a checkpoint every N steps, and at the end; -1: only at the end; 0: never. (verl: -1 is never.)"""
    async_save: Annotated[bool, ActsIf("trainer.save_freq", off=(-1, 0)), EMBODIED_TOO] = False
    """Continue training while a checkpoint is written; needs host memory for a copy. (tether's own key.)"""
    max_actor_ckpt_to_keep: Annotated[Positive | None, EMBODIED_TOO] = None
    """Checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: Annotated[Positive | None, Inherits(".max_actor_ckpt_to_keep"), EMBODIED_TOO]
    """Same number as for the actor: both models are in one checkpoint."""
    resume_mode: Annotated[Literal["auto", "disable", "resume_path"], EMBODIED_TOO] = "auto"
    """auto resumes from the newest checkpoint if any, disable never resumes, resume_path uses resume_from_path."""
    resume_from_path: Annotated[str | None, ActsIf(".resume_mode", on=("resume_path",)), EMBODIED_TOO] = None
    """Checkpoint to resume from with resume_mode=resume_path."""
    trust_checkpoint_pickle: Annotated[bool, EMBODIED] = False
    """Load environments.pkl even from a checkpoint that other users can write; it can run code. (tether's own key.)"""
    test_freq: Annotated[OffOrEvery, EMBODIED_TOO] = -1
    """Validate every N steps, and at the end; -1 or 0: never."""
    val_before_train: Annotated[bool, HAS_TESTS, EMBODIED_TOO] = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, then stop."""
    keep_best: Annotated[bool, TESTS, EMBODIED_TOO] = False
    """Keep the checkpoint of the best evaluation in the folder best, next to the newest ones. (tether's own key.)"""
    stop_at_score: Annotated[float | None, TESTS, EMBODIED_TOO] = None
    """Save and stop when an evaluation reaches this mean score or episode return. (tether's own key.)"""
    on_collapse: Annotated[Literal["warn", "stop", "rollback"], EMBODIED_TOO] = "warn"
    """If an alarm reports a collapsed policy: continue, save and stop, or roll back. (tether's own key.)"""
    rollback_lr_factor: Annotated[PositiveFraction, ROLLS_BACK, EMBODIED_TOO] = 0.5
    """Factor that each rollback applies to the policy's learning rate. (tether's own key.)"""
    max_rollbacks: Annotated[Positive, ROLLS_BACK, EMBODIED_TOO] = 3
    """Maximum rollbacks to the last checkpoint before a collapse; after them the run stops. (tether's own key.)"""
    async_mode: Annotated[Literal["off", "one_step_off", "fully_async"], EMBODIED_TOO] = "off"
    """Sample the next batch while the policy learns: exactly one update behind, or up to rollout.max_staleness."""
    profile_steps: Annotated[Steps | None, EMBODIED_TOO] = None
    """Training steps, from 1, that each process traces into the folder profile of the run."""
    rollout_data_dir: str | None = None
    """Folder for all training samples: one jsonl file per step, which `tether critic pretrain` reads."""
    record_mb: Annotated[float, Field(ge=0), Says("a number, 0 or above"), EMBODIED_TOO] = 2.0
    """Maximum megabytes of samples or episodes recorded per step for `tether view`; 0: none. (tether's own key.)"""
    check_memory: Literal["warn", "refuse", "off"] = "warn"
    """A run that does not fit into memory, by `tether plan`: warn, refuse, or do not check. (tether's own key.)"""
    preflight: Annotated[bool, EMBODIED_TOO] = True
    """Check memory, samples and rewards before the first step. (tether's own key.)"""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], EMBODIED_TOO] = "auto"
    """Device of the run; auto uses an accelerator if there is one. (verl: cuda.)"""
    n_gpus_per_node: Annotated[Positive, EMBODIED_TOO] = 1
    """Devices of each machine that share the work, or processes if trainer.device=cpu. (verl: 8.)"""
    nnodes: Annotated[Positive, EMBODIED_TOO] = 1
    """Machines of a Ray cluster that share the work."""
    max_restarts: Annotated[Count, ON_RANKS, EMBODIED_TOO] = 3
    """Automatic resumes from the last checkpoint after a rank was lost. (tether's own key.)"""
    ray_wait_register_center_timeout: Annotated[Positive, ON_RANKS, EMBODIED_TOO] = 600
    """Timeout in seconds for devices to become available, and then for processes to start. (verl: 300.)"""
    max_silence: Annotated[Positive, ON_RANKS, EMBODIED_TOO] = 180
    """Seconds without a heartbeat after which a rank counts as lost. (tether's own key.)"""
    balance_batch: Annotated[bool, ON_RANKS] = True
    """Balance the work per device when assigning rows, instead of splitting them in order. Changes only speed."""
    num_threads: Annotated[
        Annotated[int, Field(gt=0, le=MAX_THREADS), Says(f"a whole number from 1 to {MAX_THREADS}")] | None,
        EMBODIED_TOO,
    ] = None
    """CPU threads; null: OMP_NUM_THREADS, else one per usable core. (tether's own key.)"""

    @property
    def devices(self) -> int:
        """Return the number of devices on all machines."""
        return self.nnodes * self.n_gpus_per_node


class ClusterConfig(Section):
    """The devices that each model of a run uses."""

    component_placement: Annotated[Options, ON_RANKS]
    """Devices by component, for example {actor: 0-1, rollout: 2-3}; empty: every model uses all. (RLinf's key.)"""


class RayKwargsConfig(Section):
    """The Ray cluster of runs on several devices."""

    ray_init: Annotated[Options, ON_RANKS, EMBODIED_TOO]
    """Arguments of ray.init, for example {address: auto} for an existing cluster, or {num_cpus: 8}."""

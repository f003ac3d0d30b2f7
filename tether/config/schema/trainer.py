"""`trainer`: length of the run, validation, checkpoints, logs, machine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tether.config.schema.section import Count, Inherits, Name, OffOrEvery, Positive, Says, Section, Seed, as_strings

LoggerName = Literal[
    "console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio"
]  # fmt: skip
Loggers = Annotated[tuple[LoggerName, ...], BeforeValidator(as_strings)]


class TrainerConfig(Section):
    """Length of the run, validation, checkpoints, logs, machine."""

    total_epochs: Positive = 30
    """Passes over the training prompts."""
    total_training_steps: Positive | None = None
    """Training steps; null: as many as total_epochs need."""
    total_env_steps: Positive | None = None
    """Embodied runs: environment steps of the whole run, where total_training_steps is null."""
    log_freq: Positive = 1
    """Embodied runs: log every so many training steps. Episodes that ended in between are all counted."""
    critic_warmup: Count = 0
    """The policy learns from this step on, counted from 1; before it only the critic does. 0 and 1: from the start."""
    critic_warmup_until_explained_variance: Annotated[float | None, Field(lt=1), Says("a number below 1 or null")] = (
        None
    )
    """Only the critic learns until it explains this share of the returns' variance once. (tether's own key.)"""
    seed: Seed = 1
    """Seeds everything random: order of prompts, sampling, initialisation, shuffling. (tether's own key.)"""
    project_name: Name = "verl_examples"
    """Group of runs, in logs and in the checkpoint path."""
    experiment_name: Name = "gsm8k"
    """This run, in logs and in the checkpoint path."""
    logger: Loggers = ("console",)
    """Where metrics go, besides a jsonl file that is always written (also called file). (verl: console, wandb.)"""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of this run: checkpoints, logs, samples."""
    save_freq: OffOrEvery = -1
    """Save a checkpoint every so many steps, and at the end."""
    max_actor_ckpt_to_keep: Positive | None = None
    """Checkpoints to keep; null: all."""
    max_critic_ckpt_to_keep: Annotated[Positive | None, Inherits(".max_actor_ckpt_to_keep")]
    """The same number: actor and critic stand in one checkpoint."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Continue the newest checkpoint if there is one, never, or the one at resume_from_path."""
    resume_from_path: str | None = None
    """Checkpoint to continue with resume_mode=resume_path."""
    test_freq: OffOrEvery = -1
    """Validate every so many steps, and at the end."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, then stop."""
    log_val_generations: Count = 0
    """Validation samples to log."""
    rollout_data_dir: str | None = None
    """Folder for every training sample: a jsonl file a step, which `tether critic pretrain` reads."""
    validation_data_dir: str | None = None
    """Folder for every validation sample, as jsonl."""
    preflight: bool = True
    """Check prompts, samples and rewards before the first step. (tether's own key.)"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to run; auto takes an accelerator if there is one. (verl: cuda.)"""
    num_threads: Positive | None = None
    """CPU threads; null: one a core. (tether's own key.)"""
    n_gpus_per_node: Positive | None = None
    """Devices to use on this machine; null: what it has. (verl: 8.)"""
    nnodes: Positive = 1
    """Machines to use."""
    balance_batch: bool = True
    """Deal rows to devices so that each gets about as many tokens."""
    esi_redundant_time: Count = 0
    """Seconds kept free for a checkpoint before a cloud instance expires."""
    default_hdfs_dir: str | None = None
    """HDFS copy of checkpoints."""
    del_local_ckpt_after_load: bool = False
    """Delete a checkpoint once it is loaded."""
    ray_wait_register_center_timeout: Positive = 300
    """Seconds until Ray's workers must have come up."""
    use_legacy_worker_impl: Literal["auto", "enable", "disable"] = "auto"
    """Which of verl's two training paths."""


class GlobalProfilerConfig(Section):
    """`global_profiler`: which steps are profiled."""

    tool: str | None = None
    """nsys, npu, torch or torch_memory."""
    steps: list[int] | None = None
    """Steps to profile."""
    profile_continuous_steps: bool = False
    """One trace over neighbouring steps."""
    save_path: str = "outputs/profile"
    """Where traces go."""
    global_tool_config: dict[str, Any] | None = None
    """The tool's own options."""

"""Rows that text and embodied runs have in common."""

from __future__ import annotations

from collections.abc import Iterable

from tether.integrations.rlinf.rows import (
    UNSET,
    Checked,
    Mapped,
    NoEffect,
    NotRead,
    Refused,
    Table,
    Values,
    path,
    steps_or_off,
    to,
)

ACTOR = "actor_rollout_ref.actor"
OVERLAP = NoEffect("how work overlaps changes no result")
TRACES = NoEffect("trainer.profile_steps writes traces")
RANKS_LOGS = NoEffect("each rank's log is in the folder of the run")
PLACED = NoEffect("runs on one device, to the same result, unless the command says trainer.n_gpus_per_node")
NAME = NoEffect("names a group of Ray workers")
SHARDS = NoEffect("on one device there are no shards to place")
MEMORY = NoEffect("saves memory, and changes no result")
SCHEDULER = NoEffect("for cluster.auto_scheduler, which is not supported")
SCHEDULING = (
    "assign_policy", "fuse_rollout_inference_only", "migrate_out_max_bs", "monitor_interval", "preprocess_threshold",
    "recreate_nccl_groups", "rollout_use_all_gpus", "use_pre_process_policy", "use_wait_before_last_iter_policy",
)  # fmt: skip
SERVICE = NoEffect("the logger's own environment variables say so")
FORMATS = Refused("mixed precision is chosen with actor.model.precision", fine=(None, False))


def folder(value: object, values: Values) -> object:
    """Return the folder of a run: the folder of logs, and in it a folder with the name of the run."""
    root = path(values.get("runner.output_dir") or values.get("runner.logger.log_path"), values)
    if isinstance(root, str) and "None" in root.split("/"):  # an interpolation of null
        raise NotRead("a part of it is null, so trainer.default_local_dir keeps its default")
    name = values.get("runner.experiment_name") or values.get("runner.logger.experiment_name")
    return UNSET if root is None else f"{root}/{name}" if name else str(root)


def name_of_run(value: object, values: Values) -> object:
    """Return the name in logs; UNSET if the logger has its own, because then RLinf uses this one in `folder` only."""
    return UNSET if values.get("runner.logger.experiment_name") else value


def loggers(value: str | Iterable[str] | None, values: Values) -> object:
    """Return the loggers, and ``console``, because RLinf always prints metrics, too."""
    return ["console", *([value] if isinstance(value, str) else value or [])]


def resume_path(value: object, values: Values) -> object:
    """Return the checkpoint to resume from; null and auto both mean the last one of the run, if there is one."""
    return None if value in (None, "auto") else value


def resume_mode(value: object, values: Values) -> object:
    """Return the resume mode for `resume_path`."""
    return "auto" if value in (None, "auto") else "resume_path"


SHARED: Table = {
    "cluster.num_nodes": Refused("machines are counted by trainer.nnodes, beside the file", fine=(1, None)),
    "cluster.component_placement": PLACED,
    "cluster.node_groups": PLACED,
    "cluster.auto_scheduler": Refused("moving processes between components is not supported", fine=(False, None)),
    **{f"cluster.{name}": SCHEDULER for name in SCHEDULING},
    "cluster.profiling.*": TRACES,
    "cluster.tracer.*": TRACES,
    "runner.task_type": Checked("decides how the file is read"),
    "runner.logger.log_path": to("trainer.default_local_dir", by=folder),
    "runner.output_dir": to("trainer.default_local_dir", by=folder),
    "runner.logger.project_name": to("trainer.project_name"),
    "runner.logger.experiment_name": to("trainer.experiment_name"),
    "runner.experiment_name": to("trainer.experiment_name", by=name_of_run),
    "runner.logger.logger_backends": to("trainer.logger", by=loggers),
    "runner.logger.swanlab_mode": SERVICE,
    "runner.logger.wandb_entity": SERVICE,
    "runner.logger.wandb_proxy": SERVICE,
    "runner.val_check_interval": to("trainer.test_freq", by=steps_or_off, default=-1),
    "runner.save_interval": to("trainer.save_freq", by=steps_or_off, default=-1),
    "runner.resume_dir": Mapped({"trainer.resume_mode": resume_mode, "trainer.resume_from_path": resume_path}),
    "runner.ckpt_path": Refused("weights out of a .pt file are not supported; give a checkpoint as runner.resume_dir"),
    "runner.eval_policy_path": Refused("a checkpoint is tested with `tether eval`"),
    "runner.weight_sync_interval": Refused("samples always come from the newest weights", fine=(1,)),
    "runner.overlap_env_bootstrap": OVERLAP,
    "runner.use_training_pipeline": OVERLAP,
    "runner.enable_decoupled_mode": Refused("the environments of a batch step together", fine=(False,)),
    "runner.per_worker_log": RANKS_LOGS,
    "runner.per_worker_log_path": RANKS_LOGS,
    "algorithm.clip_ratio_low": to(f"{ACTOR}.clip_ratio_low"),
    "algorithm.clip_ratio_high": to(f"{ACTOR}.clip_ratio_high"),
    "algorithm.clip_ratio_c": to(f"{ACTOR}.clip_ratio_c", default=None),
    "algorithm.clip_log_ratio_min": Refused("log-ratios are always kept within 20 of 0", fine=(None, -20.0)),
    "algorithm.clip_log_ratio_max": Refused("log-ratios are always kept within 20 of 0", fine=(None, 20.0)),
    "algorithm.value_clip": to("critic.cliprange_value"),
    "algorithm.huber_delta": to("critic.huber_delta"),
    "algorithm.gamma": to("algorithm.gamma", default=1.0),
    "algorithm.gae_lambda": to("algorithm.lam", default=1.0),
    "algorithm.update_epoch": to(f"{ACTOR}.ppo_epochs", default=1),
    "algorithm.shuffle_rollout": to(f"{ACTOR}.shuffle", default=True),
    "algorithm.filter_rewards": Refused("leaving out groups by their reward is not supported yet", fine=(False, None)),
    "algorithm.rewards_lower_bound": NoEffect("acts with algorithm.filter_rewards only, which is not supported yet"),
    "algorithm.rewards_upper_bound": NoEffect("acts with algorithm.filter_rewards only, which is not supported yet"),
    "algorithm.behave_weight_threshold": to(f"{ACTOR}.policy_loss.behave_weight_threshold"),
    "algorithm.staleness_threshold": Refused(
        "it bounds samples of RLinf's own loop. For text, set trainer.async_mode=fully_async with rollout.max_staleness"
    ),
    "algorithm.rollout_store_size_per_rank": Refused("samples are not stored beyond their step", fine=(1, None)),
    "algorithm.on_policy_min_ratio": Refused("samples are not stored beyond their step", fine=(0, None)),
    "actor.seed": to("trainer.seed"),
    "actor.group_name": NAME,
    "actor.enable_offload": MEMORY,
    "actor.fsdp_config.mixed_precision.reduce_dtype": SHARDS,
    "actor.fsdp_config.mixed_precision.buffer_dtype": SHARDS,
    "actor.fsdp_config.amp_autocast.enabled": FORMATS,
    "actor.fsdp_config.amp_autocast.precision": NoEffect("acts with amp_autocast.enabled only, which is not supported"),
    "actor.fsdp_config.amp.*": NoEffect("RLinf itself has removed it"),
    "actor.fsdp_config.grad_scaler.*": NoEffect("number formats here need no gradient scaling"),
    "actor.optim.lr": to(f"{ACTOR}.optim.lr"),
    "actor.optim.clip_grad": to(f"{ACTOR}.optim.clip_grad"),
    "rollout.group_name": NAME,
    "rollout.enable_offload": MEMORY,
    "reward.group_name": NAME,
    "weight_syncer.*": NoEffect("weights travel in a way of their own"),
}

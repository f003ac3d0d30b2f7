"""Records episodes in a simulator, and trains a policy on them by behaviour cloning."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tether.checkpoints import CheckpointStore
from tether.config import LoadedConfig
from tether.control.build import fit_defaults, identity_of
from tether.control.learning.rollouts import POLICY
from tether.control.policies.mlp_policy import save_policy
from tether.integrations.robots.behaviour_cloning import CloningOptions
from tether.integrations.robots.cloning import build_cloning, build_recording
from tether.integrations.robots.lerobot import write_dataset
from tether.loop.checkpoint import write_run_yaml
from tether.metrics.loggers import RunInfo, build_loggers
from tether.runtime.run_lock import RunLock
from tether.runtime.terminal import Screen, Waiting


def collect(
    loaded: LoadedConfig, source: str, out: Path, episodes: int, seed: int | None, *, only_successful: bool
) -> None:
    """Record episodes to a dataset.

    Args:
        loaded: the configuration.
        source: the policy, as for `tether.integrations.robots.cloning.build_recording`.
        out: folder of the dataset.
        episodes: number of episodes.
        seed: seed of the start states.
        only_successful: whether only episodes that solve the task are recorded.

    Raises:
        ValueError: the source is invalid, or the folder is not empty.
    """
    console = Screen()
    recording = build_recording(loaded, source, episodes, seed, only_successful=only_successful)
    console.print(f"{episodes} episodes of {recording.env_id} to record", soft_wrap=True)
    with Waiting("recorded", episodes, console) as waiting:
        count = write_dataset(out, waiting.each(recording.episodes), fps=recording.fps, robot=recording.env_id)
    console.print(f"{count} episodes of {recording.env_id} in {out}", soft_wrap=True)
    console.print(f"imitate them  tether bc ... --data {shlex.quote(str(out))}", soft_wrap=True)


def clone(
    loaded: LoadedConfig,
    data: Path,
    out: Path | None,
    options: CloningOptions,
    *,
    held_out: float,
    bounds: tuple[float, float],
) -> None:
    """Train a new policy to imitate recorded episodes, and write a checkpoint from which a run can start.

    Args:
        loaded: the configuration of the run.
        data: folder of the dataset.
        out: folder of the checkpoint; None: ``cloned`` in the folder of the run.
        options: options of the optimizer and the length of the training.
        held_out: share of held-out episodes.
        bounds: quantiles of the recorded actions that action tokens cover.

    Raises:
        ValueError: the dataset or the environment is not usable, as for
        `tether.integrations.robots.cloning.build_cloning`.
    """
    loaded = fit_defaults(loaded)
    trainer = loaded.config.trainer
    out = out or Path(trainer.default_local_dir) / "cloned"
    console = Screen()
    with RunLock(out, key="--out"):
        cloning, policy = build_cloning(loaded.config, data, options, held_out, bounds)
        console.print(
            f"{len(cloning.learned)} decisions to learn from, {len(cloning.held_out)} held out", soft_wrap=True
        )
        info = RunInfo(out, trainer.project_name, trainer.experiment_name, loaded.shown(), total_steps=options.epochs)
        loggers, losses = build_loggers(trainer.logger, info), []
        try:
            for epoch, metrics in enumerate(cloning.run()):
                loggers.log(epoch, metrics)
                losses.append(metrics["bc/held_out_loss"])
        finally:
            loggers.close()

        def write(folder: Path) -> None:
            save_policy(policy, folder / POLICY)
            (folder / "identity.json").write_text(json.dumps(identity_of(loaded.config), indent=2))
            write_run_yaml(folder, loaded.to_yaml(), private=loaded.has_secrets)

        store = CheckpointStore(out)
        if moved := store.set_aside(None):
            console.print(f"the previous checkpoint was moved to {moved}", soft_wrap=True)
        checkpoint = store.save(len(losses) - 1, write)
    best = min(range(len(losses)), key=losses.__getitem__)
    console.print(
        f"held-out loss: {losses[0]:.3f} before, {losses[best]:.3f} after epoch {best} of {len(losses) - 1}, which is "
        "kept",
        soft_wrap=True,
    )
    console.print(f"test it       tether eval {shlex.quote(str(checkpoint))}", soft_wrap=True)
    path = shlex.quote(f"actor_rollout_ref.model.path={checkpoint}")
    console.print(f"start from it tether train ... {path}", soft_wrap=True)

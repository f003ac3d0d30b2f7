"""Evaluation of a checkpoint or another model on held-out prompts or in environments, and recording of episodes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tether.checkpoints import run_of, step_of
from tether.commands.policy import checkpoint_at, load_saved
from tether.commands.report import EPISODES
from tether.config import LoadedConfig, load_config
from tether.control.build import build_evaluation, preprocessing_line, video_folder
from tether.control.learning.rollouts import POLICY
from tether.control.policies.mlp_policy import load_policy
from tether.loop.protocol import EvaluationResult
from tether.runtime.cache import cache_dir
from tether.runtime.global_rng import seed_rng
from tether.runtime.machine import set_threads
from tether.runtime.terminal import Screen, Waiting
from tether.text.models.model_path import resolve_model_path
from tether.text.sampling.protocol import NoiseKey
from tether.text.standalone import build_evaluator


def evaluate(model: str, file: Path | None, overrides: Sequence[str]) -> None:
    """Score a model on held-out prompts or in its environments; print the metrics and write them to a file.

    If the checkpoint's folder is read-only, the metrics are only printed, with a message.

    Args:
        model: a checkpoint or the folder of a run, whose configuration is used; or another model.
        file: the configuration for another model; None: there are only overrides.
        overrides: overrides of the configuration.

    Raises:
        ValueError: there is no checkpoint, or inputs are unusable.
        CheckpointDamaged: a file of the checkpoint has changed since it was saved.
    """
    disable_progress_bar()
    screen, folder = Screen(), Path(model)
    if not folder.is_dir() or (folder / "config.json").exists():
        # Without a file, keys that only training needs get a placeholder.
        placeholders = [] if file else ["data.train_files=unused"]
        quoted = model.replace("'", "\\'")
        loaded = load_config(file, [*placeholders, f"actor_rollout_ref.model.path='{quoted}'", *overrides])
        path = resolve_model_path(model, cache_dir())
        result, out = _evaluate_text(loaded, path, 0, screen), Path(f"eval_{folder.name}.json")
    elif file is not None:
        raise ValueError(f"{file}: {folder} has its own configuration; give only overrides of it")
    else:
        checkpoint = checkpoint_at(folder)
        loaded = load_saved(checkpoint, overrides)
        if loaded.config.sft.enable and loaded.sources["data.val_files"] != "command line":
            raise ValueError(
                f"{folder}: was fine-tuned (tether sft), and its validation rows name no reward. Give prompts that "
                "do: data.val_files=FILE. The validation loss is val/loss in the run's metrics.jsonl"
            )
        # Not inside the checkpoint, whose manifest lists every file.
        out = checkpoint.parent / f"eval_{checkpoint.name}.json"
        if loaded.config.env.train.id is None:
            result = _evaluate_text(loaded, checkpoint / "actor", step_of(checkpoint), screen)
        else:
            result = EvaluationResult(_evaluate_control(loaded, checkpoint, screen), [])
    for name, value in result.metrics.items():
        screen.print(f"{name:60} {value:.4f}", soft_wrap=True)
    if cut := sum(sample.truncated for sample in result.samples):
        limit = loaded.config.data.max_response_length
        screen.print(
            f"{cut} of {len(result.samples)} replies were cut at data.max_response_length={limit}", soft_wrap=True
        )
    content = json.dumps({"metrics": result.metrics, "samples": [vars(s) for s in result.samples]}, default=str)
    names = chain([out], (out.with_stem(f"{out.stem}-{number}") for number in count(2)))
    # Keep an existing file with other content, because it has the results for other prompts or settings.
    out = next(name for name in names if not name.is_file() or name.read_text() == content)
    try:
        out.write_text(content)
    except OSError as error:
        screen.print(f"not written to {out} ({error.strerror}): the metrics above are the only output", soft_wrap=True)
    else:
        screen.print(f"written to {out}", soft_wrap=True)


def play(checkpoint: Path, overrides: Sequence[str], episodes: int, folder: Path | None) -> None:
    """Record episodes of a control policy.

    Args:
        checkpoint: a global_step_N folder, or the folder of a run (its last checkpoint).
        overrides: overrides of the run's configuration.
        episodes: number of episodes.
        folder: folder of the video; None: as configured, by default in the run's folder.

    Raises:
        ValueError: the path is not a checkpoint of a control policy, the environments cannot render, or the package
            that writes videos is not installed.
    """
    checkpoint = checkpoint_at(checkpoint)
    settings = [
        f"env.eval.num_episodes={episodes}",
        "env.eval.total_num_envs=1",
        "env.eval.video_cfg.save_video=True",
        f"trainer.default_local_dir={run_of(checkpoint)}",  # for a copied run, the folder of the copy
        *([] if folder is None else [f"env.eval.video_cfg.video_base_dir={folder}"]),
    ]
    loaded = load_saved(checkpoint, [*settings, *overrides])
    if loaded.config.env.train.id is None:
        raise ValueError(f"{checkpoint}: is a language model; use `tether generate {shlex.quote(str(checkpoint))}`")
    screen = Screen()
    metrics = _evaluate_control(loaded, checkpoint, screen)
    for name in EPISODES:
        if name in metrics:
            screen.print(f"{name:20} {metrics[name]:.2f}")
    screen.print(f"written to {video_folder(loaded.config) / checkpoint.name}.mp4", soft_wrap=True)


def _evaluate_text(loaded: LoadedConfig, model: Path | str, step: int, screen: Screen) -> EvaluationResult:
    with build_evaluator(loaded, model) as (evaluation, collector), Waiting("sampled", None, screen) as waiting:
        key = NoiseKey(loaded.config.trainer.seed, step)
        return evaluation.run(collector, key, lambda done, total: waiting.show(done, total=total))


def _evaluate_control(loaded: LoadedConfig, checkpoint: Path, screen: Screen) -> dict[str, float]:
    set_threads(loaded.config.trainer.num_threads)
    seed_rng(loaded.config.trainer.seed)  # environments may draw from the global generators
    policy = load_policy(checkpoint / POLICY)
    screen.print(preprocessing_line(loaded.config.env), soft_wrap=True)
    with ExitStack() as envs, Waiting("played", None, screen) as waiting:
        config = loaded.config
        return build_evaluation(config.env, config.policy, policy, video_folder(config), envs).run(
            policy, checkpoint.name, lambda done, total: waiting.show(done, total=total)
        )

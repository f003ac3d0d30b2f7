"""Scores a checkpoint, or a model before training: on held-out prompts, or in environments; and records episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tether.assembly.control import build_evaluation, preprocessing_line, video_folder
from tether.assembly.standalone import build_evaluator
from tether.checkpoints import run_of, step_of
from tether.commands.policy import checkpoint_at, load_saved
from tether.commands.report import EPISODES
from tether.config import LoadedConfig, load_config
from tether.models.control import load_policy
from tether.models.language.model_path import resolve_model_path
from tether.rollout import NoiseKey
from tether.runtime.cache import cache_dir
from tether.runtime.global_rng import seed_rng
from tether.runtime.machine import set_threads
from tether.runtime.terminal import Screen, Waiting
from tether.trainer import EvaluationResult
from tether.trainer.control import POLICY


def evaluate(model: str, file: Path | None, overrides: Sequence[str]) -> None:
    """Score a model on held-out prompts or in its environments; prints the metrics and writes them to a file.

    Beside a checkpoint that is read-only nothing is written, and that is said.

    Args:
        model: a checkpoint or the folder of a run, whose configuration counts; or a model that was not trained here.
        file: the configuration of the latter; None: the overrides are all of it.
        overrides: over the configuration.

    Raises:
        ValueError: no checkpoint, or unusable inputs.
        CheckpointDamaged: a file of the checkpoint is not what was saved.
    """
    disable_progress_bar()
    screen, folder = Screen(), Path(model)
    if not folder.is_dir() or (folder / "config.json").exists():
        # Without a file, what only training needs is filled in.
        trained_on = [] if file else ["data.train_files=unused"]
        quoted = model.replace("'", "\\'")
        loaded = load_config(file, [*trained_on, f"actor_rollout_ref.model.path='{quoted}'", *overrides])
        path = resolve_model_path(model, cache_dir())
        result, out = _sampled(loaded, path, 0, screen), Path(f"eval_{folder.name}.json")
    elif file is not None:
        raise ValueError(f"{file}: {folder} was trained here and has its own configuration; give overrides of it only")
    else:
        checkpoint = checkpoint_at(folder)
        loaded = load_saved(checkpoint, overrides)
        out = checkpoint.parent / f"eval_{checkpoint.name}.json"  # not in it: its manifest lists every file
        if loaded.config.env.train.id is None:
            result = _sampled(loaded, checkpoint / "actor", step_of(checkpoint), screen)
        else:
            result = EvaluationResult(_played(loaded, checkpoint, screen), [])
    for name, value in result.metrics.items():
        screen.print(f"{name:60} {value:.4f}", soft_wrap=True)
    if cut := sum(sample.truncated for sample in result.samples):
        limit = loaded.config.data.max_response_length
        screen.print(
            f"{cut} of {len(result.samples)} replies were cut at data.max_response_length={limit}", soft_wrap=True
        )
    written = json.dumps({"metrics": result.metrics, "samples": [vars(s) for s in result.samples]}, default=str)
    names = chain([out], (out.with_stem(f"{out.stem}-{number}") for number in count(2)))
    # A file that is there is of other prompts or settings, unless it says the same.
    out = next(name for name in names if not name.is_file() or name.read_text() == written)
    try:
        out.write_text(written)
    except OSError as error:
        screen.print(f"not written to {out} ({error.strerror}): what stands above is all", soft_wrap=True)
    else:
        screen.print(f"written to {out}", soft_wrap=True)


def play(checkpoint: Path, overrides: Sequence[str], episodes: int, folder: Path | None) -> None:
    """Record episodes of a control policy.

    Args:
        checkpoint: a global_step_N folder, or the folder of a run (its last one).
        overrides: of the run's configuration.
        episodes: how many.
        folder: where the video goes; None: as the configuration says, which is below the run's folder.

    Raises:
        ValueError: it is no checkpoint of a control policy; the environments show nothing; or what writes videos is not
            installed.
    """
    checkpoint = checkpoint_at(checkpoint)
    asked = [
        f"env.eval.num_episodes={episodes}",
        "env.eval.total_num_envs=1",
        "env.eval.video_cfg.save_video=True",
        f"trainer.default_local_dir={run_of(checkpoint)}",  # a copied run's own folder, not the first one's
        *([] if folder is None else [f"env.eval.video_cfg.video_base_dir={folder}"]),
    ]
    loaded = load_saved(checkpoint, [*asked, *overrides])
    if loaded.config.env.train.id is None:
        raise ValueError(f"{checkpoint}: a language model; ask it with `tether generate {checkpoint}`")
    screen = Screen()
    metrics = _played(loaded, checkpoint, screen)
    for name in EPISODES:
        if name in metrics:
            screen.print(f"{name:20} {metrics[name]:.2f}")
    screen.print(f"written to {video_folder(loaded.config) / checkpoint.name}.mp4", soft_wrap=True)


def _sampled(loaded: LoadedConfig, model: Path | str, step: int, screen: Screen) -> EvaluationResult:
    with (
        build_evaluator(loaded, model) as (evaluation, collector),
        Waiting("sampled", None, screen) as waiting,
    ):
        key = NoiseKey(loaded.config.trainer.seed, step)
        return evaluation.run(collector, key, lambda done, total: waiting.show(done, total=total))


def _played(loaded: LoadedConfig, checkpoint: Path, screen: Screen) -> dict[str, float]:
    set_threads(loaded.config.trainer.num_threads)
    seed_rng(loaded.config.trainer.seed)  # environments may draw from the global generators
    policy = load_policy(checkpoint / POLICY)
    screen.print(preprocessing_line(loaded.config), soft_wrap=True)
    with ExitStack() as envs, Waiting("played", None, screen) as waiting:
        return build_evaluation(loaded.config, policy, envs).run(
            policy, checkpoint.name, lambda done, total: waiting.show(done, total=total)
        )

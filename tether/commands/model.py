"""What the command line does with a model alone: generate, pull, list. It imports little: whoever asks waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tether.assembly.generator import build_generator
from tether.checkpoints.store import find_checkpoint
from tether.data.chat import decode
from tether.models.language.model_path import KNOWN_MODELS
from tether.models.language.registry_download import pull_model
from tether.rollout.protocol import NoiseKey, SamplingParams
from tether.runtime.cache import cache_dir
from tether.runtime.terminal import printable


def generate(model: str, prompts: Sequence[str], sampling: SamplingParams, system: str | None, seed: int) -> None:
    """Print the replies of a model."""
    disable_progress_bar()
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").exists():
        model = str(checkpoint_at(folder) / "actor")
    engine, tokenizer, encode = build_generator(model)
    ids = [encode(prompt, system) for prompt in prompts]
    batch = engine.generate(ids, sampling, NoiseKey(seed, step=0))
    for row, (response, length) in enumerate(zip(batch.response_ids, batch.response_length.tolist(), strict=True)):
        if len(prompts) * sampling.n > 1:
            print(printable(f"--- {prompts[row // sampling.n]}"))
        print(printable(decode(tokenizer, response[:length])))


def pull(name: str) -> Path:
    """Fetch a known model into the cache."""
    return pull_model(name, cache_dir(), progress=print)


def list_models() -> None:
    """Print the known models, and whether they are in the cache."""
    for name, model in KNOWN_MODELS.items():
        here = "in the cache" if (cache_dir() / name).exists() else "not pulled yet"
        print(f"{name:20} {here:16} {model.requirement}, {model.size_mb} MB")


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path names, verified; of a run's folder, its last one.

    Raises:
        ValueError: there is none.
        CheckpointDamaged: a file of it is not what was saved.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"{path}: no checkpoint here; give a global_step_N folder or the folder of a run")
    return checkpoint

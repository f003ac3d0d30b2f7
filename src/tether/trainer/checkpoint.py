"""The content of a checkpoint, and whether a run may resume from it.

On the disk::

    global_step_20/actor/             a language model and its tokenizer, a plain Hugging Face directory
    global_step_20/critic/            its critic, likewise, if there is one
    global_step_20/actor/             or a control policy: policy.json and policy.safetensors
    global_step_20/environments.pkl   the environments that it acts in
    global_step_20/training/*.pt      optimizers, position in the data, controllers, random number generators
    global_step_20/training/*.safetensors   of several ranks: the optimizers' moments, a file each
    global_step_20/identity.json      the data and the model, or the environments, that the run started from
    global_step_20/run.yaml           the resolved configuration
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from tether.checkpoints import CARD, PARTIAL, CheckpointStore, as_bytes, is_disk_full, load_state, sha256_of
from tether.runtime.disk import ANOTHER_CHECKPOINT, read_json
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.runtime.ranks import RankLost
from tether.training import Engine
from tether.types import StateDict

TRAINING = "training"
"""Folder of the states in a checkpoint."""
RATES = {"actor": "actor_rollout_ref.actor.optim.lr", "critic": "critic.optim.lr", "rm": "--lr"}
"""Folder of a model in a checkpoint -> what its learning rate is set by."""
LARGEST_WEIGHT = 1e18
"""Of a language model: with larger ones the squares that its norms sum overflow float32."""


class WeightsLost(ValueError):
    """Weights hold NaN or infinity, so that no run could continue from them; the message names a good checkpoint."""


@dataclass(frozen=True)
class Persistence:
    """Saves everything that a run needs to resume exactly."""

    store: CheckpointStore
    identity: Mapping[str, str]
    """Key of the configuration -> fingerprint of what it named, for example of the training data."""
    run_yaml: str
    private: bool = False
    """`run_yaml` holds secrets, so that its file is for its owner alone."""

    def begin(self, step: int, start: Callable[[Path], Callable[[], None]], state: StateDict) -> Callable[[], Path]:
        """Begin the checkpoint of a step; see `CheckpointStore.begin`.

        Args:
            step: that was done.
            start: begins to write the models and what belongs to them into the folder that it is given.
            state: the trainer's.

        Raises:
            WeightsLost: by what is returned; nothing is saved then.
        """
        kept = as_bytes({**state, "rng": rng_state()})

        def start_all(folder: Path) -> Callable[[], None]:
            (folder / TRAINING).mkdir()
            rest = start(folder)

            def complete() -> None:
                rest()
                self._check_weights(folder, step)
                (folder / TRAINING / "trainer.pt").write_bytes(kept)
                (folder / "identity.json").write_text(json.dumps(dict(self.identity), indent=2))
                write_run_yaml(folder, self.run_yaml, private=self.private)

            return complete

        return self.store.begin(step, start_all)

    def _check_weights(self, folder: Path, step: int) -> None:
        """Read the weights that were written, of whichever engine and of all its ranks."""
        for file in sorted(folder.glob("*/*.safetensors")):
            broken = None if file.parent.name == TRAINING else _first_broken(file)
            if broken is None:
                continue
            role, good = file.parent.name, self.store.last_saved()
            broken = f"its weights hold NaN, infinity or more than 1e18 (first {broken})"
            what = f"the {role} diverged: after step {step} {broken}, so"
            rate = RATES.get(role, "its learning rate")
            if good is None:
                raise WeightsLost(f"{what} they are not saved, and no checkpoint was saved before. Lower {rate}")
            raise WeightsLost(
                f"{what} they are not saved. The last good checkpoint is {good}; the same command resumes from it. "
                f"Lower {rate}, or it will diverge again"
            )


def _first_broken(file: Path) -> str | None:
    """Name the first tensor of a file that holds no weights any more; None: all do."""
    largest = LARGEST_WEIGHT if (file.parent / "config.json").exists() else math.inf  # a policy has statistics, too
    with safe_open(file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  it is no mapping
            weight = weights.get_tensor(name)
            if weight.is_floating_point() and weight.element_size() == 1:  # float8, which has no least number
                weight = weight.float()
            if weight.numel() and not all(abs(float(end)) < largest for end in weight.aminmax()):
                return str(name)
    return None


def check_saving(root: Path, engines: Mapping[str, Engine[Any, Any]]) -> None:
    """Save each model once before anything is learned, in a folder below `root` that goes again.

    Raises:
        ValueError: a model cannot be saved.
    """
    root.mkdir(parents=True, exist_ok=True)
    rng = rng_state()
    with TemporaryDirectory(dir=root, prefix=PARTIAL) as folder:
        for role, engine in engines.items():
            try:
                engine.check_saving(Path(folder) / role)
            except RankLost:
                raise
            except Exception as error:
                if is_disk_full(error):  # the first checkpoint says how much it needs
                    break
                raise ValueError(
                    f"the {role} cannot be saved, as was tried before the first step ({type(error).__name__}: "
                    f"{error}). Fix that, or take another model or, with LoRA, other layers "
                    "(actor_rollout_ref.model.target_modules)."
                ) from error
    set_rng_state(rng)  # whatever the libraries that write draw


def write_run_yaml(folder: Path, text: str, *, private: bool) -> None:
    """Write the resolved configuration into a checkpoint; `private`: for its owner alone, from its first byte."""
    file = folder / "run.yaml"
    file.touch(0o600 if private else 0o666)
    file.write_text(text)


def restore(checkpoint: Path, load: Mapping[str, Callable[[Path], None]]) -> StateDict:
    """Load the states of a checkpoint, the global generators among them; returns the trainer's.

    Args:
        checkpoint: whose models are loaded already.
        load: name of a state -> what takes its file over.
    """
    for name, take in load.items():
        take(checkpoint / TRAINING / f"{name}.pt")
    state = load_state(checkpoint / TRAINING / "trainer.pt")
    set_rng_state(state.pop("rng"))
    return state


def check_identity(checkpoint: Path, identity: Mapping[str, str]) -> None:
    """Refuse to resume with other data or another model than the run began with.

    Raises:
        ValueError: names each key whose content is another one now.
    """
    before = read_json(checkpoint / "identity.json", dict, ANOTHER_CHECKPOINT)
    changed = [key for key, fingerprint in identity.items() if before.get(key, fingerprint) != fingerprint]
    if changed:
        prompts = ", and for prompts the same chat template and data.chat_template_date,"
        raise ValueError(
            f"{', '.join(changed)}: not what {checkpoint} was trained with. Give the same again"
            f"{prompts if 'data.train_files' in changed else ''} to resume, or start again with "
            "trainer.resume_mode=disable and another trainer.default_local_dir."
        )


def model_fingerprint(path: Path) -> str:
    """Hash a model directory by name and content of all its files but hidden ones and pages, or a GGUF file."""
    if not path.is_dir():
        return sha256_of([path])[0]
    names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    names = [name for name in names if name.suffix != ".md" and name.name not in CARD]
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    contents = sha256_of([path / name for name in names])
    listing = "".join(f"{name}:{content}\n" for name, content in zip(names, contents, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def object_fingerprint(model: nn.Module) -> str:
    """Hash the names and values of a model's state."""
    hashed = hashlib.sha256(type(model).__name__.encode())
    for name, value in model.state_dict().items():
        hashed.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        hashed.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()

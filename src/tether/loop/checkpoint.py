"""The content of a checkpoint, and checks whether a run may resume from it.

Files::

    global_step_20/actor/             a language model and its tokenizer, a plain Hugging Face directory
    global_step_20/critic/            its critic, likewise, if there is one
    global_step_20/actor/             or a control policy: policy.json and policy.safetensors
    global_step_20/environments.pkl   the state of its environments
    global_step_20/training/*.pt      optimizers, position in the data, controllers, random number generators
    global_step_20/training/*.safetensors   the optimizers' moments of several ranks, one file each
    global_step_20/identity.json      fingerprints of the data and the model, or of the environments
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
from tether.loop.engine import Engine
from tether.runtime.disk import ANOTHER_CHECKPOINT, read_json
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.runtime.ranks import RankLost
from tether.types import StateDict

TRAINING = "training"
"""The folder of the training states in a checkpoint."""
RATES = {"actor": "actor_rollout_ref.actor.optim.lr", "critic": "critic.optim.lr", "rm": "--lr"}
"""The setting of the learning rate, by the folder of the model in a checkpoint."""
LARGEST_WEIGHT = 1e18
"""Largest weight of a language model: with larger ones, the sums of squares in its norms overflow float32."""


class WeightsLost(ValueError):
    """Raised for weights with NaN or infinity, from which no run can continue; the message names a good checkpoint."""


@dataclass(frozen=True)
class Persistence:
    """Saves the state that a run needs to resume exactly."""

    store: CheckpointStore
    identity: Mapping[str, str]
    """Fingerprints of inputs, such as the training data, by the configuration key that names them."""
    run_yaml: str
    private: bool = False
    """Whether `run_yaml` contains secrets, so that only the owner may read its file."""

    def begin(
        self, step: int, start: Callable[[Path], Callable[[], None]], state: StateDict | None
    ) -> Callable[[], Path]:
        """Begin the checkpoint of a step, as `CheckpointStore.begin`, and return a function that completes it.

        If the weights are not usable, the returned function raises `WeightsLost` and saves nothing.

        Args:
            step: the finished step.
            start: begins to write the models and their states into a folder, and returns a function that completes
                them.
            state: the state of the trainer; None: only the models are saved, and no run can resume from them.
        """
        trainer_state = None if state is None else as_bytes({**state, "rng": rng_state()})

        def start_all(folder: Path) -> Callable[[], None]:
            if trainer_state is not None:
                (folder / TRAINING).mkdir()
            complete_models = start(folder)

            def complete() -> None:
                complete_models()
                self._check_weights(folder, step)
                if trainer_state is not None:
                    (folder / TRAINING / "trainer.pt").write_bytes(trainer_state)
                (folder / "identity.json").write_text(json.dumps(dict(self.identity), indent=2))
                write_run_yaml(folder, self.run_yaml, private=self.private)

            return complete

        return self.store.begin(step, start_all)

    def _check_weights(self, folder: Path, step: int) -> None:
        """Check the weights that all ranks of all engines have written."""
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
    """Return the name of the first tensor of a file that is not finite or too large, or None."""
    # The observation statistics of a control policy may legitimately be large.
    largest = LARGEST_WEIGHT if (file.parent / "config.json").exists() else math.inf
    with safe_open(file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  it is not a mapping
            weight = weights.get_tensor(name)
            if weight.is_floating_point() and weight.element_size() == 1:  # float8 does not support aminmax
                weight = weight.float()
            if weight.numel() and not all(abs(float(bound)) < largest for bound in weight.aminmax()):
                return str(name)
    return None


def check_saving(root: Path, engines: Mapping[str, Engine[Any, Any]]) -> None:
    """Save each model once before training, in a temporary folder below `root`.

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
                if is_disk_full(error):  # the first checkpoint reports how much space it needs
                    break
                raise ValueError(
                    f"the {role} cannot be saved, which a check before the first step showed ({type(error).__name__}: "
                    f"{error}). Fix that, or use another model or, with LoRA, other layers "
                    "(model.target_modules)."
                ) from error
    set_rng_state(rng)  # the libraries that write files may draw random numbers


def write_run_yaml(folder: Path, text: str, *, private: bool) -> None:
    """Write the resolved configuration into a checkpoint; only the owner may read it if it is `private`."""
    file = folder / "run.yaml"
    # The permissions are set before the content is written.
    file.touch(0o600 if private else 0o666)
    file.write_text(text)


def restore(checkpoint: Path, load: Mapping[str, Callable[[Path], None]]) -> StateDict:
    """Load the states of a checkpoint, including the global random generators, and return the trainer's.

    Args:
        checkpoint: the checkpoint, whose models are loaded already.
        load: by the name of each state, the function that loads its file.
    """
    for name, load_file in load.items():
        load_file(checkpoint / TRAINING / f"{name}.pt")
    state = load_state(checkpoint / TRAINING / "trainer.pt")
    set_rng_state(state.pop("rng"))
    return state


def check_identity(checkpoint: Path, identity: Mapping[str, str]) -> None:
    """Check that a run resumes with the data and the model that it started from.

    Raises:
        ValueError: a file or model has changed; names its configuration key.
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
    """Hash a GGUF file, or the names and contents of a model directory's files except hidden and Markdown files."""
    if not path.is_dir():
        return sha256_of([path])[0]
    names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    names = [name for name in names if name.suffix != ".md" and name.name not in CARD]
    names = [name for name in names if not any(component.startswith(".") for component in name.parts)]
    contents = sha256_of([path / name for name in names])
    listing = "".join(f"{name}:{content}\n" for name, content in zip(names, contents, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def object_fingerprint(model: nn.Module) -> str:
    """Hash the names and values of a model's state."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()

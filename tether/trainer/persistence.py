"""What is in a checkpoint, and whether a run may go on from it.

On the disk::

    global_step_20/actor/             the policy and its tokenizer, a plain Hugging Face directory
    global_step_20/critic/            the critic, likewise, if there is one
    global_step_20/training/*.pt      optimizers, position in the data, controllers, random number generators
    global_step_20/identity.json      the data and the model that the run started from
    global_step_20/run.yaml           the resolved configuration
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tether.training.checkpoint import CheckpointStore, load_state, save_state
from tether.training.protocol import TrainingEngine

SAMPLE = 1 << 20  # bytes at each end of a weight file that its fingerprint reads


@dataclass(frozen=True)
class Persistence:
    """Saves and restores everything that a run needs to go on exactly."""

    store: CheckpointStore
    tokenizer: PreTrainedTokenizerBase
    identity: Mapping[str, str]
    """Key of the configuration -> fingerprint of what it named, for example of the training data."""
    run_yaml: str

    def save(
        self,
        step: int,
        actor: TrainingEngine[Any],
        critic: TrainingEngine[Any] | None,
        trainer_state: dict[str, Any],
    ) -> Path:
        """Write the checkpoint of a step; see `CheckpointStore.save`.

        Saving leaves the global generators as they were, whatever the libraries that write draw from them.
        """
        rng = rng_state()

        def write(folder: Path) -> None:
            training = folder / "training"
            training.mkdir()
            actor.save_model(folder / "actor")
            self.tokenizer.save_pretrained(folder / "actor")
            save_state(training / "actor.pt", actor.state_dict())
            if critic:
                critic.save_model(folder / "critic")
                self.tokenizer.save_pretrained(folder / "critic")
                save_state(training / "critic.pt", critic.state_dict())
            save_state(training / "trainer.pt", trainer_state | {"rng": rng})
            (folder / "identity.json").write_text(json.dumps(dict(self.identity), indent=2))
            (folder / "run.yaml").write_text(self.run_yaml)

        path = self.store.save(step, write)
        set_rng_state(rng)
        return path


def restore(checkpoint: Path, actor: TrainingEngine[Any], critic: TrainingEngine[Any] | None) -> dict[str, Any]:
    """Give the engines, whose weights were read from the checkpoint, its other state; returns the trainer's."""
    training = checkpoint / "training"
    actor.load_state_dict(load_state(training / "actor.pt"))
    if critic:
        critic.load_state_dict(load_state(training / "critic.pt"))
    state = load_state(training / "trainer.pt")
    set_rng_state(state.pop("rng"))
    return state


def check_identity(checkpoint: Path, identity: Mapping[str, str]) -> None:
    """Refuse to go on with other data or another model than the run began with.

    Raises:
        ValueError: names each key whose content is another one now.
    """
    before = json.loads((checkpoint / "identity.json").read_text())
    changed = [key for key, fingerprint in identity.items() if before.get(key, fingerprint) != fingerprint]
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: not what {checkpoint} was trained with. Give the same again to go on, or start "
            "anew with trainer.resume_mode=disable and another trainer.default_local_dir."
        )


def model_fingerprint(path: Path) -> str:
    """Hash a model directory by its config, and by name, size and both ends of each weight file; or a GGUF file."""
    digest = hashlib.sha256()
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLE))
            stream.seek(max(0, size - SAMPLE))
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def seed_rng(seed: int) -> None:
    """Start the global generators from a seed, so that user code that draws from them is reproducible, too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of the global generators; tether draws from none of them, but user code may."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Take over what `rng_state` gave."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])

"""Checkpoints of embodied runs.

On the disk::

    global_step_20/policy/            the control policy: policy.json and policy.safetensors
    global_step_20/training/*.pt      optimizer, reward statistics, counters
    global_step_20/identity.json      the environments that the run trains in
    global_step_20/run.yaml           the resolved configuration
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.models.control.policy import Policy, save_policy
from tether.training.checkpoint import CheckpointStore, save_state

POLICY = "policy"


@dataclass(frozen=True)
class ControlPersistence:
    """Saves everything that an embodied run needs to go on exactly."""

    store: CheckpointStore
    identity: Mapping[str, str]
    """Key of the configuration -> value that must not change between the runs of a checkpoint."""
    run_yaml: str

    def save(self, step: int, policy: Policy, learner: dict[str, Any], trainer: dict[str, Any]) -> Path:
        """Write the checkpoint of a step; see `CheckpointStore.save`."""

        def write(folder: Path) -> None:
            training = folder / "training"
            training.mkdir()
            save_policy(policy, folder / POLICY)
            save_state(training / "learner.pt", learner)
            save_state(training / "trainer.pt", trainer)
            (folder / "identity.json").write_text(json.dumps(dict(self.identity), indent=2))
            (folder / "run.yaml").write_text(self.run_yaml)

        return self.store.save(step, write)

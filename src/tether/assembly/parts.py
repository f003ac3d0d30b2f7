"""Parts of which the models of a run, and the sampler of one rank, are made; they travel to where the models are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tether.assembly.inputs import Inputs
from tether.batch import RolloutBatch, WeightUpdate
from tether.config import RunConfig
from tether.execution import StoredWeights
from tether.rollout.native import NativeEngine


@dataclass(frozen=True)
class Sources:
    """Parts of which the models of a run are made; it travels to where they are."""

    model_path: Path | str
    critic_path: Path | str
    """Of the checkpoint, where there is one."""
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Path | None
    device: torch.device
    total_steps: int
    incidents: Path


class RankSampler:
    """Samples on one rank, with a whole copy of the actor's weights.

    Args:
        engine: that samples.
        actor: the rank's engine; None on ranks that only sample.
    """

    def __init__(self, engine: NativeEngine, actor: Any | None) -> None:
        self._engine, self._actor = engine, actor
        if actor is not None:
            self.refresh()

    def refresh(self) -> int:
        """Take over the weights of this rank's actor; returns their bytes."""
        assert self._actor is not None
        return self._take(self._actor.export())

    def load(self, version: int, weights: StoredWeights) -> int:
        """Take over weights that ranks of another group have stored; returns their bytes."""
        return self._take(weights.update(version))

    def _take(self, weights: WeightUpdate) -> int:
        moved = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal moved
            for name, value in weights.tensors:
                moved += value.nbytes
                yield name, value

        self._engine.load_weights(replace(weights, tensors=counted()))
        return moved

    def generate(self, *arguments: Any) -> RolloutBatch:
        return self._engine.generate(*arguments)

    def ends(self) -> frozenset[int]:
        """Tokens that end a response."""
        return self._engine.eos_token_ids


def sources_of(config: RunConfig, inputs: Inputs, checkpoint: Path | None, **rest: Any) -> Sources:
    """`rest`: the other fields."""
    critic = checkpoint / "critic" if checkpoint else inputs.critic_path
    return Sources(inputs.model_path, critic, inputs.tokenizer, checkpoint, **rest)

"""The locations of a run's models, and the sampler of one rank; both are sent to the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tether.batch import RolloutBatch, WeightUpdate
from tether.distributed import StoredWeights
from tether.text.sampling.engine import NativeEngine


@dataclass(frozen=True)
class ModelSpecs:
    """Everything that is needed to build the models of a run; it is sent to the ranks."""

    model_path: Path | str
    critic_path: Path | str
    reference_paths: Mapping[str, Path | str]
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Path | None
    device: torch.device
    total_steps: int
    incidents: Path


class RankSampler:
    """Samples on one rank, with a full copy of the actor's weights.

    Args:
        engine: the engine that samples.
        actor: the rank's engine; None on ranks that only sample.
    """

    def __init__(self, engine: NativeEngine, actor: Any | None) -> None:
        self._engine, self._actor = engine, actor
        if actor is not None:
            self.refresh()

    def refresh(self) -> int:
        """Copy the weights of this rank's actor, and return their size in bytes."""
        assert self._actor is not None
        return self._load_update(self._actor.export())

    def load(self, version: int, weights: StoredWeights) -> int:
        """Load weights that ranks of another group stored, and return their size in bytes."""
        return self._load_update(weights.update(version))

    def _load_update(self, weights: WeightUpdate) -> int:
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

    def stop_token_ids(self) -> frozenset[int]:
        """Return the stop token ids."""
        return self._engine.eos_token_ids

    def context(self) -> int | None:
        """Return the maximum number of tokens of prompt and response; None if the model sets no limit."""
        return self._engine.context

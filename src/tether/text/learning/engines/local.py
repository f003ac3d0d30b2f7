"""A model, its optimizer and their updates in this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tether.batch import TrainBatch, WeightUpdate
from tether.checkpoints import load_state, save_state
from tether.loop.engine import CHECKED_BYTES, LossSpec, OptimizerOptions, Outputs, Updated, UpdatePlan
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.text.learning.engines.autograd import AutogradEngine
from tether.text.learning.engines.copies import to_cpu, tree_to_cpu, with_weights
from tether.text.learning.engines.division import mini_batches
from tether.text.learning.engines.master_weights import MasterWeights
from tether.text.learning.engines.shares import writers
from tether.text.learning.micro_batches import MicroBatching
from tether.types import StateDict


class LocalEngine(AutogradEngine[Outputs]):
    """Runs and updates one model (policy, critic or reference) in this process, as a
    `tether.loop.engine.Engine`.

    Args:
        model: policy, critic or reference, on its device; in float32 if it is trained.
        micro: limits of a forward and backward pass.
        optimizer: None for a model that is not trained.
        compute_dtype: dtype of forward and backward; a trained model also gets float32 master weights.
        options: further arguments of `AutogradEngine`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        micro: MicroBatching,
        optimizer: OptimizerOptions | None = None,
        *,
        compute_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        narrow = compute_dtype is not None and compute_dtype != model.dtype
        self.masters = MasterWeights(model, compute_dtype) if narrow and compute_dtype else None
        trained: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        super().__init__(model, self.masters.parameters() if self.masters else trained, micro, optimizer, **options)

    def update(
        self, batch: TrainBatch, loss: LossSpec[TrainBatch, Outputs], plan: UpdatePlan, step: int
    ) -> Updated[Outputs]:
        return self.learn(batch, loss, plan, mini_batches(batch.response_mask, plan, step), step)

    def export(self) -> WeightUpdate:
        return WeightUpdate(self.version, self.model.state_dict(keep_vars=True).items())

    def save(self, folder: Path) -> None:
        """Write the model in transformers' format."""
        assert self._save, "a frozen model is not saved"
        with self.masters.installed() if self.masters else nullcontext():
            self._save(self.model, folder)

    def check_saving(self, folder: Path) -> None:
        assert self._save, "a frozen model is not saved"
        shares = writers(self.model, math.ceil(sum(p.nbytes for p in self.model.parameters()) / CHECKED_BYTES))
        with self.masters.installed() if self.masters else nullcontext():
            weights = zip(self.model.parameters(), shares, strict=True)
            model = with_weights(self.model, (p.to("meta") if share else p.detach() for p, share in weights))
        self._save(model, folder)

    def state_dict(self) -> StateDict:
        """Return the optimizer's state and the version, without the weights."""
        assert self.optimizer
        return self.optimizer.state_dict() | {"version": self.version}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the result of `state_dict`."""
        assert self.optimizer
        self.version = int(state["version"])
        self.optimizer.load_state_dict(state)

    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        assert self._save, "a frozen model is not saved"
        if not copy:
            return lambda: self._write(folder, state)
        save, training_state = self._save, tree_to_cpu(self.state_dict())
        with self.masters.installed() if self.masters else nullcontext():
            model = with_weights(self.model, map(to_cpu, self.model.parameters()))

        def write() -> None:
            save(model, folder)
            save_state(state, training_state)

        return write

    def _write(self, folder: Path, state: Path) -> None:
        self.save(folder)
        save_state(state, self.state_dict())

    def load_state(self, file: Path) -> None:
        with reading(file, ANOTHER_CHECKPOINT):
            self.load_state_dict(load_state(file))

    def _begin_gradients(self) -> None:
        if self.masters:
            self.masters.begin_gradients()
        else:
            super()._begin_gradients()

    def _finish_gradients(self) -> None:
        if self.masters:
            self.masters.finish_gradients()

    def _weights_changed(self) -> None:
        if self.masters:
            self.masters.copy_to_model()

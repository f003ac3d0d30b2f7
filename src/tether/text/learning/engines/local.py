"""A model, its optimizer and their updates: the common base of engines in one process and on many ranks.

One update of a rollout::

    rows of the rollout ──► epochs ──► mini-batches ──► micro-batches
                                       one optimizer     one forward and
                                       step each         backward each, summed

`LocalEngine` does this in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.algorithms import Mean, Metric, count_valid, merge_metrics
from tether.batch import TrainBatch, WeightUpdate
from tether.checkpoints import load_state, save_state
from tether.loop.engine import (
    CHECKED_BYTES,
    Forward,
    LossSizes,
    LossSpec,
    OptimizerOptions,
    Outputs,
    UpdatePlan,
    UpdateResult,
    build_adamw,
    explain_out_of_memory,
    learning_rate,
    load_adamw,
    retry_with_smaller_limit,
    set_learning_rate,
)
from tether.loop.incident import Incidents
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.runtime.machine import deterministic_kernels, release_memory_periodically
from tether.text.learning.engines.copies import to_cpu, tree_to_cpu, with_weights
from tether.text.learning.engines.master_weights import MasterWeights
from tether.text.learning.engines.shares import writers
from tether.text.learning.losses import ReferenceModel
from tether.text.learning.packing import MicroBatching, MiniBatch, RowSize, mini_batches, padding_row, row_sizes
from tether.types import StateDict

Result = TypeVar("Result")
TOO_LONG = (
    "Lower data.max_response_length or data.max_prompt_length, set "
    "actor_rollout_ref.model.enable_gradient_checkpointing=True, or take a smaller model or a larger machine."
)
MOMENTS = (
    "AdamW keeps two numbers for each weight that trains. Train adapters alone (actor_rollout_ref.model.lora_rank), or "
    "take a smaller actor_rollout_ref.model.path, critic.model.path or a larger machine."
)
FIRST_UPDATE = ("ratio_mean", "ratio_max", "ratio_min", "pg_clipfrac", "pg_clipfrac_lower")
"""Metrics that are also logged for the first optimizer step alone, where the policy still is the old one."""


class SkippedMiniBatch(Generic[Outputs]):
    """A mini-batch of a language model, as a `tether.loop.incident.SkippedUpdate`."""

    def __init__(
        self,
        model: PreTrainedModel,
        reference: ReferenceModel | None,
        batch: TrainBatch,
        loss: LossSpec[TrainBatch, Outputs],
    ) -> None:
        # Pickled together, because with LoRA the reference is the model itself with its adapter disabled.
        self.model, self.reference, self.batch, self.loss = model, reference, batch, loss

    def __len__(self) -> int:
        return len(self.batch)

    def backward(self, row: int) -> Tensor:
        micro = self.batch[row : row + 1]
        self.model.zero_grad()
        outputs = self.loss.forward(self.model, micro, self.reference)
        sizes = LossSizes(int(micro.response_mask.sum()), 1)
        term = self.loss.function(outputs, micro.to(tensors_of(outputs)[0].device), sizes)
        term.loss.backward()
        return term.loss.detach()


class AutogradEngine(Generic[Outputs]):
    """Runs one model (policy, critic or reference) and accumulates its gradients over all rows, or over those of one
    rank.

    Args:
        model: policy, critic or reference, on its device.
        trained: the weights that the optimizer updates.
        micro: limits of a forward and backward pass.
        optimizer: None for a model that is not trained.
        infer_micro: limits of a forward pass without gradients; the default is `micro`.
        reference: passed to every forward, for losses that compare whole distributions.
        inference_context: a context for inference, which disables an adapter.
        save: writes the model as a Hugging Face directory.
        incident_dir: folder for updates with a non-finite gradient.
        row_sizes: returns the size of each row of a batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trained: list[nn.Parameter],
        micro: MicroBatching,
        optimizer: OptimizerOptions | None = None,
        *,
        infer_micro: MicroBatching | None = None,
        reference: ReferenceModel | None = None,
        inference_context: Callable[[PreTrainedModel], AbstractContextManager[object]] = nullcontext,
        save: Callable[[PreTrainedModel, Path], None] | None = None,
        incident_dir: Path | None = None,
        row_sizes: Callable[[Any], list[RowSize]] = row_sizes,
    ) -> None:
        self._row_sizes = row_sizes
        self.model = model
        self.micro = micro
        self.infer_micro = infer_micro or micro
        self.options = optimizer
        self.reference = reference
        self.version = 0
        self._inference_context = inference_context
        self._save = save
        self._incidents = Incidents(incident_dir)
        self._reduced: dict[MicroBatching, MicroBatching] = {}
        self.trained = trained
        self.optimizer = build_adamw(trained, optimizer) if optimizer else None

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        outputs = self._infer(batch, forward, self.infer_micro)
        assert outputs is not None, "no rows to infer"
        return outputs

    def _infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs], micro: MicroBatching) -> Outputs | None:
        self.model.eval()
        sizes = self._row_sizes(batch)

        def attempt(micro: MicroBatching) -> Outputs | None:
            groups = [torch.tensor(rows) for rows in micro.split(sizes)]
            # The update uses deterministic kernels, too; others would round differently, and the first ratio would not
            # be 1.
            with torch.no_grad(), self._inference_context(self.model), deterministic_kernels():
                padding = self._rounds(len(groups)) - len(groups)
                outputs = [self._run(forward, batch[rows]) for rows in groups]
                for _ in range(padding):
                    self._run(forward, padding_row())
            return scattered(outputs, groups, len(batch)) if outputs else None

        return self._retry_if_out_of_memory(attempt, micro, sizes)

    def learn(
        self,
        batch: TrainBatch,
        loss: LossSpec[TrainBatch, Outputs],
        plan: UpdatePlan,
        minis: Sequence[MiniBatch],
        step: int,
    ) -> UpdateResult[Outputs]:
        """Make one optimizer step for each mini-batch; see `tether.loop.engine.Engine.update`."""
        assert self.optimizer, "a frozen model has no update"
        assert self.options
        self.version += 1
        rate = learning_rate(self.options, step)
        set_learning_rate(self.optimizer, rate)
        measured: list[dict[str, Metric]] = []
        first: list[dict[str, Metric]] = []
        outputs: list[Outputs] = []
        positions: list[Tensor] = []
        norms: list[float] = []
        skipped = early_stops = 0
        for share in minis:
            mini = batch[share.rows]
            if loss.prepare is not None:
                mini = self._prepared(mini, loss, share, plan.generator(step, share.epoch, share.number))
            mini_metrics, mini_outputs = self.accumulate_gradients(mini, loss, share.sizes)
            if share.epoch == 0 and mini_outputs is not None:
                outputs.append(mini_outputs)
                positions.append(share.rows)
            measured += mini_metrics
            first = first or mini_metrics
            if plan.max_ratio is not None and mean_ratio(mini_metrics) > plan.max_ratio:
                early_stops += 1
                continue
            norm = self._clip_gradients(self.options.grad_clip)
            if math.isfinite(norm):
                with explain_out_of_memory("the optimizer's step", MOMENTS):
                    self.optimizer.step()
                self._weights_changed()
                norms.append(norm)
            else:
                skipped += 1
                self._keep_incident(step, mini, loss, share)
        self.optimizer.zero_grad(set_to_none=True)
        metrics = {name: float(metric) for name, metric in merge_metrics(measured).items()}
        metrics |= _first_update_metrics(first)
        if plan.max_ratio is not None:
            metrics["early_stops"] = float(early_stops)
        metrics |= {
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "lr": rate,
            "skipped_updates": float(skipped),
        }
        return UpdateResult(metrics, scattered(outputs, positions, len(batch)) if outputs else None)

    def accumulate_gradients(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], sizes: LossSizes | None = None
    ) -> tuple[list[dict[str, Metric]], Outputs | None]:
        """Accumulate the gradient of one mini-batch's loss over its micro-batches in the parameters.

        Args:
            mini: the rows of the mini-batch on this rank.
            loss: the loss to minimise.
            sizes: sizes of the whole mini-batch; None if all of it is on this rank.

        Returns:
            Metrics to merge, and the model's outputs for each row without gradients, or None if this rank has no row.
        """
        assert self.optimizer
        self.model.train()  # there is no dropout; train mode only enables gradient checkpointing
        rows = self._row_sizes(mini)
        if sizes is None:
            valid = count_valid(mini.response_mask)
            sizes = LossSizes(int(valid.num_tokens), int(valid.num_sequences))

        def attempt(micro: MicroBatching) -> tuple[list[dict[str, Metric]], dict[str, Tensor], Outputs | None]:
            return self._sum_gradients(mini, loss, sizes, micro.split(rows))

        with deterministic_kernels():
            measured, shares, outputs = self._retry_if_out_of_memory(attempt, self.micro, rows)
        measured, shares = self._reduce_over_ranks(measured, shares)
        one = torch.tensor(1.0)
        means: dict[str, Metric] = {name: Mean(total, one) for name, total in shares.items()}
        return [*measured, means], outputs

    def _sum_gradients(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], sizes: LossSizes, groups: list[list[int]]
    ) -> tuple[list[dict[str, Metric]], dict[str, Tensor], Outputs | None]:
        """Accumulate gradients as `accumulate_gradients` does, overwriting those of a failed attempt."""
        self._begin_gradients()
        measured: list[dict[str, Metric]] = []
        shares: dict[str, Tensor] = {}
        outputs: list[Outputs] = []
        positions = [torch.tensor(rows) for rows in groups]
        padding = self._rounds(len(positions)) - len(positions)
        for rows in positions:
            micro = mini[rows]
            micro_outputs = self._run(loss.forward, micro)
            term = loss.function(micro_outputs, micro.to(tensors_of(micro_outputs)[0].device), sizes)
            term.loss.backward()
            outputs.append(micro_outputs.detach())  # type: ignore[attr-defined]  # tensordict's classes
            measured.append(term.metrics)
            for name, share in term.shares.items():
                shares[name] = shares.get(name, 0.0) + share.detach().double()
            release_memory_periodically()
        for _ in range(padding):
            torch.stack(
                [output.sum() for output in tensors_of(self._run(loss.forward, padding_row()))]
            ).sum().backward()
        self._finish_gradients()
        return measured, shares, scattered(outputs, positions, len(mini)) if outputs else None

    def _run(self, forward: Forward[TrainBatch, Outputs], micro: TrainBatch) -> Outputs:
        return forward(self.model, micro, self.reference)

    def _rounds(self, count: int) -> int:
        """Return how many micro-batches every rank runs if this one has `count`; the additional ones are padding."""
        return count

    def _reduce_over_ranks(
        self, measured: list[dict[str, Metric]], shares: dict[str, Tensor]
    ) -> tuple[list[dict[str, Metric]], dict[str, Tensor]]:
        """Reduce metrics and sums over all ranks that have rows of the mini-batch."""
        return measured, shares

    def _prepared(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], share: MiniBatch, draws: torch.Generator
    ) -> TrainBatch:
        """Return a mini-batch after `loss.prepare` has seen all of its rows."""
        assert loss.prepare
        outputs = self._infer(mini, loss.forward, self.micro)
        assert outputs is not None
        loss.prepare(mini, outputs, draws)
        return mini

    def _begin_gradients(self) -> None:
        """Zero the gradients in place, since allocating fresh memory is slow."""
        assert self.optimizer
        self.optimizer.zero_grad(set_to_none=False)

    def _finish_gradients(self) -> None:
        """Complete the accumulated gradients; a hook for subclasses."""

    def _clip_gradients(self, limit: float) -> float:
        """Scale the gradient down to a norm of at most `limit`, and return its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.trained, limit))

    def _weights_changed(self) -> None:
        """Called after an optimizer step; a hook for subclasses."""

    def _keep_incident(
        self, step: int, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], share: MiniBatch
    ) -> None:
        self._incidents.keep(step, self.model, SkippedMiniBatch(self.model, self.reference, mini, loss))

    def _retry_if_out_of_memory(
        self, attempt: Callable[[MicroBatching], Result], micro: MicroBatching, rows: Sequence[RowSize]
    ) -> Result:
        """Run an attempt with these limits, or with smaller ones that were needed before."""
        limit = self._reduced.get(micro, micro)
        result, self._reduced[micro] = retry_with_smaller_limit(
            attempt, limit, lambda limit: limit.halved(rows), str, TOO_LONG
        )
        return result


def scattered(chunks: list[Outputs], positions: list[Tensor], rows: int) -> Outputs:
    """Scatter the outputs of chunks to their rows of the whole batch, on the CPU; other rows are zero."""
    joined = torch.cat(chunks).cpu()  # type: ignore[arg-type]  # tensordict's classes
    result = joined.new_zeros(rows)
    result[torch.cat(positions)] = joined
    return result  # type: ignore[return-value]


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return all outputs of a model that carry a gradient."""
    values = (getattr(outputs, field.name) for field in fields(outputs))
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def mean_ratio(metrics: Iterable[Mapping[str, Metric]]) -> float:
    """Return the mean importance ratio of a mini-batch from the metrics of its micro-batches."""
    return float(merge_metrics(metrics)["actor/ratio_mean"])


def _first_update_metrics(micro_metrics: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Rename the metrics of the first mini-batch: ``actor/ratio_mean`` becomes ``actor/first_update/ratio_mean``."""
    metrics = {}
    for key, metric in merge_metrics(micro_metrics).items():
        role, _, name = key.rpartition("/")
        if name in FIRST_UPDATE:
            metrics[f"{role}/first_update/{name}"] = float(metric)
    return metrics


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
    ) -> UpdateResult[Outputs]:
        return self.learn(batch, loss, plan, mini_batches(batch.response_mask, plan, step, batch.episode), step)

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
        assert self.optimizer
        return self.optimizer.state_dict() | {"version": self.version}

    def load_state_dict(self, state: StateDict) -> None:
        assert self.optimizer
        self.version = int(state["version"])
        load_adamw(self.optimizer, state)

    def saving(self, folder: Path, state: Path | None, *, copy: bool) -> Callable[[], None]:
        assert self._save, "a frozen model is not saved"
        if not copy:
            return lambda: self._write(folder, state)
        save, training_state = self._save, tree_to_cpu(self.state_dict()) if state else {}
        with self.masters.installed() if self.masters else nullcontext():
            model = with_weights(self.model, map(to_cpu, self.model.parameters()))

        def write() -> None:
            save(model, folder)
            if state:
                save_state(state, training_state)

        return write

    def _write(self, folder: Path, state: Path | None) -> None:
        self.save(folder)
        if state:
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

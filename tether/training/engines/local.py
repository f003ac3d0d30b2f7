"""A model, its optimizer and how they are updated, in this process.

One update of a rollout::

    rows of the rollout ──► epochs ──► mini-batches ──► micro-batches
                                       one optimizer     one forward and
                                       step each         backward each, summed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms import Mean, Metric, count_valid, merge_metrics
from tether.batch import TrainBatch, WeightUpdate
from tether.training.engines.incident import Incidents
from tether.training.engines.master_weights import MasterWeights
from tether.training.engines.optimizer import OptimizerOptions, build_adamw, learning_rate, set_learning_rate
from tether.training.out_of_memory import named_out_of_memory, within_memory
from tether.training.protocol import Forward, LossSizes, LossSpec, Outputs, Updated, UpdatePlan
from tether.training.text.forward import ReferenceModel
from tether.training.text.micro_batches import MicroBatching, RowSize
from tether.training.text.packing import row_sizes

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
"""Metrics that are also logged of the first optimizer step alone, where the policy is still the old one."""


class SkippedMiniBatch(Generic[Outputs]):
    """See `tether.training.engines.incident.SkippedUpdate`."""

    def __init__(
        self,
        model: PreTrainedModel,
        reference: ReferenceModel | None,
        batch: TrainBatch,
        loss: LossSpec[TrainBatch, Outputs],
    ) -> None:
        # Pickled together: with LoRA the reference is the model itself, with its adapter off.
        self.model, self.reference, self.batch, self.loss = model, reference, batch, loss

    def __len__(self) -> int:
        """Rows."""
        return len(self.batch)

    def backward(self, row: int) -> Tensor:
        """See there."""
        micro = self.batch[row : row + 1]
        self.model.zero_grad()
        outputs = self.loss.forward(self.model, micro, self.reference)
        term = self.loss.function(outputs, micro, LossSizes(int(micro.response_mask.sum()), 1))
        term.loss.backward()
        return term.loss.detach()


class LocalEngine(Generic[Outputs]):
    """Runs and updates one model (policy, critic or reference) in this process; see `tether.training.protocol.Engine`.

    Args:
        model: policy, critic or reference, on its device; in float32 if it is trained.
        micro: limits of a forward and backward pass.
        optimizer: None for a model that is only run.
        infer_micro: limits of a forward pass without gradients; None: `micro`.
        compute_dtype: dtype of forward and backward; a trained model gets float32 master weights beside it.
        reference: handed to every forward, for losses that compare whole distributions.
        during: entered while inferring; switches an adapter off.
        save: writes the model as a Hugging Face directory.
        incident_dir: where an update with a non-finite gradient is kept.
        row_sizes: what each row of a batch costs a micro-batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        micro: MicroBatching,
        optimizer: OptimizerOptions | None = None,
        *,
        infer_micro: MicroBatching | None = None,
        compute_dtype: torch.dtype | None = None,
        reference: ReferenceModel | None = None,
        during: Callable[[PreTrainedModel], AbstractContextManager[object]] = nullcontext,
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
        self._during = during
        self._save = save
        self._incidents = Incidents(incident_dir)
        self._reduced: dict[MicroBatching, MicroBatching] = {}
        self.masters = None
        if compute_dtype is not None and compute_dtype != model.dtype:
            self.masters = MasterWeights(model, compute_dtype)
        self.trained = self.masters.parameters() if self.masters else [p for p in model.parameters() if p.requires_grad]
        self.optimizer = build_adamw(self.trained, optimizer) if optimizer else None

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        """See `tether.training.protocol.Engine.infer`."""
        return self._infer(batch, forward, self.infer_micro)

    def _infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs], micro: MicroBatching) -> Outputs:
        self.model.eval()
        sizes = self._row_sizes(batch)

        def attempt(micro: MicroBatching) -> Outputs:
            places = [torch.tensor(rows) for rows in micro.split(sizes)]
            with torch.no_grad(), self._during(self.model):
                return _scattered([self._run(forward, batch[rows]) for rows in places], places, len(batch))

        return self._within_memory(attempt, micro, sizes)

    def update(
        self, batch: TrainBatch, loss: LossSpec[TrainBatch, Outputs], plan: UpdatePlan, step: int
    ) -> Updated[Outputs]:
        """See `tether.training.protocol.Engine.update`."""
        assert self.optimizer, "a frozen model has no update"
        assert self.options
        self.version += 1
        rate = learning_rate(self.options, step)
        set_learning_rate(self.optimizer, rate)
        (learned,) = batch.response_mask.any(dim=-1).nonzero(as_tuple=True)
        measured: list[dict[str, Metric]] = []
        first: list[dict[str, Metric]] = []
        outputs: list[Outputs] = []
        places: list[Tensor] = []
        norms: list[float] = []
        skipped = early_stops = 0
        for epoch in range(plan.epochs):
            for number, drawn in enumerate(plan.mini_batches(len(learned), step, epoch)):
                rows = learned[drawn]
                mini = batch[rows]
                if loss.prepare is not None:
                    loss.prepare(mini, self._infer(mini, loss.forward, self.micro), plan.generator(step, epoch, number))
                pieces, found = self.accumulate_gradients(mini, loss)
                if epoch == 0:
                    outputs.append(found)
                    places.append(rows)
                measured += pieces
                first = first or pieces
                if plan.max_ratio is not None and mean_ratio(pieces) > plan.max_ratio:
                    early_stops += 1
                    continue
                norm = float(torch.nn.utils.clip_grad_norm_(self.trained, self.options.grad_clip))
                if math.isfinite(norm):
                    with named_out_of_memory("the optimizer's step", MOMENTS):
                        self.optimizer.step()
                    if self.masters:
                        self.masters.copy_to_model()
                    norms.append(norm)
                else:
                    skipped += 1
                    skipped_batch = SkippedMiniBatch(self.model, self.reference, mini, loss)
                    self._incidents.keep(step, self.model, skipped_batch)
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
        return Updated(metrics, _scattered(outputs, places, len(batch)) if outputs else None)

    def export(self) -> WeightUpdate:
        """See `tether.training.protocol.Engine.export`."""
        return WeightUpdate(self.version, self.model.state_dict(keep_vars=True).items())

    def accumulate_gradients(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs]
    ) -> tuple[list[dict[str, Metric]], Outputs]:
        """Leave the gradient of one mini-batch's loss in the parameters, summed over its micro-batches.

        Returns:
            Metrics, to be merged, and the model's outputs for each row, without gradients.
        """
        assert self.optimizer
        self.model.train()  # dropout is off; this only lets layers recompute where gradient checkpointing is on
        sizes = self._row_sizes(mini)
        return self._within_memory(lambda micro: self._sum_gradients(mini, loss, micro.split(sizes)), self.micro, sizes)

    def _sum_gradients(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], groups: list[list[int]]
    ) -> tuple[list[dict[str, Metric]], Outputs]:
        """See `accumulate_gradients`; what an attempt that failed left in the gradients is overwritten.

        Args:
            mini: the mini-batch.
            loss: see there.
            groups: rows of each micro-batch.
        """
        assert self.optimizer
        if self.masters:
            self.masters.begin_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=False)  # the same memory again: fresh pages are slow
        valid = count_valid(mini.response_mask)
        sizes = LossSizes(int(valid.num_tokens), int(valid.num_sequences))
        measured: list[dict[str, Metric]] = []
        shares: dict[str, Tensor] = {}
        outputs: list[Outputs] = []
        places = [torch.tensor(rows) for rows in groups]
        for rows in places:
            micro = mini[rows]
            found = self._run(loss.forward, micro)
            term = loss.function(found, micro.to(self.trained[0].device), sizes)
            term.loss.backward()
            outputs.append(found.detach())  # type: ignore[attr-defined]  # tensordict's classes
            measured.append(term.metrics)
            for name, share in term.shares.items():
                shares[name] = shares.get(name, 0.0) + share.detach().double()
        if self.masters:
            self.masters.finish_gradients()
        one = torch.tensor(1.0)
        means: dict[str, Metric] = {name: Mean(total, one) for name, total in shares.items()}
        return [*measured, means], _scattered(outputs, places, len(mini))

    def save(self, folder: Path) -> None:
        """Write the model as a plain Hugging Face directory."""
        assert self._save, "a frozen model is not saved"
        with self.masters.installed() if self.masters else nullcontext():
            self._save(self.model, folder)

    def state_dict(self) -> dict[str, Any]:
        """All state beside the weights: the optimizer's, and the version."""
        assert self.optimizer
        return self.optimizer.state_dict() | {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of `state_dict`."""
        assert self.optimizer
        self.version = state["version"]
        self.optimizer.load_state_dict(state)

    def _run(self, forward: Forward[TrainBatch, Outputs], micro: TrainBatch) -> Outputs:
        return forward(self.model, micro, self.reference)

    def _within_memory(
        self, attempt: Callable[[MicroBatching], Result], micro: MicroBatching, rows: Sequence[RowSize]
    ) -> Result:
        """Run in micro-batches of these limits, or of those that once had to be taken instead."""
        limit = self._reduced.get(micro, micro)
        result, self._reduced[micro] = within_memory(attempt, limit, lambda limit: limit.halved(rows), str, TOO_LONG)
        return result


def _scattered(pieces: list[Outputs], places: list[Tensor], rows: int) -> Outputs:
    """Outputs of pieces of a batch at their rows of the whole one, on the host; zero at rows that no piece had."""
    found = torch.cat(pieces).cpu()  # type: ignore[arg-type]  # tensordict's classes
    whole = found.new_zeros(rows)
    whole[torch.cat(places)] = found
    return whole  # type: ignore[return-value]


def mean_ratio(pieces: Iterable[Mapping[str, Metric]]) -> float:
    """Mean importance ratio of a mini-batch, out of the metrics of its micro-batches."""
    return float(merge_metrics(pieces)["actor/ratio_mean"])


def _first_update_metrics(pieces: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Of one mini-batch: ``actor/ratio_mean`` becomes ``actor/first_update/ratio_mean``."""
    metrics = {}
    for key, metric in merge_metrics(pieces).items():
        role, _, name = key.rpartition("/")
        if name in FIRST_UPDATE:
            metrics[f"{role}/first_update/{name}"] = float(metric)
    return metrics

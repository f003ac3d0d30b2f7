"""Protocols of training engines, losses and learners (a model in its role as policy or critic).

An engine owns a model, its optimizer and its shards. Its arguments (a forward, a loss, a plan) are plain, picklable
specs, and it returns tensors, so that an engine in this process and one on many ranks have the same interface.

The denominators of a loss are counted over the whole mini-batch before it is split into micro-batches, so that the
split cannot change the gradient.

The module also has what all engines share: AdamW and its learning-rate schedule, and the retry of an update or
inference that runs out of memory with smaller micro-batches, which gives the same result.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from tether.algorithms import Metric
from tether.batch import WeightUpdate
from tether.keyed_random import generator, permutation


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019) with a schedule that advances once per training step."""

    lr: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    grad_clip: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    min_lr: float = 0.0
    """The rate at the end of the decay."""
    warmup_init: float = 0.0
    decay_steps: int | None = None
    """Steps after which the rate is `min_lr`; the default is `total_steps`."""
    wsd_steps: int | None = None
    """Steps of the decay of ``WSD``; the default is a tenth of `decay_steps`."""
    wsd_style: str = "exponential"


def learning_rate(options: OptimizerOptions, step: int) -> float:
    """Return the learning rate of training step `step`, counted from 0.

    Warm-up is linear from `warmup_init` over `warmup_steps`; afterwards the rate is ``min_lr + (lr - min_lr) * factor``
    where the factor (`_schedule_factor`) begins at 1; ``inverse-square-root`` is ``lr * sqrt(warmup_steps / step)``, at
    least `min_lr`. The shapes are those of Megatron-core's ``OptimizerParamScheduler`` and, with `min_lr_ratio` and
    `num_cycles`, of transformers' cosine schedule.
    """
    if step < options.warmup_steps:
        return options.warmup_init + (options.lr - options.warmup_init) * step / options.warmup_steps
    if options.schedule == "inverse-square-root":
        return max(options.min_lr, options.lr * math.sqrt(max(1, options.warmup_steps) / max(1, step)))
    return options.min_lr + (options.lr - options.min_lr) * _schedule_factor(options, step)


def _schedule_factor(options: OptimizerOptions, step: int) -> float:
    """Return the factor of the schedule: 1 for ``constant``, ``max(min, 1 - progress)`` for ``linear``.

    For ``cosine`` it is ``max(min, (1 + min) / 2 + (1 - min) / 2 * cos(2 pi num_cycles progress))``; for ``WSD``
    (warm-up, stable, decay) it is 1 until the last `wsd_steps`.
    """
    if options.schedule == "constant":
        return 1.0
    end = options.decay_steps or options.total_steps
    progress = min(1.0, (step - options.warmup_steps) / max(1, end - options.warmup_steps))
    low = options.min_lr_ratio
    if options.schedule == "linear":
        return max(low, 1 - progress)
    if options.schedule == "cosine":
        wave = math.cos(2 * math.pi * options.num_cycles * progress)
        return max(low, (1 + low) / 2 + (1 - low) / 2 * wave)
    length = options.wsd_steps or max(1, end // 10)
    decayed = min(1.0, max(0.0, (step - (end - length)) / length))
    return WSD_SHAPES[options.wsd_style](decayed)


WSD_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda decayed: 1 - decayed,
    "cosine": lambda decayed: 0.5 + 0.5 * math.cos(math.pi * decayed),
    "exponential": lambda decayed: 2 * 0.5**decayed - 1,
    "minus_sqrt": lambda decayed: 1 - math.sqrt(decayed),
}


def build_adamw(parameters: Iterable[nn.Parameter], options: OptimizerOptions) -> torch.optim.AdamW:
    """Create AdamW over the trainable parameters, fused into one kernel per step."""
    trainable = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trainable, lr=options.lr, weight_decay=options.weight_decay, betas=options.betas, eps=options.eps, fused=True
    )


def load_adamw(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a saved state but keep the options of the current configuration, which may have changed."""
    configured = [{name: group[name] for name in ("weight_decay", "betas", "eps")} for group in optimizer.param_groups]
    groups = [saved | options for saved, options in zip(state["param_groups"], configured, strict=True)]
    optimizer.load_state_dict(dict(state) | {"param_groups": groups})


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimizer's state of each weight to a device, except its step count."""
    for moments in optimizer.state.values():
        moments.update({name: value.to(device) for name, value in moments.items() if name != "step"})


logger = logging.getLogger(__name__)

Limit = TypeVar("Limit")
Result = TypeVar("Result")
CPU_ALLOCATOR = "can't allocate memory"
"""Part of the message of the RuntimeError that torch raises if an allocation on a CPU fails."""
LOWER = (
    "Take a smaller model or a larger machine; or lower, for text, actor_rollout_ref.rollout.max_num_seqs, "
    "data.max_response_length or data.max_prompt_length, and in simulators env.train.total_num_envs, "
    "env.train.max_steps_per_rollout_epoch or policy.hidden_dim."
)


class OutOfMemory(ValueError):
    """An allocation failed; the message says where, and what to change."""


class MicroBatchTooLarge(OutOfMemory):
    """A micro-batch did not fit into the memory of one of several ranks.

    The other ranks wait for it inside a layer, so it cannot be retried right away. It may fit with the setting
    `instead`, a key and its value.
    """

    def __init__(self, message: str, instead: tuple[str, int] = ("", 0)) -> None:
        super().__init__(message)
        self.instead = instead


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on a device or on the CPU."""
    failed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return failed or (isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error))


def out_of_memory_message(error: BaseException, where: str | None = None, advice: str = LOWER) -> str | None:
    """Return the message to the user about a failed allocation, or None if `error` is something else.

    Args:
        error: the error, with its traceback.
        where: the operation that ran out of memory; by default tether's last line in the traceback.
        advice: what to change.
    """
    if not is_out_of_memory(error):
        return None
    if where is None:
        package = Path(__file__).parents[1]
        frames = traceback.extract_tb(error.__traceback__)
        frame = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(package))
        where = f"{frame.filename}, line {frame.lineno}"
    return f"out of memory in {where} ({_reason(error)}). {advice}"


@contextmanager
def explain_out_of_memory(where: str | None = None, advice: str = LOWER) -> Iterator[None]:
    """Add where it happened and advice to an out-of-memory error; the arguments are those of `out_of_memory_message`.

    Raises:
        OutOfMemory: an allocation failed within the context.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory_message(error, where, advice)
        if message is None:
            raise
        raise OutOfMemory(message) from None


def retry_with_smaller_limit(
    attempt: Callable[[Limit], Result],
    limit: Limit,
    halved: Callable[[Limit], Limit | None],
    setting: Callable[[Limit], str],
    advice: str,
) -> tuple[Result, Limit]:
    """Run an attempt, with smaller and smaller micro-batches, until it fits into memory.

    Args:
        attempt: the work; it must overwrite all results of a failed attempt.
        limit: the first limit on the size of a micro-batch.
        halved: returns the next smaller limit, or None if a micro-batch is already a single row.
        setting: formats a limit as a configuration setting, for the warning.
        advice: what to change if a single row does not fit.

    Returns:
        The result, and the limit that succeeded.

    Raises:
        ValueError: a single row does not fit.
    """
    first = limit
    while True:
        try:
            result = attempt(limit)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = _reason(error)
        else:
            if limit != first:
                logger.warning(
                    "a micro-batch did not fit into memory; it was split, with the same result, and so will be the "
                    "next ones. To make this permanent: %s",
                    setting(limit),
                )
            return result, limit
        # Free memory only here: inside the except block the error's traceback keeps the tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smaller = halved(limit)
        if smaller is None:
            raise ValueError(f"out of memory with a micro-batch of a single row ({reason}). {advice}")
        limit = smaller


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class RowBatch(Protocol):
    """The rows that an update trains on: `tether.batch.TrainBatch`, or the decisions of a control policy."""

    response_mask: Tensor
    """[B, T]: the tokens or decisions of the policy that it is trained on."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


Batch = TypeVar("Batch", bound=RowBatch)
Outputs = TypeVar("Outputs")
"""Outputs of a forward for the rows of a batch: a tensordict with one entry per row."""

Forward = Callable[[Any, Batch, Any], Outputs]
"""Called with (model, micro-batch, the engine's reference model or None), and additionally with the ranks that share
the rows, if any; returns the model's outputs."""


@dataclass(frozen=True)
class LossSizes:
    """Token and row counts of the whole mini-batch: the denominators that every micro-batch uses."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True)
class LossTerm:
    """One micro-batch's contribution to the loss, and metrics to log."""

    loss: Tensor
    metrics: dict[str, Metric]
    """Metrics that are exact however the mini-batch is split into micro-batches."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Components of the loss by name: summed over the micro-batches of a mini-batch, averaged over mini-batches."""


LossFunction = Callable[[Outputs, Batch, LossSizes], LossTerm]
Prepare = Callable[[Batch, Outputs, torch.Generator], None]
"""Fills in, in place, what a loss needs to know about a whole mini-batch, such as a ranking of its tokens. Called with
the mini-batch before it is split, the model's current outputs for it (without gradients), and a random generator."""


@dataclass(frozen=True)
class LossSpec(Generic[Batch, Outputs]):
    """A loss, the forward that it is computed from, and an optional preparation of whole mini-batches."""

    forward: Forward[Batch, Outputs]
    function: LossFunction[Outputs, Batch]
    prepare: Prepare[Batch, Outputs] | None = None
    """The preparation; it costs one more forward pass over each mini-batch."""


@dataclass(frozen=True)
class UpdatePlan:
    """The number of epochs over a rollout, and how it is divided into mini-batches."""

    mini_batch_rows: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 42
    max_ratio: float | None = None
    """Mean importance ratio above which a mini-batch's optimizer step is skipped; None: no limit."""
    target_kl: float | None = None
    """Target or limit of the KL from the sampling policy, for control policies."""
    adapts_lr: bool = False
    """Whether the learning rate adapts to the KL after each epoch: it falls if the KL is above twice `target_kl`, and
    rises if it is below half of it. Otherwise epochs end once the KL is above `target_kl`."""

    def mini_batches(self, rows: int, step: int, epoch: int) -> Iterator[Tensor]:
        """Yield the row indices of each mini-batch; the last may be smaller, and nothing is yielded without rows."""
        order = self.order(rows, step, epoch) if self.shuffle else torch.arange(rows)
        yield from order.split(self.mini_batch_rows) if rows else ()

    def order(self, rows: int, step: int, epoch: int) -> Tensor:
        """Return a permutation of the rows, which depends on (seed, step, epoch) alone."""
        return torch.from_numpy(permutation(rows, self.seed, step, "mini-batches", epoch))

    def generator(self, step: int, epoch: int, number: int) -> torch.Generator:
        """Return a CPU generator for mini-batch `number` of an epoch, which depends on (seed, step, epoch, number)
        alone."""
        return generator(self.seed, step, "mini-batch", epoch, number)


@dataclass(frozen=True)
class UpdateResult(Generic[Outputs]):
    """The result of an update."""

    metrics: dict[str, float]
    outputs: Outputs | None = None
    """Outputs of each row in the first mini-batch that contained it, without gradients; zero for rows that were not
    trained on, and None if no row was."""


CHECKED_BYTES = 2**30
"""Maximum bytes of weights that `Engine.check_saving` writes before the first step, so that it is quick."""


class Engine(Protocol[Batch, Outputs]):
    """Owns, runs and updates one model: in this process, over many ranks, or with its layers split."""

    version: int
    """Number of calls of `update` so far."""

    def infer(self, batch: Batch, forward: Forward[Batch, Outputs]) -> Outputs:
        """Run `forward` over all rows without gradients, and return the outputs in the batch's order."""
        ...

    def update(
        self, batch: Batch, loss: LossSpec[Batch, Outputs], plan: UpdatePlan, step: int
    ) -> UpdateResult[Outputs]:
        """Train on a rollout: `plan.epochs` passes of mini-batches, with one optimizer step each.

        Args:
            batch: all rows; those without a valid token are omitted.
            loss: the loss to minimise.
            plan: epochs and mini-batches.
            step: training step, counted from 0, which determines the learning rate and the permutation.

        Returns:
            The model's outputs for each row, and metrics: those of the loss (ratios and clip fractions also of the
            first optimizer step alone), `grad_norm` (mean over optimizer steps), `lr`, `skipped_updates`, and
            `early_stops` if the plan has a `max_ratio`.
        """
        ...

    def export(self) -> WeightUpdate:
        """Return the current weights without copying them."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model so that it can be loaded without tether; for text in transformers' format."""
        ...

    def check_saving(self, folder: Path) -> None:
        """Write the model like `save`, or a share of its weights if it is large, to check that saving will work."""
        ...

    def saving(self, folder: Path, state: Path | None, *, copy: bool) -> Callable[[], None]:
        """Start to save the model and all training state.

        Args:
            folder: the folder of the model, as in `save`, named after the role.
            state: the file for the training state, in an existing folder; None: only the model is saved.
            copy: whether to copy the current state, so that training can continue while it is written.

        Returns:
            A function that writes, in any thread.
        """
        ...

    def load_state(self, file: Path) -> None:
        """Load the training state that `saving` wrote; the weights are loaded with the model."""
        ...


@dataclass(frozen=True)
class Learner(Generic[Batch, Outputs]):
    """A policy or a critic that is trained, with its forward, loss and plan."""

    engine: Engine[Batch, Outputs]
    forward: Forward[Batch, Outputs]
    """The forward that computes the outputs of a rollout before the update."""
    loss: LossSpec[Batch, Outputs]
    plan: UpdatePlan
    critic_loss: LossSpec[Batch, Outputs] | None = None
    """The critic's loss, if the critic is part of the policy's model; None if it has its own model or is absent."""
    loss_at: Callable[[int], tuple[LossSpec[Batch, Outputs], dict[str, float]]] | None = None
    """Maps the training step, counted from 0, to its loss and scheduled settings; None if nothing is scheduled."""

    def infer(self, batch: Batch) -> Outputs:
        """Return the outputs for all rows, without gradients."""
        return self.engine.infer(batch, self.forward)

    def update(self, batch: Batch, step: int, *, critic_only: bool = False) -> UpdateResult[Outputs]:
        """Train on the batch as `Engine.update` does, or only the critic with `critic_loss`."""
        loss, settings = self.loss_at(step) if self.loss_at else (self.loss, {})
        if critic_only:
            assert self.critic_loss
            loss, settings = self.critic_loss, {}
        updated = self.engine.update(batch, loss, self.plan, step)
        return replace(updated, metrics=updated.metrics | settings)


AnyLearner: TypeAlias = Learner[Any, Any]
"""A learner for any kind of batch, for code that does not look into batches."""
AnyLoss: TypeAlias = LossSpec[Any, Any]

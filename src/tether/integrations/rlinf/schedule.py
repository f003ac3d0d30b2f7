"""Learning rate schedules of RLinf's FSDP backend, which reads `optim`; its Megatron backend reads `lr_sched`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tether.integrations.rlinf.rows import (
    UNSET,
    Convert,
    Mapped,
    NotRead,
    Unsupported,
    Values,
    choice,
    min_lr_ratio,
    positive_int,
    to,
    unless_null,
)

FALLING = ("cosine", "linear")
SHAPES = {"constant": "constant", "torch_constant": "constant"} | {name: name for name in FALLING}
"""RLinf's name of a schedule -> tether's. In RLinf, `torch_constant` is a ConstantLR with factor 1."""


def read_by(backend: str, section: str, convert: Convert) -> Convert:
    """Return the conversion of a schedule's key that only this backend reads: Megatron `lr_sched`, FSDP `optim`."""

    def converted(value: object, values: Values) -> object:
        fsdp = values.get(f"{section}.training_backend") == "fsdp"
        if fsdp != (backend == "fsdp"):
            name, read = ("FSDP", "optim") if fsdp else ("Megatron", "lr_sched")
            raise NotRead(f"{name} reads {section}.{read} in its place")
        return convert(value, values)

    return converted


def updates_of_text(section: str) -> Callable[[Values], int]:
    """Return a function that computes how often the rate changes in a training step of a text run."""

    def updates(values: Values) -> int:
        moves = values.get(f"{section}.lr_sched_sync_with_optim", True)
        return positive_int(values, "algorithm.n_minibatches", 1) if moves else 1

    return updates


def fsdp_schedule(
    optim: str,
    native: str,
    updates: Callable[[Values], int],
    whole_run: Callable[[Values], object],
    default: object = UNSET,
) -> Mapping[str, Mapped]:
    """Return the rows of the schedule that FSDP reads.

    Args:
        optim: RLinf's section of the optimizer.
        native: native section of the optimizer.
        updates: returns how often the rate changes in a training step.
        whole_run: returns the training steps of the run, if they are known.
        default: schedule of files that name none; UNSET: the native default, which is the same.
    """

    def training_steps(steps: int, values: Values) -> int:
        moves = updates(values)
        if steps % moves:
            raise Unsupported(f"the rate moves once in {moves} optimizer steps (algorithm.n_minibatches)")
        return steps // moves

    def falls(values: Values) -> bool:
        return values.get(f"{optim}.lr_scheduler") in FALLING

    def where_it_falls(convert: Convert) -> Convert:
        def converted(value: object, values: Values) -> object:
            if not falls(values):
                raise NotRead("the rate does not fall")
            return convert(value, values)

        return converted

    def warmup(value: object, values: Values) -> object:
        steps = values.get(f"{optim}.lr_warmup_steps", -1)
        if steps < 0:
            ratio, total = values.get(f"{optim}.lr_warmup_steps_ratio"), values.get(f"{optim}.total_training_steps")
            if ratio and not total:
                raise NotRead(f"it is a share of {optim}.total_training_steps, which is missing")
            steps = int(ratio * total) if ratio else 0
        return training_steps(steps, values) or UNSET

    def decay(value: object, values: Values) -> object:
        total = positive_int(values, f"{optim}.total_training_steps", None)
        if total is None or not falls(values):
            return UNSET
        steps = training_steps(total, values)
        return UNSET if steps == whole_run(values) else steps

    def lowest(value: object, values: Values) -> object:
        if values.get(f"{optim}.min_lr_rate") is not None:
            raise NotRead(f"{optim}.min_lr_rate goes before it")
        return min_lr_ratio(optim)(value, values)

    shapes = choice(SHAPES, "there is no such schedule")
    return {
        f"{optim}.lr_scheduler": to(f"{native}.lr_scheduler_type", by=shapes, default=default),
        f"{optim}.lr_warmup_steps": to(f"{native}.lr_warmup_steps", by=warmup),
        f"{optim}.lr_warmup_steps_ratio": to(f"{native}.lr_warmup_steps", by=warmup),
        f"{optim}.total_training_steps": to(f"{native}.lr_decay_steps", by=decay),
        f"{optim}.min_lr": to(f"{native}.min_lr_ratio", by=where_it_falls(lowest)),
        f"{optim}.min_lr_rate": to(f"{native}.min_lr_ratio", by=where_it_falls(unless_null)),
        f"{optim}.num_cycles": to(f"{native}.num_cycles", by=where_it_falls(unless_null)),
    }

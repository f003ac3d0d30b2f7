"""`*.optim`: the optimizer and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.section import (
    EMBODIED_TOO,
    ActsIf,
    AliasOf,
    Betas,
    Fraction,
    NonNegative,
    NullIsUnset,
    OffOrEvery,
    Positive,
    PositiveFloat,
    Section,
)

FALLS = ActsIf(".lr_scheduler_type", off=("constant",), other=ActsIf(".lr_decay_style", off=("constant",)))
WSD = ActsIf(".lr_decay_style", on=("WSD",))


class OptimConfig(Section):
    """AdamW with linear warm-up, then a schedule of the learning rate, which advances once per training step."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, also in steps without a gradient; with lr below 3e-6 the default is lost in rounding."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    clip_grad: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down before each optimizer step."""
    lr_warmup_steps: Annotated[OffOrEvery, NullIsUnset()] = -1
    """Training steps over which the rate rises from lr_warmup_init to lr; -1: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a share of all training steps."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon in the denominator."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Megatron's name of the schedule; takes precedence unless constant. WSD: constant, then a short decay."""
    lr_decay_steps: Annotated[Positive | None, FALLS] = None
    """Training steps until the rate reaches its minimum, including the warm-up; null: all."""
    min_lr: Annotated[NonNegative, FALLS] = 0.0
    """Minimum learning rate of the decay. (Megatron's; min_lr_ratio is a share of lr.)"""
    lr_warmup_init: NonNegative = 0.0
    """Initial learning rate of the warm-up."""
    lr_wsd_decay_steps: Annotated[Positive | None, WSD] = None
    """WSD: length of the final decay in steps; null: a tenth of lr_decay_steps."""
    lr_wsd_decay_style: Annotated[Literal["exponential", "linear", "cosine", "minus_sqrt"], WSD] = "exponential"
    """WSD: shape of the final decay."""
    min_lr_ratio: Annotated[
        Fraction,
        NullIsUnset(),
        ActsIf(".lr_scheduler_type", on=("cosine", "linear"), other=ActsIf(".lr_decay_style", on=("cosine", "linear"))),
    ] = 0.0
    """Cosine and linear: minimum rate as a share of lr."""
    num_cycles: Annotated[
        PositiveFloat, ActsIf(".lr_scheduler_type", on=("cosine",), other=ActsIf(".lr_decay_style", on=("cosine",)))
    ] = 0.5
    """Cosine: periods over the run; 0.5 ends at the minimum."""
    warmup_style: Annotated[Literal["constant", "cosine"] | None, AliasOf(".lr_scheduler_type")] = None
    """Older name of lr_scheduler_type."""


class CriticOptimConfig(OptimConfig):
    """The critic's optimizer: the same with a higher default rate."""

    lr: Annotated[NonNegative, EMBODIED_TOO] = 1e-5
    """Peak learning rate of the critic."""

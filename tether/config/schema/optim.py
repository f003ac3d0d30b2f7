"""`*.optim`: the optimizer and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from tether.config.schema.section import (
    AliasOf,
    Betas,
    Fraction,
    NonNegative,
    OffOrEvery,
    PositiveFloat,
    Section,
)


class OptimConfig(Section):
    """AdamW with linear warm-up, then a constant, cosine or linear learning rate, which moves once a training step."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    clip_grad: PositiveFloat = 1.0
    """The gradient is scaled down to this global norm before each optimizer step."""
    lr_warmup_steps: OffOrEvery = -1
    """Training steps over which the rate rises from 0; -1: lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a share of all training steps."""
    eps: PositiveFloat = 1e-8
    """AdamW's term in the denominator."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """What the rate does after the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Cosine and linear: the rate never falls below this share of lr."""
    num_cycles: PositiveFloat = 0.5
    """Cosine: periods over the run; 0.5 ends at the minimum."""
    warmup_style: Annotated[Literal["constant", "cosine"] | None, AliasOf(".lr_scheduler_type")] = None
    """Older name of lr_scheduler_type."""
    optimizer: str = "AdamW"
    """Class of the optimizer."""
    optimizer_impl: str = "torch.optim"
    """Module that the optimizer's class comes from."""
    override_optimizer_config: dict[str, Any] | None = None
    """More arguments of the optimizer's class."""
    total_training_steps: int = -1
    """Length of the schedule in training steps; -1: the run's own length."""
    lr_warmup_init: float = 0.0
    """Megatron: the rate at which the warm-up begins."""
    lr_decay_steps: int | None = None
    """Megatron: length of the decay."""
    lr_decay_style: str = "constant"
    """Megatron: shape of the decay."""
    min_lr: float = 0.0
    """Megatron: lowest rate."""
    weight_decay_incr_style: str = "constant"
    """Megatron: how weight decay grows."""
    lr_wsd_decay_style: str = "exponential"
    """Megatron: shape of the last phase of warm-up, stable, decay."""
    lr_wsd_decay_steps: int | None = None
    """Megatron: length of that last phase."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Megatron: take the schedule out of the checkpoint."""


class CriticOptimConfig(OptimConfig):
    """The critic's: the same with a higher default rate."""

    lr: NonNegative = 1e-5
    """Peak learning rate of the critic."""

"""AdamW, the learning-rate schedule and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019) with a schedule that advances once a training step."""

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


def learning_rate(options: OptimizerOptions, step: int) -> float:
    """Learning rate of training step `step`, counted from 0.

    Warm-up is linear from 0 over `warmup_steps`; afterwards ``constant``; ``linear``: ``lr * max(min, 1 - progress)``;
    or ``cosine``: ``lr * max(min, (1 + min) / 2 + (1 - min) / 2 * cos(2 pi num_cycles progress))``.
    """
    if step < options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    progress = (step - options.warmup_steps) / max(1, options.total_steps - options.warmup_steps)
    low = options.min_lr_ratio
    if options.schedule == "linear":
        return options.lr * max(low, 1 - progress)
    wave = math.cos(2 * math.pi * options.num_cycles * progress)
    return options.lr * max(low, (1 + low) / 2 + (1 - low) / 2 * wave)


def build_adamw(parameters: Iterable[nn.Parameter], options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW over the parameters that train; fused into one kernel a step."""
    trainable = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trainable, lr=options.lr, weight_decay=options.weight_decay, betas=options.betas, eps=options.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr

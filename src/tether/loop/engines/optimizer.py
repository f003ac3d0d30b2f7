"""AdamW, the learning-rate schedule and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn


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

    Warm-up is linear from `warmup_init` over `warmup_steps`; afterwards the rate is ``min_lr + (lr - min_lr) * share``
    with a share (`_share`) that begins at 1; ``inverse-square-root`` is ``lr * sqrt(warmup_steps / step)``, at least
    `min_lr`. The shapes are those of Megatron-core's ``OptimizerParamScheduler`` and, with `min_lr_ratio` and
    `num_cycles`, of transformers' cosine schedule.
    """
    if step < options.warmup_steps:
        return options.warmup_init + (options.lr - options.warmup_init) * step / options.warmup_steps
    if options.schedule == "inverse-square-root":
        return max(options.min_lr, options.lr * math.sqrt(max(1, options.warmup_steps) / max(1, step)))
    return options.min_lr + (options.lr - options.min_lr) * _share(options, step)


def _share(options: OptimizerOptions, step: int) -> float:
    """Return the share of the schedule: 1 for ``constant``, ``max(min, 1 - progress)`` for ``linear``.

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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimizer's state of each weight to a device, except its step count."""
    for moments in optimizer.state.values():
        moments.update({name: value.to(device) for name, value in moments.items() if name != "step"})

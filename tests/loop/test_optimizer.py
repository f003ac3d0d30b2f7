"""AdamW and the learning rate, by hand."""

import math

import pytest
import torch
from torch import nn

from tether.control.learning.flat import FlatAdamW, FlatParameters
from tether.loop.engine import OptimizerOptions, build_adamw, learning_rate, load_adamw, set_learning_rate


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        (OptimizerOptions(1.0), [1, 1, 1, 1]),
        (OptimizerOptions(2.0, warmup_steps=4), [0, 0.5, 1, 1.5, 2, 2]),
        # half a wave over the 4 steps after the warm-up: progress 0, 1/4, 1/2, 3/4, 1, and (1 + cos(pi progress)) / 2
        (
            OptimizerOptions(1.0, schedule="cosine", warmup_steps=2, total_steps=6),
            [0, 0.5, 1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0],
        ),
        # from 1 down to 0.2 around their middle, 0.6
        (OptimizerOptions(1.0, schedule="cosine", total_steps=4, min_lr_ratio=0.2), [1, 0.6 + 0.4 / math.sqrt(2), 0.6]),
        # a whole wave: down, and up again
        (OptimizerOptions(1.0, schedule="cosine", total_steps=4, num_cycles=1.0), [1, 0.5, 0, 0.5, 1]),
        # towards a rate above 0, and there before the run ends
        (OptimizerOptions(1.0, schedule="linear", total_steps=4, min_lr=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (OptimizerOptions(1.0, schedule="linear", total_steps=9, decay_steps=2), [1, 0.5, 0, 0]),
        (OptimizerOptions(1.0, warmup_steps=2, warmup_init=0.5), [0.5, 0.75, 1, 1]),
        # sqrt(1 / step) after one step of warm-up
        (OptimizerOptions(1.0, schedule="inverse-square-root", warmup_steps=1), [0, 1, 0.5**0.5, 3**-0.5, 0.5]),
        # 1 until two steps before the end, then down: half-way 1/2, and 2 * 0.5^0.5 - 1
        (OptimizerOptions(1.0, schedule="WSD", total_steps=4, wsd_steps=2, wsd_style="linear"), [1, 1, 1, 0.5, 0]),
        (OptimizerOptions(1.0, schedule="WSD", total_steps=4, wsd_steps=2), [1, 1, 1, math.sqrt(2) - 1, 0]),
        (OptimizerOptions(1.0, schedule="WSD", total_steps=2, wsd_steps=2, wsd_style="cosine"), [1, 0.5, 0]),
        (OptimizerOptions(1.0, schedule="WSD", total_steps=4, wsd_steps=4, wsd_style="minus_sqrt"), [1, 0.5]),
        # all warm-up: nothing is left to divide by
        (OptimizerOptions(1.0, schedule="cosine", warmup_steps=2, total_steps=2), [0, 0.5, 1]),
    ],
)
def test_the_schedule(options: OptimizerOptions, rates: list[float]) -> None:
    assert [learning_rate(options, step) for step in range(len(rates))] == pytest.approx(rates)


def test_one_step_of_adamw() -> None:
    """Weight 2, gradient 3: decay lr * 0.1 * 2, and the first step's corrected moments give lr * 3 / sqrt(9)."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 2.0)
    optimizer = build_adamw(layer.parameters(), OptimizerOptions(lr=99.0, weight_decay=0.1, betas=(0.8, 0.9)))
    set_learning_rate(optimizer, 0.01)
    layer.weight.grad = torch.full_like(layer.weight, 3.0)
    optimizer.step()
    assert layer.weight.item() == pytest.approx(2 - 0.01 * 0.1 * 2 - 0.01, abs=1e-9)
    state = optimizer.state[layer.weight]
    assert (state["exp_avg"].item(), state["exp_avg_sq"].item()) == pytest.approx((0.2 * 3, 0.1 * 9))


def test_options_that_changed_before_a_resume_act() -> None:
    """torch's own `load_state_dict` brings back the saved ones."""
    layer = nn.Linear(1, 1)
    before = build_adamw(layer.parameters(), OptimizerOptions(lr=0.1, weight_decay=0.1))
    layer(torch.ones(1)).backward()
    before.step()
    after = build_adamw(layer.parameters(), OptimizerOptions(lr=0.1, weight_decay=0.0, betas=(0.5, 0.6), eps=1e-3))
    load_adamw(after, before.state_dict())
    (group,) = after.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.0, (0.5, 0.6), 1e-3)
    for parameter in layer.parameters():
        assert after.state[parameter]["exp_avg"].equal(before.state[parameter]["exp_avg"])
    with pytest.raises(ValueError, match="parameter group"):
        load_adamw(build_adamw([layer.weight], OptimizerOptions(lr=0.1)), before.state_dict())


def test_frozen_parameters_are_left_out() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    (trained,) = build_adamw(layer.parameters(), OptimizerOptions(1.0)).param_groups[0]["params"]
    assert trained is layer.weight


@pytest.mark.parametrize(("lr", "changed"), [(1e-6, 0.0), (2.9e-6, 0.0), (3e-6, 1.0), (1e-4, 1.0)])
def test_weight_decay_without_a_gradient_acts_from_half_an_ulp_on(lr: float, changed: float) -> None:
    """A factor of 1 - 0.01 lr is 1 in float32 up to 2^-25 = 2.98e-8."""
    weights = torch.cat([torch.tensor([1.0, -2.0]), torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    ours, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    theirs.grad = torch.zeros_like(theirs)
    build_adamw([theirs], OptimizerOptions(lr)).step()
    flat = FlatParameters([[ours]])
    FlatAdamW(flat, betas=(0.9, 0.999), eps=1e-8, weight_decay=OptimizerOptions(lr).weight_decay).step([lr])
    for found in (theirs.detach(), flat.values):
        assert (found != weights).double().mean() == changed

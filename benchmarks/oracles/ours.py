"""tether's side of the checks, in the form that the peers' results are brought to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.oracles.cases import Case
from benchmarks.oracles.compare import Outputs
from tether.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    KLController,
    aggregate_loss,
    count_valid,
    kl_penalty,
    value_loss,
)

UPDATES = ((0.02, 64), (0.5, 64), (0.11, 100), (-0.3, 7))
"""(measured KL, rows) of the steps that a controller is taken through."""


def estimate(name: str, rewards: str = "rewards", **keywords: Any) -> Callable[[Case], Outputs]:
    """Return the call of an advantage estimator; string keywords name a field of the case."""

    def call(case: Case) -> Outputs:
        given = {k: getattr(case, v) if isinstance(v, str) else v for k, v in keywords.items()}
        result = ADVANTAGE_ESTIMATORS[name](getattr(case, rewards), case.mask, **given)
        return {"advantages": result.advantages, "returns": result.returns}

    return call


def policy_loss(name: str, mode: str, max_length: int | None = None, **keywords: Any) -> Callable[[Case], Outputs]:
    """Return the call of a policy loss: the aggregated loss and its gradient; keywords as in `estimate`."""

    def call(case: Case) -> Outputs:
        given = {k: getattr(case, v) if isinstance(v, str) and v in vars(case) else v for k, v in keywords.items()}

        def loss(log_probs: Tensor) -> Tensor:
            term = POLICY_LOSSES[name](log_probs, case.old_log_probs, case.advantages, case.mask, **given)
            return aggregate_loss(term.loss, case.mask, mode, **sizes(case), max_length=max_length)

        return with_gradient(loss, case.log_probs)

    return call


def critic_loss(mode: str = "token-mean", **keywords: Any) -> Callable[[Case], Outputs]:
    """Return the call of the value loss, aggregated, with its gradient."""

    def call(case: Case) -> Outputs:
        def loss(values: Tensor) -> Tensor:
            term = value_loss(values, case.old_values, case.returns, case.mask, **keywords)
            return aggregate_loss(term.loss, case.mask, mode, **sizes(case))

        return with_gradient(loss, case.values)

    return call


def kl(kind: str) -> Callable[[Case], Outputs]:
    """Return the call of a KL estimator: its value and gradient at each token."""

    def call(case: Case) -> Outputs:
        return per_token(lambda log_probs: kl_penalty(log_probs, case.ref_log_probs, kind, case.mask), case)

    return call


def controller(make: Callable[[], Any]) -> Callable[[Case], Outputs]:
    """Return the coefficients that a KL controller of either side goes through."""

    def call(_: Case) -> Outputs:
        held: KLController = make()
        values = []
        for kl_of_step, rows in UPDATES:
            held.update(kl_of_step, rows)
            values.append(float(held.value))
        return {"values": torch.tensor(values, dtype=torch.float64)}

    return call


def sizes(case: Case) -> dict[str, Tensor]:
    """Count the tokens and rows of a case, as keywords of `aggregate_loss`."""
    return count_valid(case.mask)._asdict()


def with_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Outputs:
    """Evaluate a loss and its gradient."""
    variable = at.clone().requires_grad_()
    value = loss(variable)
    (gradient,) = torch.autograd.grad(value, variable)
    return {"loss": value.detach(), "gradient": gradient}


def per_token(function: Callable[[Tensor], Tensor], case: Case) -> Outputs:
    """Evaluate a function of each token's log-probability and its derivative."""
    variable = case.log_probs.clone().requires_grad_()
    value = function(variable)
    (gradient,) = torch.autograd.grad(value.sum(), variable)
    return {"value": value.detach(), "gradient": gradient}

"""Strength of the KL penalty in the reward, from step to step."""

import math
from typing import Protocol

from tether.algorithms.checks import NonNegative, Positive, checked


class KLController(Protocol):
    """Holds the coefficient; the trainer updates it once a step and keeps its state in the checkpoint."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to the KL that was measured over n_steps rows."""

    def state_dict(self) -> dict[str, float]:
        """Return what `load_state_dict` restores exactly."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""


class FixedKLController:
    """Keeps the coefficient as it is: value = kl_coef (the constant beta of Ziegler et al. 2019, 1909.08593).

    Assumes: the weight was found beforehand, or the KL need not be steered.
    Use it: first.
    Watch: `actor/reward_kl_penalty`.
    Keys: `algorithm.kl_ctrl.type=fixed`, `algorithm.kl_ctrl.kl_coef`.
    """

    @checked
    def __init__(self, kl_coef: NonNegative) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return nothing: the coefficient belongs to the config, and a changed config wins over a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing."""


class AdaptiveKLController:
    """Raises the coefficient while the KL is over its target, and lowers it below (Ziegler et al. 2019, 1909.08593).

    value *= max(1/2, 1 + clip(kl / target_kl - 1, -0.2, 0.2) * n / horizon), with n the rows of the step. It at most
    halves in a step: without that bound (which neither the paper nor verl has) the penalty would turn into a reward for
    distance where a step has more than 5 horizon rows.

    Assumes: the KL answers to the weight within the horizon.
    Use it: where the scale of the reward is unknown, but the KL that is wanted is known.
    Watch: `actor/reward_kl_penalty` near target_kl, `actor/reward_kl_penalty_coeff` settling.
    Keys: `algorithm.kl_ctrl.type=adaptive`, `algorithm.kl_ctrl.kl_coef`, `algorithm.kl_ctrl.target_kl`,
        `algorithm.kl_ctrl.horizon`.
    """

    @checked
    def __init__(self, init_kl_coef: NonNegative, target_kl: Positive, horizon: Positive) -> None:
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to the KL that was measured over n_steps rows; one that is no finite number changes nothing."""
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= max(0.5, 1 + error * n_steps / self.horizon)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient reached so far."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved coefficient."""
        self.value = state["value"]

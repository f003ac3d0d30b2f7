"""Controllers of the coefficient of the KL penalty in the reward."""

import math
from typing import Protocol

from tether.algorithms.checks import NonNegative, Positive, checked


class KLController(Protocol):
    """Holds the coefficient; the trainer updates it once per step and saves its state in the checkpoint."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient to the KL that was measured over n_steps rows."""

    def state_dict(self) -> dict[str, float]:
        """Return the state, which `load_state_dict` restores exactly."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved state."""


class FixedKLController:
    """A constant coefficient: value = kl_coef (the constant beta of Ziegler et al. 2019, 1909.08593).

    Assumes: the weight was tuned beforehand, or the KL need not be controlled.
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
        """Return an empty state."""
        # The coefficient belongs to the config, and a changed config has priority over a checkpoint.
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing."""


class AdaptiveKLController:
    """Raises the coefficient while the KL is above its target, and lowers it below (Ziegler et al. 2019, 1909.08593).

    value *= max(1/2, 1 + clip(kl / target_kl - 1, -0.2, 0.2) * n / horizon), with n the rows of the step. It at most
    halves in a step: without that bound (which neither the paper nor verl has) the penalty would turn into a reward for
    distance in a step of more than 5 horizon rows.

    Assumes: the KL responds to the weight within the horizon.
    Use it: where the scale of the reward is unknown, but the desired KL is known.
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
        """Adapt the coefficient to the KL that was measured over n_steps rows, unless it is not finite."""
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= max(0.5, 1 + error * n_steps / self.horizon)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved coefficient."""
        self.value = state["value"]

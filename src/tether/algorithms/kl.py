"""KL of the policy from the reference: per-token estimators from log-probs, and the KL penalty in the reward.

Let d = l - q, where l and q are the log-probabilities of a token, sampled from the policy, under policy and reference.
In expectation over samples from the policy, as a *value* and as the *gradient* of a loss term (Schulman, "Approximating
KL divergence", 2020):

| kind | formula | expected value | expected gradient |
|---|---|---|---|
| ``k1``, ``kl`` | d | KL(policy, ref) | zero: in a loss it does nothing |
| ``abs`` | abs(d) | E abs(d) | that of the total variation distance, times 2 |
| ``k2``, ``mse`` | d^2 / 2 | E d^2 / 2 | KL(policy, ref) |
| ``k3``, ``low_var_kl`` | exp(-d) - 1 + d | KL(policy, ref) | KL(ref, policy) |
| each with ``+`` | same as without | same as without | KL(policy, ref), from k2 |
| ``full`` | from logits | exact, each token | KL(policy, ref) |

k3 clamps d to +-20 and its value to 10, as verl does; beyond these bounds its gradient is 0.

In the reward, ``full`` at a token does not depend on which token was sampled there, so it only affects the policy
through the returns of earlier tokens: it keeps the policy away from contexts in which it differs from the reference.
With p the policy and KL_t its exact KL from the reference at token t of a response a::

    gradient of E sum_t KL_t = E sum_t [ gradient of KL_t + (gradient of log p(a_t)) sum_{s>t} KL_s ]

``full`` in the reward gives the second term, and ``full`` in the loss with the same weight the first. Together they are
the complete gradient, with less variance than ``k1`` in the reward, whose expected gradient is the same. ``full`` in
the reward alone does not constrain the last token, so it has no effect on responses of one token.

Watch: `actor/kl_loss` (in the loss), `actor/reward_kl_penalty` (in the reward): it should grow slowly; after a jump the
    policy rarely returns to the reference.
Keys: `actor_rollout_ref.actor.use_kl_loss`, `actor_rollout_ref.actor.kl_loss_type`,
    `actor_rollout_ref.actor.kl_loss_coef`; `algorithm.use_kl_in_reward`, `algorithm.kl_penalty`, `algorithm.kl_ctrl`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algorithms.logits import full_kl
from tether.algorithms.masking import clip, count_valid, masked_mean, select, widen
from tether.algorithms.registry import NonNegative, Positive, checked
from tether.algorithms.shapes import Mask, Scalar, Tokens


class KLController(Protocol):
    """Holds the coefficient of the KL penalty; the trainer updates it once per step and saves its state."""

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
        # The coefficient comes from the configuration, which has priority over a checkpoint.
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing."""


class AdaptiveKLController:
    """Raises the coefficient while the KL is above its target, and lowers it below (Ziegler et al. 2019, 1909.08593).

    value *= max(1/2, 1 + clip(kl / target_kl - 1, -0.2, 0.2) * n / horizon), with n the rows of the step. The
    coefficient at most halves in a step. Without that bound, which neither the paper nor verl has, it would become
    negative in a step of more than 5 horizon rows, and reward distance from the reference.

    Assumes: the KL responds to the weight within the horizon.
    Use it: where the scale of the reward is unknown, but the desired KL is known.
    Watch: `actor/reward_kl_penalty` near target_kl, `actor/reward_kl_penalty_coeff` settling.
    Keys: `algorithm.kl_ctrl.type=adaptive`, `algorithm.kl_ctrl.kl_coef`, `algorithm.kl_ctrl.target_kl`,
        `algorithm.kl_ctrl.horizon`.
    """

    @checked
    def __init__(self, init_kl_coef: NonNegative, target_kl: Positive, horizon: Positive) -> None:
        self.value = self.initial = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient to the KL that was measured over n_steps rows, unless it is not finite."""
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= max(0.5, 1 + error * n_steps / self.horizon)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient and the initial one."""
        return {"value": self.value, "initial": self.initial}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved coefficient, unless it is of a fixed controller or the initial coefficient has changed."""
        if "value" in state and state.get("initial", self.initial) == self.initial:
            self.value = state["value"]


def k1(log_probs: Tokens, ref_log_probs: Tokens) -> Tokens:
    """d: unbiased, high variance, sometimes negative. Its expected gradient is zero.

    Assumes: tokens were sampled from the policy itself.
    Use it: in the reward; never in a loss.
    """
    return widen(log_probs) - widen(ref_log_probs)


def absolute(log_probs: Tokens, ref_log_probs: Tokens) -> Tokens:
    """|d|.

    Assumes: the same as `k1`.
    Use it: in the reward, where penalties must not be negative. It does not estimate a KL.
    """
    return k1(log_probs, ref_log_probs).abs()


def k2(log_probs: Tokens, ref_log_probs: Tokens) -> Tokens:
    """d^2 / 2: biased as a value, but its gradient is that of the KL.

    Assumes: the two policies are close: E d^2 / 2 is the KL up to third order.
    Use it: in a loss.
    """
    return 0.5 * k1(log_probs, ref_log_probs).square()


def k3(log_probs: Tokens, ref_log_probs: Tokens) -> Tokens:
    """exp(-d) - 1 + d: unbiased, never negative, low variance.

    Assumes: the same as `k1`; far from the reference its variance grows with exp(-d).
    Use it: to log a value, or in a loss that should have the gradient of KL(ref, policy).
    """
    minus_d = clip(-k1(log_probs, ref_log_probs), -20.0, 20.0)
    return clip(torch.expm1(minus_d) - minus_d, -math.inf, 10.0)


Estimator = Callable[[Tokens, Tokens], Tokens]


def straight_through(estimator: Estimator) -> Estimator:
    """Return an estimator with the value of `estimator` and the gradient of k2.

    Assumes: the same as the estimator.
    Use it: in a loss, to log an unbiased value and follow the gradient of the KL; usually ``k3+``.
    """

    def estimate(log_probs: Tokens, ref_log_probs: Tokens) -> Tokens:
        carrier = k2(log_probs, ref_log_probs)
        return estimator(log_probs, ref_log_probs).detach() + (carrier - carrier.detach())

    return estimate


_FROM_LOG_PROBS: dict[str, Estimator] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}
_FROM_LOG_PROBS |= {f"{kind}+": straight_through(estimator) for kind, estimator in _FROM_LOG_PROBS.items()}

KL_ESTIMATORS: dict[str, Callable[..., Float[Tensor, "..."]]] = {
    name: checked(estimator) for name, estimator in {**_FROM_LOG_PROBS, "full": full_kl}.items()
}
"""Estimators by name, called with (log_probs, ref_log_probs), or ``full`` with (logits, ref_logits, chunk_size). All
return [B, T]."""


def kl_penalty(log_probs: Tokens, ref_log_probs: Tokens, kind: str, response_mask: Mask | None = None) -> Tokens:
    """Estimate the KL of each token. The module's docstring lists the kinds. The reference gets no gradient.

    Args:
        log_probs: log-probs of the policy.
        ref_log_probs: log-probs of the reference.
        kind: a name in `KL_ESTIMATORS` other than ``full``.
        response_mask: required if masked positions may hold invalid values: they are set to 0 before the estimate, so
            that not even a NaN reaches a gradient.

    Raises:
        ValueError: the kind is unknown, or is ``full``, which needs logits.
    """
    if kind == "full":
        raise ValueError(
            "kl_penalty takes log-probabilities of the sampled tokens only; 'full' needs logits: call full_kl"
        )
    if kind not in _FROM_LOG_PROBS:
        raise ValueError(f"unknown KL estimator {kind!r}. Use one of: {', '.join(_FROM_LOG_PROBS)}")
    ref_log_probs = ref_log_probs.detach()
    if response_mask is not None:
        log_probs, ref_log_probs = select(log_probs, response_mask), select(ref_log_probs, response_mask)
    return _FROM_LOG_PROBS[kind](log_probs, ref_log_probs)


class PenalizedRewards(NamedTuple):
    """The result of `apply_kl_penalty`."""

    token_level_rewards: Tokens
    kl: Scalar
    """Mean over rows of the row's mean KL, to be logged and passed to the controller."""


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tokens, kl: Tokens, response_mask: Mask, *, kl_coef: NonNegative
) -> PenalizedRewards:
    """Subtract the KL of each token from its reward: r_t = score_t - kl_coef * kl_t; 0 outside the mask.

    `kl` is the KL of the old policy, from `kl_penalty` or `full_kl`. Update the controller with the returned mean after
    this call, because a step's coefficient must not depend on its own KL.
    """
    kl = select(kl, response_mask)
    rewards = select(token_level_scores, response_mask) - kl_coef * kl
    row_means = masked_mean(kl, response_mask, dim=-1)
    return PenalizedRewards(rewards, row_means.sum() / count_valid(response_mask).num_sequences.clamp(min=1))

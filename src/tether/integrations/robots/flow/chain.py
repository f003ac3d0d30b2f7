"""The denoising steps of a flow as a Gaussian Markov chain, following pi_RL (Chen et al. 2025).

Time t runs from 1 (noise) to 0 (actions) in N steps of d = 1/N. The network returns the velocity v(x, t) of a rectified
flow, x_t = (1 - t) x_0 + t x_1 with x_1 ~ N(0, 1), so its estimates of both ends are

    x_0 = x - t v        x_1 = x + (1 - t) v,

and the Euler step of the ODE combines them at the next time s = t - d: (1 - s) x_0 + s x_1. The kinds of steps are:

- ``flow_sde`` (Flow-GRPO, Liu et al. 2025; pi_RL's Flow-SDE): the reverse SDE with the same marginals,
  dx = [v + sigma^2 / (2 t) x_1] dt + sigma dw, since the score of x_t is -x_1 / t. One Euler-Maruyama step has the mean
  (1 - s) x_0 + (s - sigma^2 d / (2 t)) x_1 and the standard deviation sigma sqrt(d), with
  sigma = level sqrt(t / (1 - t)); at t = 1 the denominator uses the next time s instead of t.
- ``flow_cps`` (coefficients-preserving sampling, Wang and Yu 2025): s x_1 becomes s (cos(a) x_1 + sin(a) noise),
  a = level pi / 2, so the squares of both coefficients add up to s^2. As x_1 is an estimate, the marginals are close to
  the ODE's, but not equal. The last step (s = 0) has no noise.
- ``flow_noise`` (pi_RL's Flow-Noise, after ReinFlow, Zhang et al. 2025): the mean is the ODE's step, and the policy
  learns the standard deviation. The marginals differ from the ODE's.

The probability of a decision is that of its chain: N(x_1; 0, 1) times the density of each random step. The former
cancels in every ratio and is omitted. As in RLinf, only the entries that the environment uses are included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.control.policies.networks import HALF_LOG_2PI
from tether.integrations.robots.flow.spec import FlowSpec, NoiseMethod


def times(index: Tensor, num_steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the times before and after steps with these indices; index 0 is the step from noise."""
    before = 1 - index.to(dtype) / num_steps
    return before, before - 1 / num_steps


def step(
    x: Tensor,
    velocity: Tensor,
    index: Tensor,
    num_steps: int,
    method: NoiseMethod | None,
    level: float = 0.0,
    learned_std: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of the next state.

    Args:
        x: [B, ...] states before the step.
        velocity: [B, ...] velocities of the network.
        index: [B] indices of the steps, from 0 on.
        num_steps: N.
        method: kind of the step; None: the ODE's step.
        level: scale of the noise.
        learned_std: [B, ...] standard deviation of ``flow_noise``.

    Returns:
        [B, ...] each.
    """
    t, s = (time.reshape(-1, *[1] * (x.dim() - 1)) for time in times(index, num_steps, x.dtype))
    x_0, x_1 = x - t * velocity, x + (1 - t) * velocity
    if method is None or method == "flow_noise":
        std = torch.zeros_like(x) if method is None or learned_std is None else learned_std
        return (1 - s) * x_0 + s * x_1, std
    if method == "flow_cps":
        angle = level * math.pi / 2
        return (1 - s) * x_0 + s * math.cos(angle) * x_1, (s * math.sin(angle)).expand_as(x)
    sigma = level * torch.sqrt(t / (1 - torch.where(index.reshape(t.shape) == 0, s, t)))
    d = 1 / num_steps
    return (1 - s) * x_0 + (s - sigma**2 * d / (2 * t)) * x_1, (sigma * math.sqrt(d)).expand_as(x)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of each entry under a Gaussian."""
    return -0.5 * ((x - mean) / std).square() - std.log() - HALF_LOG_2PI


@dataclass(frozen=True)
class Record:
    """The states of the chains of B decisions that are recorded to compute their log-probabilities."""

    actions: Tensor
    """[B, K, D]: the end of the chain, limited to the entries that the environment uses."""
    index: Tensor | None
    """[B]: index of the random step; None: all steps are random."""
    states: Tensor
    """[B, 1, H, A]: the state before the random step; or [B, N, H, A]: the states before all steps."""
    after: Tensor | None
    """[B, K, D]: the state after the random step; None if all steps are random, because `states` has it."""

    def columns(self, spec: FlowSpec) -> Tensor:
        """Return the record as actions [B, K * W], in the layout of `tether.integrations.robots.flow.spec`."""
        rows, chunk = self.actions.shape[:2]
        tensors = [self.states.flatten(1)]
        if self.index is not None and self.after is not None:
            tensors = [self.index[:, None].to(self.states.dtype), *tensors, self.after.flatten(1)]
        extra = torch.cat(tensors, dim=1)
        missing = chunk * (spec.action_width - spec.action_dim) - extra.shape[1]
        extra = torch.nn.functional.pad(extra, (0, missing)).unflatten(1, (chunk, -1))
        return torch.cat([self.actions, extra], dim=2).reshape(rows, -1)

    @classmethod
    def of_columns(cls, columns: Tensor, spec: FlowSpec) -> Record:
        """Return the record for actions in the layout of `columns`."""
        split = columns.unflatten(1, (spec.num_action_chunks, spec.action_width))
        actions, extra = split[:, :, : spec.action_dim], split[:, :, spec.action_dim :].flatten(1)
        shape = (-1, spec.horizon, spec.latent_dim)
        if spec.joint_logprob:
            return cls(actions, None, extra[:, : spec.recorded].unflatten(1, shape), None)
        states, after = extra[:, 1 : spec.recorded].tensor_split([spec.latents], dim=1)
        index = extra[:, 0].round().long().clamp(0, spec.num_steps - 1)
        return cls(actions, index, states.unflatten(1, shape), after.unflatten(1, actions.shape[1:]))

    def steps(self, spec: FlowSpec) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the random steps: indices [B], states before [B, H, A], and states after [B, K, D]."""
        if self.index is not None and self.after is not None:
            return [(self.index, self.states[:, 0], self.after)]
        states = self.states[:, :, : spec.num_action_chunks, : spec.action_dim]
        after = [*states.unbind(1)[1:], self.actions]
        indices = torch.arange(spec.num_steps, device=self.states.device)
        steps = zip(indices, self.states.unbind(1), after, strict=True)
        return [(index.expand(len(state)), state, end) for index, state, end in steps][: spec.random_steps]

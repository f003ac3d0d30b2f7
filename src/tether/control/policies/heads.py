"""Heads: distributions of actions from a policy's outputs, either choices or Gaussian with one of two kinds of noise.

Both are sampled (`tether.control.policies.actors`) with noise that is drawn beforehand, so samples depend on (seed,
step) alone. Log-probabilities and entropies are per column of an action; `tether.control.learning.losses` sums them to
the requested level. `backward` is the chain rule by hand, as in `tether.control.policies.mlp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Evaluated:
    """The statistics of given actions under a head."""

    log_probs: Tensor
    """[B, width]: log-probability of each column."""
    entropy: Tensor
    """[B, width]: entropy of each column's distribution."""
    saved: Tensor
    """[B, outputs]: all log-probabilities, or the actions in standard deviations from the mean, for `backward`."""


class _LogSoftmax(torch.autograd.Function):
    """Log-softmax over the last dimension, whose gradient is rounded as in `CategoricalHead.backward`.

    PyTorch's gradient fuses a product and a difference. With this one, a loss that autograd differentiates gets the
    same bits as `tether.control.learning.flat.FlatEngine`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        log_probs = logits.log_softmax(dim=-1)
        ctx.save_for_backward(log_probs)
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_probs,) = ctx.saved_tensors
        result: Tensor = grad - log_probs.exp() * grad.sum(dim=-1, keepdim=True)
        return result


def _log_softmax(logits: Tensor) -> Tensor:
    if not logits.requires_grad:
        return logits.log_softmax(dim=-1)
    log_probs: Tensor = _LogSoftmax.apply(logits)
    return log_probs


class CategoricalHead(nn.Module):
    """One or several choices, conditionally independent given the observation.

    Args:
        choices: number of alternatives of each column of an action.
    """

    _starts: Tensor
    _counts: Tensor

    def __init__(self, choices: tuple[int, ...]) -> None:
        super().__init__()
        self.choices = choices
        self.outputs = self.linear = sum(choices)
        self.width = len(choices)
        starts = torch.tensor([sum(choices[:column]) for column in range(len(choices))])
        self.register_buffer("_starts", starts, persistent=False)
        self.register_buffer("_counts", torch.tensor(choices), persistent=False)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return Gumbel noise [*shape, outputs]: the argmax of logits + noise is a sample of their softmax."""
        return torch.empty(*shape, self.outputs).exponential_(generator=generator).log_().neg_()

    def evaluate(self, logits: Tensor, actions: Tensor) -> Evaluated:
        """Return log-probabilities and entropies, [..., width] each, of actions [..., width] under logits [...,
        outputs]."""
        if self.width == 1:
            everything = _log_softmax(logits)
            entropy = -(everything.exp() * everything).sum(dim=-1, keepdim=True)
        else:
            by_choice = [_log_softmax(x) for x in logits.split(self.choices, dim=-1)]
            everything = torch.cat(by_choice, dim=-1)
            entropy = torch.cat([-(x.exp() * x).sum(dim=-1, keepdim=True) for x in by_choice], dim=-1)
        return Evaluated(everything.gather(-1, self._chosen(actions)), entropy, everything)

    def backward(self, done: Evaluated, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of the logits, [B, outputs].

        d log p_a / d logits = onehot(a) - p, and dH / d logits = -p (log p + H).

        Args:
            done: result of `evaluate`.
            actions: [B, width]
            log_prob_grad: [B, width] or [B, 1], the same for every column.
            entropy_grad: [B, width] or [B, 1], or [1, 1], the same for all.
        """
        log_prob_grad = log_prob_grad.expand(-1, self.width)
        spread_grad, spread_entropy = self._spread(log_prob_grad), self._spread(done.entropy)
        entropy_grad = entropy_grad if entropy_grad.shape[1] == 1 else self._spread(entropy_grad)
        grad = -done.saved.exp() * (spread_grad + entropy_grad * (done.saved + spread_entropy))
        return grad.scatter_add_(1, self._chosen(actions), log_prob_grad)

    def _chosen(self, actions: Tensor) -> Tensor:
        return actions if self.width == 1 else actions + self._starts

    def _spread(self, columns: Tensor) -> Tensor:
        """Repeat [B, width] to [B, outputs] (or return [B, 1], which broadcasts)."""
        if self.width == 1:
            return columns
        return columns.repeat_interleave(self._counts, dim=1, output_size=self.outputs)


class GaussianHead(nn.Module):
    """A Gaussian whose mean is the output and whose standard deviation is a parameter, equal in all states.

    Actions are not squashed; the environment clips them to its bounds.

    Args:
        width: columns of an action.
        init_logstd: logarithm of the initial standard deviation.
    """

    def __init__(self, width: int, init_logstd: float) -> None:
        super().__init__()
        self.outputs = self.linear = self.width = width
        self.logstd = nn.Parameter(torch.full((width,), init_logstd))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard normal noise [*shape, width]: mean + std * noise is a sample."""
        return torch.randn(*shape, self.width, generator=generator)

    def evaluate(self, mean: Tensor, actions: Tensor) -> Evaluated:
        """Return log-probabilities and entropies, [..., width] each, of actions [..., width] under means [...,
        width]."""
        scaled = (actions - mean) * torch.exp(-self.logstd)
        log_probs = -0.5 * scaled.square() - (self.logstd + HALF_LOG_2PI)
        return Evaluated(log_probs, (self.logstd + (0.5 + HALF_LOG_2PI)).expand_as(log_probs), scaled)

    def backward(self, done: Evaluated, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of the mean, [B, width], and store that of the standard deviation in its ``grad``.

        With z = (a - mean) / std: d log p / d mean = z / std, d log p / d logstd = z^2 - 1 and dH / d logstd = 1.
        Arguments are those of `CategoricalHead.backward`.
        """
        assert self.logstd.grad is not None
        weighted = done.saved * log_prob_grad
        logstd_grad = weighted * done.saved - log_prob_grad + entropy_grad
        torch.sum(logstd_grad, 0, out=self.logstd.grad)
        return weighted * torch.exp(-self.logstd)


class StateDependentHead(nn.Module):
    """A Gaussian whose noise is a function of the state, fixed for several decisions (gSDE, Raffin et al. 2022).

    With features phi [H] and one matrix of noise E [H, D], E_ij ~ N(0, std_ij^2), an action is the mean plus phi E: the
    same state gets the same noise while E is fixed, so that a robot does not jitter. Given the features, column j is
    normal with the variance sum_i phi_i^2 std_ij^2. No gradient flows through the features.

    Args:
        width: D, columns of an action.
        features: H.
        init_logstd: logarithm of the initial entries of std.
        hold_decisions: number of decisions with the same matrix; None: all of a rollout.
    """

    EPSILON = 1e-6
    """Added to a variance for numerical stability."""

    def __init__(self, width: int, features: int, init_logstd: float, hold_decisions: int | None) -> None:
        super().__init__()
        self.width = self.linear = width
        self.outputs = width + features
        """Means, followed by the features."""
        self.hold_decisions = hold_decisions
        self.logstd = nn.Parameter(torch.full((features, width), init_logstd))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard normal noise [*shape, H * D], equal for `hold_decisions` decisions of (..., decisions,
        environments)."""
        size = self.logstd.numel()
        if len(shape) == 1:
            return torch.randn(*shape, size, generator=generator)
        *outer, decisions, rows = shape
        hold = self.hold_decisions or decisions
        drawn = torch.randn(*outer, -(-decisions // hold), rows, size, generator=generator)
        if drawn.shape[-3] == 1:
            return drawn.expand(*shape, size)
        return drawn.repeat_interleave(hold, dim=-3)[..., :decisions, :, :]

    def evaluate(self, outputs: Tensor, actions: Tensor) -> Evaluated:
        """Return log-probabilities and entropies, [..., D] each, of actions [..., D] under outputs [..., D + H]."""
        mean, features = outputs.split([self.width, self.outputs - self.width], dim=-1)
        squares = features.detach().square()
        variance = squares @ (2 * self.logstd).exp() + self.EPSILON
        logstd = 0.5 * variance.log()
        scaled = (actions - mean) * torch.exp(-logstd)
        log_probs = -0.5 * scaled.square() - (logstd + HALF_LOG_2PI)
        return Evaluated(log_probs, logstd + (0.5 + HALF_LOG_2PI), torch.cat([scaled, variance, squares], dim=-1))

    def backward(self, done: Evaluated, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of means and features, [B, D + H], the latter 0, and store that of the logstd in its
        ``grad``.

        With z = (a - mean) / s and s^2 the variance: d log p / d mean = z / s, d log p / d s^2 = (z^2 - 1) / (2 s^2),
        dH / d s^2 = 1 / (2 s^2) and d s_j^2 / d logstd_ij = 2 phi_i^2 std_ij^2. Arguments are those of
        `CategoricalHead.backward`.
        """
        assert self.logstd.grad is not None
        scaled, variance, squares = done.saved.split([self.width, self.width, self.outputs - self.width], dim=-1)
        weighted = scaled * log_prob_grad
        by_variance = (weighted * scaled - log_prob_grad + entropy_grad) / variance
        torch.mm(squares.t(), by_variance, out=self.logstd.grad)
        self.logstd.grad.mul_((2 * self.logstd).exp())
        return torch.cat([weighted * variance.rsqrt(), torch.zeros_like(squares)], dim=-1)


Head = CategoricalHead | GaussianHead | StateDependentHead

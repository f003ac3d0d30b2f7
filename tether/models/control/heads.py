"""From a policy's outputs to a distribution of actions: choices or Gaussian.

Both sample from noise that is drawn beforehand, so what is sampled depends on (seed, step) alone. Log-probabilities
and entropies come a column of the action at a time; `tether.training.control` sums them to the level that is asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class CategoricalHead(nn.Module):
    """One or several choices, independent of each other given the observation.

    Args:
        choices: number of alternatives of each column of an action.
    """

    def __init__(self, choices: tuple[int, ...]) -> None:
        super().__init__()
        self.choices = choices
        self.outputs = sum(choices)
        self.width = len(choices)
        self.action_dtype = torch.int64

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise [*shape, outputs]: the largest of logits + noise is a sample of their softmax."""
        return torch.empty(*shape, self.outputs).exponential_(generator=generator).log_().neg_()

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """[N, outputs] -> actions [N, width]."""
        return self.mode(logits + noise)

    def mode(self, logits: Tensor) -> Tensor:
        """The likeliest actions, [N, width]."""
        if self.width == 1:
            return logits.argmax(dim=-1, keepdim=True)
        return torch.stack([part.argmax(dim=-1) for part in logits.split(self.choices, dim=-1)], dim=-1)

    def log_prob_and_entropy(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, outputs], [B, width] -> log-probability and entropy of each column, [B, width] both."""
        parts = [part.log_softmax(dim=-1) for part in logits.split(self.choices, dim=-1)]
        chosen = [part.gather(1, actions[:, i : i + 1]) for i, part in enumerate(parts)]
        entropy = [-(part.exp() * part).sum(dim=-1, keepdim=True) for part in parts]
        return torch.cat(chosen, dim=1), torch.cat(entropy, dim=1)


class GaussianHead(nn.Module):
    """A Gaussian whose mean is the output and whose standard deviation is a parameter, equal in all states.

    Nothing is squashed; the environment clips what exceeds its bounds.

    Args:
        width: columns of an action.
        init_logstd: logarithm of the first standard deviation.
    """

    def __init__(self, width: int, init_logstd: float) -> None:
        super().__init__()
        self.outputs = self.width = width
        self.action_dtype = torch.float32
        self.logstd = nn.Parameter(torch.full((width,), init_logstd))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal noise [*shape, width]."""
        return torch.randn(*shape, self.width, generator=generator)

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        """[N, width] -> actions [N, width]."""
        return torch.addcmul(mean, noise, self.logstd.exp())

    def mode(self, mean: Tensor) -> Tensor:
        """The likeliest actions: the mean."""
        return mean

    def log_prob_and_entropy(self, mean: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, width], [B, width] -> log-probability and entropy of each column, [B, width] both."""
        scaled = (actions - mean) * torch.exp(-self.logstd)
        log_prob = -0.5 * scaled.square() - (self.logstd + HALF_LOG_2PI)
        return log_prob, (self.logstd + (0.5 + HALF_LOG_2PI)).expand_as(log_prob)


Head = CategoricalHead | GaussianHead

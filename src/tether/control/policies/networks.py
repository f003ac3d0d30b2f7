"""The modules of a policy: perceptrons, running statistics of observations, heads, and actors that sample actions.

For networks this small, autograd's overhead takes several times as long as the arithmetic. The ``backward`` methods of
`Mlp` and of the heads apply the chain rule in a fixed order and write directly into the gradient buffers; a test
compares them with autograd in float64.

Heads are distributions of actions: categorical, Gaussian, or both. They sample with noise that is drawn beforehand, so
samples depend on (seed, step) alone. Log-probabilities and entropies are per column of an action;
`tether.control.learning.losses` sums them to the requested level.

Actors are for fast inference. `Actor` computes the networks in NumPy, equal up to rounding. `NetworkActor` calls the
networks, for those whose arithmetic takes longer than the overhead of tensors. Acting does not need log-probabilities
and values; the networks compute them later for a full rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tether.control.envs.protocol import PolicyArrays
from tether.observations import ACTION_MASK, Array, Observation

if TYPE_CHECKING:
    from tether.control.policies.mlp_policy import ControlPolicy
    from tether.control.policies.network_policy import NetworkPolicy

FloatArray: TypeAlias = NDArray[np.float32]
FORBIDDEN = -1e9
"""Logit of a choice that is not allowed; finite, so that nothing computed from it is NaN."""


@dataclass(frozen=True)
class Activation:
    """A nonlinearity whose derivative is a function of its output."""

    apply: Callable[[Tensor], Tensor]
    apply_array: Callable[[FloatArray], FloatArray]
    """The nonlinearity in NumPy."""
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, output) -> gradient of the input."""
    gain: float
    """Scale of an orthogonal weight that preserves the variance."""


def _tanh(x: Tensor) -> Tensor:
    """Compute tanh. On a CPU without autograd, compute it in place with NumPy, in a seventh of PyTorch's time."""
    if x.requires_grad or not x.is_cpu or x.dtype == torch.bfloat16:
        return torch.tanh(x)
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def _relu(x: FloatArray) -> FloatArray:
    return np.maximum(x, 0.0)


def _elu(x: FloatArray) -> FloatArray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


def _tanh_backward(grad: Tensor, out: Tensor) -> Tensor:
    return torch.addcmul(grad, grad * out, out, value=-1)


def _relu_backward(grad: Tensor, out: Tensor) -> Tensor:
    return grad * (out > 0)


def _elu_backward(grad: Tensor, out: Tensor) -> Tensor:
    return torch.where(out > 0, grad, grad * (out + 1))


ACTIVATIONS = {  # named functions, so that a policy can be pickled
    "tanh": Activation(_tanh, np.tanh, _tanh_backward, math.sqrt(2)),
    "relu": Activation(torch.relu, _relu, _relu_backward, math.sqrt(2)),
    "elu": Activation(nn.functional.elu, _elu, _elu_backward, math.sqrt(2)),
}


Numbers = TypeVar("Numbers", Tensor, FloatArray)
"""Tensors or arrays."""


def exp(x: Numbers) -> Numbers:
    """Compute exp; for arrays, bitwise equal to PyTorch's."""
    return x.exp() if isinstance(x, Tensor) else torch.from_numpy(x).exp().numpy()


def as_array(tensor: Tensor) -> FloatArray:
    """Return the numbers of a tensor, sharing its memory on the CPU."""
    return tensor.detach().cpu().numpy()


def orthogonal_linear(in_features: int, out_features: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with orthogonal initialisation (Saxe et al. 2014) scaled by `gain`, and a bias of 0."""
    layer = nn.Linear(in_features, out_features)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def layers_in_numpy(
    layers: Iterable[tuple[Tensor, Tensor]], activation: Activation
) -> Callable[[FloatArray], FloatArray]:
    """Return a function that applies linear layers with a nonlinearity after each, in NumPy with the current weights
    and biases."""
    arrays = [(as_array(weight).T, as_array(bias)) for weight, bias in layers]

    def forward(x: FloatArray) -> FloatArray:
        for weight, bias in arrays:
            x = x @ weight
            x += bias
            x = activation.apply_array(x)
        return x

    return forward


class Mlp(nn.Module):
    """Linear layers with a nonlinearity between them.

    Args:
        sizes: width of the input, of each hidden layer and of the output.
        activation: one of `ACTIVATIONS`.
        output_gain: scale of the last layer's initialisation; small for a policy, so that it starts close to uniform.
        generator: random generator of the initialisation.
    """

    def __init__(self, sizes: list[int], activation: str, output_gain: float, generator: torch.Generator) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        gains = [self.activation.gain] * (len(sizes) - 2) + [output_gain]
        layers = [orthogonal_linear(*pair, gain, generator) for pair, gain in zip(pairwise(sizes), gains, strict=True)]
        self.layers = nn.ModuleList(layers)
        # Cached, because attribute access of a module is slow and an update accesses them many times.
        self.linear: list[tuple[Tensor, Tensor]] = [(layer.weight, layer.bias) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, last size] for [B, first size]."""
        return self.activations(x)[-1]

    def in_numpy(self) -> Callable[[FloatArray], FloatArray]:
        """Return a function that computes `forward` in NumPy with the current weights.

        Acting has few rows at a time, for which the overhead of tensors dominates a forward pass.
        """
        *hidden, last = self.linear
        before = layers_in_numpy(hidden, self.activation)
        weight, bias = as_array(last[0]).T, as_array(last[1])
        return lambda x: before(x) @ weight + bias

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the input, the output of each hidden layer after its nonlinearity, and the output."""
        passed = [x]
        last = len(self.linear) - 1
        for index, (weight, bias) in enumerate(self.linear):
            x = nn.functional.linear(x, weight, bias)
            if index < last:
                x = self.activation.apply(x)
            passed.append(x)
        return passed

    def backward(
        self, passed: list[Tensor], grad: Tensor, hidden_grad: Tensor | None = None, *, add: bool = False
    ) -> None:
        """Write the gradient of every parameter into its existing ``grad``.

        Args:
            passed: result of `activations`.
            grad: gradient of the output, [B, last size].
            hidden_grad: further gradient of the last hidden layer, from other modules that read it.
            add: add to the existing gradients instead of overwriting them.
        """
        for index in range(len(self.linear) - 1, -1, -1):
            weight, bias = self.linear[index]
            if add:
                assert weight.grad is not None
                assert bias.grad is not None
                weight.grad.addmm_(grad.t(), passed[index])
                bias.grad.add_(grad.sum(0))
            else:
                torch.mm(grad.t(), passed[index], out=weight.grad)
                torch.sum(grad, 0, out=bias.grad)
            if index > 0:
                grad = torch.mm(grad, weight)
                if hidden_grad is not None:
                    grad, hidden_grad = grad + hidden_grad, None
                grad = self.activation.backward(grad, passed[index])


EPSILON = 1e-8


class RunningNormalizer(nn.Module):
    """Normalises observations to mean 0 and variance 1 with the statistics of all earlier observations.

    Statistics change only in `update`, between rollouts, so that a policy does not drift while it samples. Before the
    first update, observations are only clipped.

    Args:
        size: number of entries of an observation.
        clip: bound of the absolute value of the result.
        unchanged: [size] mask of entries that are neither normalised nor clipped; None: all are.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    shift: Tensor
    scale: Tensor
    clip: Tensor

    def __init__(self, size: int, clip: float, unchanged: Tensor | None = None) -> None:
        super().__init__()
        self._unchanged = torch.zeros(size, dtype=torch.bool) if unchanged is None else unchanged
        self.fixed = False
        """Whether `update` is disabled. A pretrained policy would behave differently if its statistics changed."""
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        # `forward` reads these, in float32.
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("clip", torch.full((size,), clip).masked_fill(self._unchanged, math.inf), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """Return normalised observations [..., size]."""
        return ((obs - self.shift) * self.scale).clamp_(-self.clip, self.clip)

    def in_numpy(self) -> Callable[[FloatArray], FloatArray]:
        """Return a function that computes `forward` in NumPy with the current statistics."""
        shift, scale, clip = as_array(self.shift), as_array(self.scale), as_array(self.clip)
        return lambda obs: np.minimum(np.maximum((obs - shift) * scale, -clip), clip)

    def update(self, obs: Tensor) -> None:
        """Add observations [B, size] to the statistics (Chan et al. 1979)."""
        if self.fixed or not obs.shape[-1]:
            return
        new = obs.double()
        total = self.count + len(new)
        shift = new.mean(dim=0) - self.mean
        squares = self.var * self.count + new.var(dim=0, unbiased=False) * len(new)
        self.var.copy_((squares + shift.square() * self.count * len(new) / total) / total)
        self.mean.add_(shift * len(new) / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean.masked_fill(self._unchanged, 0.0))
        self.scale.copy_((self.var + EPSILON).rsqrt().masked_fill(self._unchanged, 1.0))


HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class ActionEvaluation:
    """Log-probabilities and entropies of actions under a head."""

    log_probs: Tensor
    """[B, width]: log-probability of each column."""
    entropy: Tensor
    """[B, width]: entropy of each column's distribution."""
    saved: Tensor
    """[B, outputs]: values for `backward`: log-probs of all alternatives, or (actions - mean) / std."""


class _LogSoftmax(torch.autograd.Function):
    """Log-softmax over the last dimension, whose gradient is rounded as in `CategoricalHead.backward`.

    PyTorch's gradient fuses a product and a difference. This one makes gradients by autograd bitwise equal to those of
    `tether.control.learning.flat.FlatEngine`.
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
    """One or several choices, conditionally independent given the observation."""

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

    def evaluate(self, logits: Tensor, actions: Tensor) -> ActionEvaluation:
        """Return log-probabilities and entropies, [..., width] each, of actions [..., width] under logits [...,
        outputs]."""
        if self.width == 1:
            everything = _log_softmax(logits)
            entropy = -(everything.exp() * everything).sum(dim=-1, keepdim=True)
        else:
            by_choice = [_log_softmax(x) for x in logits.split(self.choices, dim=-1)]
            everything = torch.cat(by_choice, dim=-1)
            entropy = torch.cat([-(x.exp() * x).sum(dim=-1, keepdim=True) for x in by_choice], dim=-1)
        return ActionEvaluation(everything.gather(-1, self._chosen(actions)), entropy, everything)

    def backward(self, done: ActionEvaluation, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of the logits, [B, outputs].

        d log p_a / d logits = onehot(a) - p, and dH / d logits = -p (log p + H).

        Args:
            done: result of `evaluate`.
            actions: [B, width]
            log_prob_grad: gradient with respect to the log-probabilities: [B, width], or [B, 1] if columns are equal.
            entropy_grad: gradient with respect to the entropies: [B, width], [B, 1], or [1, 1] if all are equal.
        """
        log_prob_grad = log_prob_grad.expand(-1, self.width)
        spread_grad, spread_entropy = self._spread(log_prob_grad), self._spread(done.entropy)
        entropy_grad = entropy_grad if entropy_grad.shape[1] == 1 else self._spread(entropy_grad)
        grad = -done.saved.exp() * (spread_grad + entropy_grad * (done.saved + spread_entropy))
        return grad.scatter_add_(1, self._chosen(actions), log_prob_grad)

    def _chosen(self, actions: Tensor) -> Tensor:
        return actions if self.width == 1 else actions + self._starts

    def _spread(self, columns: Tensor) -> Tensor:
        """Repeat the columns [B, width] for each alternative, [B, outputs]; return [B, 1] as it is, to broadcast."""
        if self.width == 1:
            return columns
        return columns.repeat_interleave(self._counts, dim=1, output_size=self.outputs)


class GaussianHead(nn.Module):
    """A Gaussian whose mean is the output and whose standard deviation is a parameter, equal in all states.

    Actions are not squashed; the environment clips them to its bounds.
    """

    def __init__(self, width: int, init_logstd: float) -> None:
        super().__init__()
        self.outputs = self.linear = self.width = width
        self.logstd = nn.Parameter(torch.full((width,), init_logstd))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard normal noise [*shape, width]: mean + std * noise is a sample."""
        return torch.randn(*shape, self.width, generator=generator)

    def evaluate(self, mean: Tensor, actions: Tensor) -> ActionEvaluation:
        """Return log-probabilities and entropies, [..., width] each, of actions [..., width] under means [...,
        width]."""
        scaled = (actions - mean) * torch.exp(-self.logstd)
        log_probs = -0.5 * scaled.square() - (self.logstd + HALF_LOG_2PI)
        return ActionEvaluation(log_probs, (self.logstd + (0.5 + HALF_LOG_2PI)).expand_as(log_probs), scaled)

    def backward(self, done: ActionEvaluation, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of the mean, [B, width], and store that of ``logstd`` in its ``grad``.

        With z = (a - mean) / std: d log p / d mean = z / std, d log p / d logstd = z^2 - 1 and dH / d logstd = 1.
        Arguments as for `CategoricalHead.backward`.
        """
        assert self.logstd.grad is not None
        weighted = done.saved * log_prob_grad
        logstd_grad = weighted * done.saved - log_prob_grad + entropy_grad
        torch.sum(logstd_grad, 0, out=self.logstd.grad)
        return weighted * torch.exp(-self.logstd)


class StateDependentHead(nn.Module):
    """A Gaussian whose noise is a function of the state, fixed for several decisions (gSDE, Raffin et al. 2022).

    With features phi [H] and a noise matrix E [H, D], E_ij ~ N(0, std_ij^2), an action is the mean plus phi E: while E
    is fixed, equal states get equal noise, so that a robot does not jitter. Given the features, column j is normal with
    variance sum_i phi_i^2 std_ij^2. No gradient flows through the features.

    Args:
        width: D, columns of an action.
        features: H.
        init_logstd: logarithm of the initial entries of std.
        hold_decisions: number of consecutive decisions with the same matrix; None: all of a rollout.
    """

    EPSILON = 1e-6
    """Added to a variance for numerical stability."""

    def __init__(self, width: int, features: int, init_logstd: float, hold_decisions: int | None) -> None:
        super().__init__()
        self.width = self.linear = width
        self.outputs = width + features
        """Number of outputs: the means, followed by the features."""
        self.hold_decisions = hold_decisions
        self.logstd = nn.Parameter(torch.full((features, width), init_logstd))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard normal noise [*shape, H * D]; with `shape` (..., decisions, environments), `hold_decisions`
        consecutive decisions have the same noise."""
        size = self.logstd.numel()
        if len(shape) == 1:
            return torch.randn(*shape, size, generator=generator)
        *outer, decisions, rows = shape
        hold = self.hold_decisions or decisions
        drawn = torch.randn(*outer, -(-decisions // hold), rows, size, generator=generator)
        if drawn.shape[-3] == 1:
            return drawn.expand(*shape, size)
        return drawn.repeat_interleave(hold, dim=-3)[..., :decisions, :, :]

    def evaluate(self, outputs: Tensor, actions: Tensor) -> ActionEvaluation:
        """Return log-probabilities and entropies, [..., D] each, of actions [..., D] under outputs [..., D + H]."""
        mean, features = outputs.split([self.width, self.outputs - self.width], dim=-1)
        squares = features.detach().square()
        variance = squares @ (2 * self.logstd).exp() + self.EPSILON
        logstd = 0.5 * variance.log()
        scaled = (actions - mean) * torch.exp(-logstd)
        log_probs = -0.5 * scaled.square() - (logstd + HALF_LOG_2PI)
        return ActionEvaluation(
            log_probs, logstd + (0.5 + HALF_LOG_2PI), torch.cat([scaled, variance, squares], dim=-1)
        )

    def backward(self, done: ActionEvaluation, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of means and features, [B, D + H] (0 for features), and store that of ``logstd`` in its
        ``grad``.

        With z = (a - mean) / s and s^2 the variance: d log p / d mean = z / s, d log p / d s^2 = (z^2 - 1) / (2 s^2),
        dH / d s^2 = 1 / (2 s^2) and d s_j^2 / d logstd_ij = 2 phi_i^2 std_ij^2. Arguments as for
        `CategoricalHead.backward`.
        """
        assert self.logstd.grad is not None
        scaled, variance, squares = done.saved.split([self.width, self.width, self.outputs - self.width], dim=-1)
        weighted = scaled * log_prob_grad
        by_variance = (weighted * scaled - log_prob_grad + entropy_grad) / variance
        torch.mm(squares.t(), by_variance, out=self.logstd.grad)
        self.logstd.grad.mul_((2 * self.logstd).exp())
        return torch.cat([weighted * variance.rsqrt(), torch.zeros_like(squares)], dim=-1)


class MixedHead(nn.Module):
    """Discrete and continuous columns, independent given the observation; columns and outputs of the discrete ones come
    first."""

    def __init__(self, choices: tuple[int, ...], width: int, init_logstd: float) -> None:
        super().__init__()
        self.chosen, self.numbers = CategoricalHead(choices), GaussianHead(width, init_logstd)
        self.outputs = self.linear = self.chosen.outputs + width
        self.width = self.chosen.width + width

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the concatenated noise [*shape, outputs] of both heads."""
        return torch.cat([head.noise(shape, generator) for head in (self.chosen, self.numbers)], dim=-1)

    def evaluate(self, outputs: Tensor, actions: Tensor) -> ActionEvaluation:
        """Return log-probabilities and entropies, [..., width] each, of actions [..., width] under outputs [...,
        outputs]."""
        logits, means = self._split(outputs, self.chosen.outputs)
        chosen, numbers = self._split(actions, self.chosen.width)
        both = self.chosen.evaluate(logits, chosen.long()), self.numbers.evaluate(means, numbers)
        columns = zip(*((one.log_probs, one.entropy, one.saved) for one in both), strict=True)
        return ActionEvaluation(*(torch.cat(values, dim=-1) for values in columns))

    def backward(self, done: ActionEvaluation, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of the outputs, [B, outputs]; arguments as for `CategoricalHead.backward`."""
        saved = self._split(done.saved, self.chosen.outputs)
        by_head = zip(
            *(
                self._split(columns, self.chosen.width)
                for columns in (done.log_probs, done.entropy, actions, log_prob_grad, entropy_grad)
            ),
            strict=True,
        )
        heads: tuple[CategoricalHead | GaussianHead, ...] = (self.chosen, self.numbers)
        grads = [
            head.backward(ActionEvaluation(log_probs, entropy, saved_values), each.to(dtype), by_log_prob, by_entropy)
            for head, saved_values, dtype, (log_probs, entropy, each, by_log_prob, by_entropy) in zip(
                heads, saved, (torch.int64, actions.dtype), by_head, strict=True
            )
        ]
        return torch.cat(grads, dim=1)

    def _split(self, columns: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Split columns into those of both heads; a single column, which broadcasts, is returned for both."""
        return (columns, columns) if columns.shape[-1] == 1 else (columns[..., :first], columns[..., first:])


Head = CategoricalHead | GaussianHead | StateDependentHead | MixedHead


def device_of(policy: nn.Module) -> torch.device:
    """Return the device of a policy."""
    return next(policy.parameters()).device


Act = Callable[[Observation, FloatArray | None, FloatArray], tuple[Array, FloatArray]]
"""(observations of N environments; noise [N, ...] of the head, or None for the most likely actions; recurrent states
[N, S]) -> actions of a chunk [N, K * D], next states."""

Forward = Callable[[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]
"""(normalised rows [N, O], states [N, S]) -> outputs [N, outputs] of the head before masks, next states."""


class ActionSampler:
    """Chooses actions from a head's outputs, with the head's weights at construction."""

    def __init__(self, head: Head) -> None:
        self._mixed: tuple[ActionSampler, ActionSampler, int] | None = None
        self._means = head.width if isinstance(head, StateDependentHead) else None
        self._choices: tuple[int, ...] | None = None
        self._std: FloatArray | None = None
        if isinstance(head, MixedHead):
            self._mixed = ActionSampler(head.chosen), ActionSampler(head.numbers), head.chosen.outputs
        elif isinstance(head, CategoricalHead):
            self._choices = head.choices
        else:
            self._std = np.exp(as_array(head.logstd))

    def __call__(self, outputs: FloatArray, noise: FloatArray | None) -> Array:
        """Return actions [N, K * D] for outputs [N, outputs] and the head's noise for N observations."""
        if self._mixed is not None:
            chosen, numbers, end = self._mixed
            noises = (None, None) if noise is None else (noise[:, :end], noise[:, end:])
            both = chosen(outputs[:, :end], noises[0]), numbers(outputs[:, end:], noises[1])
            return np.concatenate(both, axis=1, dtype=np.float32, casting="unsafe")
        if self._means is not None:
            means, features = np.split(outputs, [self._means], axis=1)
            if noise is None:
                return means
            assert self._std is not None
            matrices = noise.reshape(len(noise), features.shape[1], self._means) * self._std
            return means + (features[:, None] @ matrices)[:, 0]
        if self._std is not None:
            return outputs if noise is None else outputs + noise * self._std
        scores = outputs if noise is None else outputs + noise
        assert self._choices is not None
        if len(self._choices) == 1:
            return scores.argmax(axis=1, keepdims=True)
        by_choice = np.split(scores, np.cumsum(self._choices)[:-1], axis=1)
        return np.stack([choice.argmax(axis=1) for choice in by_choice], axis=1)


class Actor:
    """The `Act` of policies without images, in NumPy with the weights at construction; create a new one after an
    update."""

    def __init__(self, policy: ControlPolicy | NetworkPolicy) -> None:
        self._policy, self._row, self._forward = policy, policy.row, policy.in_numpy()
        self._normalize = None if policy.normalizer is None else policy.normalizer.in_numpy()
        self._choose = ActionSampler(policy.head)
        self._has_mask = policy.spec.has_mask

    def arrays(self) -> PolicyArrays | None:
        """Return the policy as arrays for a compiled rollout; None if it is more than a perceptron and one head."""
        policy, head = self._policy, self._policy.head
        choice = isinstance(head, CategoricalHead) and head.width == 1
        if policy.state_width or self._has_mask or self._row.single_field is None:
            return None
        if not isinstance(policy.actor, Mlp) or not (choice or isinstance(head, GaussianHead)):
            return None
        normalizer = policy.normalizer or RunningNormalizer(self._row.width, math.inf)
        layers = [(as_array(weight).T.copy(), as_array(bias)) for weight, bias in policy.actor.linear]
        return PolicyArrays(
            policy.spec.activation,
            tuple(weight for weight, _ in layers),
            tuple(bias for _, bias in layers),
            as_array(normalizer.shift),
            as_array(normalizer.scale),
            as_array(normalizer.clip),
            np.exp(as_array(head.logstd)) if isinstance(head, GaussianHead) else np.zeros(0, np.float32),
        )

    def __call__(self, obs: Observation, noise: FloatArray | None, state: FloatArray) -> tuple[Array, FloatArray]:
        name = self._row.single_field
        row = self._row(as_tensors(obs)).numpy() if name is None else obs[name]
        if self._normalize is not None:
            row = self._normalize(row)
        outputs, state = self._forward(row, state)
        if self._has_mask:
            allowed = obs[ACTION_MASK]
            if further := outputs.shape[1] - allowed.shape[1]:  # outputs of continuous columns, which have no mask
                allowed = np.pad(allowed, ((0, 0), (0, further)), constant_values=1)
            outputs = np.where(allowed, outputs, np.float32(FORBIDDEN))
        return self._choose(outputs, noise), state


class NetworkActor:
    """The `Act` of policies with images or user-defined networks, and of all policies on devices other than the CPU.

    Create a new one after an update.
    """

    def __init__(self, policy: ControlPolicy | NetworkPolicy) -> None:
        self._policy, self._device = policy, device_of(policy)
        self._choose = ActionSampler(policy.head)

    def __call__(self, obs: Observation, noise: FloatArray | None, state: FloatArray) -> tuple[Array, FloatArray]:
        inputs = self._policy.inputs(as_tensors(obs, self._device))
        policy: Any = self._policy  # Any, because the types of inputs and `act` match within each policy only
        outputs, after = policy.act(inputs, torch.from_numpy(state).to(self._device))
        return self._choose(outputs.cpu().numpy(), noise), after.cpu().numpy()


def as_tensors(obs: Observation, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the fields as tensors on a device; on the CPU, the default, they share the memory."""
    return {name: torch.from_numpy(array).to(device or "cpu") for name, array in obs.items()}

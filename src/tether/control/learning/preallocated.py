"""Gradients of two small perceptrons for mini-batches of a fixed size, in preallocated memory.

With a few hundred rows, most of the time of `tether.control.learning.flat.FlatEngine.gradients` is the overhead of some
eighty calls of PyTorch, each of which allocates its result. Here every mini-batch writes its results into the same
memory, which stays in the cache, and small elementwise operations use NumPy, whose calls take a third of the time.
Matrix products, exponentials, sums and fused products use PyTorch, and operations have the same order, so that results
are bitwise equal to those of `FlatEngine.gradients`, the reference.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tether.control.learning.losses import (
    EPISODES_WEIGH_EQUALLY,
    ControlLoss,
    Outputs,
    Samples,
    clip_ratios,
    loss_weights,
    value_gradient,
    vanilla_gradient,
)
from tether.control.policies.mlp_policy import ControlPolicy, Policy
from tether.control.policies.networks import HALF_LOG_2PI, CategoricalHead, FloatArray, GaussianHead, Mlp

MAX_ROWS = 4096
"""Maximum number of rows. With more, arithmetic takes longer than the overhead of calls."""


class ArrayBuffer(NamedTuple):
    """Preallocated memory, as a tensor and as an array."""

    tensor: Tensor
    array: FloatArray

    @classmethod
    def empty(cls, like: Tensor, *shape: int) -> Self:
        tensor = like.new_empty(shape)
        return cls(tensor, tensor.numpy())


class PreallocatedMlp:
    """The forward and backward pass of an `Mlp` with tanh for `rows` rows; see `Mlp.activations` and `Mlp.backward`."""

    def __init__(self, mlp: Mlp, rows: int) -> None:
        self._layers = [(weight.detach(), bias.detach(), weight.grad, bias.grad) for weight, bias in mlp.linear]
        first = self._layers[0][0]
        self._after, self._grads, self._by_hidden = (
            [ArrayBuffer.empty(first, rows, len(weight)) for weight, *_ in self._layers] for _ in range(3)
        )
        self.outputs = self._after[-1]
        """[rows, last size]: result of `forward`."""
        self.grad = self._grads[-1]
        """[rows, last size]: gradient of the outputs, an argument of `backward`."""

    def forward(self, inputs: Tensor) -> None:
        """Compute the outputs for inputs [rows, first size]."""
        last = len(self._layers) - 1
        for index, (weight, bias, *_) in enumerate(self._layers):
            after = self._after[index]
            inputs = torch.addmm(bias, inputs, weight.t(), out=after.tensor)
            if index < last:
                np.tanh(after.array, out=after.array)

    def backward(self, inputs: Tensor) -> None:
        """Write the gradient of every parameter into its ``grad``; `inputs` are those of `forward`."""
        for index in range(len(self._layers) - 1, -1, -1):
            weight, _, weight_grad, bias_grad = self._layers[index]
            grad, before = self._grads[index].tensor, self._after[index - 1].tensor if index else inputs
            torch.mm(grad.t(), before, out=weight_grad)
            torch.sum(grad, 0, out=bias_grad)
            if index:
                by_hidden, by_preactivation = self._by_hidden[index - 1].tensor, self._grads[index - 1].tensor
                torch.mm(grad, weight, out=by_hidden)
                torch.mul(by_hidden, before, out=by_preactivation)
                torch.addcmul(by_hidden, by_preactivation, before, value=-1, out=by_preactivation)


class PreallocatedCategorical:
    """A `CategoricalHead` with one choice for `rows` rows; `mlp` stores the logits and their gradient."""

    def __init__(self, mlp: PreallocatedMlp, rows: int) -> None:
        self._mlp, logits = mlp, mlp.outputs.tensor
        self._all_log_probs, self._probs, self._product = (ArrayBuffer.empty(logits, *logits.shape) for _ in range(3))
        self.log_probs, self.entropy = ArrayBuffer.empty(logits, rows, 1), ArrayBuffer.empty(logits, rows, 1)

    def evaluate(self, actions: Tensor) -> None:
        """Compute log-probabilities and entropies, [rows, 1] each, as `CategoricalHead.evaluate` does."""
        all_log_probs, probs = self._all_log_probs, self._probs
        torch.log_softmax(self._mlp.outputs.tensor, -1, out=all_log_probs.tensor)
        torch.exp(all_log_probs.tensor, out=probs.tensor)
        np.multiply(probs.array, all_log_probs.array, out=self._product.array)
        torch.sum(self._product.tensor, -1, keepdim=True, out=self.entropy.tensor)
        np.negative(self.entropy.array, out=self.entropy.array)
        torch.gather(all_log_probs.tensor, -1, actions, out=self.log_probs.tensor)

    def backward(self, actions: Tensor, log_prob_grad: FloatArray, entropy_grad: float) -> None:
        """Write the gradient of the logits, as `CategoricalHead.backward` computes it."""
        grad = self._mlp.grad.array
        np.add(self._all_log_probs.array, self.entropy.array, out=grad)
        grad *= entropy_grad
        grad += log_prob_grad
        np.negative(self._probs.array, out=self._probs.array)
        grad *= self._probs.array
        self._mlp.grad.tensor.scatter_add_(1, actions, torch.from_numpy(log_prob_grad))


class PreallocatedGaussian:
    """A `GaussianHead` for `rows` rows; `mlp` stores the means and their gradient."""

    def __init__(self, head: GaussianHead, mlp: PreallocatedMlp, rows: int) -> None:
        assert head.logstd.grad is not None
        self._mlp, mean = mlp, mlp.outputs.tensor
        logstd = head.logstd.detach()
        self._logstd, self._logstd_grad = ArrayBuffer(logstd, logstd.numpy()), head.logstd.grad
        self._inverse = ArrayBuffer.empty(mean, len(logstd))
        self._scaled, self._columns = ArrayBuffer.empty(mean, *mean.shape), ArrayBuffer.empty(mean, *mean.shape)
        self.log_probs, self.entropy = (
            ArrayBuffer.empty(mean, rows, 1),
            ArrayBuffer.empty(mean, rows, len(logstd)),
        )

    def evaluate(self, actions: Tensor) -> None:
        """Compute log-probabilities [rows, 1], summed over columns, and entropies [rows, width], as
        `GaussianHead.evaluate` does."""
        logstd, scaled, columns = self._logstd.array, self._scaled.array, self._columns.array
        np.negative(logstd, out=self._inverse.array)
        torch.exp(self._inverse.tensor, out=self._inverse.tensor)
        np.subtract(actions.numpy(), self._mlp.outputs.array, out=scaled)
        scaled *= self._inverse.array
        np.multiply(scaled, scaled, out=columns)
        columns *= -0.5
        columns -= logstd + HALF_LOG_2PI
        torch.sum(self._columns.tensor, -1, keepdim=True, out=self.log_probs.tensor)
        self.entropy.array[...] = logstd + (0.5 + HALF_LOG_2PI)

    def backward(self, actions: Tensor, log_prob_grad: FloatArray, entropy_grad: float) -> None:
        """Write the gradients of the mean and of the standard deviation, as `GaussianHead.backward` computes them."""
        weighted, scaled = self._columns.array, self._scaled.array
        np.multiply(scaled, log_prob_grad, out=weighted)
        scaled *= weighted
        scaled -= log_prob_grad
        scaled += entropy_grad
        torch.sum(self._scaled.tensor, 0, out=self._logstd_grad)
        np.multiply(weighted, self._inverse.array, out=self._mlp.grad.array)


class PreallocatedGradients:
    """Computes the gradients of mini-batches with a fixed number of rows; see `of`.

    Args:
        policy: the policy, whose parameters have a ``grad``.
        loss: the loss to minimise.
        rows: decisions of a mini-batch.
    """

    def __init__(self, policy: ControlPolicy, loss: ControlLoss, rows: int) -> None:
        assert policy.critic is not None
        self._loss, self._clips = loss, clip_ratios(loss.options)
        self._actor, self._critic = PreallocatedMlp(policy.actor, rows), PreallocatedMlp(policy.critic, rows)
        head = policy.head
        self._head = (
            PreallocatedGaussian(head, self._actor, rows)
            if isinstance(head, GaussianHead)
            else PreallocatedCategorical(self._actor, rows)
        )
        elements = self._head.log_probs.tensor
        self._weight = loss_weights(loss.aggregation, elements, None, None, loss.max_length)
        self._value_weight = loss_weights("token-mean", elements, None, None, None) * loss.value_coeff
        self._entropy_grad = loss.entropy_gradient(self._head.entropy.tensor, None, 1).item()

    @classmethod
    def of(cls, policy: Policy, loss: ControlLoss, mini: Samples) -> Self | None:
        """Return an instance for mini-batches of this size, or None if a requirement is not met.

        Actor and critic must be separate perceptrons with tanh on a CPU. An action must be a single choice or Gaussian.
        The loss must be ``vanilla``, with one unmasked log-probability per decision, and without weights of episodes.
        """
        if not isinstance(policy, ControlPolicy) or policy.critic is None or policy.micro_batch is not None:
            return None
        spec, head, values = policy.spec, policy.head, mini.values
        if spec.share_critic or spec.activation != "tanh" or spec.num_action_chunks > 1:
            return None
        if not (isinstance(head, GaussianHead) or (isinstance(head, CategoricalHead) and head.width == 1)):
            return None
        if loss.name != "vanilla" or loss.aggregation == EPISODES_WEIGH_EQUALLY or loss.critic_only:
            return None
        if values is None or not values.is_cpu or values.shape[1] > 1 or mini.old_log_probs.shape[1] > 1:
            return None
        if mini.mask is not None or len(mini) > MAX_ROWS:
            return None
        return cls(policy, loss, len(mini))

    def __call__(self, mini: Samples) -> Outputs:
        """Compute the gradient of a mini-batch's loss in every parameter's ``grad``, as `FlatEngine.gradients` does."""
        assert isinstance(mini.obs, Tensor)
        assert mini.values is not None
        assert mini.returns is not None
        actor, critic, head = self._actor, self._critic, self._head
        actor.forward(mini.obs)
        critic.forward(mini.obs)
        head.evaluate(mini.actions)
        grad = vanilla_gradient(
            head.log_probs.array, mini.old_log_probs.numpy(), mini.advantages.numpy(), **self._clips
        )
        grad *= self._weight
        by_value = value_gradient(
            critic.outputs.array,
            mini.values.numpy(),
            mini.returns.numpy(),
            cliprange_value=self._loss.cliprange_value,
            huber_delta=self._loss.huber_delta,
        )
        np.multiply(by_value, self._value_weight, out=critic.grad.array)
        head.backward(mini.actions, grad, self._entropy_grad)
        actor.backward(mini.obs)
        critic.backward(mini.obs)
        return Outputs(
            head.log_probs.tensor.clone(),
            head.entropy.tensor.clone(),
            critic.outputs.tensor.clone(),
            None,
            torch.linalg.vector_norm(actor.grad.tensor),
        )

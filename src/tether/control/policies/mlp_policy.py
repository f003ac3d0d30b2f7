"""MLP policies (an actor, a critic and statistics of observations); creates, saves and loads all control policies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tether.control.policies.network_policy import NetworkPolicy
from tether.control.policies.networks import Actor, Forward, Mlp, NetworkActor, device_of
from tether.control.policies.own_policy import OwnPolicy
from tether.control.policies.spec import ForwardPass, Memory, ObservationBatch, PolicySpec, RolloutEvaluation
from tether.integrations import integration
from tether.observations import ObsPart
from tether.runtime.disk import read_json, reading
from tether.types import JsonObject

if TYPE_CHECKING:
    from tether.control.policies.memoryless_policy import MemorylessPolicy

SPEC_FILE, WEIGHTS_FILE = "policy.json", "policy.safetensors"
SPACES = "spaces"
"""Key of the environment's spaces in the spec file, along with the fields of the spec."""
OTHER_VERSION = "Another version of tether wrote this file; train the policy again with this one"


class ControlPolicy(nn.Module):
    """Actor and critic as perceptrons over one normalised observation, with gradients in closed form."""

    state_width = 0
    """There is no recurrent state."""
    spaces: JsonObject | None = None
    """Spaces of the environment (`tether.control.envs.spaces`); None: not known."""

    def __init__(self, spec: PolicySpec, seed: int) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        hidden, critic_hidden = [
            [spec.obs_dim] + [shape.hidden_dim] * shape.num_layers for shape in (spec, spec.critic_spec)
        ]
        self.row, self.head = spec.make_row(), spec.make_head()
        self.actor = Mlp([*hidden, self.head.outputs], spec.activation, 0.01 * math.sqrt(2), generator)
        self.critic: Mlp | None = None
        if spec.value_width:
            before = hidden[-1:] if spec.share_critic else critic_hidden
            self.critic = Mlp([*before, spec.value_width], spec.activation, 1.0, generator)
        self.normalizer = spec.make_normalizer()
        self.micro_batch: int | None = None
        """Number of decisions in a forward and backward pass; None: all at once."""

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        critic = [] if self.critic is None else list(self.critic.parameters())
        return [*self.actor.parameters(), *self.head.parameters()], critic

    def narrow_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that compute in bfloat16 in training: none."""
        return []

    def inputs(self, obs: ObservationBatch) -> Tensor:
        """Return the inputs of the networks for observations: normalised flat rows [..., O]."""
        row = self.row(obs)
        return row if self.normalizer is None else self.normalizer(row)

    def update_statistics(self, obs: ObservationBatch) -> None:
        """Update the statistics for normalisation with the numbers of observations [B, ...]."""
        if self.normalizer is not None:
            self.normalizer.update(self.row(obs))

    def acting(self) -> Actor | NetworkActor:
        """Return an actor with the current weights, on the device of the policy."""
        return Actor(self) if device_of(self).type == "cpu" else NetworkActor(self)

    @torch.no_grad()
    def act(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [N, outputs] for the `inputs` of N observations, and the state unchanged."""
        return self.actor(obs), state

    def in_numpy(self) -> Forward:
        """Return a function that computes the actor's outputs in NumPy, as `NetworkPolicy.in_numpy` does."""
        forward = self.actor.in_numpy()
        return lambda row, state: (forward(row), state)

    @torch.no_grad()
    def values(self, obs: Tensor) -> Tensor:
        """Return values [B, V] of normalised observations [B, O]."""
        assert self.critic is not None
        return self.critic(self.actor.activations(obs)[-2] if self.spec.share_critic else obs)

    def log_probs(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return differentiable log-probabilities [B, K * D] of actions [B, K * D] given normalised observations
        [B, O]."""
        return self.head.evaluate(self.actor(obs), actions).log_probs

    @torch.no_grad()
    def outputs(self, obs: Tensor, memory: Memory | None, actions: Tensor | None = None) -> Tensor:
        """Return outputs [B, outputs] of normalised observations [B, O]."""
        return self._in_micro_batches(self.actor, obs)

    @torch.no_grad()
    def run(self, obs: Tensor, memory: Memory | None, actions: Tensor | None = None) -> ForwardPass:
        """Run a forward pass over normalised observations [B, O], for `backward`."""
        if self.micro_batch is None or len(obs) <= self.micro_batch:
            hidden, valued = self._activations(obs)
            return ForwardPass(hidden[-1], valued[-1] if valued else None, ((obs,), hidden, valued))
        batches = obs.split(self.micro_batch)
        ends = [(hidden[-1], valued[-1:]) for hidden, valued in map(self._activations, batches)]
        values = [value for _, end in ends for value in end]
        return ForwardPass(
            torch.cat([end for end, _ in ends]), torch.cat(values) if values else None, (batches, [], [])
        )

    def decide(self, obs: Tensor, memory: Memory | None, actions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return differentiable outputs [B, outputs] and values [B, V] of normalised observations [B, O]."""
        hidden, valued = self._activations(obs)
        return hidden[-1], valued[-1] if valued else None

    def _activations(self, obs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the activations of the actor and of the critic (empty without a critic)."""
        hidden = self.actor.activations(obs)
        if self.critic is None:
            return hidden, []
        return hidden, self.critic.activations(hidden[-2] if self.spec.share_critic else obs)

    def _in_micro_batches(self, network: Callable[[Tensor], Tensor], obs: Tensor) -> Tensor:
        batches = obs.split(self.micro_batch or max(1, len(obs)))
        return torch.cat([network(batch) for batch in batches]) if len(batches) > 1 else network(obs)

    @torch.no_grad()
    def backward(self, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
        """Write the gradient of every parameter except the head's into its existing ``grad``.

        Args:
            passed: result of `run`.
            outputs_grad: gradient of the loss with respect to the outputs, [B, outputs]; None leaves the actor's
                gradients unchanged.
            values_grad: gradient with respect to the values, [B, V]; None: there is no critic.
        """
        batches, hidden, valued = passed.saved
        if len(batches) == 1:
            self._backward(hidden, valued, outputs_grad, values_grad)
            return
        for index, (start, stop) in enumerate(pairwise(accumulate(map(len, batches), initial=0))):
            grads = (None if grad is None else grad[start:stop] for grad in (outputs_grad, values_grad))
            self._backward(*self._activations(batches[index]), *grads, add=index > 0)

    def _backward(
        self,
        hidden: list[Tensor],
        valued: list[Tensor],
        outputs_grad: Tensor | None,
        values_grad: Tensor | None,
        *,
        add: bool = False,
    ) -> None:
        """Run `backward` for one micro-batch; `add` adds to the existing gradients instead of overwriting them."""
        hidden_grad = None
        if self.critic is not None and values_grad is not None:
            self.critic.backward(valued, values_grad, add=add)
            if self.spec.share_critic:
                hidden_grad = values_grad @ self.critic.linear[0][0]
        if outputs_grad is not None:
            self.actor.backward(hidden, outputs_grad, hidden_grad, add=add)

    @torch.no_grad()
    def review(
        self,
        obs: Tensor,
        starts: Tensor,
        state: Tensor,
        final_obs: Tensor,
        final_at: tuple[Tensor, Tensor],
        actions: Tensor | None = None,
    ) -> RolloutEvaluation:
        """Evaluate a rollout, as `NetworkPolicy.review` does: normalised observations [M, C + 1, O] and [F, O]."""
        outputs = self._in_micro_batches(self.actor, obs[:, :-1].flatten(0, 1)).unflatten(0, (len(obs), -1))
        if self.critic is None:
            return RolloutEvaluation(outputs, None, None)
        values = self._in_micro_batches(self.values, obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        return RolloutEvaluation(outputs, values, self._in_micro_batches(self.values, final_obs))


Policy: TypeAlias = "ControlPolicy | NetworkPolicy | MemorylessPolicy"


def make_policy(spec: PolicySpec, seed: int) -> ControlPolicy | NetworkPolicy:
    """Return a policy of this shape, with initial weights from `seed`."""
    if spec.network is not None:
        return OwnPolicy(spec, seed)
    return ControlPolicy(spec, seed) if spec.is_plain else NetworkPolicy(spec, seed)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the spec and the spaces of the environment as JSON, and the weights with the statistics as safetensors."""
    folder.mkdir()
    (folder / SPEC_FILE).write_text(json.dumps(asdict(policy.spec) | {SPACES: policy.spaces}, indent=2))
    save_file({name: value.detach().clone() for name, value in policy.state_dict().items()}, folder / WEIGHTS_FILE)


def load_policy(folder: Path) -> Policy:
    """Load a policy that `save_policy` wrote.

    Raises:
        ValueError: the folder has no policy, or the weights do not fit the spec.
    """
    if not (folder / SPEC_FILE).is_file():
        raise ValueError(f"{folder}: no control policy here ({SPEC_FILE} is missing); name a checkpoint of such a run")
    fields = read_json(folder / SPEC_FILE, dict, OTHER_VERSION)
    spaces = fields.pop(SPACES, None)
    policy = _empty_policy(folder / SPEC_FILE, fields)
    policy.spaces = spaces
    with reading(folder / WEIGHTS_FILE, OTHER_VERSION):
        _load_weights(policy, folder / WEIGHTS_FILE)
    return policy


def _load_weights(policy: Policy, file: Path) -> None:
    weights, expected = load_file(file), policy.state_dict()
    if weights.keys() != expected.keys():
        unknown, missing = sorted(weights.keys() - expected.keys()), sorted(expected.keys() - weights.keys())
        raise ValueError(f"{file}: unknown weights {unknown[:3]}, missing weights {missing[:3]}. {OTHER_VERSION}")
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(
            f"{file}: {len(broken)} weights hold NaN or infinity, the first is {broken[0]}. Take a "
            "checkpoint from before that, with a lower actor_rollout_ref.actor.optim.lr"
        )
    policy.load_state_dict(weights)


def _empty_policy(file: Path, saved: JsonObject) -> Policy:
    """Return a policy for the fields of a spec file, before its weights are loaded."""
    fields = {name: _as_tuple(value) for name, value in saved.items()}
    with reading(file, OTHER_VERSION):
        if "layout" not in fields and (fields.get("pictures") or "model_type" in fields):
            raise ValueError(f"{file}: does not name the fields of its observations. {OTHER_VERSION}")
        fields["layout"] = tuple(ObsPart(**field) for field in fields.get("layout", ()))  # empty: one row of numbers
        if "model_type" not in fields:
            return make_policy(PolicySpec(**fields), seed=0)
        if "horizon" in fields:
            flow = integration("robots", "flow.policy")
            fields.pop("choices", None)
            flowing: Policy = flow.FlowPolicy(flow.FlowSpec(**fields), seed=0)
            return flowing
        vla = integration("robots", "vla.policy")  # importing transformers takes seconds
        policy: Policy = vla.VlaPolicy(vla.VlaSpec.of_fields(fields), seed=0)
    return policy


def _as_tuple(value: object) -> Any:
    """Convert lists to tuples, because JSON has only lists."""
    if isinstance(value, dict):
        return {name: _as_tuple(inner) for name, inner in value.items()}
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value

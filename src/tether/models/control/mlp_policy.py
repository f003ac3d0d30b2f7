"""Control policies: an actor, a critic and the statistics of what they see."""

from __future__ import annotations

import importlib
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

from tether.models.control.actors import Actor, Forward
from tether.models.control.mlp import Mlp
from tether.models.control.network_policy import NetworkPolicy
from tether.models.control.observations import ObservationBatch
from tether.models.control.own_policy import OwnPolicy
from tether.models.control.spec import ForwardPass, Memory, PolicySpec, RolloutEvaluation
from tether.observations import ObsPart
from tether.runtime.disk import read_json, reading

if TYPE_CHECKING:
    from tether.models.flow.policy import FlowPolicy
    from tether.models.vla.policy import VlaPolicy

SPEC_FILE, WEIGHTS_FILE = "policy.json", "policy.safetensors"
OTHER_VERSION = "Another version of tether wrote this file; train the policy again with this one"


class ControlPolicy(nn.Module):
    """Actor and critic as perceptrons over one normalised observation, with gradients by hand.

    Args:
        spec: the shape.
        seed: of the first weights.
    """

    state_width = 0
    """There is no memory."""

    def __init__(self, spec: PolicySpec, seed: int) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        hidden, of_critic = [[spec.obs_dim] + [of.hidden_dim] * of.num_layers for of in (spec, spec.of_critic)]
        self.row, self.head = spec.make_row(), spec.make_head()
        self.actor = Mlp([*hidden, self.head.outputs], spec.activation, 0.01 * math.sqrt(2), generator)
        self.critic: Mlp | None = None
        if spec.value_width:
            before = hidden[-1:] if spec.share_critic else of_critic
            self.critic = Mlp([*before, spec.value_width], spec.activation, 1.0, generator)
        self.normalizer = spec.make_normalizer()
        self.micro_batch: int | None = None
        """Decisions of a forward and backward pass; None: all at once."""

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of the actor, and of the critic."""
        critic = [] if self.critic is None else list(self.critic.parameters())
        return [*self.actor.parameters(), *self.head.parameters()], critic

    def inputs(self, obs: ObservationBatch) -> Tensor:
        """The inputs of the networks from observations: a flat row [..., O], normalised."""
        row = self.row(obs)
        return row if self.normalizer is None else self.normalizer(row)

    def update_statistics(self, obs: ObservationBatch) -> None:
        """Take the numbers of observations [B, ...] into the statistics by which they are normalised."""
        if self.normalizer is not None:
            self.normalizer.update(self.row(obs))

    def acting(self) -> Actor:
        """An actor with the current weights."""
        return Actor(self)

    def in_numpy(self) -> Forward:
        """See `NetworkPolicy.in_numpy`."""
        forward = self.actor.in_numpy()
        return lambda row, state: (forward(row), state)

    @torch.no_grad()
    def values(self, obs: Tensor) -> Tensor:
        """Values [B, V] of normalised observations [B, O]."""
        assert self.critic is not None
        return self.critic(self.actor.activations(obs)[-2] if self.spec.share_critic else obs)

    def log_probs(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Log-probabilities [B, K * D] of actions [B, K * D], given normalised observations [B, O]; differentiable."""
        return self.head.evaluate(self.actor(obs), actions).log_probs

    @torch.no_grad()
    def outputs(self, obs: Tensor, memory: Memory | None, actions: Tensor | None = None) -> Tensor:
        """Outputs [B, outputs] of normalised observations [B, O]."""
        return self._in_parts(self.actor, obs)

    def run(self, obs: Tensor, memory: Memory | None, actions: Tensor | None = None) -> ForwardPass:
        """Say something of normalised observations [B, O], for `backward`."""
        if self.micro_batch is None or len(obs) <= self.micro_batch:
            hidden, valued = self._activations(obs)
            return ForwardPass(hidden[-1], valued[-1] if valued else None, ((obs,), hidden, valued))
        pieces = obs.split(self.micro_batch)
        ends = [(hidden[-1], valued[-1:]) for hidden, valued in map(self._activations, pieces)]
        values = [value for _, end in ends for value in end]
        return ForwardPass(torch.cat([end for end, _ in ends]), torch.cat(values) if values else None, (pieces, [], []))

    def decide(self, obs: Tensor, memory: Memory | None, actions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, outputs] and values [B, V] of normalised observations [B, O], differentiable."""
        hidden, valued = self._activations(obs)
        return hidden[-1], valued[-1] if valued else None

    def _activations(self, obs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of the actor, and of the critic; none where there is no critic."""
        hidden = self.actor.activations(obs)
        if self.critic is None:
            return hidden, []
        return hidden, self.critic.activations(hidden[-2] if self.spec.share_critic else obs)

    def _in_parts(self, network: Callable[[Tensor], Tensor], obs: Tensor) -> Tensor:
        pieces = obs.split(self.micro_batch or max(1, len(obs)))
        return torch.cat([network(piece) for piece in pieces]) if len(pieces) > 1 else network(obs)

    def backward(self, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
        """Write the gradient of every parameter but the head's into its existing ``grad``.

        Args:
            passed: what `run` gave.
            outputs_grad: of the loss by the outputs, [B, outputs]; None leaves the actor's gradients as they are.
            values_grad: by the values, [B, V]; None: there is no critic.
        """
        pieces, hidden, valued = passed.saved
        if len(pieces) == 1:
            self._backward(hidden, valued, outputs_grad, values_grad)
            return
        for number, (start, stop) in enumerate(pairwise(accumulate(map(len, pieces), initial=0))):
            grads = (None if grad is None else grad[start:stop] for grad in (outputs_grad, values_grad))
            self._backward(*self._activations(pieces[number]), *grads, add=number > 0)

    def _backward(
        self,
        hidden: list[Tensor],
        valued: list[Tensor],
        outputs_grad: Tensor | None,
        values_grad: Tensor | None,
        *,
        add: bool = False,
    ) -> None:
        """See `backward`, of one piece; `add` to the gradients that are there, instead of over them."""
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
        """Pass over a rollout: normalised observations [M, C + 1, O] and [F, O]; see `NetworkPolicy.review`."""
        outputs = self._in_parts(self.actor, obs[:, :-1].flatten(0, 1)).unflatten(0, (len(obs), -1))
        if self.critic is None:
            return RolloutEvaluation(outputs, None, None)
        values = self._in_parts(self.values, obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        return RolloutEvaluation(outputs, values, self._in_parts(self.values, final_obs))


Policy: TypeAlias = "ControlPolicy | NetworkPolicy | VlaPolicy | FlowPolicy"


def make_policy(spec: PolicySpec, seed: int) -> ControlPolicy | NetworkPolicy:
    """The policy of a shape, with first weights by `seed`."""
    if spec.network is not None:
        return OwnPolicy(spec, seed)
    return ControlPolicy(spec, seed) if spec.is_plain else NetworkPolicy(spec, seed)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the spec as JSON and the weights, statistics among them, as safetensors."""
    folder.mkdir()
    (folder / SPEC_FILE).write_text(json.dumps(asdict(policy.spec), indent=2))
    save_file({name: value.detach().clone() for name, value in policy.state_dict().items()}, folder / WEIGHTS_FILE)


def load_policy(folder: Path) -> Policy:
    """Load what `save_policy` wrote.

    Raises:
        ValueError: there is no policy in the folder, or its weights are not those of its spec.
    """
    if not (folder / SPEC_FILE).is_file():
        raise ValueError(f"{folder}: no control policy here ({SPEC_FILE} is missing); name a checkpoint of such a run")
    policy = _empty_policy(folder / SPEC_FILE)
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


def _empty_policy(file: Path) -> Policy:
    """The policy of a spec, before its weights."""
    fields = {name: _as_tuple(value) for name, value in read_json(file, dict, OTHER_VERSION).items()}
    with reading(file, OTHER_VERSION):
        if "layout" not in fields and (fields.get("pictures") or "model_type" in fields):
            raise ValueError(f"{file}: does not name the parts of its observations. {OTHER_VERSION}")
        fields["layout"] = tuple(ObsPart(**part) for part in fields.get("layout", ()))  # none: one row of numbers
        if "model_type" not in fields:
            return make_policy(PolicySpec(**fields), seed=0)
        if "horizon" in fields:
            flow = importlib.import_module("tether.models.flow.policy")
            fields.pop("choices", None)
            flowing: Policy = flow.FlowPolicy(flow.FlowSpec(**fields), seed=0)
            return flowing
        vla = importlib.import_module("tether.models.vla.policy")  # transformers takes seconds to load
        policy: Policy = vla.VlaPolicy(vla.VlaSpec.of_fields(fields), seed=0)
    return policy


def _as_tuple(value: object) -> Any:
    """JSON has lists only."""
    if isinstance(value, dict):
        return {name: _as_tuple(inner) for name, inner in value.items()}
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value

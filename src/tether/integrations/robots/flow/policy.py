"""A flow-matching policy with the interface of `tether.control.policies.network_policy` for training and acting.

Its actions are recorded with the chain that produced them (`tether.integrations.robots.flow.chain`), and its outputs
are the log-probabilities and entropies of these chains.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.control.policies.memoryless_policy import MemorylessPolicy
from tether.control.policies.networks import HALF_LOG_2PI, ActionEvaluation, device_of
from tether.control.policies.spec import NUMBERS, PICTURE, FlatRow, ObservationBatch, Observations, Pictures
from tether.integrations.robots.chain_actions import ChainActions
from tether.integrations.robots.flow import backbone as backbones
from tether.integrations.robots.flow.backbone import TOKEN_MASK, TOKENS, Prefix
from tether.integrations.robots.flow.chain import Record, log_density, step, times
from tether.integrations.robots.flow.prompts import FlowPrompts, task_and_state_prompt, task_prompt
from tether.integrations.robots.flow.spec import FlowSpec
from tether.integrations.robots.vla.model import ValueHead
from tether.observations import decode_text

TIME_ALPHA, TIME_SCALE, TIME_OFFSET = 1.5, 0.999, 0.001
"""Times of imitation are `TIME_SCALE` x Beta(`TIME_ALPHA`, 1) + `TIME_OFFSET`, as in openpi."""
NOISE_SIZES = (128, 64)


FROM_START = (
    "action_scale", "state_scale", "horizon", "latent_dim", "state_dim", "prompt_length", "tokenizer", "image_size",
    "sizes", "empty_cameras",
)  # fmt: skip
"""Fields of the spec that a run copies from its initial policy."""


class ChainHead(nn.Module):
    """The distribution of chains. The policy's outputs already are log-probabilities and entropies, [B, K * D] each.

    Args:
        spec: spec of the policy.
    """

    def __init__(self, spec: FlowSpec) -> None:
        super().__init__()
        self._spec = spec
        self.width = spec.num_action_chunks * spec.action_dim
        self.outputs = self.linear = 2 * self.width

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return noise [*shape, entries]: a number in [0, 1) that selects the random step, then the normal noise of the
        start and of each random step."""
        spec = self._spec
        steps = spec.random_steps if spec.joint_logprob else 1
        normal = torch.randn(*shape, (1 + steps) * spec.latents, generator=generator)
        return torch.cat([torch.rand(*shape, 1, generator=generator), normal], dim=-1)

    def evaluate(self, outputs: Tensor, actions: Tensor) -> ActionEvaluation:
        """Return log-probabilities and entropies, [..., K * D] each, from outputs [..., 2 * K * D]."""
        log_probs, entropy = outputs.split(self.width, dim=-1)
        return ActionEvaluation(log_probs, entropy, outputs)

    def backward(self, done: ActionEvaluation, actions: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor) -> Tensor:
        """Return the gradient of the outputs, [B, 2 * K * D]; arguments as for `CategoricalHead.backward`."""
        shape = done.log_probs.shape
        return torch.cat([log_prob_grad.expand(shape), entropy_grad.expand(shape)], dim=1)


class NoiseHead(nn.Module):
    """Computes the standard deviations of ``flow_noise``, between two bounds, from hidden states; sizes as in RLinf.

    Args:
        hidden_dim: E.
        latent_dim: A.
        bounds: minimum and maximum.
    """

    def __init__(self, hidden_dim: int, latent_dim: int, bounds: tuple[float, float]) -> None:
        super().__init__()
        first, second = NOISE_SIZES
        layers = (nn.Linear(hidden_dim, first), nn.Tanh(), nn.Linear(first, second), nn.Tanh())
        self.layers = nn.Sequential(*layers, nn.Linear(second, latent_dim))
        self._low, self._high = map(math.log, bounds)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [B, H, A] for hidden states [B, H, E]: exp of a number between the logarithms of the bounds."""
        share = (torch.tanh(self.layers(hidden)) + 1) / 2
        return torch.exp(self._low + (self._high - self._low) * share)


class FlowPolicy(MemorylessPolicy):
    """A flow-matching policy: network, value head, and a noise head for ``flow_noise``.

    Args:
        spec: spec of the policy.
        seed: seed of the initial weights.

    Raises:
        ValueError: lerobot is not installed, or the tokenizer cannot be loaded.
    """

    max_rows = 64
    set_by_run = (
        "value_width", "num_steps", "noise_method", "noise_level", "noise_logvar_range", "joint_logprob",
        "step_logprobs", "detach_critic_input", "train_expert_only", "choices",
    )  # fmt: skip

    def __init__(self, spec: FlowSpec, seed: int) -> None:
        super().__init__()
        self.spec, self.head = spec, ChainHead(spec)
        self._row = FlatRow(spec.layout, without=[*spec.pictures, spec.text or ""])
        self._pictures = Pictures(spec.layout, spec.pictures) if spec.pictures else None
        self._prompts = FlowPrompts(spec.prompt_length, spec.tokenizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: Any = backbones.make_backbone(spec)
            self.critic = ValueHead(self.model.critic_width, spec.value_width) if spec.value_width else None
            self.noise_head: NoiseHead | None = None
            if spec.noise_method == "flow_noise":
                self.noise_head = NoiseHead(self.model.expert_width, spec.latent_dim, spec.noise_logvar_range)

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the trained parameters of the policy, and of the value head."""
        critic = [] if self.critic is None else list(self.critic.parameters())
        actor = [*self.model.parameters(), *([] if self.noise_head is None else self.noise_head.parameters())]
        return [parameter for parameter in actor if parameter.requires_grad], critic

    def inputs(self, obs: ObservationBatch) -> TensorDict:
        """Return inputs for observations [..., *shape]: scaled and padded numbers, uint8 images, and the prompt."""
        row = self._row(obs)
        if self._row.width:
            offset, scale = (row.new_tensor(column) for column in self.spec.state_scale)
            row = (row - offset) / scale
        tokens, mask = self._tokens(obs, row)
        numbers = nn.functional.pad(row, (0, self.spec.state_dim - row.shape[-1]))
        fields = {NUMBERS: numbers, TOKENS: tokens.to(row.device), TOKEN_MASK: mask.to(row.device)}
        if self._pictures is not None:
            fields[PICTURE] = self._pictures(obs)
        return TensorDict(fields, batch_size=row.shape[:-1])

    def update_statistics(self, obs: ObservationBatch) -> None:
        """Do nothing: the scale of numbers is part of the spec, so there are no statistics."""

    def forward(self, obs: Observations, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, 2 * K * D] and values [B, V] for observations [B, ...] and recorded actions [B, K * W]."""
        assert isinstance(obs, TensorDict)
        prefix = self.model.prefix(obs)
        return self._outputs(prefix, actions, self._base(obs)), self._values(prefix)

    def imitation_losses(self, obs: Observations, actions: Tensor, generator: torch.Generator) -> Tensor:
        """Return the conditional flow-matching loss (Lipman et al. 2023) of recorded actions, [B, H * D].

        Args:
            obs: [B, ...] result of `inputs`.
            actions: [B, H * D] actions in the environment's scale.
            generator: random generator of noise and times.
        """
        spec = self.spec
        assert isinstance(obs, TensorDict)
        target = actions.unflatten(1, (spec.horizon, spec.action_dim))
        offset, scale = (target.new_tensor(column) for column in spec.action_scale)
        target = (target - offset) / scale - self._base(obs)
        target = nn.functional.pad(target, (0, spec.latent_dim - spec.action_dim))
        noise = torch.randn(target.shape, generator=generator).to(target)
        # The cumulative distribution function of Beta(a, 1) is u^a.
        uniform = torch.rand(len(target), generator=generator) ** (1 / TIME_ALPHA)
        t = (TIME_SCALE * uniform + TIME_OFFSET).to(target)
        losses: Tensor = self.model.matching_losses(obs, target, noise, t)
        return losses[:, :, : spec.action_dim].flatten(1)

    @torch.no_grad()
    def values(self, obs: Observations) -> Tensor:
        """Return values [B, V] of observations [B, ...]."""
        assert self.critic is not None
        if not len(obs):
            return torch.zeros(0, self.spec.value_width, device=device_of(self))
        return torch.cat([self.critic(self.model.prefix(batch).critic_input) for batch in obs.split(self._rows)])

    @torch.no_grad()
    def act(self, obs: Observations, noise: Tensor | None) -> Tensor:
        """Return recorded actions [N, K * W].

        Args:
            obs: [N, ...] observations.
            noise: [N, ...] noise of the head; None: follow the ODE from 0, the most likely start.
        """
        assert isinstance(obs, TensorDict)
        spec, prefix = self.spec, self.model.prefix(obs)
        x = obs[NUMBERS].new_zeros(len(obs), spec.horizon, spec.latent_dim)
        step_noise = None if noise is None else noise[:, 1:].to(x).unflatten(1, (-1, *x.shape[1:]))
        chosen = torch.zeros(len(obs), dtype=torch.int64, device=x.device)
        if step_noise is not None and noise is not None:
            x = step_noise[:, 0]
            if not spec.joint_logprob:
                chosen = (noise[:, 0] * spec.random_steps).long().clamp(max=spec.random_steps - 1).to(x.device)
        states, before, after = [], x, x
        for number in range(spec.num_steps):
            index = torch.full_like(chosen, number)
            states.append(x)
            velocity, std = self._velocity(prefix, x, index)
            following, _ = step(x, velocity, index, spec.num_steps, None)
            if step_noise is not None and number < spec.random_steps:
                mean, std = step(x, velocity, index, spec.num_steps, spec.noise_method, spec.noise_level, std)
                is_chosen = (chosen == number)[:, None, None] | spec.joint_logprob
                following = torch.where(
                    is_chosen, mean + std * step_noise[:, 1 + number * spec.joint_logprob], following
                )
                before, after = torch.where(is_chosen, x, before), torch.where(is_chosen, following, after)
            x = following
        used = slice(spec.num_action_chunks), slice(spec.action_dim)
        actions = x[:, used[0], used[1]] + self._base(obs)
        if spec.joint_logprob:
            return Record(actions, None, torch.stack(states, dim=1), None).columns(spec)
        return Record(actions, chosen, before[:, None], after[:, used[0], used[1]]).columns(spec)

    def action_code(self) -> ChainActions:
        offset, scale = self.spec.action_scale
        return ChainActions(offset, scale, self.spec.action_width)

    def inherited_fields(self) -> dict[str, object]:
        return {name: getattr(self.spec, name) for name in FROM_START}

    def load_plain(self, weights: dict[str, Tensor]) -> None:
        """Load weights in the format of `plain_state`; a noise head stays unchanged if they lack it."""
        state = self.state_dict()
        for name, value in weights.items():
            if name in state:
                state[name].copy_(value)

    def plain_state(self) -> dict[str, Tensor]:
        """Return the weights."""
        return self.state_dict()

    def _values(self, prefix: Prefix) -> Tensor | None:
        if self.critic is None:
            return None
        features = prefix.critic_input
        values: Tensor = self.critic(features.detach() if self.spec.detach_critic_input else features)
        return values

    def _velocity(self, prefix: Prefix, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return velocities, and with ``flow_noise`` the learned standard deviations, [B, H, A] each."""
        velocity, hidden = self.model.velocity(prefix, x, times(index, self.spec.num_steps, x.dtype)[0])
        return velocity, None if self.noise_head is None else self.noise_head(hidden)

    def _base(self, obs: TensorDict) -> Tensor:
        """Return the values [B, 1, D] to which relative actions are added, in the scale of actions; zeros for absolute
        columns."""
        spec, numbers = self.spec, obs[NUMBERS]
        base = numbers.new_zeros(len(numbers), 1, spec.action_dim)
        if spec.relative_actions:
            columns = slice(spec.relative_actions)
            offset, scale = (numbers.new_tensor(column[columns]) for column in spec.state_scale)
            state = numbers[:, columns] * scale + offset
            base[:, 0, columns] = state / numbers.new_tensor(spec.action_scale[1][columns])
        return base

    def _outputs(self, prefix: Prefix, actions: Tensor, base: Tensor) -> Tensor:
        """Return log-probabilities and mean entropies, [B, 2 * K * D], of the random steps of chains [B, K * W].

        `base` is the result of `_base`: recorded actions include it, the states of a chain do not.
        """
        spec = self.spec
        log_probs, entropies = [], []
        record = Record.of_columns(actions, spec)
        for index, before, after in replace(record, actions=record.actions - base).steps(spec):
            velocity, learned = self._velocity(prefix, before, index)
            mean, std = step(before, velocity, index, spec.num_steps, spec.noise_method, spec.noise_level, learned)
            used = (slice(None), slice(spec.num_action_chunks), slice(spec.action_dim))
            log_probs.append(log_density(after, mean[used], std[used]))
            entropies.append(std[used].log() + (0.5 + HALF_LOG_2PI))
        total = torch.stack(log_probs).sum(dim=0)
        if spec.joint_logprob and spec.step_logprobs == "mean":  # over all steps and the start
            total = total / (spec.num_steps + 1)
        return torch.cat([total.flatten(1), torch.stack(entropies).mean(dim=0).flatten(1)], dim=1)

    def _tokens(self, obs: ObservationBatch, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids and their mask, [..., L] each."""
        shape, spec = row.shape[:-1], self.spec
        count = math.prod(shape)
        if spec.text is None:
            tasks, which = [""], np.zeros(count, dtype=np.int64)
        else:
            codes = obs[spec.text].flatten(0, -2).cpu().numpy()
            unique, which = np.unique(codes, axis=0, return_inverse=True)
            tasks, which = [decode_text(text) for text in unique], which.reshape(-1)
        if spec.model_type == "pi05" and spec.discrete_state_input:
            states = row.reshape(count, row.shape[-1]).float().cpu().numpy()
            texts = [task_and_state_prompt(tasks[task], state) for task, state in zip(which, states, strict=True)]
            ids, mask = self._prompts(texts)
        else:
            ids, mask = (
                column[torch.from_numpy(which)] for column in self._prompts([task_prompt(task) for task in tasks])
            )
        return ids.unflatten(0, shape), mask.unflatten(0, shape)

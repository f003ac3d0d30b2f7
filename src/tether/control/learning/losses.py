"""The samples of a control policy, their loss, and its gradient.

S decisions are rows; each decision chooses the actions of a chunk. For a recurrent policy they form M sequences of C
decisions, one per column of the rollout, and the shape [S, ...] below is [M, C, ...]; ``Memory.selected`` marks the
decisions to train on.

A chunk is K actions of D columns each, concatenated: columns [..., K * D]. It is trained at one of three levels, at
which it has L numbers: K * D at ``token_level``, K at ``action_level``, 1 at ``chunk_level``. If an episode ended in
the middle of a chunk, a mask [..., K] marks the actions that were executed; the others are ignored. A mini-batch has B
decisions, with V values each.

The loss is a dataclass with the names and coefficients of `tether.algorithms`. Its gradients are computed in closed
form, because autograd would take longer than these small networks themselves. Each is the derivative of a function in
`tether.algorithms`, which is the definition: tests compare the two in float64. A loss without a closed form is
differentiated by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from tether.algorithms import (
    MAX_LOG_RATIO,
    REQUIRED_AGGREGATION,
    TOKEN_SELECTIONS,
    TokenLoss,
    masked_mean,
    merge_metrics,
    value_loss,
)
from tether.algorithms.aggregation import loss_divisors
from tether.batch import EnvBatch
from tether.config.schema import ActorConfig, AlgorithmConfig, CriticConfig
from tether.control.policies.mlp_policy import Policy
from tether.control.policies.networks import Numbers, device_of, exp
from tether.control.policies.spec import Memory, Observations
from tether.loop.engine import LossSpec
from tether.loop.own_functions import policy_loss
from tether.loop.run import policy_loss_options, selection_options

Level = Literal["token_level", "action_level", "chunk_level"]


def sum_to_level(columns: Tensor, level: Level, chunk: int = 1, mask: Tensor | None = None) -> Tensor:
    """Sum columns [..., K * D] to a level, [..., L].

    Args:
        columns: log-probabilities or entropies.
        level: the level of the result.
        chunk: K, actions per chunk.
        mask: [..., K]: actions that were executed; None means all.
    """
    if mask is not None:
        columns = torch.where(per_column(mask, columns.shape[-1]), columns, 0.0)
    if level == "token_level" or columns.shape[-1] == 1:
        return columns
    if level == "action_level" and chunk > 1:
        return columns.unflatten(-1, (chunk, -1)).sum(dim=-1)
    return columns.sum(dim=-1, keepdim=True)


def to_columns(grad: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
    """Return the gradient of the columns [B, width] from the gradient of `sum_to_level`'s result [B, L]; [B, 1] if it
    is the same for all columns."""
    if mask is not None:
        return torch.where(per_column(mask, width), per_column(grad, width), 0.0)
    return grad if grad.shape[1] == 1 else per_column(grad, width)


def per_column(values: Tensor, width: int) -> Tensor:
    """Repeat the value of each action or chunk, [..., L], for each of its columns, [..., width]."""
    return values if values.shape[-1] == width else values.repeat_interleave(width // values.shape[-1], dim=-1)


def mask_at(level: Level, mask: Tensor | None, width: int) -> Tensor | None:
    """Return the mask [B, L] of `sum_to_level`'s result, or None if all are valid, as at ``chunk_level``, where every
    chunk has an executed action."""
    if mask is None or level == "chunk_level":
        return None
    return per_column(mask, width) if level == "token_level" else mask


EPISODES_WEIGH_EQUALLY = "masked_mean_ratio"


@dataclass(frozen=True)
class Samples:
    """Decisions to train on, one per row. K: actions of a chunk; D: columns of an action; L: numbers at a level."""

    obs: Observations
    """[S, ...] inputs of the networks."""
    actions: Tensor
    """[S, K * D]"""
    old_log_probs: Tensor
    """[S, L]: log-probs under the policy before the update."""
    advantages: Tensor
    """[S, L]"""
    values: Tensor | None = None
    """[S, V]: values of the critic before the update; None without a critic."""
    returns: Tensor | None = None
    """[S, V]"""
    mask: Tensor | None = None
    """[S, K]: which actions were executed, at least the first; None means all."""
    weights: Tensor | None = None
    """[S, 1]: weight of the row in the loss, if episodes have equal weights."""
    memory: Memory | None = None
    observed: TensorDict | None = None
    """[N]: observations that update the policy's statistics after the update; not aligned with the rows."""
    rollout_log_probs: Tensor | None = None
    """[S, L]: log-probs under the policy that acted; None if it is the policy of `old_log_probs`."""

    def __len__(self) -> int:
        return len(self.obs)

    def __getitem__(self, rows: Tensor | slice) -> Samples:
        return self.each(lambda column: column[rows])

    def to(self, device: torch.device) -> Samples:
        return self.each(lambda column: column.to(device))

    @property
    def response_mask(self) -> Tensor:
        """Return the mask [S, K] of the actions that were executed."""
        return torch.ones(len(self), 1, dtype=torch.bool) if self.mask is None else self.mask

    def split(self, size: int) -> Iterator[Samples]:
        """Split into chunks of `size` decisions, the last one possibly smaller; sequences are not split."""
        if self.memory is not None:
            size //= self.memory.selected.shape[1]
        columns = self._columns()
        for chunk in zip(*(column.split(size) for column in columns.values()), strict=True):
            yield Samples(**dict(zip(columns, chunk, strict=True)), observed=self.observed)

    def decisions(self) -> Samples:
        """Return the decisions to train on as rows, also for recurrent policies; observations are unchanged."""
        if self.memory is None:
            return self
        selected = self.memory.selected
        return replace(self.each(lambda column: column[selected], "obs", "memory"), memory=None)

    def each(self, change: Callable[[Tensor], Tensor], *but: str) -> Samples:
        """Apply a function to all columns except those named in `but`; `observed` is unchanged."""
        changed: dict[str, Any] = {
            name: column.each(change) if isinstance(column, Memory) else change(column)
            for name, column in self._columns().items()
            if name not in but
        }
        return replace(self, **changed)

    def _columns(self) -> dict[str, Any]:
        """Return the columns that are not None, which all have the same rows."""
        declared = ((column.name, getattr(self, column.name)) for column in fields(self))
        return {name: column for name, column in declared if column is not None and name != "observed"}


def shard_by_rank(samples: Samples, ranks: int) -> list[tuple[Samples, Observations]]:
    """Distribute the observations over ranks, round-robin by row, and return each rank's samples and observations.

    Instead of its observation, each row of the samples has the index of the observation among the rank's, or -1 if the
    observation is on another rank.
    """
    owner = torch.arange(len(samples)) % ranks
    shards = []
    for mine in (owner == rank for rank in range(ranks)):
        numbers = torch.where(mine, mine.cumsum(0) - 1, -1)
        shards.append((replace(samples, obs=numbers), samples.obs[mine]))
    return shards


def loss_weights(
    mode: str, loss: Tensor, mask: Tensor | None, episode_weights: Tensor | None, max_length: float | None
) -> Tensor | float:
    """Return the weight of each element of a loss [B, L] in the aggregated loss; rows are treated as sequences.

    It is the derivative of `tether.algorithms.aggregate_loss`, or of `masked_mean_ratio`, with respect to the loss.

    Args:
        mode: the aggregation mode.
        loss: a tensor with the shape of the loss.
        mask: [B, L]: valid elements; None means all.
        episode_weights: [B, 1] weights for ``masked_mean_ratio``.
        max_length: the divisor of modes with ``-norm``.
    """
    rows, columns = loss.shape
    if mode == EPISODES_WEIGH_EQUALLY:
        assert episode_weights is not None
        alike = episode_weights / (rows * columns)
        return alike if mask is None else alike * mask
    of_row, of_all = loss_divisors(
        mode,
        columns if mask is None else mask.sum(dim=1, keepdim=True),
        num_tokens=loss.numel() if mask is None else mask.sum(),
        num_sequences=rows,
        max_length=columns if max_length is None else max_length,
    )
    return 1 / (of_row * of_all) if mask is None else mask.to(loss.dtype) / (of_row * of_all)


@dataclass(frozen=True)
class RolloutOutputs:
    """A policy's outputs for M rows of C decisions, on the CPU, which are stored in `EnvBatch`."""

    log_probs: Tensor
    """[M, C, L]"""
    seen: Observations
    values: Tensor | None
    bootstrap_values: Tensor | None


def _on_cpu(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.cpu()


@dataclass(frozen=True)
class RolloutForward:
    """Computes log-probs of the executed actions, and the critic's values if there is one."""

    logprob_level: Level = "action_level"

    @torch.no_grad()
    def __call__(self, policy: Policy, batch: EnvBatch, reference: object = None) -> RolloutOutputs:
        chunk, device = batch.chunk, device_of(policy)
        seen, actions = policy.inputs(batch.obs.to(device)), batch.actions.to(device)
        row, step = batch.final_at
        passed = policy.review(
            seen,
            batch.starts.to(device),
            batch.state.to(device),
            policy.inputs(batch.final_obs.to(device)),
            (row.to(device), (step // chunk).to(device)),
            actions,
        )
        mask = batch.valid.unflatten(1, (-1, chunk)) if chunk > 1 else None
        columns = policy.head.evaluate(passed.outputs, actions).log_probs.cpu()
        log_probs = sum_to_level(columns, self.logprob_level, chunk, mask)
        return RolloutOutputs(log_probs, seen.cpu(), _on_cpu(passed.values), _on_cpu(passed.final_values))


CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def clip_ratios(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a policy loss that are arguments of `vanilla_gradient`."""
    return {key: options[key] for key in CLIPS if key in options}


@dataclass(frozen=True)
class LossGradient:
    """The gradient of the sum of all elements of a loss [B, L]."""

    by_log_probs: Tensor
    """[B, L]"""
    loss: TokenLoss | None = None
    """The loss of each element, if the gradient required it."""


Draws = Callable[[], torch.Generator]
"""Creates the random generator, if a loss needs one."""
PolicyGradient = Callable[[Tensor, Tensor, Tensor, Tensor | None, Draws], LossGradient]
"""Called with (log_probs, old_log_probs, advantages, mask or None, draws), [B, L] each."""


def vanilla_gradient(
    log_probs: Numbers,
    old_log_probs: Numbers,
    advantages: Numbers,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> Numbers:
    """Return the derivative [B, L] of ``POLICY_LOSSES["vanilla"]`` with respect to the log-probabilities.

    With r = p / p_old, the loss -A r has the derivative -A r. Where a clip or the dual clip binds, the loss is constant
    and its derivative 0.
    """
    log_ratio = log_probs - old_log_probs
    ratio = exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    costs = -advantages
    unclipped = costs * ratio
    live = unclipped >= costs * ratio.clip(1 - clip_ratio_low, 1 + clip_ratio_high)
    live &= abs(log_ratio) <= MAX_LOG_RATIO
    if clip_ratio_c is not None:
        live &= (advantages >= 0) | (unclipped <= costs * clip_ratio_c)
    return unclipped * live


def value_gradient(
    values: Numbers, old_values: Numbers, returns: Numbers, *, cliprange_value: float | None, huber_delta: float | None
) -> Numbers:
    """Return the derivative [B, 1] of `tether.algorithms.value_loss` with respect to the values.

    The loss is the larger one of V's and the clipped V's; the derivative of the latter is 0 where the clip binds.
    Since both depend on the distance to R only, the maximum is the loss with the larger distance.
    """
    error = values - returns
    gradient = error if huber_delta is None else error.clip(-huber_delta, huber_delta)
    if cliprange_value is None:
        return gradient
    near_old = values.clip(old_values - cliprange_value, old_values + cliprange_value)
    return gradient * (abs(error) >= abs(near_old - returns))


def policy_gradient(
    name: str, options: Mapping[str, float | Tensor | None], selection: Mapping[str, float]
) -> PolicyGradient:
    """Return a function that computes the gradient of a policy loss, in closed form or by autograd.

    Args:
        name: a key of ``POLICY_LOSSES``.
        options: keyword arguments of the loss.
        selection: keyword arguments of ``TOKEN_SELECTIONS[name]``, for losses that treat selected tokens differently.
    """
    if name == "vanilla":
        clips = clip_ratios(options)

        def closed_form(
            log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None, draws: Draws
        ) -> LossGradient:
            gradient = vanilla_gradient(log_probs, old, advantages, **clips)
            return LossGradient(gradient if mask is None else torch.where(mask, gradient, 0.0))

        return closed_form

    policy_loss(name)  # checks a user's function before the run begins
    select = TOKEN_SELECTIONS.get(name)

    def differentiate(
        log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None, draws: Draws
    ) -> LossGradient:
        mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
        keywords: dict[str, object] = {"rollout_log_probs": old, **options}
        if select is not None:
            keywords["selected"] = select(log_probs, old, advantages, mask, generator=draws(), **selection)
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            loss = policy_loss(name)(leaf, old, advantages, mask, **keywords)
            (gradient,) = torch.autograd.grad(loss.loss.sum(), [leaf])
        return LossGradient(gradient, TokenLoss(loss.loss.detach(), loss.metrics))

    return differentiate


@dataclass(frozen=True)
class Outputs:
    """A policy's outputs for a mini-batch, before its optimizer step."""

    log_probs: Tensor
    """[B, L]"""
    entropy: Tensor
    """[B, K * D]"""
    values: Tensor | None
    """[B, V]"""
    loss: TokenLoss | None
    """The policy's loss of each element, if its gradient required it."""
    policy_grad_norm: Tensor | None = None
    """Norm of the gradient of the mean loss with respect to the policy's outputs [B, outputs]; None if only the critic
    was trained. It excludes the value loss, even if actor and critic share layers."""


@dataclass(frozen=True)
class ControlLoss:
    """L = policy loss - entropy_coeff x mean entropy + value_coeff x value loss."""

    name: str = "vanilla"
    options: Mapping[str, float | None] = field(default_factory=dict)
    """Keyword arguments of the policy loss, such as clip ratios."""
    selection: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of the token selection, for losses that treat selected elements differently."""
    aggregation: str = "token-mean"
    """Aggregation of the policy loss; with ``masked_mean_ratio`` the value loss has the same weights."""
    max_length: float | None = None
    """Divisor of modes with ``-norm``; None: the number of elements of a row."""
    entropy_coeff: float = 0.0
    value_coeff: float = 1.0
    cliprange_value: float | None = None
    huber_delta: float | None = None
    logprob_level: Level = "action_level"
    entropy_level: Level = "action_level"
    critic_only: bool = False
    """Whether only the value loss is minimised and the policy stays unchanged."""

    @classmethod
    def from_config(
        cls, actor: ActorConfig, critic: CriticConfig, algorithm: AlgorithmConfig, *, auto_reset: bool
    ) -> ControlLoss:
        """Return the configured loss; `auto_reset`: whether episodes continue in the next rollout."""
        return cls(
            name=actor.policy_loss.loss_mode,
            options=policy_loss_options(actor),
            selection=selection_options(actor),
            aggregation=aggregation_of(actor, auto_reset=auto_reset),
            max_length=scale_factor(actor),
            entropy_coeff=actor.entropy_coeff,
            value_coeff=critic.loss_coef,
            cliprange_value=critic.cliprange_value,
            huber_delta=critic.huber_delta,
            logprob_level=algorithm.logprob_type,
            entropy_level=algorithm.entropy_type,
        )

    def log_probs(self, columns: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
        """Return the log-probs [B, L] at the level of the loss from the log-probs of columns [B, K * D]."""
        return sum_to_level(columns, self.logprob_level, chunk, mask)

    def token_loss(self, log_probs: Tensor, rows: Samples, width: int) -> TokenLoss:
        """Return the policy's loss of each element; arguments as for `policy_gradient`."""
        counted = mask_at(self.logprob_level, rows.mask, width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        options = {"rollout_log_probs": rows.old_log_probs, **self._options(rows)}
        return policy_loss(self.name)(log_probs, rows.old_log_probs, rows.advantages, mask, **options)

    def _options(self, rows: Samples) -> Mapping[str, Any]:
        acted = rows.rollout_log_probs
        return self.options if acted is None else {**self.options, "rollout_log_probs": acted}

    def policy_gradient(self, log_probs: Tensor, rows: Samples, width: int, draws: Draws) -> LossGradient:
        """Return the gradient of the aggregated policy loss with respect to the log-probs.

        Args:
            log_probs: log-probs [B, L].
            rows: the mini-batch.
            width: K * D.
            draws: creates the generator for losses that choose elements at random.
        """
        counted = mask_at(self.logprob_level, rows.mask, width)
        differentiate = policy_gradient(self.name, self._options(rows), self.selection)
        gradient = differentiate(log_probs, rows.old_log_probs, rows.advantages, counted, draws)
        return LossGradient(gradient.by_log_probs * self._weights(log_probs, rows, width), gradient.loss)

    def values_gradient(self, values: Tensor, rows: Samples) -> Tensor:
        """Return the gradient [B, V] of the loss with respect to the values."""
        assert rows.values is not None
        assert rows.returns is not None
        counted, weights = self._value_weights(values, rows)
        grad = value_gradient(
            values, rows.values, rows.returns, cliprange_value=self.cliprange_value, huber_delta=self.huber_delta
        )
        if counted is not None:
            grad = torch.where(counted, grad, 0.0)
        return grad * weights

    def entropy_gradient(self, entropy: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
        """Return the gradient of the loss with respect to the entropy of each column, [B, K * D], or [1, 1] if it is
        the same for all."""
        level, (rows, width), coeff = self.entropy_level, entropy.shape, self.entropy_coeff
        if mask is None:
            columns = {"token_level": width, "action_level": chunk, "chunk_level": 1}[level]
            return entropy.new_full((1, 1), -coeff / (rows * columns))
        counted = mask_at(level, mask, width)
        elements = rows if counted is None else int(counted.sum())
        return per_column(mask, width).to(entropy.dtype) * (-coeff / elements)

    def metrics(self, rows: Samples, outputs: Sequence[Outputs], chunk: int, width: int) -> dict[str, float]:
        """Return losses and statistics of all samples, from the outputs before the optimizer step of each mini-batch.

        Args:
            rows: the samples, in the order of the outputs.
            outputs: outputs of each mini-batch.
            chunk: K, actions per decision.
            width: K * D.
        """
        if not outputs:
            return {}
        columns = torch.cat([output.entropy for output in outputs])
        entropy = sum_to_level(columns, self.entropy_level, chunk, rows.mask)
        counted = mask_at(self.entropy_level, rows.mask, width)
        metrics = {"actor/entropy": float(entropy.mean() if counted is None else masked_mean(entropy, counted))}
        if not self.critic_only:
            metrics |= self._policy_metrics(rows, outputs, width)
        if rows.values is None or rows.returns is None:
            return metrics
        values = torch.cat([output.values for output in outputs if output.values is not None])
        counted = None if values.shape[1] == 1 else rows.mask
        critic = value_loss(
            values,
            rows.values,
            rows.returns,
            torch.ones_like(values, dtype=torch.bool) if counted is None else counted,
            cliprange_value=self.cliprange_value,
            huber_delta=self.huber_delta,
        )
        return metrics | {name: float(metric) for name, metric in critic.metrics.items()}

    def _policy_metrics(self, rows: Samples, outputs: Sequence[Outputs], width: int) -> dict[str, float]:
        log_probs = torch.cat([output.log_probs for output in outputs])
        losses = [output.loss for output in outputs if output.loss is not None]
        if losses:
            loss = TokenLoss(
                torch.cat([token_loss.loss for token_loss in losses]),
                merge_metrics(token_loss.metrics for token_loss in losses),
            )
        else:
            loss = self.token_loss(log_probs, rows, width)
        metrics = {name: float(metric) for name, metric in loss.metrics.items()}
        norms = [  # root mean square over decisions of the norm of the gradient of each decision's loss
            float(output.policy_grad_norm) * math.sqrt(len(output.log_probs))
            for output in outputs
            if output.policy_grad_norm is not None
        ]
        return metrics | {
            "actor/pg_loss": float((loss.loss * self._weights(log_probs, rows, width)).sum()),
            "actor/policy_grad_norm": sum(norms) / len(norms),
        }

    def _value_weights(self, values: Tensor, rows: Samples) -> tuple[Tensor | None, Tensor | float]:
        """Return the mask of valid values [B, V] (None means all), and the weight of each in the loss."""
        counted = None if values.shape[1] == 1 else rows.mask  # a value per action, or one for the chunk
        mode = EPISODES_WEIGH_EQUALLY if self.aggregation == EPISODES_WEIGH_EQUALLY else "token-mean"
        return counted, loss_weights(mode, values, counted, rows.weights, None) * self.value_coeff

    def _weights(self, log_probs: Tensor, rows: Samples, width: int) -> Tensor | float:
        counted = mask_at(self.logprob_level, rows.mask, width)
        return loss_weights(self.aggregation, log_probs, counted, rows.weights, self.max_length)


def aggregation_of(actor: ActorConfig, *, auto_reset: bool) -> str:
    """Return the configured aggregation; by default the one that the loss requires, or the usual one."""
    usual = "token-mean" if auto_reset else EPISODES_WEIGH_EQUALLY
    return actor.loss_agg_mode or REQUIRED_AGGREGATION.get(actor.policy_loss.loss_mode, usual)


def scale_factor(actor: ActorConfig) -> float | None:
    """Return ``loss_scale_factor`` if the configured aggregation uses it."""
    return None if actor.loss_agg_mode is None else actor.loss_scale_factor


def loss_spec(loss: ControlLoss, forward: RolloutForward) -> LossSpec[Any, RolloutOutputs]:
    """Return the loss for engines that compute gradients from its fields, such as `FlatEngine`, and never call it."""
    function: Any = loss
    return LossSpec(forward, function)

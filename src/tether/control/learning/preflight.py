"""The preflight of a control policy: checks observations, rewards and actions of some steps in its environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tether.batch import EnvBatch
from tether.control.collecting.collector import EnvCollector
from tether.control.envs.protocol import ActionSpec, ContinuousActions, MixedActions, VectorEnv
from tether.control.learning.rollouts import EnvRollouts, StartStates
from tether.control.policies.mlp_policy import ControlPolicy, Policy
from tether.keyed_random import generator, seed_of
from tether.loop.preflight import Finding
from tether.observations import Array, Observation, ObsLayout
from tether.runtime.global_rng import rng_state, set_rng_state

ENVIRONMENTS, DECISIONS = 8, 32
"""Number of environments that are created for the preflight, and maximum number of decisions in each."""
LARGE = 100.0
"""Absolute value of an observation that is too large for a network without normalisation."""
OVERFLOWS = 1e15
"""Reward above which updates overflow float32: returns are a hundred times as large, and the loss squares them."""
CLIPPED_SHARE = 0.5
"""Share of action values outside the bounds at which a warning is shown."""


@dataclass(frozen=True)
class StepSample:
    """Steps of all environments, as a `tether.loop.preflight.PreflightSample`."""

    title: str
    ranges: Sequence[tuple[str, float, float]]
    """Name, minimum and maximum of each measurement."""
    episodes: int
    """The number of episodes that ended."""
    findings: Sequence[Finding]
    step_rows: int

    def render(self) -> list[RenderableType]:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("", "min", "max"):
            table.add_column(column)
        for name, low, high in self.ranges:
            table.add_row(name, f"{low:.4g}", f"{high:.4g}")
        return [Text(self.title, style="bold"), table, Text(f"episodes that ended: {self.episodes}")]


def sample_steps(make: Callable[[], VectorEnv], source: StartStates, rollouts: EnvRollouts) -> StepSample:
    """Act with the untrained policy in separate environments, so that the training environments do not change.

    Args:
        make: creates a few environments with the options of the training environments.
        source: provides the start states.
        rollouts: rollouts that have not begun.

    Raises:
        ValueError: an observation or a reward is not finite; the message names environment and step.
    """
    policy, chunk = rollouts.policy, rollouts.collector.chunk
    epochs, decisions, count = rollouts.collector.noise_shape
    rng, seed = rng_state(), seed_of(source.seed, 0, "preflight")
    with closing(make()) as env:
        collector = EnvCollector(env, chunk * min(decisions, DECISIONS), chunk=chunk, state_width=policy.state_width)
        noise = policy.head.noise(collector.noise_shape, generator(seed, 0, "noise"))
        batch = collector.collect(policy.acting(), noise, [seed])
    set_rng_state(rng)
    obs = {name: np.asarray(values) for name, values in batch.obs.items()}
    measured = {f"observation {name}": values for name, values in obs.items()}
    measured |= {"action": batch.actions.numpy(), "reward": batch.token_level_scores[batch.valid].numpy()}
    return StepSample(
        f"{env.id}: {collector.steps} steps of {env.num_envs} environments",
        [(name, float(values.min()), float(values.max())) for name, values in measured.items() if values.size],
        len(batch.episodes),
        [
            *([] if policy.normalizer is not None else observation_findings(obs)),
            *(pixel_findings(env.layout, obs) if _reads_pixels_as_numbers(policy) else []),
            *step_findings(batch),
            *action_findings(batch.actions.numpy(), env.actions),
        ],
        epochs * decisions * count,
    )


def observation_findings(obs: Observation) -> Iterator[Finding]:
    """Yield a finding for each observation with numbers that are too large for a network."""
    for name, values in obs.items():
        if values.dtype.kind == "f" and values.size and (largest := float(np.abs(values).max())) > LARGE:
            yield Finding(
                "observation_range",
                f"observation {name}: entries reach {largest:.3g}, and networks learn badly from such numbers. Set "
                "policy.normalize_observations=True.",
            )


def _reads_pixels_as_numbers(policy: Policy) -> bool:
    if not isinstance(policy, ControlPolicy) or policy.normalizer is not None:
        return False
    spec = policy.spec
    return not spec.pictures and spec.network is None and spec.features_extractor is None


def pixel_findings(layout: ObsLayout, obs: Observation) -> Iterator[Finding]:
    """Yield a finding for each image whose pixels a perceptron reads as large numbers."""
    for field in layout:
        if field.kind == "image" and (largest := int(obs[field.name].max(initial=0))) > LARGE:
            yield Finding(
                "pixels_as_numbers",
                f"observation {field.name}: a perceptron reads the pixels of this picture, up to {largest}, as so many "
                "numbers, and learns badly from them. Set policy.model_type=cnn_policy.",
            )


def step_findings(batch: EnvBatch) -> Iterator[Finding]:
    """Yield findings about rewards that are all 0 or too large, and about episodes that all end after one step."""
    rewards = batch.token_level_scores[batch.valid]
    if len(rewards) and not rewards.any():
        yield Finding(
            "zero_reward_variance",
            f"all {len(rewards)} rewards are 0: if returns do not differ, there is nothing to learn. In a task with "
            "sparse rewards that may be chance; otherwise check the reward, or begin with an easier task.",
        )
    if len(rewards) and (largest := float(rewards.abs().max())) > OVERFLOWS:
        yield Finding(
            "reward_range",
            f"rewards reach {largest:.3g}, and the squares of their sums overflow float32, so that no update is "
            "possible. Set env.train.reward_coef to scale them to about 1.",
        )
    if batch.episodes and all(episode.length == 1 for episode in batch.episodes):
        yield Finding(
            "episodes_end_at_once",
            f"all {len(batch.episodes)} episodes ended after one step. Check what ends them in the environment, and "
            "env.train.max_episode_steps.",
        )


def action_findings(actions: Array, spec: ActionSpec) -> Iterator[Finding]:
    """Yield a finding if the environment clips most actions."""
    if isinstance(spec, MixedActions):
        actions, spec = actions[..., len(spec.choices) :], spec.numbers
    if isinstance(spec, ContinuousActions) and spec.low:
        columns = actions.reshape(-1, spec.width)
        clipped = float(((columns < spec.low) | (columns > spec.high)).mean())
        if clipped >= CLIPPED_SHARE:
            yield Finding(
                "actions_clipped",
                f"{clipped:.0%} of the sampled actions are outside the environment's bounds and are clipped to them, "
                "so that most actions are at a bound. Lower policy.init_logstd.",
            )

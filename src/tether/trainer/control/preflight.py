"""The preflight of a control policy: some steps in its environments, their observations and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tether.batch import EnvBatch
from tether.envs import ContinuousActions, DiscreteActions, VectorEnv
from tether.keyed_random import generator, seed_of
from tether.models.control import ControlPolicy, Policy
from tether.observations import Array, Observation, ObsLayout
from tether.rollout.env import EnvCollector
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.trainer.control.rollouts import EnvRollouts, StartStates
from tether.trainer.preflight import Finding

ENVIRONMENTS, DECISIONS = 8, 32
"""That are made and closed again, and what is decided in each, at most."""
LARGE = 100.0
"""An entry of an observation, either way, that a network reads badly as it is."""
OVERFLOWS = 1e15
"""Of a reward: returns are a hundred times as large, and float32 ends at the square of that and of a network's size."""
CLIPPED_SHARE = 0.5
"""Share of sampled actions outside the bounds at which most of them are one of two."""


@dataclass(frozen=True)
class SeenSteps:
    """Steps of all environments; see `tether.trainer.preflight.Seen`."""

    about: str
    """Which."""
    ranges: Sequence[tuple[str, float, float]]
    """Name of a measurement, its least and its greatest value."""
    episodes: int
    """That ended."""
    findings: Sequence[Finding]
    step_rows: int

    def shown(self) -> list[RenderableType]:
        """See `Seen`."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("", "least", "greatest"):
            table.add_column(column)
        for name, low, high in self.ranges:
            table.add_row(name, f"{low:.4g}", f"{high:.4g}")
        return [Text(self.about, style="bold"), table, Text(f"episodes that ended: {self.episodes}")]


def look_at_steps(make: Callable[[], VectorEnv], source: StartStates, rollouts: EnvRollouts) -> SeenSteps:
    """Act with the untrained policy in environments of its own: those of training may keep what happens in them.

    Args:
        make: some environments like those of training.
        source: of the start states.
        rollouts: that have not begun.

    Raises:
        ValueError: an observation or a reward is not finite; names environment and step.
    """
    policy, chunk = rollouts.policy, rollouts.collector.chunk
    epochs, decisions, count = rollouts.collector.noise_shape
    draws, seed = rng_state(), seed_of(source.seed, 0, "preflight")
    with closing(make()) as env:
        collector = EnvCollector(env, chunk * min(decisions, DECISIONS), chunk=chunk, state_width=policy.state_width)
        noise = policy.head.noise(collector.noise_shape, generator(seed, 0, "noise"))
        batch = collector.collect(policy.acting(), noise, [seed])
    set_rng_state(draws)
    obs = {name: np.asarray(part) for name, part in batch.obs.items()}
    measured = {f"observation {name}": part for name, part in obs.items()}
    measured |= {"action": batch.actions.numpy(), "reward": batch.token_level_scores[batch.valid].numpy()}
    return SeenSteps(
        f"{env.id}: {collector.steps} steps of {env.num_envs} environments",
        [(name, float(of.min()), float(of.max())) for name, of in measured.items() if of.size],
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
    """Numbers too large for a network."""
    for name, part in obs.items():
        if part.dtype.kind == "f" and part.size and (largest := float(np.abs(part).max())) > LARGE:
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
    """Pictures whose bytes a perceptron reads as large numbers."""
    for field in layout:
        if field.kind == "image" and (largest := int(obs[field.name].max(initial=0))) > LARGE:
            yield Finding(
                "pixels_as_numbers",
                f"observation {field.name}: a perceptron reads the pixels of this picture, up to {largest}, as so many "
                "numbers, and learns badly from them. Set policy.model_type=cnn_policy.",
            )


def step_findings(batch: EnvBatch) -> Iterator[Finding]:
    """Rewards that do not differ; episodes that end at once."""
    rewards = batch.token_level_scores[batch.valid]
    if len(rewards) and not rewards.any():
        yield Finding(
            "zero_reward_variance",
            f"all {len(rewards)} rewards are 0: where returns do not differ there is nothing to learn. In a task whose "
            "rewards are rare that may be chance; else check the reward, or begin with an easier task.",
        )
    if len(rewards) and (largest := float(rewards.abs().max())) > OVERFLOWS:
        yield Finding(
            "reward_range",
            f"rewards reach {largest:.3g}, and float32 does not hold the squares of their sums: no update can be "
            "made. Unless env.train.reward_coef brings them to about 1, set it so.",
        )
    if batch.episodes and all(episode.length == 1 for episode in batch.episodes):
        yield Finding(
            "episodes_end_at_once",
            f"all {len(batch.episodes)} episodes ended after one step. Check what ends them in the environment, and "
            "env.train.max_episode_steps.",
        )


def action_findings(actions: Array, spec: ContinuousActions | DiscreteActions) -> Iterator[Finding]:
    """Actions that the environment clips, most of them."""
    if isinstance(spec, ContinuousActions) and spec.low:
        chosen = actions.reshape(-1, spec.width)
        clipped = float(((chosen < spec.low) | (chosen > spec.high)).mean())
        if clipped >= CLIPPED_SHARE:
            yield Finding(
                "actions_clipped",
                f"{clipped:.0%} of the sampled actions are outside the environment's bounds and are clipped to them, "
                "so that most actions are one of two. Lower policy.init_logstd.",
            )

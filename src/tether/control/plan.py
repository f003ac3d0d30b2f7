"""The plan of a control run: time and memory, from measuring its simulator and updates on this machine for a second.

A roofline model predicts little here: simulators differ by a factor of a thousand, and small networks are bound by the
overhead of calls. So the run's own components collect some steps and learn from them, without writing to the run's
folder, and the planned times are extrapolated from these. The operations of the policy are counted as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from tether.batch import EnvBatch
from tether.config import LoadedConfig, RunConfig
from tether.control.build import ControlComponents, build_components, build_learner, fit_defaults, training_steps
from tether.control.collecting.collector import EnvCollector
from tether.control.learning.advantages import ControlAdvantages, EnvRewards, LearnedDecisions
from tether.control.learning.losses import RolloutOutputs, Samples
from tether.control.policies.config import FLOW_TYPES, VLA_TYPES
from tether.keyed_random import generator
from tether.loop.engine import Learner, UpdatePlan
from tether.plan.devices import GIB, gib
from tether.plan.planning import Interval
from tether.plan.report import span
from tether.runtime.core_clock import BUSY, CoreClock
from tether.runtime.machine import available_memory, set_threads

Result = TypeVar("Result")
SECONDS, REPEATS = 1.0, 3
"""Total time of the measured rollouts, and their number. The fastest counts, since other programs slow the others
down."""
FIRST_DECISIONS = 8
"""Decisions per environment in the first measurement, which estimates the time of a decision."""
SPREAD = (0.7, 1.4)
"""The planned time of a phase is between these multiples of the measured time."""
PROCESS = 0.6 * GIB
"""Bytes of the libraries in the process (measured)."""
STATE = 16
"""Bytes per parameter: weight, gradient and AdamW's two moments, in float32."""


@dataclass(frozen=True)
class ControlPlan:
    """Planned time and memory of a control run on this machine."""

    env: str
    parameters: int
    operations: float
    """Operations of one decision of the policy and its critic."""
    env_steps: int
    """Steps of all environments in a training step."""
    chunk: int
    """Environment steps per decision."""
    epochs: int
    """Epochs of an update."""
    times: Mapping[str, Interval]
    """Phase -> seconds per training step; ``env`` is included in ``gen``."""
    step: Interval
    memory: Mapping[str, float]
    """Component -> bytes."""
    steps: int
    measured: float
    """Seconds that the measurement took."""
    busy: float
    """Fraction of the measurement spent waiting for cores that other programs used."""
    machine: float | None
    """Bytes of free memory on this machine; None if unknown."""

    @property
    def phases(self) -> dict[str, Interval]:
        """The phases, and the total step."""
        return {**self.times, "step": self.step}

    @property
    def busy_note(self) -> str:
        """A clause for messages if other programs disturbed the measurement; otherwise empty."""
        if self.busy <= BUSY:
            return ""
        return f", while other programs had the cores for {self.busy:.0%} of the time: the run may be faster"

    @property
    def fits(self) -> bool:
        """Whether all components fit into the free memory."""
        return self.machine is None or self.peak <= self.machine

    @property
    def rate(self) -> Interval:
        """Environment steps per second."""
        return Interval(*(self.env_steps / seconds for seconds in (self.step.high, self.step.middle, self.step.low)))

    @property
    def hours(self) -> Interval:
        """Hours for all training steps, without evaluations and checkpoints."""
        return Interval(*(self.steps * s / 3600 for s in (self.step.low, self.step.middle, self.step.high)))

    @property
    def peak(self) -> float:
        """Bytes of all components together."""
        return sum(self.memory.values())

    def summary(self) -> list[str]:
        """Return the plan as lines of text."""
        largest = max(self.memory, key=lambda name: self.memory[name])
        free = "" if self.machine is None else f" of {gib(self.machine)} that are free"
        decisions = self.env_steps // self.chunk
        update = 3 * self.epochs * decisions * self.operations
        return [
            f"{self.env}: a policy of {self.parameters:,} weights with {self.operations:,.0f} operations a decision, "
            f"{(decisions * self.operations + update) / 1e9:,.2f} billion in a training step; measured in "
            f"{self.measured:.1f} s{self.busy_note}",
            f"{'fits' if self.fits else 'does not fit'}: {gib(self.peak)}{free}; most of it is {largest} "
            f"({gib(self.memory[largest])})",
            f"a training step of {self.env_steps:,} steps takes {span(self.step)}: {span(self.rate, 'steps/s')}",
            f"{self.steps:,} training steps: {span(self.hours, 'hours')}, without evaluations and checkpoints",
        ]

    def as_data(self) -> dict[str, object]:
        """Return the plan as plain data; sizes are bytes, times [low, middle, high] in seconds."""
        return {
            "verdict": "fits" if self.fits else "does not fit",
            "env": self.env,
            "parameters": self.parameters,
            "operations_per_decision": self.operations,
            "memory": {name: round(size) for name, size in self.memory.items()},
            "seconds": {phase: [i.low, i.middle, i.high] for phase, i in self.phases.items()},
            "steps_per_second": [self.rate.low, self.rate.middle, self.rate.high],
            "steps": self.steps,
            "hours": [self.hours.low, self.hours.middle, self.hours.high],
        }


def plan_control(loaded: LoadedConfig) -> ControlPlan:
    """Measure the components of a run and return its plan.

    Raises:
        ValueError: the environments cannot be made, no policy fits them, or plans do not support this kind of policy.
    """
    begun = perf_counter()
    config = loaded.config
    if config.policy.model_type in (*VLA_TYPES, *FLOW_TYPES):
        raise ValueError(
            f"policy.model_type={config.policy.model_type}: runs of vision-language-action and flow policies are not "
            "planned. The first steps of the run show its memory and its steps per second."
        )
    if config.trainer.devices > 1:
        raise ValueError(f"trainer.devices={config.trainer.devices}: control is planned for one process. Set 1")
    config = fit_defaults(loaded).config
    set_threads(config.trainer.num_threads)
    with ExitStack() as resources:
        steps = training_steps(config.trainer, config.env.train)
        components, _ = build_components(
            config, None, steps, Path(config.trainer.default_local_dir) / "ranks", resources
        )
        return _plan_from_samples(config, components, steps, begun)


def _plan_from_samples(config: RunConfig, components: ControlComponents, steps: int, begun: float) -> ControlPlan:
    """Measure rollouts of about a second in total, and one epoch of learning from each."""
    actor, full_collector, cores = build_learner(config, components, steps), components.collector, CoreClock()
    epochs, decisions, envs = full_collector.noise_shape
    first = min(FIRST_DECISIONS, decisions)
    _measure(config, components, actor, _short_collector(components, first))  # discarded: the first one takes longer
    sample = _measure(config, components, actor, _short_collector(components, first))
    collected = min(decisions, max(first, int(first * SECONDS / REPEATS / sample.seconds["gen"])))
    collector = _short_collector(components, collected)
    samples = [_measure(config, components, actor, collector) for _ in range(REPEATS)]
    scale, mini = epochs * decisions / collected, actor.plan.mini_batch_rows
    rows = median(sample.rows for sample in samples)
    # With these networks, the time of a mini-batch hardly depends on its number of rows.
    mini_batches = math.ceil(scale * rows / mini) / math.ceil(rows / mini)
    times = {
        phase: _interval(
            min(sample.seconds[phase] for sample in samples)
            * (actor.plan.epochs * mini_batches if phase == "update_actor" else scale)
        )
        for phase in sample.seconds
    }
    weights = sum(parameter.numel() for parameter in components.policy.parameters())
    return ControlPlan(
        env=components.env.id,
        parameters=weights,
        operations=sample.operations,
        env_steps=epochs * decisions * envs * full_collector.chunk,
        chunk=full_collector.chunk,
        epochs=actor.plan.epochs,
        times=times,
        step=_interval(sum(interval.middle for phase, interval in times.items() if phase != "env")),
        memory={
            "process": PROCESS,
            "a rollout, and the samples of it": 2.0 * full_collector.nbytes,
            "policy, gradients and optimizer": float(STATE * weights),
        },
        steps=steps,
        measured=perf_counter() - begun,
        busy=cores.wait_fraction() or 0.0,
        machine=available_memory(torch.device("cpu")),
    )


@dataclass(frozen=True)
class _Sample:
    """Measurements of a rollout and of one epoch of learning from it."""

    seconds: dict[str, float]
    rows: int
    """Number of decisions in the update."""
    operations: float
    """Operations of the policy and its critic for one decision."""


def _measure(
    config: RunConfig, components: ControlComponents, actor: Learner[Any, RolloutOutputs], collector: EnvCollector
) -> _Sample:
    seconds, stepped = dict[str, float](), collector.env_seconds
    collector.restart(0)
    noise = components.policy.head.noise(collector.noise_shape, generator(0, 0, "plan"))
    started = perf_counter()
    seconds["gen"], batch = _timed(lambda: collector.collect(components.policy.acting(), noise))
    seconds["env"] = seconds["gen"] * (collector.env_seconds - stepped) / (perf_counter() - started)
    with FlopCounterMode(display=False) as counter:
        batch.update_from(actor.infer(batch))
    seconds["old_log_prob"], _ = _timed(lambda: actor.infer(batch))
    seconds["adv"], samples = _timed(lambda: _samples(config, components, batch))
    one_epoch = UpdatePlan(actor.plan.mini_batch_rows)
    seconds["update_actor"], _ = _timed(lambda: actor.engine.update(samples, actor.loss, one_epoch, 0))
    return _Sample(seconds, max(1, len(samples)), counter.get_total_flops() / batch.actions.shape[:2].numel())


def _samples(config: RunConfig, components: ControlComponents, batch: EnvBatch) -> Samples:
    """Return the decisions of a rollout with their advantages."""
    train = config.env.train
    batch.token_level_rewards = batch.token_level_scores
    EnvRewards.from_config(train, config.policy, config.algorithm).apply(batch)
    ControlAdvantages.from_config(config.algorithm, train)(batch)
    samples, _ = LearnedDecisions.from_config(config.actor_rollout_ref.actor, train, components.policy)(batch, 1)
    return samples


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds of a call, without time lost to other programs, and its result."""
    cores, started = CoreClock(), perf_counter()
    result = call()
    return (perf_counter() - started) * (1 - (cores.wait_fraction() or 0.0)), result


def _interval(seconds: float) -> Interval:
    low, high = SPREAD
    return Interval(low * seconds, seconds, high * seconds)


def _short_collector(components: ControlComponents, decisions: int) -> EnvCollector:
    """Return a collector of the run's environments with fewer decisions."""
    full = components.collector
    return EnvCollector(full.env, full.chunk * decisions, chunk=full.chunk, state_width=components.policy.state_width)

"""The training loop of a control policy.

One step: the policy acts in the environments for a while; the critic values what it saw; rewards become advantages;
actor and critic learn from them. `ControlTrainer.step` is exactly that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tether.envs.protocol import VectorEnv
from tether.metrics.loggers import Loggers
from tether.metrics.timing import Timer
from tether.models.control.policy import Policy
from tether.models.control.spec import numbers_of
from tether.rollout.env import EnvCollector
from tether.rollout.env_eval import evaluate
from tether.rollout.episodes import Episode, episode_metrics
from tether.trainer.control_persistence import ControlPersistence
from tether.trainer.control_rewards import RewardShaping
from tether.trainer.control_samples import SampleOptions, make_samples
from tether.trainer.critic_warmup import CriticWarmup
from tether.trainer.trainer import Schedule
from tether.training.control import ControlLearner

OpenVideo = Callable[[str], AbstractContextManager[Callable[[], None]]]
"""Name of a video -> what to call at the start of it and after each step, until it is closed."""


@dataclass(frozen=True)
class ControlEvaluation:
    """How a policy is tested."""

    env: VectorEnv
    num_episodes: int
    seed: int
    confidence: float
    open_video: OpenVideo | None = None
    """Records the first environment; None: nothing is recorded."""

    def run(self, policy: Policy, name: str, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Metrics of episodes without noise.

        Args:
            policy: that plays.
            name: of the video.
            progress: called with (episodes done, episodes in all).
        """
        chunk = policy.spec.num_action_chunks
        with self.open_video(name) if self.open_video else nullcontext() as watch:
            episodes = evaluate(
                self.env,
                policy.acting(),
                self.num_episodes,
                self.seed,
                progress,
                chunk=chunk,
                watch=watch,
                state_width=policy.state_width,
            )
        return episode_metrics(episodes, "eval", self.confidence)


@dataclass
class ControlTrainer:
    """All parts of an embodied run; `tether.trainer.build.control` makes one from a configuration."""

    policy: Policy
    collector: EnvCollector
    learner: ControlLearner
    rewards: RewardShaping
    options: SampleOptions
    critic_warmup: CriticWarmup
    evaluation: ControlEvaluation | None
    schedule: Schedule
    persistence: ControlPersistence
    loggers: Loggers
    seed: int
    """Of noise and of the order of samples."""
    env_seed: int
    """Of start states."""
    auto_reset: bool = True
    """Episodes go on over rollouts; False: each rollout begins new ones."""
    log_freq: int = 1
    step_number: int = 0
    """Training steps done."""
    env_steps: int = 0
    """Steps of all environments together."""
    finished: list[Episode] = field(default_factory=list)
    """Episodes that ended since the last log."""

    def step(self) -> dict[str, float]:
        """Do one training step; returns its metrics."""
        number, time = self.step_number + 1, Timer()
        env_seconds = self.collector.env_seconds
        with time("step"):
            with time("gen"):
                noise = self.policy.head.noise(self.collector.noise_shape, generator(self.seed, number, "noise"))
                rollout = self.collector.collect(self.policy.acting(), noise, self._start_seeds(number))
            with time("adv"):
                samples, metrics = make_samples(rollout, self.rewards(rollout), self.policy, self.options)
            with time("update_actor"):
                order = generator(self.seed, number, "order")
                train_policy = self.critic_warmup.is_over(number, metrics.get("critic/vf_explained_var", 0.0))
                metrics |= self.learner.update(samples, number - 1, order, train_policy=train_policy)
            if self.policy.normalizer:  # for the next rollout: this one was sampled, and learned from, without
                numbers = numbers_of(rollout.obs)[:-1]
                self.policy.normalizer.update(numbers.flatten(0, 1)[rollout.decided.flatten()])
        self.step_number = number
        taken = int(rollout.valid.sum())
        self.env_steps += taken
        self.finished += rollout.episodes
        speed = {"perf/env_steps": float(self.env_steps), "perf/sps": taken / time.seconds["step"]}
        time.seconds["env"] = self.collector.env_seconds - env_seconds
        return metrics | speed | time.metrics() | {"training/global_step": float(number)}

    def fit(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train up to the last step, or until `interrupted` says so after a step; then a checkpoint is saved."""
        if self.step_number == 0:
            self._restart()
            if self.evaluation and self.schedule.test_freq > 0:
                self.loggers.log(0, self.evaluate())
        while self.step_number < self.schedule.total_steps:
            metrics = self.step()
            done, stopping = self.step_number, interrupted()
            tested = self.evaluation is not None and self.schedule.tests_at(done) and not stopping
            if tested:
                metrics |= self.evaluate()
            if tested or stopping or done % self.log_freq == 0 or done == self.schedule.total_steps:
                self.loggers.log(done, episode_metrics(self.finished, "env") | metrics)
                self.finished.clear()
            if self.schedule.saves_at(done) or stopping:
                self.save()
            if stopping:
                return

    def evaluate(self) -> dict[str, float]:
        """Test the current policy; returns its metrics."""
        assert self.evaluation
        time = Timer(on_phase=self.loggers.phase)
        with time("testing"):
            metrics = self.evaluation.run(
                self.policy,
                f"step_{self.step_number}",
                lambda done, total: self.loggers.phase("testing", done, total),
            )
        return metrics | time.metrics()

    def save(self) -> None:
        """Write a checkpoint of the current step, then begin new episodes everywhere.

        Simulators cannot be saved, so a run that goes on from here finds them at a start. By beginning anew in the run
        that saves, too, both go on alike, bit for bit. How long saving took is logged under the step.
        """
        time = Timer(on_phase=self.loggers.phase)
        with time("save_checkpoint"):
            self.persistence.save(self.step_number, self.policy, self.learner.state_dict(), self.state())
        self.loggers.log(self.step_number, time.metrics())
        self._restart()

    def state(self) -> dict[str, Any]:
        """All state that is neither the policy's nor the learner's."""
        return {
            "step": self.step_number,
            "env_steps": self.env_steps,
            "rewards": self.rewards.state_dict(),
            "critic_warmup": self.critic_warmup.state_dict(),
            "finished": [vars(episode) for episode in self.finished],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave, and begin new episodes everywhere."""
        self.step_number, self.env_steps = state["step"], state["env_steps"]
        self.finished = [Episode(**episode) for episode in state["finished"]]
        self.rewards.load_state_dict(state["rewards"])
        self.critic_warmup.load_state_dict(state["critic_warmup"])
        self._restart()

    def _restart(self) -> None:
        self.collector.restart(seed_of(self.env_seed, self.step_number, "start"))
        self.rewards.restart()

    def _start_seeds(self, number: int) -> list[int]:
        """Seeds of the rollouts of a training step, where each begins new episodes."""
        if self.auto_reset:
            return []
        return [seed_of(self.env_seed, number, f"start {epoch}") for epoch in range(self.collector.epochs)]


def seed_of(seed: int, step: int, purpose: str) -> int:
    """A seed for one purpose in one training step."""
    words = np.random.SeedSequence([seed % 2**32, step, *purpose.encode()]).generate_state(1)
    return int(words[0]) % 2**31


def generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """A generator for one purpose in one training step: nothing that was drawn before changes what it gives."""
    return torch.Generator().manual_seed(seed_of(seed, step, purpose))

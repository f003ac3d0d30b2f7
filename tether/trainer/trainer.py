"""The training loop.

One step: sample responses to a batch of prompts and score them; ask the policy, the reference and the critic what
they make of each token; turn rewards into advantages; update the critic and the policy; hand the new weights to the
sampler. `Trainer.step` is exactly that. Everything optional is an object that may be None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tether.batch import Prompt, TrainBatch
from tether.data.prompts import PromptDataset
from tether.data.sampler import PromptSampler
from tether.metrics.loggers import Loggers
from tether.metrics.timing import Timer
from tether.rollout.protocol import NoiseKey, SamplingParams
from tether.trainer.collect import Collector
from tether.trainer.critic_warmup import CriticWarmup
from tether.trainer.dynamic_sampling import DynamicSampling
from tether.trainer.evaluate import Evaluation
from tether.trainer.greedy_baseline import GreedyBaseline
from tether.trainer.kl_reward import KLReward
from tether.trainer.measure import sampler_metrics, step_metrics, value_metrics
from tether.trainer.mismatch import MismatchAlarm
from tether.trainer.persistence import Persistence
from tether.trainer.pf_ppo import PolicyFiltration
from tether.trainer.reward_components import RewardComponents
from tether.trainer.reward_shaping import RewardShaping
from tether.trainer.rollout_correction import RolloutCorrection
from tether.trainer.rollout_files import RolloutFiles
from tether.training.forward import PolicyOutputs, ValueOutputs
from tether.training.learner import Learner
from tether.training.protocol import TrainingEngine


@dataclass(frozen=True)
class Schedule:
    """When what happens, in training steps; a frequency of 0 or below means never."""

    total_steps: int
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = True

    def saves_at(self, step: int) -> bool:
        """Is a checkpoint due after this step; always after the last, if any are saved."""
        return self.save_freq > 0 and (step % self.save_freq == 0 or step == self.total_steps)

    def tests_at(self, step: int) -> bool:
        """Is a validation due after this step; always after the last, if there are any."""
        return self.test_freq > 0 and (step % self.test_freq == 0 or step == self.total_steps)


OldLogProbs = Literal["recomputed", "sampler", "update"]
"""Where the log-probs under the old policy come from: a forward pass of their own; the sampler's, as they are (bypass
mode); or the only update that a rollout is used for, which begins with the old policy."""


@dataclass
class Trainer:
    """All parts of a run; `tether.trainer.build` makes one from a configuration."""

    dataset: PromptDataset
    sampler: PromptSampler
    collector: Collector
    sampling: SamplingParams
    actor: Learner[PolicyOutputs]
    critic: Learner[ValueOutputs] | None
    reference: Callable[[TrainBatch], PolicyOutputs] | None
    greedy_baseline: GreedyBaseline | None
    reward_components: RewardComponents | None
    reward_shaping: RewardShaping | None
    kl_reward: KLReward | None
    estimate_advantages: Callable[[TrainBatch], None]
    dynamic_sampling: DynamicSampling | None
    rollout_correction: RolloutCorrection | None
    policy_filtration: PolicyFiltration | None
    critic_warmup: CriticWarmup
    rollout_files: RolloutFiles | None
    evaluation: Evaluation | None
    schedule: Schedule
    persistence: Persistence
    mismatch: MismatchAlarm
    loggers: Loggers
    seed: int
    old_log_probs: OldLogProbs = "recomputed"
    step_number: int = 0
    """Training steps done."""
    validation_due: bool = False
    """An interrupt came before the validation of the last step: it is made up for when the run goes on."""

    def step(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Do one training step on these prompts; returns its metrics."""
        number, time = self.step_number + 1, Timer(on_phase=self.loggers.phase)
        metrics: dict[str, float] = {}
        with time("step"):
            with time("gen"):
                key = NoiseKey(self.seed, number)
                collector = self.dynamic_sampling or self.collector
                experience = collector.collect(prompts, self.sampling, key, self._show_progress)
            time.move(experience.reward_seconds, "gen", "reward")
            batch = TrainBatch.assemble(experience.rollout, experience.scores)
            if self.greedy_baseline:
                with time("gen_max"):
                    metrics |= self.greedy_baseline.add_to(batch, experience.prompts, self.collector, key)
            if self.reward_components:
                metrics |= self.reward_components.add_to(batch, experience.outcomes)
            policy = None
            if self.old_log_probs == "sampler":
                batch.old_log_probs = batch.rollout_log_probs
            elif self.old_log_probs == "recomputed":
                with time("old_log_prob"):
                    policy = self.actor.infer(batch)
                batch.old_log_probs, batch.sum_pi_squared = policy.log_probs, policy.sum_pi_squared
                metrics |= self._compare_with_sampler(batch)
            if self.rollout_correction:
                metrics |= self.rollout_correction.apply(batch)
            if self.reference:
                with time("ref"):
                    batch.ref_log_probs = self.reference(batch).log_probs
            if self.critic:
                with time("values"):
                    critic = self.critic.infer(batch)
                    batch.values, batch.bootstrap_values = critic.values, critic.bootstrap_values
            with time("adv"):
                metrics |= self._to_advantages(batch)
                learned = batch
                if self.policy_filtration:
                    learned, filtered = self.policy_filtration.draw(batch, number)
                    metrics |= filtered
            if self.critic:
                with time("update_critic"):
                    metrics |= _prefixed("critic", self.critic.update(learned, number - 1).metrics)
            if self.critic_warmup.is_over(number, metrics.get("critic/vf_explained_var", -math.inf)):
                with time("update_actor"):
                    updated = self.actor.update(learned, number - 1)
                metrics |= _prefixed("actor", updated.metrics)
                if self.old_log_probs == "update" and updated.outputs is not None:
                    batch.old_log_probs = updated.outputs.log_probs
                    metrics |= self._compare_with_sampler(batch)
                with time("update_weights"):
                    self.collector.engine.sync_weights()
            if self.rollout_files:
                with time("dump_rollout_generations"):
                    self.rollout_files.write(number, experience, batch)
        self.step_number = number
        measured = step_metrics(batch, policy, experience.report, time, self.dataset.report.max_prompt_length)
        return metrics | measured | {"training/global_step": float(number)}

    def _compare_with_sampler(self, batch: TrainBatch) -> dict[str, float]:
        metrics = sampler_metrics(batch)
        return metrics | self.mismatch.check(metrics, self.loggers.warn)

    def _to_advantages(self, batch: TrainBatch) -> dict[str, float]:
        """Scores, shaped and with the KL penalty, become advantages and returns."""
        metrics: dict[str, float] = {}
        batch.token_level_rewards = batch.token_level_scores
        if self.reward_shaping:
            metrics |= self.reward_shaping.apply(batch)
        if self.kl_reward:
            metrics |= self.kl_reward.apply(batch)
        self.estimate_advantages(batch)
        return metrics | value_metrics(batch)

    def fit(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train up to the last step, or until `interrupted` says so after a step; then a checkpoint is saved."""
        if self.step_number == 0 and self.evaluation and self.schedule.val_before_train:
            self.loggers.log(0, self.evaluate())
        if self.validation_due:
            self.validation_due = False
            self.loggers.log(self.step_number, self.evaluate())
        while self.step_number < self.schedule.total_steps:
            epoch, rows = self.sampler.epoch, self.sampler.next_batch()
            metrics = self.step([self.dataset[row] for row in rows]) | {"training/epoch": float(epoch)}
            done = self.step_number
            stopping = interrupted()
            if self.evaluation and self.schedule.tests_at(done):
                if stopping:
                    self.validation_due = True
                else:
                    metrics |= self.evaluate()
            self.loggers.log(done, metrics)
            # After the log: a run killed in between does the step again, and its line is replaced, never missing.
            if self.schedule.saves_at(done) or stopping:
                self.save()
            if stopping:
                return
        if complaint := self.critic_warmup.never_over():
            self.loggers.warn(complaint)

    def evaluate(self) -> dict[str, float]:
        """Validate the current policy; returns its metrics and logs samples."""
        assert self.evaluation
        time = Timer(on_phase=self.loggers.phase)
        with time("testing"):
            result = self.evaluation.run(self.collector, NoiseKey(self.seed, self.step_number), self._show_progress)
        self.loggers.log_samples(self.step_number, result.samples)
        return result.metrics | time.metrics()

    def save(self) -> None:
        """Write a checkpoint of the current step; how long that took is logged under the step, too."""
        time = Timer(on_phase=self.loggers.phase)
        with time("save_checkpoint"):
            self.persistence.save(self.step_number, self.actor.engine, self.critic_engine, self.state())
        self.loggers.log(self.step_number, time.metrics())

    def state(self) -> dict[str, Any]:
        """All state that is not in an engine."""
        return {
            "step": self.step_number,
            "validation_due": self.validation_due,
            "sampler": self.sampler.state_dict(),
            "reward_shaping": self.reward_shaping.state_dict() if self.reward_shaping else None,
            "kl_reward": self.kl_reward.state_dict() if self.kl_reward else None,
            "critic_warmup": self.critic_warmup.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.step_number = state["step"]
        self.validation_due = state["validation_due"] and self.evaluation is not None
        self.sampler.load_state_dict(state["sampler"])
        if self.reward_shaping and state["reward_shaping"]:
            self.reward_shaping.load_state_dict(state["reward_shaping"])
        if self.kl_reward and state["kl_reward"]:
            self.kl_reward.load_state_dict(state["kl_reward"])
        self.critic_warmup.load_state_dict(state["critic_warmup"])

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a full training batch."""
        return self.dynamic_sampling.num_groups if self.dynamic_sampling else self.sampler.batch_size

    @property
    def critic_engine(self) -> TrainingEngine[ValueOutputs] | None:
        """The critic's engine, if there is a critic."""
        return self.critic.engine if self.critic else None

    def _show_progress(self, done: int, total: int) -> None:
        self.loggers.phase("gen", done, total)


def _prefixed(role: str, metrics: dict[str, float]) -> dict[str, float]:
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}

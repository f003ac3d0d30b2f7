"""The training loop.

One step: sample responses to a batch of prompts and score them; ask the policy, the reference and the critic what
they make of each token; turn rewards into advantages; update the critic and the policy; hand the new weights to the
sampler. `Trainer.step` is exactly that. Everything optional is an object that may be None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tether.batch import Prompt, TrainBatch
from tether.data.prompts import PromptDataset
from tether.data.sampler import PromptSampler
from tether.metrics.timing import Timer
from tether.rollout.protocol import NoiseKey, SamplingParams
from tether.trainer.loop import TrainingLoop
from tether.trainer.parts.collector import Collector
from tether.trainer.parts.dynamic_sampling import DynamicSampling
from tether.trainer.parts.greedy_baseline import GreedyBaseline
from tether.trainer.parts.kl_reward import KLReward
from tether.trainer.parts.mismatch import MismatchAlarm
from tether.trainer.parts.pf_ppo import PolicyFiltration
from tether.trainer.parts.reward_components import RewardComponents
from tether.trainer.parts.reward_shaping import RewardShaping
from tether.trainer.parts.rollout_correction import RolloutCorrection
from tether.trainer.text.evaluation import Evaluation
from tether.trainer.text.rollout_files import RolloutFiles
from tether.trainer.text.step_metrics import sampler_metrics, step_metrics, value_metrics
from tether.training.learner import Learner
from tether.training.protocol import TrainingEngine
from tether.training.text.forward import PolicyOutputs, ValueOutputs

OldLogProbs = Literal["recomputed", "sampler", "update"]
"""Where the log-probs under the old policy come from: a forward pass of their own; the sampler's, as they are (bypass
mode); or the only update that a rollout is used for, which begins with the old policy."""


@dataclass(kw_only=True)
class Trainer(TrainingLoop):
    """All parts of a run; `tether.assembly` makes one from a configuration."""

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
    rollout_files: RolloutFiles | None
    evaluation: Evaluation | None
    mismatch: MismatchAlarm
    seed: int
    old_log_probs: OldLogProbs = "recomputed"

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
            if self.rollout_files:
                with time("dump_rollout_generations"):
                    self.rollout_files.write(number, experience, batch)
            self.weights_change = True
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

    def advance(self) -> dict[str, float]:
        """See `TrainingLoop.advance`."""
        epoch, rows = self.sampler.epoch, self.sampler.next_batch()
        return self.step([self.dataset[row] for row in rows]) | {"training/epoch": float(epoch)}

    @property
    def can_evaluate(self) -> bool:
        """See `TrainingLoop.can_evaluate`."""
        return self.evaluation is not None

    def evaluate(self) -> dict[str, float]:
        """Validate the current policy; returns its metrics and logs samples."""
        assert self.evaluation
        time = Timer(on_phase=self.loggers.phase)
        with time("testing"):
            result = self.evaluation.run(self.collector, NoiseKey(self.seed, self.step_number), self._show_progress)
        self.loggers.log_samples(self.step_number, result.samples)
        return result.metrics | time.metrics()

    def write_checkpoint(self, state: dict[str, Any], *, in_step: bool = False) -> Path:
        """See `TrainingLoop.write_checkpoint`."""
        engines: dict[str, TrainingEngine[Any]] = {"actor": self.actor.engine}
        if self.critic:
            engines["critic"] = self.critic.engine

        def write(folder: Path) -> None:
            for role, engine in engines.items():
                engine.save_model(folder / role)
                self.collector.tokenizer.save_pretrained(folder / role)

        states = {role: engine.state_dict() for role, engine in engines.items()}
        return self.persistence.save(state["step"], write, states | {"trainer": state})

    def state(self) -> dict[str, Any]:
        """See `TrainingLoop.state`."""
        return super().state() | {
            "sampler": self.sampler.state_dict(),
            "reward_shaping": self.reward_shaping.state_dict() if self.reward_shaping else None,
            "kl_reward": self.kl_reward.state_dict() if self.kl_reward else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See `TrainingLoop.load_state`."""
        super().load_state(state)
        self.sampler.load_state_dict(state["sampler"])
        if self.reward_shaping and state["reward_shaping"]:
            self.reward_shaping.load_state_dict(state["reward_shaping"])
        if self.kl_reward and state["kl_reward"]:
            self.kl_reward.load_state_dict(state["kl_reward"])

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a full training batch."""
        return self.dynamic_sampling.num_groups if self.dynamic_sampling else self.sampler.batch_size

    def _show_progress(self, done: int, total: int) -> None:
        self.loggers.phase("gen", done, total)


def _prefixed(role: str, metrics: dict[str, float]) -> dict[str, float]:
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}

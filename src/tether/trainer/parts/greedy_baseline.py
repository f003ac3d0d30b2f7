"""ReMax's baseline: in each step the policy also answers every prompt greedily (arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tether.batch import Prompt, TrainBatch
from tether.rollout import NoiseKey, SamplingParams
from tether.trainer.parts.collector import Collector
from tether.trainer.parts.reward_shaping import LengthPenalty


@dataclass(frozen=True)
class GreedyBaseline:
    """Scores one greedy response per prompt like the sampled responses."""

    sampling: SamplingParams
    """Sampling parameters with n = 1 and temperature 0."""
    length_penalty: LengthPenalty | None = None
    """The length penalty of reward shaping, which applies to both sides of the comparison."""
    scale: float = 1.0
    """The factor of scores of reward shaping."""

    def add_to(
        self, batch: TrainBatch, prompts: Sequence[Prompt], collector: Collector, key: NoiseKey
    ) -> dict[str, float]:
        """Set `reward_baselines`, and ignore the rows of a prompt whose greedy response has no score.

        Args:
            batch: the sampled responses; `uid` is the index of the prompt.
            prompts: the prompts of the step.
            collector: samples from the policy that the batch was sampled from, and scores.
            key: noise key of the step; a greedy response needs no noise.

        Returns:
            Metrics of the baseline and its cost.
        """
        experience = collector.collect(prompts, self.sampling, key)
        length = experience.rollout.response_length
        baselines = self.scale * experience.scores
        if self.length_penalty:
            baselines = baselines + self.length_penalty(length)
        row_baselines = baselines[batch.uid]
        batch.leave_out(row_baselines.isnan())
        batch.reward_baselines = row_baselines.nan_to_num()
        cost = {
            "baseline/response_tokens": float(length.sum()),
            "baseline/unscored_prompts": float(baselines.isnan().sum()),
        }
        scored = baselines[~baselines.isnan()]
        return cost | {"baseline/score_mean": float(scored.double().mean())} if len(scored) else cost

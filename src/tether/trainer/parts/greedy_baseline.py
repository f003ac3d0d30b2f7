"""ReMax's baseline: in each step the policy answers every prompt once more, greedily (arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tether.batch import Prompt, TrainBatch
from tether.rollout import NoiseKey, SamplingParams
from tether.trainer.parts.collector import Collector
from tether.trainer.parts.reward_shaping import LengthPenalty


@dataclass(frozen=True)
class GreedyBaseline:
    """One greedy response a prompt, scored like the others."""

    sampling: SamplingParams
    """With n = 1 and temperature 0."""
    length_penalty: LengthPenalty | None = None
    """Of reward shaping, so that both sides of the comparison are shaped alike."""
    scale: float = 1.0
    """Likewise."""

    def add_to(
        self, batch: TrainBatch, prompts: Sequence[Prompt], collector: Collector, key: NoiseKey
    ) -> dict[str, float]:
        """Set `reward_baselines`; the rows of a prompt whose greedy response has no score are left out.

        Args:
            batch: with the sampled responses; its `uid` counts the prompts.
            prompts: the prompts of the step.
            collector: samples from the policy that the batch was sampled from, and scores.
            key: of the step. A greedy response draws nothing.

        Returns:
            What the baseline is, how often it is beaten, and what it cost.
        """
        experience = collector.collect(prompts, self.sampling, key)
        length = experience.rollout.response_length
        baselines = self.scale * experience.scores
        if self.length_penalty:
            baselines = baselines + self.length_penalty(length)
        of_row = baselines[batch.uid]
        batch.leave_out(of_row.isnan())
        batch.reward_baselines = of_row.nan_to_num()
        cost = {
            "baseline/response_tokens": float(length.sum()),
            "baseline/unscored_prompts": float(baselines.isnan().sum()),
        }
        known = baselines[~baselines.isnan()]
        return cost | {"baseline/score_mean": float(known.double().mean())} if len(known) else cost

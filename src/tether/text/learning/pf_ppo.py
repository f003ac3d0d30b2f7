"""PF-PPO in the training loop: the update trains on rows that are resampled by their reward."""

from __future__ import annotations

from dataclasses import dataclass

from tether.algorithms import masked_sum, pf_ppo_indices
from tether.batch import TrainBatch
from tether.keyed_random import generator


@dataclass(frozen=True)
class PolicyFiltration:
    """Draws the rows of the update with `pf_ppo_indices` (Shen and Zhang 2024, arXiv 2409.06957)."""

    method: str
    weight_pow: float
    seed: int

    def draw(self, batch: TrainBatch, step: int) -> tuple[TrainBatch, dict[str, float]]:
        """Draw as many episodes as the batch has, with replacement, and return their rows with metrics.

        The draw depends only on (seed, step) and the scores. Advantages remain those of the full batch. A batch without
        tokens to train on is returned unchanged.
        """
        episodes = batch.episodes()
        valid = episodes.response_mask.any(dim=-1)
        if not valid.any():
            return batch, {}
        scores = masked_sum(episodes.token_level_scores, episodes.response_mask, dim=-1)
        rows = pf_ppo_indices(
            scores,
            valid,
            reweight_method=self.method,
            weight_pow=self.weight_pow,
            generator=generator(self.seed, step, "pf_ppo"),
        )
        metrics = {
            "pf_ppo/distinct_fraction": len(rows.unique()) / int(valid.sum()),
            "pf_ppo/score_mean": float(scores[rows].mean()),
        }
        return batch.of_episodes(rows), metrics

"""``algorithm.kl_penalty=full``: the KL over the vocabulary as a reward, against the logits of both models."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.device import DEVICE
from tests.runs.steps import built
from tests.runs.tiny_run import GAE, LIGHT, base_overrides
from tether.batch import TrainBatch, filled

TEMPERATURE = 0.7
FULL = [
    *(*GAE, *LIGHT, "algorithm.kl_penalty=full", "algorithm.kl_ctrl.type=fixed", "algorithm.kl_ctrl.kl_coef=0.5"),
    *(f"actor_rollout_ref.rollout.temperature={TEMPERATURE}", "trainer.critic_warmup=0"),
]


def kl_by_logits(batch: TrainBatch, policy: torch.nn.Module, reference: torch.nn.Module) -> torch.Tensor:
    """Return KL(policy, reference) of each response token, by whole logits of one row at a time."""
    kl = torch.zeros(batch.response_mask.shape)
    for row, (p, r) in enumerate(zip(batch.prompt_length.tolist(), batch.response_length.tolist(), strict=True)):
        ids = torch.cat([batch.prompt_ids[row, :p], batch.response_ids[row, :r]])[None].to(DEVICE)
        with torch.no_grad():
            log_p, log_q = (
                (model(ids).logits[0, p - 1 : -1].double() / TEMPERATURE).log_softmax(-1)
                for model in (policy, reference)
            )
        kl[row, :r] = (log_p.exp() * (log_p - log_q)).sum(-1).cpu()
    return kl * batch.response_mask


def second_step(overrides: list[str], model: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return the KL by logits, what the step took off its scores, and its metrics; in the first step both are 0."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE) for _ in range(2))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    with built(overrides) as run:
        trainer = run.trainer
        estimate = trainer.estimate_advantages

        def recording(batch: TrainBatch) -> dict[str, float]:
            taken_off = batch.token_level_scores - filled(batch.token_level_rewards)
            policy.load_state_dict(trainer.actor.engine.model.state_dict())
            found.append((kl_by_logits(batch, policy, reference), taken_off))
            return estimate(batch)

        trainer.estimate_advantages = recording
        trainer.rollouts.begin(0)
        first = trainer.advance()
        assert first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
        metrics = trainer.advance()
    return *found[-1], metrics


def test_the_reward_is_lowered_by_the_kl_over_the_vocabulary_however_rows_are_cut(inputs: Path, tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ended = []
    for micro in (1, 16):
        overrides = [*base_overrides(inputs, tmp_path / str(micro)), *FULL, f"{key}={micro}"]
        kl, taken_off, metrics = second_step(overrides, inputs / "model")
        assert kl.max() > 1e-3
        torch.testing.assert_close(taken_off, 0.5 * kl, rtol=1e-3, atol=1e-6)
        lengths = (kl != 0).sum(dim=-1)
        mean = float((kl.sum(dim=-1) / lengths.clamp(min=1))[lengths > 0].mean())
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-3)
        assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
        ended.append(taken_off)
    torch.testing.assert_close(*ended, rtol=1e-5, atol=1e-7)

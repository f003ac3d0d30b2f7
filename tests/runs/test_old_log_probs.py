"""Where the old log-probs come from; a run learns the same from those of the update as from a pass of its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runs.steps import Stepped, built, first_step
from tests.runs.tiny_run import GRPO, LIGHT, base_overrides, without_clocks
from tether.config import load_config
from tether.loop.alarms import ALARM
from tether.loop.loop import OldLogProbs
from tether.runtime.objects import register_objects
from tether.text.learning.off_policy import old_log_probs_from

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ONE_UPDATE = [*GRPO, *LIGHT, f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.shuffle=False"]
SLOW = pytest.mark.slow
BF16_SAMPLER = ["actor_rollout_ref.rollout.dtype=bfloat16"]


WHERE: dict[OldLogProbs, list[list[str]]] = {
    "update": [[], ["algorithm.adv_estimator=gae"], [f"{ACTOR}.policy_loss.loss_mode=gspo"]],
    "sampler": [[f"{CORRECTION}.bypass_mode=True"]],
    "recomputed": [
        [f"{ACTOR}.ppo_epochs=2"],
        [f"{ACTOR}.ppo_mini_batch_size=2"],
        ["algorithm.use_kl_in_reward=True"],
        ["algorithm.use_pf_ppo=True"],
        ["algorithm.adv_estimator=optimal_token_baseline"],
        [f"{CORRECTION}.rollout_is=token"],
        [f"{CORRECTION}.rollout_token_veto_threshold=0.1"],
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov"],
        ["trainer.critic_warmup=2", "algorithm.adv_estimator=gae"],
        ["trainer.critic_warmup_until_explained_variance=0.1", "algorithm.adv_estimator=gae"],
    ],
}


def test_where_they_come_from(inputs: Path, tmp_path: Path) -> None:
    base = [*base_overrides(inputs, tmp_path), *ONE_UPDATE]
    for source, cases in WHERE.items():
        for overrides in cases:
            assert old_log_probs_from(load_config(None, [*base, *overrides]).config) == source, overrides


def train_by(overrides: list[str], source: OldLogProbs | None = None, steps: int = 2) -> Stepped:
    """Do some steps with `source` in the place of what the configuration leads to."""
    with built(overrides) as run:
        trainer = run.trainer
        if source is not None:
            trainer.old_log_probs, actor = source, trainer.actor
            trainer.actor = replace(
                actor, loss=replace(actor.loss, forward=replace(actor.loss.forward, with_entropy=True))
            )
        trainer.rollouts.begin(0)
        return Stepped(trainer, [trainer.advance() for _ in range(steps)], [])


@pytest.mark.parametrize(
    "loss", ["vanilla", *(pytest.param(loss, marks=SLOW) for loss in ("gspo", "cispo", "decoupled"))]
)
def test_a_run_learns_the_same_without_a_pass_of_its_own(loss: str, inputs: Path, tmp_path: Path) -> None:
    overrides = [*base_overrides(inputs, tmp_path), *ONE_UPDATE, f"{ACTOR}.policy_loss.loss_mode={loss}"]
    update, recomputed = (train_by(overrides, source) for source in ("update", "recomputed"))
    ours, theirs = (dict(found.trainer.actor.engine.model.named_parameters()) for found in (update, recomputed))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)
    for one, other in zip(map(without_clocks, update.metrics), map(without_clocks, recomputed.metrics), strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-2, abs=1e-3, nan_ok=True)
        assert one["actor/ratio_max"] == one["actor/ratio_min"] == 1
        assert one[ALARM] == 0


def test_where_a_rollout_is_used_twice_it_would_not_learn_the_same(inputs: Path, tmp_path: Path) -> None:
    """The negative control: from the second mini-batch on, the policy is no longer the old one."""
    overrides = [*base_overrides(inputs, tmp_path), *ONE_UPDATE, f"{ACTOR}.ppo_epochs=4"]
    update, recomputed = (train_by(overrides, source, 1).metrics[0] for source in ("update", "recomputed"))
    assert update["actor/ratio_max"] == 1
    assert recomputed["actor/ratio_max"] > 1.001
    assert update["actor/ppo_kl"] != pytest.approx(recomputed["actor/ppo_kl"], rel=1e-2)


def test_the_sampler_is_still_compared_with_the_policy(inputs: Path, tmp_path: Path) -> None:
    metrics = first_step([*base_overrides(inputs, tmp_path), *ONE_UPDATE, *BF16_SAMPLER])
    assert metrics["training/rollout_probs_diff_max"] > 1e-5
    assert metrics["rollout_corr/k3_kl"] > 0
    assert metrics["actor/entropy"] > 0


def test_a_step_without_a_scored_response_compares_nothing(inputs: Path, tmp_path: Path) -> None:
    with register_objects({"letters": lambda **_: None}):
        metrics = first_step([*base_overrides(inputs, tmp_path), *ONE_UPDATE])
    assert metrics["training/global_step"] == 1
    assert ALARM not in metrics

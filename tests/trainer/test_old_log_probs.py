"""Where the old log-probs come from; a run learns the same from those of the update as from a pass of its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.tiny_run import GRPO, base_overrides, measured, weights
from tether.assembly.off_policy import old_log_probs_from
from tether.assembly.run import build_run
from tether.config import load_config
from tether.trainer.loop import OldLogProbs
from tether.trainer.parts.mismatch import ALARM

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ONE_UPDATE = [*GRPO, f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.shuffle=False"]
BF16_SAMPLER = ["actor_rollout_ref.rollout.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "update"),
        (["algorithm.adv_estimator=gae"], "update"),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "update"),
        ([f"{CORRECTION}.bypass_mode=True"], "sampler"),
        ([f"{ACTOR}.ppo_epochs=2"], "recomputed"),
        ([f"{ACTOR}.ppo_mini_batch_size=2"], "recomputed"),
        (["algorithm.use_kl_in_reward=True"], "recomputed"),
        (["algorithm.use_pf_ppo=True"], "recomputed"),
        (["algorithm.adv_estimator=optimal_token_baseline"], "recomputed"),
        ([f"{CORRECTION}.rollout_is=token"], "recomputed"),
        ([f"{CORRECTION}.rollout_token_veto_threshold=0.1"], "recomputed"),
        ([f"{ACTOR}.policy_loss.loss_mode=clip_cov"], "recomputed"),
        (["trainer.critic_warmup=2", "algorithm.adv_estimator=gae"], "recomputed"),
        (["trainer.critic_warmup_until_explained_variance=0.1", "algorithm.adv_estimator=gae"], "recomputed"),
    ],
)
def test_where_they_come_from(overrides: list[str], expected: OldLogProbs, inputs: Path, tmp_path: Path) -> None:
    config = load_config(None, [*base_overrides(inputs, tmp_path), *ONE_UPDATE, *overrides]).config
    assert old_log_probs_from(config) == expected


def run(overrides: list[str], source: OldLogProbs | None = None) -> Path:
    """Three steps and a checkpoint; `source` in the place of what the configuration leads to."""
    built = build_run(load_config(None, [*overrides, "trainer.save_freq=3"]))
    if source is not None:
        built.trainer.old_log_probs = source
        actor = built.trainer.actor
        built.trainer.actor = replace(
            actor, loss=replace(actor.loss, forward=replace(actor.loss.forward, with_entropy=True))
        )
    try:
        built.trainer.fit()
    finally:
        built.close()
    return built.directory


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo", "decoupled"])
def test_a_run_learns_the_same_without_a_pass_of_its_own(loss: str, inputs: Path, tmp_path: Path) -> None:
    found = {}
    for source in ("update", "recomputed"):
        overrides = [*base_overrides(inputs, tmp_path / source), *ONE_UPDATE, f"{ACTOR}.policy_loss.loss_mode={loss}"]
        found[source] = run(overrides, source)
    ours, theirs = (weights(found[source] / "global_step_3") for source in ("update", "recomputed"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)
    ours, theirs = (measured(found[source]) for source in ("update", "recomputed"))
    assert ours.keys() == theirs.keys()
    for step, metrics in theirs.items():
        assert ours[step].keys() == metrics.keys()
        assert ours[step] == pytest.approx(metrics, rel=1e-2, abs=1e-3, nan_ok=True)
        assert ours[step]["actor/ratio_max"] == ours[step]["actor/ratio_min"] == 1
        assert ours[step][ALARM] == 0


def test_where_a_rollout_is_used_twice_it_would_not_learn_the_same(inputs: Path, tmp_path: Path) -> None:
    """The negative control: from the second mini-batch on, the policy is no longer the old one."""
    found = {}
    for source in ("update", "recomputed"):
        overrides = [*base_overrides(inputs, tmp_path / source), *ONE_UPDATE, f"{ACTOR}.ppo_epochs=4"]
        found[source] = measured(run(overrides, source))[3]
    assert found["update"]["actor/ratio_max"] == 1
    assert found["recomputed"]["actor/ratio_max"] > 1.001
    assert found["update"]["actor/ppo_kl"] != pytest.approx(found["recomputed"]["actor/ppo_kl"], rel=1e-2)


def test_the_sampler_is_still_compared_with_the_policy(inputs: Path, tmp_path: Path) -> None:
    metrics = measured(run([*base_overrides(inputs, tmp_path), *ONE_UPDATE, *BF16_SAMPLER]))
    for step in (1, 2, 3):
        assert metrics[step]["training/rollout_probs_diff_max"] > 1e-5
        assert metrics[step]["rollout_corr/k3_kl"] > 0
        assert metrics[step]["actor/entropy"] > 0


def test_a_step_without_a_scored_response_compares_nothing(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**_):\n    return None\n")
    overrides = [*base_overrides(inputs, tmp_path / "run"), *ONE_UPDATE]
    metrics = measured(run([*overrides, f"custom_reward_function.path={tmp_path / 'reward.py'}"]))
    assert metrics[3]["training/global_step"] == 3
    assert ALARM not in metrics[3]

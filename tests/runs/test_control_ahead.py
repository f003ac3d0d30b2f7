"""Embodied runs whose environments are stepped while the policy learns (`trainer.async_mode`)."""

import pytest

pytest.importorskip("gymnasium")

from tests.runs.control_run import assert_resume_is_exact, train
from tests.runs.tiny_run import measured
from tether.config import ConfigError, load_config

LOSS = "actor_rollout_ref.actor.policy_loss"
KEYS = [
    "env.train.id=CartPole-v1", "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=32",
    "env.train.auto_reset=False", "env.train.rollout_epoch=2", "env.eval.num_episodes=2", "policy.hidden_dim=16",
    "policy.num_layers=1", "actor_rollout_ref.actor.ppo_mini_batch_size=64", f"{LOSS}.loss_mode=decoupled",
    "trainer.logger=file", "trainer.log_freq=1", "trainer.test_freq=2", "trainer.total_training_steps=4",
]  # fmt: skip
ONE_BEHIND, FREE = "trainer.async_mode=one_step_off", "trainer.async_mode=fully_async"


def test_a_run_one_update_behind_resumes_bitwise(tmp_path):
    whole = assert_resume_is_exact(tmp_path, [*KEYS, ONE_BEHIND], total=4, start=2)
    metrics = measured(whole.directory)
    assert [metrics[step]["training/staleness"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    # The first rollout is the learning policy's own; the others are those of one update before.
    assert metrics[1]["actor/behave_weight_mean"] == pytest.approx(1, abs=1e-6)
    assert all(abs(metrics[step]["actor/behave_weight_mean"] - 1) > 1e-6 for step in (2, 3, 4))


def test_a_free_run_is_at_most_so_many_updates_behind_and_goes_on_from_a_checkpoint(tmp_path):
    free = [*KEYS, FREE, "actor_rollout_ref.rollout.max_staleness=2", f"trainer.default_local_dir={tmp_path}"]
    train([*free, "trainer.save_freq=2"], until=2)
    run = train([*free, "trainer.save_freq=2"])
    assert run.resumed_from == tmp_path / "global_step_2"
    metrics = measured(tmp_path)
    assert all(0 <= metrics[step]["training/staleness"] <= 2 for step in (1, 2, 3, 4))


@pytest.mark.slow
def test_cartpole_is_learned_one_update_behind(tmp_path):
    run = [
        "env.train.total_num_envs=8", "env.train.max_steps_per_rollout_epoch=200", "env.train.rollout_epoch=1",
        "env.train.max_episode_steps=200", "actor_rollout_ref.actor.optim.lr=2e-3", "policy.hidden_dim=64",
        "actor_rollout_ref.actor.ppo_epochs=8", "trainer.total_training_steps=40", "trainer.test_freq=40",
        "env.eval.num_episodes=20", f"trainer.default_local_dir={tmp_path}",
    ]  # fmt: skip
    train([*KEYS, *run, ONE_BEHIND])
    assert measured(tmp_path)[40]["eval/return"] > 150


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("env.train.auto_reset=True", r"env\.train\.auto_reset: True lets episodes go on.*async_mode=off"),
        ("trainer.n_gpus_per_node=2", r"trainer\.async_mode: one_step_off samples in this process"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(override, says):
    with pytest.raises(ConfigError, match=says):
        load_config(None, [*KEYS, ONE_BEHIND, "trainer.device=cpu", override])


def test_a_loss_that_does_not_correct_has_a_note():
    notes = load_config(None, [*KEYS, ONE_BEHIND, f"{LOSS}.loss_mode=vanilla"]).notes
    assert any("actions come from older weights" in note for note in notes)
    assert not any("older weights" in note for note in load_config(None, [*KEYS, ONE_BEHIND]).notes)

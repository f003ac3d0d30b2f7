"""Embodied runs: an environment id is a whole config; their defaults, what they do not read, and their rules."""

import pytest

from tests.config.loading import load, problems_of
from tether.config import ConfigError, load_config

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
CARTPOLE = "env.train.id=CartPole-v1"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


def test_an_id_is_enough():
    loaded = load_config(None, [CARTPOLE])
    config = loaded.config
    assert config.algorithm.gamma == 0.99
    assert config.actor_rollout_ref.actor.optim.lr == config.critic.optim.lr == 2.5e-4
    assert config.trainer.default_local_dir == "checkpoints/control/CartPole-v1"
    assert config.env.eval.id == "CartPole-v1"
    assert loaded.sources["algorithm.gamma"] == "default of embodied runs"
    assert loaded.notes == ()


def test_no_model_is_a_new_network():
    null = "actor_rollout_ref.model.path=null"
    new = load_config(None, [CARTPOLE]).config
    assert load_config(None, [CARTPOLE, null]).config == new
    assert load_config(None, [CARTPOLE, "actor_rollout_ref.model.path=cloned", null]).config == new


def test_defaults_are_those_of_the_task():
    mujoco = load_config(None, ["env.train.id=HalfCheetah-v5"]).config
    assert mujoco.env.train.max_steps_per_rollout_epoch == 2048
    assert mujoco.policy.normalize_observations
    assert mujoco.actor_rollout_ref.actor.ppo_mini_batch_size == 64


def test_defaults_are_those_of_the_policy():
    policy = load_config(None, [CARTPOLE, "policy.model_type=cnn_policy"]).config.policy
    assert (policy.hidden_dim, policy.num_layers, policy.activation, policy.share_critic) == (512, 1, "relu", True)
    loaded = load_config(None, ["env.train.id=MiniGrid-DoorKey-5x5-v0"])
    assert loaded.config.policy.model_type == "cnn_policy"
    assert loaded.config.policy.hidden_dim == 128
    assert loaded.config.env.train.drop_observations == ("mission",)
    assert loaded.notes == ()
    plain = load_config(None, ["env.train.id=minigrid:MiniGrid-Empty-5x5-v0", "policy.model_type=mlp_policy"])
    assert plain.config.policy.share_critic is False
    assert load_config(None, [CARTPOLE, "policy.pixel_scale=3"]).notes == (
        "no effect: policy.pixel_scale=3.0 (policy.model_type is mlp_policy)",
    )


def test_micro_batches_are_mini_batches_unless_asked():
    actor = load_config(None, [CARTPOLE, "policy.lstm_dim=8"]).config.actor_rollout_ref.actor
    assert actor.ppo_micro_batch_size_per_gpu == actor.ppo_mini_batch_size == 256


def test_the_user_goes_over_them():
    config = load_config(None, [CARTPOLE, "algorithm.gamma=0.5", "actor_rollout_ref.actor.optim.lr=1e-3"]).config
    assert config.algorithm.gamma == 0.5
    assert config.critic.optim.lr == 1e-3


def test_a_saved_config_loads_to_itself(tmp_path):
    loaded = load_config(None, [CARTPOLE, "env.train.init_params.render_mode=rgb_array"])
    (tmp_path / "run.yaml").write_text(loaded.to_yaml())
    assert load_config(tmp_path / "run.yaml", []).config == loaded.config
    assert "train_files" not in loaded.to_yaml()


def test_text_runs_are_as_before():
    config = load().config
    assert (config.algorithm.gamma, config.env.train.id) == (1.0, None)
    assert load("env.train.total_num_envs=4").notes == ("no effect: env.train.total_num_envs=4 (env.train.id is null)",)


def test_text_keys_are_said_to_do_nothing():
    loaded = load_config(None, [CARTPOLE, "data.max_prompt_length=100", "algorithm.use_kl_in_reward=True"])
    assert loaded.notes == (
        "no effect: data.max_prompt_length=100, algorithm.use_kl_in_reward=True "
        "(env.train.id is set, and embodied runs do not read it)",
    )


@pytest.mark.parametrize(
    ("override", "path", "fix"),
    [
        ("env.train.total_num_envs=1", "actor_rollout_ref.actor.ppo_mini_batch_size", "set it to at most 128"),
        ("env.train.ignore_terminations=True", "env.train.ignore_terminations", "set env.train.max_episode_steps"),
        ("trainer.device=cuda", "trainer.device", "leave it out"),
        ("trainer.n_gpus_per_node=2", "trainer.device", "set cpu; or cuda, for large networks"),
        ("trainer.nnodes=9 trainer.device=cpu", "env.train.total_num_envs", "set it to at least 9"),
        ("algorithm.adv_estimator=grpo", "env.train.auto_reset", "set env.train.auto_reset=False"),
        ("algorithm.adv_estimator=remax", "algorithm.adv_estimator", "reinforce_plus_plus_baseline, opo, gpg, raw"),
        (f"{LOSS}=bypass_mode", LOSS, "use vanilla, which is the same here"),
        (f"{LOSS}=dppo_kl", LOSS, "use vanilla, which compares ratios"),
        ("algorithm.filter_rewards=True", "algorithm.filter_rewards", "set env.train.auto_reset=False"),
        ("env.train.num_workers=2", "env.train.num_workers", "set env.train.vectorization=subprocess, or leave it out"),
        (
            f"{LOSS}=gspo actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.loss_agg_mode",
            "leave actor_rollout_ref.actor.loss_agg_mode out",
        ),
        (
            "actor_rollout_ref.actor.loss_agg_mode=masked_mean_ratio",
            "actor_rollout_ref.actor.loss_agg_mode",
            "set env.train.auto_reset=False, or use token-mean",
        ),
        ("env.train.group_size=3", "env.train.total_num_envs", "set it to a multiple of 3"),
        ("policy.num_action_chunks=3", "env.train.max_steps_per_rollout_epoch", "set it to a multiple of 3"),
        ("policy.hidden_dims=3", "policy.hidden_dims", "did you mean policy.hidden_dim?"),
        (
            "env.train.max_steps_per_rollout_epoch=100 policy.lstm_dim=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "set it to a multiple of 100",
        ),
        (f"{MICRO}=64 policy.lstm_dim=8", MICRO, "set it to a multiple of 128"),
        (f"{MICRO}=512 policy.model_type=cnn_policy", MICRO, "leave it out"),
    ],
)
def test_contradictions(override, path, fix):
    assert problems_of(CARTPOLE, *override.split(), base=[])[path].endswith(fix)


@pytest.mark.parametrize("model_type", ["cnn_policy", "openvla"])
def test_large_networks_may_be_on_another_device(model_type):
    loaded = load_config(None, [CARTPOLE, f"policy.model_type={model_type}", "trainer.device=cuda"])
    assert loaded.config.trainer.device == "cuda"


@pytest.mark.parametrize("wrong", ["env.train.idd", "env.trian.id", "env.train.di"])
def test_a_slip_in_the_id_is_the_only_problem(wrong):
    """Without an id, the run would be one of text, which lacks files and a model."""
    assert problems_of(f"{wrong}=CartPole-v1", base=[]) == {
        wrong: f"{wrong}: unknown key. did you mean env.train.id?",
    }


@pytest.mark.parametrize(
    ("overrides", "envs", "undecided"),
    [
        (["env.train.id=LunarLander-v3"], 8, True),
        (["env.train.id=LunarLander-v3", "env.train.init_params.continuous=true"], 1, False),
        (["env.train.id=LunarLander-v3", "env.train.init_params.continuous=false"], 8, True),
        (["env.train.id=Pendulum-v1"], 1, False),
        (["env.train.id=WalkerWalk-v1", "env.train.env_type=envpool"], 8, True),
        (["env.train.id=reach-v3", "env.train.env_type=metaworld"], 8, False),
    ],
)
def test_defaults_follow_the_kind_of_actions(overrides, envs, undecided):
    loaded = load_config(None, overrides)
    assert loaded.config.env.train.total_num_envs == envs
    assert (loaded.undecided is not None) == undecided


WAITS = ["env.train.auto_reset=False", "algorithm.adv_estimator=grpo", "env.train.group_size=2"]


@pytest.mark.parametrize(
    ("overrides", "path", "fix"),
    [
        ([*WAITS, "env.train.env_type=envpool"], "env.train.env_type", "use gymnasium"),
        ([*WAITS, "env.train.vectorization=vector"], "env.train.vectorization", "use auto, sync or subprocess"),
        (
            ["policy.share_critic=True", "policy.critic_hidden_dim=8"],
            "policy.critic_hidden_dim",
            "or set policy.share_critic=False",
        ),
        ([*WAITS, "policy.share_critic=True"], "policy.share_critic", "leave it out"),
        ([*WAITS, "env.train.group_size=1"], "env.train.group_size", "set it to 2 or more, or use gae"),
        (
            ["policy.num_action_chunks=2", "algorithm.logprob_type=chunk_level"],
            "algorithm.logprob_type",
            "set algorithm.reward_type=chunk_level, or use action_level",
        ),
        (
            ["env.eval.video_cfg.save_video=True", "env.eval.env_type=envpool"],
            "env.eval.env_type",
            "use gymnasium, with the same task as env.eval.id, if it has it",
        ),
        (
            [*WAITS, "algorithm.filter_rewards=True", "algorithm.rewards_lower_bound=2"],
            "algorithm.rewards_lower_bound",
            "set it to at most 1.0",
        ),
    ],
)
def test_contradictions_of_two_keys(overrides, path, fix):
    assert problems_of(CARTPOLE, *overrides, base=[])[path].endswith(fix)


def test_without_an_id_the_text_keys_are_required():
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        load_config(None, ["env.train.total_num_envs=4"])

"""The two examples of RLinf's PPO page: every key of theirs, and the runs that they become."""

from pathlib import Path

import pytest

from tests.installed import needs_megatron
from tests.runs.forked_group import ForkedGroup
from tests.runs.tiny_run import write_inputs
from tether.config import ConfigError, load_config, uses_megatron
from tether.config.keys import keys
from tether.control.build import build_control_run
from tether.distributed import groups
from tether.integrations.rlinf.embodied import EMBODIED, FIXED, FIXED_MLP
from tether.integrations.rlinf.rows import Mapped
from tether.integrations.rlinf.text import TEXT
from tether.metrics.loggers.jsonl import read_metrics
from tether.text.build import build_run

HERE = Path(__file__).parent
PAGE_KEYS = (
    "normalize_advantages", "group_size", "adv_type", "loss_type", "loss_agg_func", "rollout_micro_batch_size",
    "logprob_forward_micro_batch_size", "entropy_bonus", "clip_ratio_high", "clip_ratio_low", "clip_ratio_c",
    "value_clip", "gamma", "gae_lambda", "huber_delta", "reward_type", "logprob_type", "entropy_type",
    "bootstrap_type", "update_epoch", "rollout_epoch", "filter_rewards",
)  # fmt: skip


@pytest.mark.parametrize("table", [EMBODIED, TEXT])
@pytest.mark.parametrize("key", PAGE_KEYS)
def test_every_key_of_the_page_has_a_row_of_its_own_on_both_tasks(table, key):
    assert f"algorithm.{key}" in table


@pytest.mark.parametrize("table", [EMBODIED, TEXT])
def test_rows_lead_to_native_keys(table):
    targets = {native for row in table.values() if isinstance(row, Mapped) for native in row.to}
    assert targets | set({**FIXED, **FIXED_MLP}) <= set(keys())


def test_the_embodied_example():
    loaded = load_config(HERE / "page_embodied.yaml", [])
    config = loaded.config
    actor, train = config.actor_rollout_ref.actor, config.env.train
    assert (config.algorithm.gamma, config.algorithm.lam) == (0.99, 0.95)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c, actor.entropy_coeff) == (0.2, 0.2, None, 0)
    assert (config.critic.cliprange_value, config.critic.huber_delta, config.critic.loss_coef) == (0.2, 10.0, 1.0)
    assert (actor.optim.lr, config.critic.optim.lr, actor.optim.betas) == (3e-4, 1e-3, (0.9, 0.999))
    assert (actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle) == (64, 1, True)
    assert (train.id, train.init_params, train.total_num_envs) == ("Pendulum-v1", {"g": 9.0}, 4)
    assert (config.env.eval.id, config.env.eval.init_params, config.env.eval.num_episodes) == (
        "Pendulum-v1",
        {"g": 9.0},
        2,
    )
    assert (config.policy.hidden_dim, config.policy.num_layers, config.policy.init_logstd) == (32, 3, -0.5)
    assert (config.trainer.total_training_steps, config.trainer.default_local_dir) == (2, "runs/page")
    assert config.trainer.logger == ("console", "tensorboard")
    assert not config.policy.normalize_observations
    assert loaded.sources["algorithm.lam"] == "page_embodied.yaml, as algorithm.gae_lambda"
    assert len(loaded.notes) == 1, loaded.notes
    assert "of its keys do nothing here" in loaded.notes[0]


def test_the_text_example():
    config = load_config(HERE / "page_reasoning.yaml", []).config
    actor = config.actor_rollout_ref.actor
    assert config.critic.enable
    assert (actor.strategy, config.critic.strategy) == ("megatron", "megatron")
    assert (config.algorithm.adv_estimator, config.algorithm.gamma, config.algorithm.lam) == ("gae", 1.0, 1.0)
    assert (actor.clip_ratio_c, config.critic.cliprange_value, actor.loss_agg_mode) == (3.0, 0.2, "token-mean")
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (4, 2)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (64, 8)
    assert (actor.fsdp_config.dtype, config.actor_rollout_ref.rollout.dtype) == ("float32", "float32")
    assert config.actor_rollout_ref.rollout.top_k == -1
    assert config.trainer.default_local_dir == "runs/page"


def test_a_checkpoint_of_megatron_gives_the_weights():
    two = ["trainer.n_gpus_per_node=2", "actor.model.megatron_checkpoint=weights"]
    given = load_config(HERE / "page_reasoning.yaml", [*two, "actor.megatron.use_hf_ckpt=False"]).config
    actor, critic = given.actor_rollout_ref.actor.megatron, given.critic.megatron
    assert (actor.use_dist_checkpointing, actor.dist_checkpointing_path) == (True, "weights")
    assert (critic.use_dist_checkpointing, critic.dist_checkpointing_path) == (False, None)
    with pytest.raises(ConfigError, match=r"it contradicts actor\.megatron\.use_hf_ckpt=True"):
        load_config(HERE / "page_reasoning.yaml", two)
    none = load_config(HERE / "page_reasoning.yaml", [two[0], "actor.model.megatron_checkpoint=null"]).config
    assert not none.actor_rollout_ref.actor.megatron.use_dist_checkpointing


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=[pytest.mark.slow, needs_megatron])])
def test_the_text_example_trains(devices, tmp_path, monkeypatch):
    """On two devices Megatron splits the matrices of actor and critic."""
    if devices > 1:
        monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    inputs = write_inputs(tmp_path)
    overrides = [
        f"rollout.model.model_path={inputs / 'model'}",
        f"data.train_data_paths=[{inputs / 'train.jsonl'}]",
        f"data.val_data_paths=[{inputs / 'val.jsonl'}]",
        f"runner.output_dir={tmp_path}",
        "runner.logger.logger_backends=[]",
        f"custom_reward_function.path={inputs / 'reward.py'}",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.val_before_train=False",
        f"trainer.n_gpus_per_node={devices}",
        f"actor.model.tensor_model_parallel_size={devices}",
        f"critic.model.tensor_model_parallel_size={devices}",
    ]
    run = build_run(load_config(HERE / "page_reasoning.yaml", overrides))
    try:
        assert uses_megatron(run.loaded.config) == (devices > 1)
        run.trainer.fit()
    finally:
        run.close()
    assert run.directory == tmp_path / "page"
    metrics = read_metrics(run.directory)
    assert list(metrics) == [1, 2, 3]  # ten prompts, four a step
    assert "critic/vf_loss" in metrics[3]


def test_the_embodied_example_trains(tmp_path):
    pytest.importorskip("gymnasium")
    overrides = [f"runner.logger.log_path={tmp_path}", "runner.logger.logger_backends=[]", "trainer.num_threads=1"]
    run = build_control_run(load_config(HERE / "page_embodied.yaml", overrides))
    try:
        run.trainer.fit()
    finally:
        run.close()
    assert run.directory == tmp_path / "page"
    assert max(read_metrics(run.directory)) == 2


def test_all_that_is_wrong_with_a_file_at_once():
    overrides = ["algorithm.kl_beta=0.1", "actor.optim.lrr=1", "cluster.num_nodes=0", "runner.max_steps=many"]
    with pytest.raises(ConfigError) as error:
        load_config(HERE / "page_embodied.yaml", [*overrides, "algorithm.gamma=2", "policy.hidden_dims=3"])
    said = {problem.path: str(problem) for problem in error.value.problems}
    assert said == {
        "algorithm.kl_beta": "algorithm.kl_beta: 0.1 is refused: embodied runs have no reference policy. leave it out, "
        "or set 0",
        "runner.max_steps": "runner.max_steps: many is refused: it is not a whole number. leave it out",
        "actor.optim.lrr": "actor.optim.lrr: unknown key of RLinf. did you mean actor.optim.lr? or take it out: "
        "~actor.optim.lrr",
        "policy.hidden_dims": "policy.hidden_dims: unknown key. did you mean policy.hidden_dim?",
        "cluster.num_nodes": "cluster.num_nodes: 0 is refused: machines are counted by trainer.nnodes, beside the "
        "file. leave it out, or set 1",
        "algorithm.gamma": "algorithm.gamma: 2 is not a number from 0 to 1. the default is 1.0",
    }

"""verl's example scripts: each resolves, or is refused for exactly the keys that ask for what tether lacks."""

import pytest

from tests.config.scripts import SCRIPTS
from tether.config import ConfigError, load_config


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_refused_for_exactly_the_unsupported_keys(name):
    overrides, refused = SCRIPTS[name]
    if not refused:
        assert load_config(None, overrides).config.trainer.n_gpus_per_node > 1
        return
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert {problem.path for problem in error.value.problems} == refused
    assert len(error.value.problems) == len(refused)


@pytest.mark.parametrize("name", [name for name, (_, refused) in SCRIPTS.items() if not refused])
def test_script_resolves_on_one_device(name):
    overrides, _ = SCRIPTS[name]
    config = load_config(None, [*overrides, "trainer.n_gpus_per_node=1"]).config
    assert f"trainer.total_epochs={config.trainer.total_epochs}" in overrides
    assert config.trainer.logger == ("console", "wandb")


def test_the_last_of_two_settings_wins():
    overrides, _ = SCRIPTS["run_qwen2.5-32b"]
    config = load_config(None, [*overrides, "trainer.n_gpus_per_node=1", "trainer.nnodes=1"]).config
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing
    assert not config.critic.model.enable_gradient_checkpointing


def test_token_budgets_reach_the_critic_and_the_reference():
    overrides, _ = SCRIPTS["run_qwen2-7b_seq_balance"]
    config = load_config(None, [*overrides, "trainer.n_gpus_per_node=1"]).config
    assert config.data.train_files == ("/data/gsm8k/train.parquet", "/data/math/train.parquet")
    assert config.critic.use_dynamic_bsz
    assert config.critic.forward_max_token_len_per_gpu == 98304
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 24000

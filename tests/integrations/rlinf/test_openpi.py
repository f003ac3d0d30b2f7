"""The import of files of pi0 and pi0.5: what of `actor.model.openpi` is taken over, and what is refused by name."""

import pytest
from omegaconf import OmegaConf

from tether.config import load_config

PRESET = """
runner: {task_type: embodied}
env: {train: {env_type: gymnasium, id: Pendulum-v1, total_num_envs: 8, max_steps_per_rollout_epoch: 40}}
algorithm: {adv_type: gae, loss_type: actor_critic, entropy_bonus: 0}
actor:
  model:
    model_type: openpi
    model_path: /models/pi0
    num_action_chunks: 5
    action_dim: 7
    num_steps: 4
    add_value_head: true
    use_proprio: true
    openpi:
      config_name: pi0_libero
      num_images_in_input: 2
      noise_level: 0.3
      noise_method: flow_cps
      action_chunk: ${actor.model.num_action_chunks}
      num_steps: ${actor.model.num_steps}
      train_expert_only: true
      action_env_dim: ${actor.model.action_dim}
      add_value_head: ${actor.model.add_value_head}
      detach_critic_input: true
      use_dsrl: false
      dsrl_state_dim: 8
"""
OPENPI = "actor.model.openpi"


def test_what_the_preset_says_is_taken_over(imported):
    result = imported(PRESET)
    assert result.problems == ()
    assert result.refusals() == []
    taken = {key.removeprefix("policy."): value for key, value in result.native.items() if key.startswith("policy.")}
    wanted = {
        "model_type": "pi0", "num_steps": 4, "noise_method": "flow_cps", "noise_level": 0.3, "num_action_chunks": 5,
        "train_expert_only": True, "detach_critic_input": True,
    }  # fmt: skip
    assert taken.items() >= wanted.items()
    assert result.native["actor_rollout_ref.model.path"] == "/models/pi0"


def test_the_file_loads(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(PRESET)
    loaded = load_config(file, [])
    assert (loaded.config.policy.model_type, loaded.config.policy.noise_level) == ("pi0", 0.3)


def test_pi05_is_told_by_the_name_of_its_configuration_and_has_rlinfs_number_of_steps(imported):
    tree = OmegaConf.create(PRESET)
    del tree.actor.model.openpi["num_steps"]
    tree.actor.model.openpi.config_name, tree.actor.model.openpi.value_after_vlm = "pi05_maniskill", True
    result = imported(OmegaConf.to_yaml(tree))
    assert result.native["policy.model_type"] == "pi05"
    assert result.native["policy.num_steps"] == 10
    assert result.refusals() == []


def test_pi05_of_older_files_is_told_by_a_key_of_its_own(imported):
    tree = OmegaConf.create(PRESET)
    del tree.actor.model.openpi["config_name"]
    tree.actor.model.openpi.pi05, tree.actor.model.openpi.value_after_vlm = True, True
    older = OmegaConf.to_yaml(tree)
    result = imported(older)
    assert result.native["policy.model_type"] == "pi05"
    assert (result.problems, result.refusals()) == ((), [])
    assert imported(older, f"{OPENPI}.pi05=False", f"{OPENPI}.value_after_vlm=False").refusals() == []
    (problem,) = imported(PRESET, f"+{OPENPI}.pi05=True").refusals()
    assert problem.path == f"{OPENPI}.pi05"
    assert "config_name says pi0" in str(problem)


def test_sizes_of_the_network_are_those_of_its_folder(imported):
    sizes = ("action_horizon=8", "action_dim=32", "max_token_len=200", "paligemma_variant=gemma_2b")
    result = imported(PRESET, *(f"+{OPENPI}.{size}" for size in sizes))
    assert (result.problems, result.refusals()) == ((), [])


def test_columns_of_openpis_own_data_are_refused(imported):
    (problem,) = imported(PRESET, "+actor.model.openpi_data.repo_id=owner/set").refusals()
    assert problem.path == "actor.model.openpi_data.*"
    assert "policy_preprocessor.json" in str(problem)


def test_a_joint_density_is_the_mean_that_rlinf_takes(imported):
    native = imported(PRESET, f"{OPENPI}.joint_logprob=True", f"{OPENPI}.noise_method=flow_noise").native
    assert (native["policy.joint_logprob"], native["policy.step_logprobs"]) == (True, "mean")
    assert "policy.step_logprobs" not in imported(PRESET, f"{OPENPI}.joint_logprob=False").native


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("noise_method=flow_ode", "flow_sde, flow_noise and flow_cps"),
        ("noise_anneal=True", "stays as it is"),
        ("double_layer=True", "one random step"),
        ("is_nft=True", "NFT"),
        ("use_dsrl=True", "DSRL"),
        ("value_after_vlm=True", "the action expert"),
        ("value_vlm_mode=last_token", "mean of all tokens"),
        ("config_name=other", "no configuration of pi0"),
    ],
)
def test_what_is_not_done_is_refused_by_name(imported, override, says):
    (problem,) = imported(PRESET, f"{OPENPI}.{override}").refusals()
    assert problem.path == f"{OPENPI}.{override.split('=')[0]}"
    assert says in str(problem)


def test_other_policies_do_not_read_the_section(imported):
    native = imported(PRESET, "actor.model.model_type=mlp_policy").native
    assert not {"policy.num_steps", "policy.noise_method", "policy.noise_level"} & set(native)


def test_how_openpi_compiles_has_no_effect(imported):
    result = imported(PRESET, f"+{OPENPI}.pytorch_compile_mode=null")
    assert (result.problems, result.refusals()) == ((), [])

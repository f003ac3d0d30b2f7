"""RLinf's ten PPO recipes with an MLP policy: each imports, but for exactly the keys that ask for what tether lacks."""

import pytest

from tests.integrations.rlinf.recipes import RECIPES, write_recipe
from tether.config import load_config
from tether.config.loading.overrides import parse_overrides
from tether.integrations.rlinf.importer import import_file

ON_PENDULUM = ["env.train.env_type=gymnasium", "env.eval.env_type=gymnasium", "env.train.id=Pendulum-v1"]
"""The command of docs/guides/coming-from-rlinf.md."""
WITHOUT = ["reward.use_reward_model=False"]
OTHER_NOTES = ("do nothing here", "take turns", "tests write no episodes")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_refused_for_exactly_the_unsupported_keys(tmp_path, name):
    imported = import_file(write_recipe(tmp_path, name), parse_overrides(["env.train.id=Task-v0"])[0])
    assert imported.problems == ()
    assert {problem.path for problem in imported.refusals()} == RECIPES[name][2]
    assert imported.native["env.train.id"] == "Task-v0"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs_on_another_simulator(tmp_path, name):
    path = write_recipe(tmp_path, name)
    loaded = load_config(
        path, [*ON_PENDULUM, *(WITHOUT if RECIPES[name][2] & {item.split("=")[0] for item in WITHOUT} else [])]
    )
    config = loaded.config
    assert config.policy.num_layers == 3
    assert config.critic.huber_delta == 10.0
    assert config.actor_rollout_ref.actor.clip_ratio_c == 3.0
    assert config.trainer.total_training_steps in (200, 1000)
    for env in (config.env.train, config.env.eval):
        assert (env.id, env.env_type, env.init_params) == ("Pendulum-v1", "gymnasium", {})
    notes = [note for note in loaded.notes if not any(words in note for words in OTHER_NOTES)]
    assert len(notes) == 1
    assert any("take turns" in note for note in loaded.notes) == ("async" in name)
    assert notes[0].startswith(f"another simulator, task or policy than that of {name}.yaml: its env.train.")


def test_another_task_of_a_simulator_keeps_its_arguments(tmp_path):
    path = write_recipe(tmp_path, "maniskill_ppo_mlp")
    loaded = load_config(path, ["env.train.id=PushCube-v1"])
    config = loaded.config
    assert (config.env.train.id, config.env.eval.id) == ("PushCube-v1", "PushCube-v1")
    assert config.env.train.init_params["control_mode"] == config.env.eval.init_params["control_mode"]
    assert config.env.train.init_params["sim_backend"] == "gpu"
    other = load_config(path, ["env.train.init_params.id=PushCube-v1", "env.eval.init_params.id=PickCube-v1"]).config
    assert (other.env.train.id, other.env.eval.id) == ("PushCube-v1", "PickCube-v1")


def test_the_same_task_keeps_everything(tmp_path):
    path = write_recipe(tmp_path, "maniskill_ppo_mlp")
    same, plain = (load_config(path, given) for given in (["env.train.id=PickCube-v1"], []))
    assert same.tree() == plain.tree()
    assert not [note for note in same.notes if "another simulator" in note]


def test_arguments_are_cleared(tmp_path):
    loaded = load_config(
        write_recipe(tmp_path, "maniskill_ppo_mlp"), [*ON_PENDULUM[:2], "env.train.init_params={}", *ON_PENDULUM[2:]]
    )
    assert loaded.config.env.train.init_params == {}
    native = import_file(
        write_recipe(tmp_path, "maniskill_ppo_mlp"),
        parse_overrides(["env.train.init_params={}", "env.train.id=PickCube-v1"])[0],
    ).native
    assert native["env.train.init_params"] == {"control_mode": "pd_joint_delta_pos"}  # which follows from the robot


def test_a_preset_stands_below_the_files_own_keys(tmp_path):
    native = import_file(write_recipe(tmp_path, "maniskill_ppo_mlp"), []).native
    assert native["env.train.id"] == "PickCube-v1"
    assert native["env.train.total_num_envs"] == 1024  # the preset: null
    assert native["env.train.auto_reset"] is True  # the preset: False
    assert native["env.train.init_params"] == {
        **{"obs_mode": "state", "sim_backend": "gpu", "sim_config": {"sim_freq": 100, "control_freq": 20}},
        "max_episode_steps": 50,  # the preset: its own sibling's value
        "control_mode": "pd_joint_delta_pos",  # the preset: the text None, which actor.model.policy_setup replaces
    }
    assert native["env.eval.ignore_terminations"] is True
    assert (native["algorithm.gamma"], native["algorithm.lam"]) == (0.8, 0.9)
    assert native["algorithm.bootstrap_type"] == "always"
    assert native["actor_rollout_ref.actor.ppo_mini_batch_size"] == 6400
    assert native["env.eval.num_episodes"] == 32


def test_defaults_of_rlinf_are_taken_where_the_file_is_silent(tmp_path):
    lines = {line.key: line for line in import_file(write_recipe(tmp_path, "frankasim_ppo_mlp"), []).lines}
    assert lines["algorithm.bootstrap_type"].status == "defaulted"
    assert dict(lines["algorithm.bootstrap_type"].native) == {"algorithm.bootstrap_type": "standard"}
    assert lines["policy.activation"].status == "defaulted"
    assert lines["algorithm.gamma"].status == "mapped"
    assert lines["algorithm.length_params.*"].status == "no effect"


PRESET_OF_OFT = [
    "actor.model.model_type=openvla_oft", "+actor.model.implement_version=rlinf",
    "+actor.model.value_type=action_level", "+actor.model.use_proprio=False", "+actor.model.use_film=False",
    "+actor.model.unnorm_key=libero_10_no_noops", "+actor.model.center_crop=True",
    "+actor.model.max_prompt_length=50", "+actor.model.vocab_size=32000", "+actor.model.hidden_size=4096",
    "+actor.model.image_size=[224,224]", "+actor.model.lora_path=null", "+actor.model.num_images_in_input=1",
    "+actor.model.attn_implementation=flash_attention_2", "+actor.model.force_musa_eager_sdpa=True",
    "+actor.model.low_cpu_mem_usage=True", "+actor.model.trust_remote_code=True",
]  # fmt: skip
"""Keys of the preset that the recipe with an MLP has not."""
OLDER = [
    "+env.channel.name=env", "+rollout.channel.queue_size=0", "+actor.channel.queue_name=replay",
    "+rollout.mode=colocate", "+rollout.generation_backend=huggingface", "+actor.tokenizer.padding_side=right",
    "+actor.tokenizer.use_fast=False",
]  # fmt: skip
"""Keys of files of the older versions."""


def test_keys_of_openvla_oft_are_taken_over_and_what_it_cannot_do_is_refused_by_name(tmp_path):
    path = write_recipe(tmp_path, "maniskill_ppo_mlp")
    imported = import_file(path, parse_overrides([*PRESET_OF_OFT, *OLDER])[0])
    assert imported.problems == ()
    assert imported.refusals() == []
    taken = {
        "model_type": "openvla_oft", "unnorm_key": "libero_10_no_noops", "center_crop": True, "max_prompt_length": 50,
    }  # fmt: skip
    assert {name: imported.native[f"policy.{name}"] for name in taken} == taken
    others = {
        "use_film": "True", "use_proprio": "True", "lora_path": "elsewhere", "implement_version": "official",
        "attn_implementation": "sdpa",
    }  # fmt: skip
    changed = [f"actor.model.{name}={value}" for name, value in others.items()]
    found = import_file(path, parse_overrides([*PRESET_OF_OFT, *changed])[0]).refusals()
    assert {problem.path for problem in found} == {f"actor.model.{name}" for name in others}
    # OpenVLA attends alike with all of them, and other policies do not read these keys.
    one = [*PRESET_OF_OFT, "actor.model.attn_implementation=sdpa", "actor.model.model_type=openvla"]
    assert import_file(path, parse_overrides(one)[0]).refusals() == []
    other = import_file(path, parse_overrides([*PRESET_OF_OFT, *changed, "actor.model.model_type=mlp_policy"])[0])
    assert not {f"policy.{name}" for name in ("unnorm_key", "center_crop", "max_prompt_length")} & set(other.native)

"""Keys of RLinf's older files, and of runs that tether does not have: each has its fate, none is unknown."""

from pathlib import Path

import pytest

from tether.config.loading.settings import import_notes

OLDER = """
runner: {task_type: embodied}
algorithm: {auto_reset: false, ignore_terminations: true, use_fixed_reset_state_ids: true, specific_reset_id: null,
  max_episode_steps: 240, use_ordered_reset_state_ids: false, n_chunk_steps: 48, n_eval_chunk_steps: 48,
  obs_mode: rgb, require_values: true, num_group_envs: 4, group_size: 2, adv_type: gae, loss_type: actor_critic}
env:
  train: {simulator_type: gymnasium, id: Pendulum-v1, num_group: 4, num_task: 4, only_eval: false,
    num_envs: "${multiply:${algorithm.group_size}, ${algorithm.num_group_envs}}"}
rollout: {model_dir: /models/start/, precision: "${actor.model.precision}"}
actor: {checkpoint_load_path: /models/start, checkpoint_save_path: ../results,
  model: {model_name: mlp_policy, precision: "32", num_action_chunks: 5, sharding_strategy: no_shard}}
"""
TEXT = """
runner: {task_type: reasoning}
algorithm: {adv_type: grpo, loss_type: grpo, sampling_params: {use_greedy: false}}
rollout: {model_dir: /models/qwen, model_arch: qwen2.5, precision: bf16}
inference: {model_arch: "${rollout.model_arch}", load_from_actor: true}
actor: {checkpoint_load_path: null, model: {attention_softmax_in_fp32: true, num_layers: 4}, optim: {loss_scale: 65536}}
critic: {use_critic_model: false}
"""


def refused(result):
    return {problem.path: problem.what for problem in result.refusals()}


def test_older_names_are_read_as_those_of_today(imported):
    result = imported(OLDER, "env.train.total_num_envs=8")
    assert result.problems == ()
    assert refused(result) == {}
    native = result.native
    assert native["env.train.env_type"] == "gymnasium"
    assert native["env.train.auto_reset"] is False
    assert native["env.train.ignore_terminations"] is True
    assert native["env.train.use_fixed_reset_state_ids"] is True
    assert native["env.train.max_episode_steps"] == 240
    assert native["env.train.max_steps_per_rollout_epoch"] == 240  # 48 chunks of 5 actions
    assert native["actor_rollout_ref.model.path"] == "/models/start"
    assert native["policy.model_type"] == "mlp_policy"
    assert result.origins["policy.model_type"] == "actor.model.model_name"  # its name in the file
    assert {line.key: line.status for line in result.lines}["rollout.precision"] == "mapped"


def test_environments_of_each_process_are_no_number_of_environments(imported):
    found = refused(imported(OLDER))
    assert set(found) == {"env.train.num_envs"}
    assert "set env.train.total_num_envs" in found["env.train.num_envs"]


def test_a_key_wins_over_its_older_name(imported):
    result = imported(OLDER, "env.train.total_num_envs=8", "env.train.auto_reset=True")
    assert result.native["env.train.auto_reset"] is True
    (line,) = (line for line in result.lines if line.key == "algorithm.auto_reset")
    assert line.why == "older name of env.train.auto_reset, which is read"


def test_a_refused_value_is_named_by_the_key_of_the_file(imported):
    found = refused(imported(OLDER, "env.train.total_num_envs=8", "rollout.precision=bf16"))
    assert set(found) == {"rollout.precision"}
    assert found["rollout.precision"].startswith("bf16 is refused: control policies compute in fp32")
    found = refused(imported(OLDER, "actor.model.model_name=gr00t", "rollout.model.num_q_heads=2"))
    assert set(found) == {"actor.model.model_name", "env.train.num_envs"}


def test_two_models_to_start_from_are_a_contradiction(imported):
    result = imported(OLDER, "env.train.total_num_envs=8", "actor.checkpoint_load_path=/models/other")
    (problem,) = result.problems
    assert problem.fix == "keep one of the two"


def test_older_names_are_noted_with_those_of_today(imported):
    """They are read for one more release."""
    assert imported(OLDER).older_names == {
        "rollout.model_dir": "rollout.model.model_path",
        "rollout.precision": "rollout.model.precision",
        "actor.model.model_name": "actor.model.model_type",
        "algorithm.auto_reset": "env.train.auto_reset",
        "algorithm.ignore_terminations": "env.train.ignore_terminations",
        "algorithm.use_fixed_reset_state_ids": "env.train.use_fixed_reset_state_ids",
        "algorithm.max_episode_steps": "env.train.max_episode_steps",
        "env.train.simulator_type": "env.train.env_type",
        "actor.checkpoint_load_path": "actor.model.model_path",
    }
    older = imported(TEXT, "runner.task_type=math", "algorithm.loss_type=ppo")
    assert older.older_names["runner.task_type=math"] == "runner.task_type=reasoning"
    assert older.older_names["algorithm.loss_type=ppo"] == "algorithm.loss_type=actor"
    assert {line.key: line.value for line in older.lines}["algorithm.loss_type"] == "ppo"  # as written
    (note,) = (note for note in import_notes(older, Path("run.yaml")) if "older names" in note)
    assert note.startswith("run.yaml has older names of RLinf's, which are read for one more release: ")
    assert "rollout.model_dir (now rollout.model.model_path)" in note


def test_older_text_runs(imported):
    result = imported(TEXT)
    assert result.problems == ()
    assert refused(result) == {}
    assert result.native["actor_rollout_ref.model.path"] == "/models/qwen"
    assert result.native["actor_rollout_ref.rollout.dtype"] == "bfloat16"
    assert result.native["actor_rollout_ref.actor.policy_loss.loss_mode"] == "vanilla"
    assert result.origins["actor_rollout_ref.model.path"] == "rollout.model_dir"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor.checkpoint_load_path=/models/megatron", "Megatron's files are not read"),
        ("algorithm.sampling_params.use_greedy=True", "training needs samples"),
        ("algorithm.sampling_params.stop=[a]", "end with the model's own tokens"),
        ("actor.model.attention_dropout=0.1", "nothing is dropped"),
        ("actor.model.load_in_8bit=True", "quantised"),
        ("algorithm.down_sampling.do_down_sampling=True", "not left out by a rule"),
    ],
)
def test_what_would_change_the_result_is_refused(imported, override, says):
    (why,) = refused(imported(TEXT, override)).values()
    assert says in why


def test_adapters_and_the_penalty_in_rewards_of_text_runs(imported):
    adapters = ("actor.model.is_lora=True", "actor.model.lora_rank=8", "critic.model.is_lora=True")
    penalty = ("algorithm.adv_type=reinpp", "algorithm.reinpp_kl_beta=0.001", "algorithm.kl_penalty_type=k2")
    native = imported(TEXT, *adapters, *penalty).native
    assert (native["actor_rollout_ref.model.lora_rank"], native["critic.model.lora_rank"]) == (8, 32)
    assert native["algorithm.use_kl_in_reward"] is True
    assert native["algorithm.kl_ctrl.kl_coef"] == 0.001
    assert native["algorithm.kl_penalty"] == "k2"
    with_baseline = refused(imported(TEXT, *penalty, "algorithm.use_reinpp_baseline=True"))
    assert set(with_baseline) == {"algorithm.reinpp_kl_beta"}
    assert "algorithm.use_kl_in_reward" not in imported(TEXT, "algorithm.reinpp_kl_beta=0").native


@pytest.mark.parametrize(
    "override",
    [
        "+actor.fsdp.forward_prefetch=False",
        "+actor.model.do_sample=False",
        "+actor.model.micro_batch_size=1",
        "+actor.model.val_micro_batch_size=8",
        "+actor.model.name=vllm",
        "+actor.model.temperature=1.6",
        "+actor.model.top_k=-1",
        "+actor.model.top_p=1",
        "+actor.model.noise_level=0.1",
        "+actor.model.ckpt_path=null",
        "+actor.model.add_bias_linear=False",
        "+actor.model.add_qkv_bias=True",
        "+actor.model.vh_mode=a0",
        "+cluster.num_gpus_per_node=8",
    ],
)
def test_what_older_files_say_of_memory_and_nothing_read_has_no_effect(imported, override):
    result = imported(OLDER, "env.train.total_num_envs=8", override)
    assert result.problems == ()
    assert refused(result) == {}


def test_the_older_name_of_shuffling_acts(imported):
    older = OLDER.replace("obs_mode: rgb", "shuffle_samples: false")
    assert imported(older).native["actor_rollout_ref.actor.shuffle"] is False


def test_another_place_of_the_value_head_is_refused_for_openvla(imported):
    overrides = ["env.train.total_num_envs=8", "+actor.model.vh_mode=a6"]
    assert set(refused(imported(OLDER.replace("mlp_policy", "openvla"), *overrides))) == {"actor.model.vh_mode"}
    other = imported(OLDER.replace("mlp_policy", "cnn_policy"), *overrides)
    assert {line.key: line.status for line in other.lines}["actor.model.vh_mode"] == "no effect"


def test_weights_beside_the_folder_are_refused_under_the_older_name_too(imported):
    found = refused(imported(OLDER, "env.train.total_num_envs=8", "+actor.model.ckpt_path=/models/last.pt"))
    assert set(found) == {"actor.model.ckpt_path"}
    assert ".pt file" in found["actor.model.ckpt_path"]


@pytest.mark.parametrize("text", [OLDER, TEXT])
@pytest.mark.parametrize(
    "key", ["algorithm.replay_buffer.cache_size", "algorithm.nft_beta", "runner.save_dir", "inference.group_name"]
)
def test_keys_of_other_runs_are_known(imported, text, key):
    result = imported(text, f"+{key}=1")
    assert result.problems == ()
    assert {line.status for line in result.lines if key.startswith(line.key.removesuffix(".*"))} == {"no effect"}


@pytest.mark.parametrize(
    "key",
    [
        "rollout.attention_backend=triton",
        "rollout.sglang_decode_log_interval=500000",
        "rollout.use_torch_compile=False",
        "rollout.torch_compile_max_bs=128",
        "rollout.validate_weight_first_sync=True",
        "rollout.weight_reload=sync",
        "cluster.num_gpus_per_node=1",
        "actor.model.sharding_strategy=full_shard",
        "actor.sync_precision=bf16",
        "runner.pad_after_pack=False",
    ],
)
def test_what_text_files_say_of_servers_and_memory_has_no_effect(imported, key):
    result = imported(TEXT, key)
    assert result.problems == ()
    assert refused(result) == {}


@pytest.mark.parametrize(
    "section", ["agentloop: {max_turns: 2}", "tools: {search: {topk: 3}}", "agentlightning: {n: 1}"]
)
def test_agents_are_refused_once_for_each_section(imported, section):
    result = imported(TEXT + section)
    assert result.problems == ()
    (why,) = refused(result).values()
    assert "tools" in why


def test_keys_of_another_kind_of_rows_are_not_checked(imported):
    rows = TEXT + "data: {type: vision_language, image_keys: [images], lazy_loading: true, colour: red}"
    result = imported(rows)
    assert result.problems == ()
    assert set(refused(result)) == {"data.type"}
    (problem,) = imported(rows, "data.type=math").problems  # the others are read for pictures only
    assert problem.path == "data.colour"


@pytest.mark.parametrize("override", ["algorithm.sampling_params.stop_token_ids=[1]", "reward.len_reward_penalty=0.1"])
def test_what_ends_or_scores_responses_otherwise_is_refused(imported, override):
    result = imported(TEXT, override)
    assert result.problems == ()
    assert set(refused(result)) == {override.split("=")[0]}


def test_older_names_of_estimator_and_loss(imported):
    older = OLDER.replace("adv_type: gae", "adv_type: embodied_gae").replace("actor_critic", "embodied_ppo")
    result = imported(older, "env.train.total_num_envs=8")
    assert refused(result) == {}
    assert result.native["algorithm.adv_estimator"] == "gae"
    assert result.native["actor_rollout_ref.actor.policy_loss.loss_mode"] == "vanilla"


def test_the_time_in_a_name_resolves(imported):
    result = imported(TEXT.replace("task_type: reasoning", 'task_type: reasoning, experiment_name: "a-${now:%Y}"'))
    assert result.problems == ()
    assert result.native["trainer.experiment_name"].startswith("a-20")


SCHEDULE = "optim: {total_training_steps: 50, lr_warmup_steps: -1, num_cycles: 0.5}, model:"


def test_the_length_of_a_decay(imported):
    older = OLDER.replace("model: {model_name", f"{SCHEDULE} {{model_name").replace(
        "Pendulum-v1,", "Pendulum-v1, total_num_envs: 8,"
    )
    steps = "actor_rollout_ref.actor.optim.lr_decay_steps"
    assert steps not in imported(older).native  # the rate is constant
    falling = "actor.optim.lr_scheduler=cosine"
    assert imported(older, falling).native[steps] == 50
    assert steps not in imported(older, falling, "runner.max_epochs=50").native  # the whole run
    rising = imported(older, falling, "actor.optim.lr_warmup_steps_ratio=0.1")  # of 50 steps
    assert rising.native["actor_rollout_ref.actor.optim.lr_warmup_steps"] == 5
    assert (rising.native[steps], refused(rising)) == (50, {})

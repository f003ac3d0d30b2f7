"""The import of a file: which kind of run it is, what its keys become, and what is said of the others."""

import pytest
from omegaconf import OmegaConf

from tether.config import ConfigError, load_config
from tether.config.loading.rlinf_marks import is_rlinf

TEXT = """
runner: {task_type: reasoning}
algorithm: {adv_type: gae, loss_type: actor}
critic: {use_critic_model: true}
"""
EMBODIED = """
runner: {task_type: embodied}
env: {train: {env_type: gymnasium, id: CartPole-v1}}
actor: {model: {model_type: mlp_policy}}
"""
ACTOR = "actor_rollout_ref.actor"


def refusals(imported):
    return {problem.path: problem.what for problem in imported.refusals()}


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ({"runner": {}}, True),
        ({"cluster": {}, "algorithm": {"gamma": 1}}, True),
        ({"algorithm": {"adv_type": "gae"}}, True),
        ({"algorithm": {"gamma": 1}, "critic": {}, "data": {}, "env": {}}, False),
        ({"trainer": {}, "runner": {}}, False),
        ({}, False),
    ],
)
def test_files_of_rlinf_are_told_apart(tree, found):
    assert is_rlinf(tree) is found


def test_a_file_without_a_task_type_is_read_by_its_content(imported):
    assert "env.train.id" in imported("env: {train: {id: CartPole-v1}}").native
    assert imported("algorithm: {loss_type: actor_critic}").native["env.train.id"] == "???"
    assert imported("algorithm: {loss_type: actor}\ncritic: {use_critic_model: true}").native["critic.enable"] is True


@pytest.mark.parametrize("model", ["model_type: openvla", "model_type: openpi, openpi: {config_name: pi0_libero}"])
def test_a_published_policy_without_a_checkpoint_is_to_be_given_one(imported, model, tmp_path):
    """A new one, of random weights, is had for the asking."""
    start, text = "actor_rollout_ref.model.path", EMBODIED.replace("model_type: mlp_policy", model)
    assert start not in imported(EMBODIED).native
    assert imported(text).native[start] == "???"
    assert imported(text, "actor.model.model_path=some/dir").native[start] == "some/dir"
    (file := tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"{start}: [?]{{3}} stands for a value still to be given"):
        load_config(file, [])
    assert not load_config(file, [f"{start}=null"]).config.actor_rollout_ref.model.path


@pytest.mark.parametrize(
    ("task", "fix"),
    [("sft", "`tether sft`"), ("offline", "use embodied or reasoning"), ("embodied_eval", "`tether eval`")],
)
def test_other_kinds_of_run_are_refused(imported, task, fix):
    (problem,) = imported(f"runner: {{task_type: {task}}}").problems
    assert problem.path == "runner.task_type"
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (TEXT, "algorithm.gae_lamda", "did you mean algorithm.gae_lambda?"),
        (TEXT, "runner.max_epoch", "did you mean runner.max_epochs?"),
        (TEXT, "actor.optim.value_lr", "is a key of embodied runs only"),
        (EMBODIED, "actor.lr", "did you mean actor.optim.lr?"),
        (EMBODIED, "algorithm.n_minibatches", "is a key of text runs only"),
        (EMBODIED, "runner.nonsense.of.mine", "unknown key of RLinf. take it out (~runner.nonsense.of.mine)"),
    ],
)
def test_unknown_keys(imported, text, key, says):
    tree = OmegaConf.create(text)
    OmegaConf.update(tree, key, 1, force_add=True)
    (problem,) = imported(OmegaConf.to_yaml(tree)).problems
    assert problem.path == key
    assert says in str(problem)


@pytest.mark.parametrize("nothing", ["{}", "null"])
@pytest.mark.parametrize("section", ["rollout", "actor.optim", "runner"])
def test_an_empty_section_says_nothing(imported, section, nothing):
    tree = OmegaConf.create(EMBODIED)
    OmegaConf.update(tree, section, OmegaConf.create(f"a: {nothing}").a, merge=False, force_add=True)
    assert imported(OmegaConf.to_yaml(tree)).problems == ()
    OmegaConf.update(tree, "nonsense", {}, force_add=True)
    assert [problem.path for problem in imported(OmegaConf.to_yaml(tree)).problems] == ["nonsense"]


def test_two_keys_for_one_quantity(imported):
    assert imported(TEXT, "algorithm.value_clip=0.2", "algorithm.value_cliprange=0.2").problems == ()
    (problem,) = imported(TEXT, "algorithm.value_clip=0.2", "algorithm.value_cliprange=0.5").problems
    assert str(problem) == (
        "algorithm.value_cliprange: 0.5 asks for critic.cliprange_value=0.5, but algorithm.value_clip for 0.2. "
        "keep one of the two"
    )


@pytest.mark.parametrize(
    ("overrides", "native"),
    [
        # 12 prompts, in 3 mini-batches of 4
        (["data.rollout_batch_size=12", "algorithm.n_minibatches=3"], {f"{ACTOR}.ppo_mini_batch_size": 4}),
        # 2 rollouts of 12 prompts a step, each in 3 mini-batches
        (
            ["data.rollout_batch_size=12", "algorithm.n_minibatches=3", "algorithm.rollout_epoch=2"],
            {"data.train_batch_size": 24, f"{ACTOR}.ppo_mini_batch_size": 4},
        ),
        # 16 responses are 4 prompts of 4 responses
        (["actor.global_batch_size=16", "algorithm.group_size=4"], {f"{ACTOR}.ppo_mini_batch_size": 4}),
        (["runner.seq_length=100", "data.max_prompt_length=60"], {"data.max_response_length": 40}),
        (["algorithm.sampling_params.max_new_tokens=30"], {"data.max_response_length": 30}),
        (["algorithm.kl_beta=0.0"], {f"{ACTOR}.use_kl_loss": False}),
        (["algorithm.kl_beta=0.1"], {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.1}),
        (["algorithm.sampling_params.top_k=1000000"], {"actor_rollout_ref.rollout.top_k": -1}),
        (["algorithm.sampling_params.top_k=50"], {"actor_rollout_ref.rollout.top_k": 50}),
        (["algorithm.logprob_forward_micro_batch_size=3"], {"critic.forward_micro_batch_size_per_gpu": 3}),
        (["algorithm.rollout_micro_batch_size=3"], {"actor_rollout_ref.rollout.max_num_seqs": 3}),
        (["actor.model.precision=bf16"], {f"{ACTOR}.fsdp_config.dtype": "bfloat16"}),
        (
            ["actor.model.precision=32", "actor.fsdp_config.mixed_precision.param_dtype=bf16"],
            {f"{ACTOR}.fsdp_config.dtype": "bfloat16"},
        ),
        (["critic.optim.lr=1e-4", "critic.lr_sched.min_lr=1e-5"], {"critic.optim.min_lr_ratio": pytest.approx(0.1)}),
        (["runner.resume_dir=null"], {"trainer.resume_mode": "auto"}),
        (["runner.resume_dir=a/b"], {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "a/b"}),
        # RLinf counts the steps that the policy waits, trainer.critic_warmup names the first in which it learns.
        (["algorithm.critic_warmup_steps=3"], {"trainer.critic_warmup": 4}),
        (["algorithm.critic_warmup_steps=0"], {"trainer.critic_warmup": 0}),
        (["algorithm.recompute_logprobs=False"], {"algorithm.rollout_correction.bypass_mode": True}),
        (["algorithm.bootstrap_type=standard"], {"algorithm.bootstrap_truncated": True}),
        (["algorithm.adv_type=raw"], {"algorithm.adv_estimator": "raw"}),
        (
            ["algorithm.adv_type=reinpp", "algorithm.use_reinpp_baseline=True"],
            {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
        ),
        (["algorithm.normalize_advantages=False"], {"algorithm.normalize_advantages": False}),
        (["algorithm.early_stop_imp_ratio=5.0"], {f"{ACTOR}.early_stop_imp_ratio": 5.0}),
        (["algorithm.max_num_gen_batches=1"], {"algorithm.filter_groups.enable": False}),
        (
            ["algorithm.max_num_gen_batches=3"],
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 3},
        ),
        (["reward.reward_scale=5.0"], {"reward_model.reward_scale": 5.0}),
        (
            ["data.answer_key=solutions", "reward.reward_type=math"],
            {"data.answer_key": "solutions", "data.data_source": "math"},
        ),
        (["algorithm.behave_weight_threshold=4.0"], {f"{ACTOR}.policy_loss.behave_weight_threshold": 4.0}),
        (["algorithm.loss_type=decoupled_actor_critic"], {f"{ACTOR}.policy_loss.loss_mode": "decoupled"}),
        ([], {f"{ACTOR}.clip_ratio_c": None, f"{ACTOR}.shuffle": True, f"{ACTOR}.ppo_epochs": 1}),
    ],
)
def test_values_of_text_runs(imported, overrides, native):
    result = imported(TEXT, *overrides)
    assert result.problems == ()
    assert refusals(result) == {}
    assert {key: result.native[key] for key in native} == native


@pytest.mark.parametrize(
    ("overrides", "native"),
    [
        (["runner.max_epochs=100", "runner.max_steps=30"], {"trainer.total_training_steps": 30}),
        (["runner.max_epochs=100", "runner.max_steps=-1"], {"trainer.total_training_steps": 100}),
        # 3 environments, each with 2 rounds of 100 steps: episodes of 50 steps fit twice
        (
            [
                "env.eval.total_num_envs=3",
                "env.eval.rollout_epoch=2",
                "env.eval.max_steps_per_rollout_epoch=100",
                "env.eval.max_episode_steps=50",
            ],
            {"env.eval.num_episodes": 12},
        ),
        (["algorithm.group_size=4"], {"env.train.group_size": 4}),
        (["actor.optim.lr=1e-3", "actor.optim.value_lr=1e-2"], {"critic.optim.lr": 1e-2}),
        (["actor.optim.adam_beta1=0.8"], {f"{ACTOR}.optim.betas": [0.8, 0.999]}),
        (["env.train.auto_reset=False"], {"env.train.auto_reset": False}),
        ([], {f"{ACTOR}.optim.weight_decay": 0.01, "critic.loss_coef": 1.0, "policy.hidden_dim": 256}),
    ],
)
def test_values_of_embodied_runs(imported, overrides, native):
    result = imported(EMBODIED, *overrides)
    assert result.problems == ()
    assert refusals(result) == {}
    assert {key: result.native[key] for key in native} == native


@pytest.mark.parametrize(
    ("text", "override", "says"),
    [
        (TEXT, "algorithm.adv_type=opd", "supported: gae, grpo, reinpp, raw"),
        (TEXT, "algorithm.reward_type=chunk_level", "scores responses"),
        (TEXT, "algorithm.bootstrap_type=always", "no state after the end"),
        (TEXT, "reward.reward_type=vqa", "the data_source of a row chooses its rule"),
        (TEXT, "reward.use_reward_model=True", "not supported yet"),
        (TEXT, "data.type=vision_language", "text prompts"),
        (TEXT, "algorithm.loss_agg_func=mean", "no such aggregation"),
        (TEXT, "critic.use_critic_model=False", "needs values"),
        (TEXT, "runner.seq_length=[1]", "is not a whole number above 0"),
        (TEXT, "algorithm.sampling_params.top_k=many", "many is of the wrong type"),
        (EMBODIED, "algorithm.loss_agg_func=mean", "no such aggregation"),
        (EMBODIED, "algorithm.loss_type=actor", "use one of actor_critic, decoupled_actor_critic"),
        (EMBODIED, "algorithm.kl_beta=0.1", "no reference policy"),
        (EMBODIED, "actor.model.model_type=gr00t", "not supported yet"),
        (
            EMBODIED,
            "actor.model.model_type=cnn_policy",
            "set actor.model.model_type=mlp_policy policy.model_type=cnn_policy",
        ),
        (EMBODIED, "actor.model.precision=bf16", "fp32"),
        (EMBODIED, "env.train.env_type=robotwin", "not carried over"),
        (EMBODIED, "algorithm.adv_type=embodied_sac", "SAC is not available (supported: gae, grpo, raw)"),
        (EMBODIED, "algorithm.loss_type=embodied_sac", "SAC is not available (supported: actor, actor_critic"),
        (EMBODIED, "algorithm.loss_type=embodied_dagger", "DAgger is not available"),
        (EMBODIED, "actor.optim.critic_warmup_steps=10", "set trainer.critic_warmup"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(imported, text, override, says):
    key = override.split("=")[0]
    assert says in refusals(imported(text, override))[key]


def test_a_refusal_says_one_thing(imported):
    """The fix does not contradict itself, and lists each value once."""
    said = {str(problem) for problem in imported(EMBODIED, "env.train.env_type=robotwin").refusals()}
    assert (
        "env.train.env_type: robotwin is refused: what a file says about this simulator is not carried over "
        "(supported: gymnasium, envpool, maniskill, libero, metaworld). give env.train.env_type, id and init_params as "
        "tether's"
    ) in said
    (said,) = imported(EMBODIED, "actor.model.precision=bf16").refusals()
    assert str(said).endswith("in bf16, too. leave it out, or set fp32")


def test_maniskill_with_images_is_refused_for_its_images(imported):
    images = EMBODIED.replace("gymnasium", "maniskill, init_params: {obs_mode: rgb}")
    said = refusals(imported(images))["env.train.env_type"]
    assert said == "maniskill is refused: ManiSkill is carried over with state observations only, not obs_mode=rgb"


def test_episodes_in_groups(imported):
    groups = ["algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=4"]
    result = imported(EMBODIED, *groups, "env.train.auto_reset=False", "algorithm.loss_agg_func=token-mean")
    assert refusals(result) == {}
    assert result.native["algorithm.adv_estimator"] == "grpo"
    assert result.native["env.train.group_size"] == 4
    assert f"{ACTOR}.loss_agg_mode" not in result.native  # RLinf weighs episodes alike, whatever it says
    assert (
        "use one of actor"
        in refusals(imported(EMBODIED, groups[0], "algorithm.loss_type=actor_critic"))["algorithm.loss_type"]
    )


def test_videos_are_those_of_tests(imported):
    folder = "env.eval.video_cfg.video_base_dir=videos"
    assert "env.eval.video_cfg.video_base_dir" not in imported(EMBODIED, folder).native
    native = imported(EMBODIED, folder, "env.eval.video_cfg.save_video=True").native
    assert native["env.eval.video_cfg.save_video"] is True
    assert native["env.eval.video_cfg.video_base_dir"] == "videos"


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("env.train.video_cfg.save_video=True", "recorded of tests only"),
        ("env.eval.use_rel_reward=True", "the simulator's own rewards"),
        ("env.eval.reward_coef=5.0", "the simulator's own rewards"),
    ],
)
def test_what_changes_no_policy_is_noted_and_stops_no_file(imported, key, why):
    result = imported(EMBODIED, key)
    assert refusals(result) == {}
    (said,) = [line.why for line in result.lines if line.key == key.partition("=")[0]]
    assert why in said


def test_only_gae_can_do_without_normalised_advantages(imported):
    result = imported(TEXT, "algorithm.adv_type=raw", "algorithm.normalize_advantages=False")
    assert refusals(result) == {}
    assert "algorithm.normalize_advantages" not in result.native


def test_answers_of_verls_layout_are_found_there(imported):
    assert "data.answer_key" not in imported(TEXT, "data.answer_key=reward_model.ground_truth").native


def test_a_value_head_on_a_language_model_is_refused(imported):
    result = imported(TEXT, "algorithm.loss_type=actor_critic", "critic.use_critic_model=False")
    assert set(refusals(result)) == {"algorithm.loss_type", "critic.use_critic_model"}
    assert refusals(imported(TEXT, "algorithm.loss_type=actor_critic")) == {}


def test_entropy_that_is_not_computed_has_no_weight(imported):
    assert refusals(imported(TEXT, "algorithm.calculate_entropy=False", "algorithm.entropy_bonus=0")) == {}
    off = imported(TEXT, "algorithm.calculate_entropy=False", "algorithm.entropy_bonus=0.01")
    assert "contradicts" in refusals(off)["algorithm.entropy_bonus"]


def test_placement_has_no_effect(imported):
    result = imported(EMBODIED, "cluster.component_placement={actor: 0-3}", "cluster.node_groups=[{label: robots}]")
    assert (result.problems, refusals(result)) == ((), {})
    idle = {line.key for line in result.lines if line.status == "no effect"}
    assert idle >= {"cluster.component_placement", "cluster.node_groups"}


def test_the_task_of_an_environment_is_no_argument_of_it(imported):
    result = imported("env: {train: {init_params: {id: Pendulum-v1, g: 9.8}}}")
    assert result.native["env.train.id"] == "Pendulum-v1"
    assert result.native["env.train.init_params"] == {"g": 9.8}


def test_overrides_in_both_languages(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(EMBODIED)
    loaded = load_config(file, ["runner.max_epochs=3", "policy.init_logstd=-1.0", "env.eval.num_episodes=7"])
    assert loaded.config.trainer.total_training_steps == 3
    assert loaded.sources["trainer.total_training_steps"] == "run.yaml, as runner.max_epochs"
    assert loaded.config.policy.init_logstd == -1.0
    assert loaded.config.env.eval.num_episodes == 7
    with pytest.raises(ConfigError, match="no simulator is named"):
        load_config(file, ["~env.train.id"])


def test_the_saved_config_is_native(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(EMBODIED)
    loaded = load_config(file, [])
    (tmp_path / "saved.yaml").write_text(loaded.to_yaml())
    assert load_config(tmp_path / "saved.yaml", []).config == loaded.config


MANISKILL = """
runner: {task_type: embodied}
env:
  train: {env_type: maniskill, init_params: {id: PickCube-v1, obs_mode: state, control_mode: None}}
  eval: {env_type: maniskill, init_params: {id: PickCube-v1, obs_mode: state, control_mode: None}}
"""


@pytest.mark.parametrize(
    ("setup", "mode"),
    [
        ("panda-qpos", "pd_joint_delta_pos"),
        ("panda-ee-dpos", "pd_ee_delta_pos"),
        ("panda-ee-target-dpos", "pd_ee_target_delta_pose"),
        ("widowx_bridge", "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"),
    ],
)
def test_the_policy_setup_says_how_maniskills_robot_is_controlled(imported, setup, mode):
    result = imported(MANISKILL, f"actor.model.policy_setup={setup}")
    assert refusals(result) == {}
    for role in ("train", "eval"):  # RLinf overwrites what the file says
        assert result.native[f"env.{role}.init_params"] == {"obs_mode": "state", "control_mode": mode}


def test_a_control_mode_that_is_none_never_reaches_the_simulator(imported):
    assert imported(MANISKILL).native["env.train.init_params"] == {"obs_mode": "state"}
    kept = imported(MANISKILL.replace("control_mode: None", "control_mode: pd_joint_pos"))
    assert kept.native["env.train.init_params"]["control_mode"] == "pd_joint_pos"


def test_an_environment_without_arguments_still_gets_its_control_mode(imported):
    bare = "env: {train: {env_type: maniskill, id: PickCube-v1}, eval: {env_type: maniskill, id: PickCube-v1}}"
    native = imported(bare, "actor.model.policy_setup=panda-ee-dpos").native
    assert native["env.train.init_params"] == native["env.eval.init_params"] == {"control_mode": "pd_ee_delta_pos"}


@pytest.mark.parametrize("setup", ["panda", "ur5"])
def test_a_robot_that_maniskill_does_not_have_is_refused(imported, setup):
    result = imported(MANISKILL, f"actor.model.policy_setup={setup}")
    assert "panda-qpos, panda-ee-dpos" in refusals(result)["actor.model.policy_setup"]
    other = imported(EMBODIED, f"actor.model.policy_setup={setup}")  # only ManiSkill reads it
    assert refusals(other) == {}


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (EMBODIED, "env.train.total_num_env", "did you mean env.train.total_num_envs?"),
        (EMBODIED, "env.eval.nonsense_of_mine", "unknown key of RLinf"),
        (TEXT, "data.rollout_batch_siz", "did you mean data.rollout_batch_size?"),
        (TEXT, "reward.reward_typ", "did you mean reward.reward_type?"),
        (TEXT, "algorithm.sampling_params.temperatur", "did you mean algorithm.sampling_params.temperature?"),
        (TEXT, "rollout.sampling_params.temperature_train", "is a key of embodied runs only"),
    ],
)
def test_an_unknown_key_is_not_said_to_be_the_other_kinds(imported, text, key, says):
    tree = OmegaConf.create(text)
    OmegaConf.update(tree, key, 1, force_add=True)
    (problem,) = imported(OmegaConf.to_yaml(tree)).problems
    assert problem.path == key
    assert says in str(problem)


LIBERO = """
runner: {task_type: embodied}
env:
  train: {env_type: libero, task_suite_name: libero_10, num_group: 3, total_num_envs: 8}
  eval: {env_type: libero, task_suite_name: libero_10, total_num_envs: 8}
actor: {model: {model_type: gr00t, gr00t: {noise_level: 0.5}}, global_batch_size: 64}
"""


def test_stages_of_environments_change_no_result(imported):
    result = imported(EMBODIED, "rollout.pipeline_stage_num=2")
    (line,) = (line for line in result.lines if line.key == "rollout.pipeline_stage_num")
    assert line.status == "no effect"
    assert result.problems == ()


def test_keys_of_a_refused_simulator_or_policy_do_not_hide_the_refusal(imported):
    result = imported(LIBERO)
    assert set(refusals(result)) == {"env.train.env_type", "env.eval.env_type", "actor.model.model_type"}
    assert result.problems == ()
    lines = {line.key: line for line in result.lines}
    assert lines["env.train.task_suite_name"].status == "no effect"
    assert lines["env.train.task_suite_name"].why == "belongs to env.train.env_type=libero, which is not supported"
    assert lines["actor.model.gr00t.noise_level"].why.startswith("belongs to actor.model.model_type=gr00t")


def test_another_simulator_leaves_out_what_only_the_old_one_reads(imported):
    mlp = LIBERO.replace("model_type: gr00t, gr00t: {noise_level: 0.5}", "model_type: mlp_policy")
    extra = mlp.replace("num_group: 3", "num_group: 3, omni_config: {env: {fast: true}}, seed: 7")
    other = ("env.train.env_type=gymnasium", "env.eval.env_type=gymnasium", "env.train.id=Pendulum-v1")
    result = imported(extra, *other)
    assert (result.problems, result.refusals()) == ((), [])
    assert set(result.left_out) == {
        "env.train.task_suite_name", "env.train.omni_config", "env.eval.task_suite_name"
    }  # fmt: skip
    assert (result.native["env.train.total_num_envs"], result.native["env.train.seed"]) == (8, 7)


def test_a_simulator_that_is_not_translated_is_set_in_native_keys(imported):
    mlp = LIBERO.replace("model_type: gr00t, gr00t: {noise_level: 0.5}", "model_type: mlp_policy")
    for eval_too in ([], ["env.eval.env_type=libero"]):
        result = imported(mlp, "env.train.env_type=libero", *eval_too, "env.train.id=libero_10/3")
        assert (result.problems, result.refusals()) == ((), [])
        assert {"env.train.env_type", "env.train.task_suite_name", "env.eval.env_type"} <= set(result.left_out)
        assert [item.path for item in result.other_overrides] == [
            "env.train.env_type",
            *(["env.eval.env_type"] if eval_too else []),
        ]
        assert result.native["env.train.id"] == "libero_10/3"


def test_two_names_of_a_run_are_those_of_its_folder_and_of_its_logs(imported):
    names = ["runner.experiment_name=a", "runner.logger.experiment_name=ci", "runner.output_dir=results"]
    result = imported(TEXT, *names)
    assert result.problems == ()
    assert result.native["trainer.experiment_name"] == "ci"
    assert result.native["trainer.default_local_dir"] == "results/a"


def test_a_null_is_no_folder(imported):
    """An interpolation of null is the text None."""
    log_path = "runner.logger.log_path=${runner.output_dir}/${runner.experiment_name}"
    nulls = imported(TEXT, log_path, "runner.output_dir=null", "runner.experiment_name=null")
    assert "trainer.default_local_dir" not in nulls.native
    assert {line.key: line.status for line in nulls.lines}["runner.logger.log_path"] == "no effect"
    named = imported(TEXT, log_path, "runner.output_dir=results", "runner.experiment_name=null")
    assert named.native["trainer.default_local_dir"] == "results"


def test_what_only_other_simulators_or_the_reward_model_read_is_listed(imported):
    result = imported(EMBODIED, "env.eval.use_ordered_reset_state_ids=True", "router_server_args.server.tp_size=1")
    assert (result.problems, result.refusals()) == ((), [])
    why = {line.key: line.why for line in result.lines if line.status == "no effect"}
    assert "start states follow" in why["env.eval.use_ordered_reset_state_ids"]
    assert "reward.use_reward_model" in why["router_server_args.*"]


def test_both_constant_schedules_are_constant(imported):
    for name in ("constant", "torch_constant"):
        assert (
            imported(EMBODIED, f"actor.optim.lr_scheduler={name}").native[f"{ACTOR}.optim.lr_scheduler_type"]
            == "constant"
        )


def test_null_is_false_where_a_key_is_true_or_false(imported):
    flow = EMBODIED.replace("mlp_policy", "openpi, openpi: {config_name: pi0_libero, detach_critic_input: null}")
    assert imported(flow).native["policy.detach_critic_input"] is False


def test_asynchronous_files_are_run_in_turns_with_a_note(imported):
    result = imported(EMBODIED, "algorithm.loss_type=decoupled_actor_critic")
    assert [text.partition(":")[0] for text in result.remarks()] == ["algorithm.loss_type=decoupled_actor_critic"]
    assert imported(EMBODIED).remarks() == []


def test_a_network_has_none_of_the_options_of_large_policies(imported):
    options = "implement_version: official, use_proprio: true, lora_path: a, is_lora: true, vh_mode: a0"
    vla = f"{{model_type: openvla_oft, {options}}}"
    result = imported(EMBODIED.replace("{model_type: mlp_policy}", vla), "actor.model.model_type=mlp_policy")
    assert (result.problems, result.refusals()) == ((), [])
    assert {name.rpartition(".")[2] for name in result.left_out} == {
        "implement_version", "use_proprio", "lora_path", "is_lora", "vh_mode"
    }  # fmt: skip
    assert "actor_rollout_ref.model.lora_rank" not in result.native


def test_another_policy_leaves_out_what_only_the_old_one_reads(imported):
    flow = "{model_type: gr00t, denoising_steps: 4, rl_head_config: {noise_level: 0.5}, num_action_chunks: 5}"
    text = EMBODIED.replace("{model_type: mlp_policy}", flow) + "rollout: {model: {denoising_steps: 4}}\n"
    result = imported(text, "actor.model.model_type=mlp_policy")
    assert (result.problems, result.refusals()) == ((), [])
    assert set(result.left_out) == {
        "actor.model.denoising_steps", "actor.model.rl_head_config", "rollout.model.denoising_steps"
    }  # fmt: skip
    assert result.native["policy.num_action_chunks"] == 5
    given = imported(text, "actor.model.model_type=mlp_policy", "+actor.model.nonsense=1")
    assert [problem.path for problem in given.problems] == ["actor.model.nonsense"]
    mlp = text.replace("gr00t", "mlp_policy")
    assert len(imported(mlp, "actor.model.model_type=mlp_policy").problems) == 3  # it is the file's own


def test_a_file_whose_simulator_is_refused_is_still_an_embodied_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(LIBERO)
    with pytest.raises(ConfigError) as error:
        load_config(file, [])
    paths = [problem.path for problem in error.value.problems]
    assert paths == ["env.train.env_type", "env.eval.env_type", "actor.model.model_type", "env.train.id"]
    assert error.value.problems[-1].what == "missing: no simulator is named"


def test_refusals_are_named_before_unknown_keys(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(EMBODIED + "reward: {use_reward_model: true}\nrollout: {nonsense: 1}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, [])
    assert [problem.path for problem in error.value.problems] == ["reward.use_reward_model", "rollout.nonsense"]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["lr_decay_iters=10"], None),  # RLinf's own default is a constant rate
        (["lr_decay_iters=10", "lr_decay_style=constant"], None),
        (["lr_decay_iters=10", "lr_decay_style=linear"], 10),
        (["lr_decay_iters=10", "lr_decay_style=cosine", "algorithm.n_minibatches=2"], 5),  # 2 optimizer steps a step
        (["lr_decay_iters=10", "lr_decay_style=linear", "algorithm.n_minibatches=4"], "4 optimizer steps"),
        (["lr_decay_iters=10", "lr_decay_style=linear", "lr_warmup_fraction=0.1"], "lr_warmup_iters"),
        (["lr_decay_iters=10", "lr_decay_style=cosine", "runner.max_steps=10"], None),  # the whole run
    ],
)
@pytest.mark.parametrize(("section", "native"), [("actor", "actor_rollout_ref.actor"), ("critic", "critic")])
def test_a_decay_is_counted_in_training_steps(imported, section, native, overrides, steps):
    given = [text if "." in text.split("=")[0] else f"{section}.lr_sched.{text}" for text in overrides]
    result = imported(TEXT, *given)
    assert result.native.get(f"{native}.optim.lr_decay_steps") == (steps if isinstance(steps, int) else None)
    refused = refusals(result)
    if isinstance(steps, str):
        assert steps in refused[f"{section}.lr_sched.lr_decay_iters"]
    else:
        assert refused == {}


@pytest.mark.parametrize("section", ["actor", "critic"])
def test_the_number_format_that_is_refused_is_the_one_that_is_named(imported, section):
    mixed = f"{section}.fsdp_config.mixed_precision.param_dtype"
    result = imported(TEXT, f"{section}.model.precision=fp32", f"{mixed}=fp16")
    assert set(refusals(result)) == {mixed}
    assert imported(TEXT, f"{section}.model.precision=fp16", f"{mixed}=fp32").refusals() == []
    assert imported(TEXT, f"{mixed}=${{torch.dtype:bfloat16}}").refusals() == []
    assert imported(TEXT, f"{section}.model.precision='null'").refusals() == []


def test_a_wrong_number_is_refused_once(imported):
    assert set(refusals(imported(TEXT, "algorithm.n_minibatches=2", "data.rollout_batch_size=-4"))) == {
        "data.rollout_batch_size"
    }
    assert set(refusals(imported(EMBODIED, "runner.max_epochs=3", "runner.max_steps=many"))) == {"runner.max_steps"}


@pytest.mark.parametrize(
    ("text", "overrides", "native"),
    [
        # RLinf's environments read their own key; algorithm.reward_coef is where recipes interpolate it from.
        (EMBODIED, ["algorithm.reward_coef=5.0", "env.train.reward_coef=1.0"], {"env.train.reward_coef": 1.0}),
        (EMBODIED, ["algorithm.reward_coef=5.0"], {}),
        (EMBODIED, ["algorithm.rollout_epoch=4", "env.train.rollout_epoch=1"], {"env.train.rollout_epoch": 1}),
        (EMBODIED, ["algorithm.rollout_epoch=4"], {"env.train.rollout_epoch": 4}),
        (
            TEXT,
            ["actor.model.recompute_granularity=null", "actor.fsdp_config.gradient_checkpointing=True"],
            {"actor_rollout_ref.model.enable_gradient_checkpointing": True},
        ),
        (
            TEXT,
            ["critic.model.recompute_granularity=full", "critic.fsdp_config.gradient_checkpointing=False"],
            {"critic.model.enable_gradient_checkpointing": True},
        ),
        (
            TEXT,
            ["algorithm.recompute_logprobs=False", "algorithm.importance_sampling_fix=True"],
            {"algorithm.rollout_correction.bypass_mode": False, "algorithm.rollout_correction.rollout_is": "token"},
        ),
        (
            TEXT,
            ["rollout.model.model_path=models/qwen/", "actor.model.model_path=models/qwen"],
            {"actor_rollout_ref.model.path": "models/qwen"},
        ),
        (
            TEXT,
            ["runner.output_dir=results/", "runner.experiment_name=a"],
            {"trainer.default_local_dir": "results/a"},
        ),
    ],
)
def test_keys_that_agree_are_no_conflict(imported, text, overrides, native):
    result = imported(text, *overrides)
    assert result.problems == ()
    assert refusals(result) == {}
    assert {key: result.native.get(key) for key in native} == native
    if not native:
        assert "env.train.reward_coef" not in result.native


def policy_keys(imported):
    return {key for key in imported.native if key.startswith("policy.")}


@pytest.mark.parametrize(
    "model",
    ["{model_type: openvla_oft}", "{model_type: openpi, openpi: {config_name: pi0_libero}}", "{model_type: gr00t}"],
)
def test_facts_of_the_mlp_are_not_those_of_another_policy(imported, model):
    text = f"runner: {{task_type: embodied}}\nactor: {{model: {model}}}\ncritic: {{use_critic_model: false}}"
    of_policy = {"policy.model_type", "policy.num_steps", "policy.relative_actions", "policy.normalize_rewards"}
    assert policy_keys(imported(text)) <= of_policy
    mlp = imported("runner: {task_type: embodied}\nactor: {model: {model_type: mlp_policy}}")
    assert {"policy.num_layers", "policy.hidden_dim", "policy.activation", "policy.share_critic"} <= policy_keys(mlp)


def test_an_unknown_key_may_be_taken_out(imported):
    """By an override, as in Hydra; those of sections that native files have, too."""
    text = EMBODIED + "algorithm: {gama: 0.9, gamma: 0.8, nonsense: 1}\nrollout: {nonsense: 1}\nreward: {old: {a: 1}}"
    problems = {problem.path: str(problem) for problem in imported(text).problems}
    assert "did you mean algorithm.gamma? or take it out: ~algorithm.gama" in problems["algorithm.gama"]
    assert "~rollout.nonsense" in problems["rollout.nonsense"]
    taken_out = imported(text, "~algorithm.gama", "~algorithm.nonsense", "~rollout.nonsense", "~reward.old")
    assert (taken_out.problems, taken_out.other_overrides, taken_out.native["algorithm.gamma"]) == ((), (), 0.8)
    (left,) = imported(text, "~algorithm.lam").other_overrides
    assert left.path == "algorithm.lam"

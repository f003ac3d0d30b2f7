"""Keys that RLinf's sources read, by their fate: acts, no effect here, or refused by name; none is unknown."""

import pytest
import yaml

from tether.integrations.rlinf.report import to_native_yaml

EMBODIED = """
runner: {task_type: embodied, max_epochs: 100}
env: {train: {env_type: gymnasium, id: Pendulum-v1, total_num_envs: 8}}
algorithm: {adv_type: gae, loss_type: actor_critic, entropy_bonus: 0}
actor: {model: {model_type: mlp_policy}, optim: {lr: 1e-3}}
"""
TEXT = """
runner: {task_type: reasoning}
data: {type: math, rollout_batch_size: 8}
algorithm: {adv_type: grpo, loss_type: actor, group_size: 2, n_minibatches: 2}
rollout: {model: {model_path: model}}
actor: {training_backend: megatron, optim: {lr: 1e-3}}
reward: {reward_type: math}
critic: {use_critic_model: false}
"""
ACTOR = "actor_rollout_ref.actor"


def fates(result):
    assert result.problems == ()
    return {line.key: line.status for line in result.lines}


def refused(result):
    return {problem.path: problem.what for problem in result.refusals()}


WITHOUT_EFFECT_IN_SIMULATORS = (
    "env.data_collection.enabled=True",
    "env.data_collection.save_dir=data",
    "env.train.enable_init_offload=True",
    "env.train.wm_env_type=libero",
    "env.train.override_cfg.step_frequency=10",
    "env.train.override_cfgs=[1,2]",
    "actor.openpi_data.repo_id=owner/set",
    "actor.offline_torch_compile=True",
    "actor.enable_drq=True",
    "actor.model.iql_config.hidden_dims=[256]",
    "actor.model.load_to_device=False",
    "algorithm.dagger.init_beta=1.0",
    "algorithm.actor_agg_q=min",
    "rollout.sync_weight_nccl_min_ctas=1",
    "runner.logger.wandb_entity=team",
    "runner.rtc.min_exec_horizon=2",
    "runner.stop_eval_on_keyboard_success=False",
    "env.train.chunk_pause_seconds=0.4",
    "env.train.main_image_key=wrist_1",
    "env.train.no_gripper=False",
    "env.train.use_spacemouse=False",
    "actor.model.image_num=2",
    "actor.model.rewrite_chunk_gripper=True",
    "actor.model.openpi.rtc_guidance_clip=5.0",
    "rollout.model.openpi.rtc_enabled=True",
    "rollout.model.num_action_chunks=5",
    "profile_data.actor_cost=95.7",
)


def test_keys_without_effect_in_embodied_runs(imported):
    plain = imported(EMBODIED).native
    for override in WITHOUT_EFFECT_IN_SIMULATORS:
        result = imported(EMBODIED, override)
        key = override.split("=")[0]
        found = {name: fate for name, fate in fates(result).items() if key.startswith(name.removesuffix("*"))}
        assert set(found.values()) == {"no effect"}, override
        assert result.native == plain, override


def test_chunks_that_are_replanned_and_copies_of_keys_that_there_are_not(imported):
    assert refused(imported(EMBODIED, "runner.rtc.enabled=False")) == {}
    assert "replanned" in refused(imported(EMBODIED, "runner.rtc.enabled=True"))["runner.rtc.enabled"]
    (problem,) = imported(EMBODIED, "rollout.model.num_action_chunk=5").problems
    assert str(problem).startswith("rollout.model.num_action_chunk: unknown key of RLinf. did you mean rollout.model.")


def test_null_loggers_print(imported):
    assert imported(EMBODIED, "runner.logger.logger_backends=null").native["trainer.logger"] == ["console"]


WITHOUT_EFFECT_IN_TEXT = (
    "actor.model.init_method_std=0.008",
    "actor.model.moe_grouped_gemm=te",
    "actor.model.moe_router_pre_softmax=False",
    "actor.model.multi_latent_attention=False",
    "actor.model.mcore_customization_config={}",
    "actor.model.tp_comm_overlap=False",
    "actor.lr_sched.start_weight_decay=null",
    "actor.global_batch_size=2",
    "algorithm.clip_log_ratio_max=20",
    "algorithm.clip_log_ratio_min=-20.0",
    "actor.optim.initial_loss_scale=65536",
    "actor.optim.hysteresis=2",
    "actor.optim.loss_scale_window=1000",
    "actor.use_triton=True",
    "cluster.monitor_interval=1",
    "profile_data.rollout_cost=59.9",
    "cluster.use_pre_process_policy=True",
    "data.choice_key=choices",
    "data.image_keys=[image]",
    "data.process_workers=4",
    "data.use_chat_template=True",
    "data.data_size=-1",
    "data.type=reasoning",
    "reward.reward_weights.qa_accuracy=1.0",
    "reward.max_workers=4",
    "reward.enable_offload=True",
    "reward.use_prompt=False",
    "rollout.is_eval=False",
    "rollout.seed=1234",
    "runner.logger.swanlab_mode=cloud",
)


def test_keys_and_values_that_change_nothing_in_text_runs(imported):
    plain = imported(TEXT).native
    for override in WITHOUT_EFFECT_IN_TEXT:
        result = imported(TEXT, override)
        assert (result.problems, refused(result), result.native) == ((), {}, plain), override


REFUSED_IN_TEXT = [
    ("actor.model.moe_input_jitter_eps=0.1", "at random"),
    ("actor.model.moe_token_dropping=True", "leave no token out"),
    ("actor.model.moe_router_load_balancing_type=sinkhorn", "none, aux_loss"),
    ("actor.model.moe_router_enable_expert_bias=True", "config.json"),
    ("actor.model.fp8=True", "bf16 and fp32"),
    ("actor.model.freeze_language_model=True", "all weights are trained"),
    ("actor.pretrained_checkpoint=folder", "megatron_checkpoint"),
    ("algorithm.loss_type=drpo", "no counterpart"),
    ("data.prepend_prompt=Think", "those of the rows"),
    ("reward.reward_min_val=0.0", "1 and -1 times reward_scale"),
    ("reward.reward_max_val=2.0", "1 and -1 times reward_scale"),
    ("reward.use_prompt=True", "not the prompt"),
    ("rollout.is_eval=True", "tether eval"),
]


def test_what_would_change_a_text_run_is_refused_by_name(imported):
    for override, says in REFUSED_IN_TEXT:
        result = imported(TEXT, override)
        assert result.problems == (), override
        assert says in refused(result).get(override.split("=")[0], ""), override


BALANCE, OF_LOGITS, KIND = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({BALANCE: 0.01}, {BALANCE: 0.01, KIND: "aux_loss"}),
        ({BALANCE: 0.01, KIND: "seq_aux_loss"}, {BALANCE: 0.01, KIND: "seq_aux_loss"}),
        ({BALANCE: 0.01, KIND: "none"}, None),
        ({BALANCE: 0.0, KIND: "aux_loss"}, None),
        ({OF_LOGITS: 0.001, KIND: "none"}, {OF_LOGITS: 0.001}),
        ({BALANCE: 0.01, OF_LOGITS: 0.001}, {BALANCE: 0.01, KIND: "aux_loss", OF_LOGITS: 0.001}),
        ({OF_LOGITS: "null"}, None),
    ],
)
def test_losses_of_routers_are_those_of_megatron(imported, given, wanted):
    def losses(backend):
        values = [f"actor.model.{name}={value}" for name, value in given.items()]
        result = imported(TEXT, f"actor.training_backend={backend}", *values)
        assert (result.problems, refused(result)) == ((), {})
        written = yaml.safe_load(to_native_yaml(result))["actor_rollout_ref"]["actor"]
        return written.get("megatron", {}).get("override_transformer_config")

    assert losses("megatron") == wanted
    assert losses("fsdp") is None


@pytest.mark.parametrize(("given", "wanted"), [((), {}), ((f"critic.model.{OF_LOGITS}=0.1",), {OF_LOGITS: 0.1})])
def test_losses_of_the_actors_routers_are_not_the_critics(imported, given, wanted):
    text = TEXT.replace("use_critic_model: false", "use_critic_model: true")
    native = imported(text, f"actor.model.{BALANCE}=0.01", *given).native
    assert native["critic.megatron.override_transformer_config"] == wanted


def test_keys_of_another_rule_are_left_to_its_refusal(imported):
    scored = TEXT.replace("reward_type: math", "reward_type: math, format_score: 0.2")
    result = imported(scored, "reward.reward_type=searchr1")
    assert result.problems == ()
    assert set(refused(result)) == {"reward.reward_type"}
    (problem,) = imported(scored).problems
    assert problem.path == "reward.format_score"


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ("reward_scale: 5.0", 5.0),
        ("reward_max_val: 1.0, reward_min_val: -1.0", None),
        ("reward_max_val: 2.0, reward_min_val: -2.0", 2.0),
        ("reward_max_val: 2.0, reward_min_val: -2.0, reward_scale: 5.0", 10.0),
        ("reward_max_val: 0.5, reward_min_val: -0.5, reward_scale: null", 0.5),
    ],
)
def test_what_answers_are_worth(imported, values, scale):
    result = imported(TEXT.replace("reward_type: math", f"reward_type: math, {values}"))
    assert refused(result) == {}
    assert result.native.get("reward_model.reward_scale") == scale


def test_sizes_of_a_step_are_those_that_rlinf_computes(imported):
    sizes = ("actor.micro_batch_size=1", "actor.global_batch_size=8")
    result = imported(TEXT, *sizes, "algorithm.training_batch_size_per_gpu=4")
    assert {fates(result)[size.split("=")[0]] for size in sizes} == {"no effect"}
    assert result.native[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == 4
    assert result.native[f"{ACTOR}.ppo_mini_batch_size"] == 4  # 8 prompts in 2 steps
    assert imported(TEXT, sizes[0]).native[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == 1


def test_the_first_rows_of_a_file(imported):
    native = imported(TEXT, "data.data_size=100").native
    assert (native["data.train_max_samples"], native["data.val_max_samples"]) == (100, 100)


INIT = "lr_warmup_init"
RISE = {"lr_warmup_steps_ratio": 0.285, "total_training_steps": 662}  # 188 steps of the optimizer


@pytest.mark.parametrize(
    ("given", "more", "wanted"),
    [
        (RISE, (), {"lr_warmup_steps": 94}),  # two steps of the optimizer in a training step
        (RISE, ("+actor.lr_sched_sync_with_optim=False",), {"lr_warmup_steps": 188}),
        ({"lr_warmup_steps_ratio": 0.1}, (), {}),  # a share of no steps
        ({"lr_warmup_steps": 10, **RISE}, (), {"lr_warmup_steps": 5}),
        (
            {"lr_scheduler": "cosine", "total_training_steps": 40, "min_lr": 1e-4, "num_cycles": 0.5},
            (),
            {"lr_scheduler_type": "cosine", "lr_decay_steps": 20, "min_lr_ratio": 0.1, "num_cycles": 0.5},
        ),
        (
            {"lr_scheduler": "cosine", "min_lr": 1e-4, "min_lr_rate": 0.2},
            (),
            {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.2},
        ),
        (
            {"lr_scheduler": "cosine", "total_training_steps": 40},
            ("runner.max_steps=20",),  # the whole run
            {"lr_scheduler_type": "cosine"},
        ),
        ({"lr_scheduler": "constant", "min_lr": 1e-4, "num_cycles": 1}, (), {"lr_scheduler_type": "constant"}),
    ],
)
def test_fsdp_reads_the_schedule_of_optim(imported, given, more, wanted):
    def schedule(backend):
        optim = [f"+actor.optim.{key}={value}" for key, value in given.items()]
        sched = [
            f"+actor.lr_sched.{text}"
            for text in ("lr_warmup_fraction=0.5", "lr_warmup_init=1e-5", "lr_decay_style=linear")
        ]
        result = imported(TEXT, f"actor.training_backend={backend}", *optim, *sched, *more)
        assert (refused(result), fates(result)["actor.lr_sched.lr_warmup_init"] == "no effect") == (
            {},
            backend == "fsdp",
        )
        section = f"{ACTOR}.optim."
        return {key.removeprefix(section): value for key, value in result.native.items() if key.startswith(section)}

    assert schedule("fsdp") == pytest.approx({"lr": 1e-3, **wanted})
    assert schedule("megatron")["lr_warmup_steps_ratio"] == 0.5
    assert schedule("megatron")["lr_scheduler_type"] == "linear"


def test_parts_of_a_training_step_are_no_steps_of_the_schedule(imported):
    odd = ("actor.training_backend=fsdp", "+actor.optim.lr_warmup_steps=3")
    assert "2 optimizer steps" in refused(imported(TEXT, *odd))["actor.optim.lr_warmup_steps"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"lr_warmup_steps_ratio": 0.1, "total_training_steps": 50}, {"lr_warmup_steps": 5}),
        ({"lr_warmup_steps_ratio": 0.1}, {}),  # RLinf takes it of no steps
        ({"lr_warmup_steps": -1}, {}),
        ({"lr_scheduler": "cosine", "min_lr_rate": 0.2}, {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.2}),
    ],
)
def test_the_schedule_of_embodied_runs(imported, given, wanted):
    result = imported(EMBODIED, *(f"+actor.optim.{key}={value}" for key, value in given.items()))
    assert refused(result) == {}
    names = ("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio", "lr_decay_steps", "min_lr_ratio")
    found = {name: result.native[key] for name in names if (key := f"{ACTOR}.optim.{name}") in result.native}
    assert found == {"lr_scheduler_type": "constant", **wanted}


@pytest.mark.parametrize(
    ("text", "names", "wanted"),
    [
        (EMBODIED, ("embodied_gae", "embodied_ppo"), "gae"),
        (EMBODIED, ("ppo", "ppo"), "gae"),  # the first release's
        (EMBODIED, ("embodied_grpo", "embodied_grpo"), "grpo"),
        (EMBODIED, ("grpo", "grpo"), "grpo"),
        (TEXT, ("grpo", "ppo"), "grpo"),
        (TEXT, ("math_grpo", "math_ppo_actor"), "grpo"),
    ],
)
def test_older_names_of_estimators_and_losses(imported, text, names, wanted):
    result = imported(text, f"algorithm.adv_type={names[0]}", f"algorithm.loss_type={names[1]}")
    assert (result.problems, refused(result)) == ((), {})
    assert result.native["algorithm.adv_estimator"] == wanted
    assert result.native[f"{ACTOR}.policy_loss.loss_mode"] == "vanilla"


@pytest.mark.parametrize("text", [EMBODIED, TEXT])
def test_a_refusal_lists_the_names_of_today(imported, text):
    why = refused(imported(text, "algorithm.adv_type=math_gae_no_critic"))["algorithm.adv_type"]
    assert "gae, grpo" in why
    assert "embodied_" not in why
    assert "math_grpo" not in why


def test_the_first_releases_text_runs_had_no_estimator_of_that_name(imported):
    assert "no counterpart" in refused(imported(TEXT, "algorithm.adv_type=ppo"))["algorithm.adv_type"]


def test_math_is_the_older_name_of_reasoning(imported):
    for older in ("runner.task_type=math", "algorithm.loss_type=grpo"):  # names of that time
        result = imported(TEXT, older)
        assert (result.problems, refused(result)) == ((), {})
        assert result.native == imported(TEXT).native


TOKENS = EMBODIED.replace("mlp_policy", "openvla")


DRAWN = [
    ("temperature_train", 1.6, 1.6),
    ("temperature", 0.8, 0.8),
    ("do_sample", True, None),
    ("do_sample", False, "sampled in training"),
    ("use_greedy", True, "sampled in training"),
    ("temperature_eval", 0.0, None),
    ("temperature_eval", 0.6, "likeliest"),
    ("top_k", 0, None),
    ("top_k", 256, None),  # as many as there are
    ("top_k", 50, "from all values"),
    ("top_p", 1.0, None),
    ("top_p", 0.9, "from all values"),
    ("repetition_penalty", 1.2, None),
]


@pytest.mark.parametrize("section", ["rollout.sampling_params", "algorithm.sampling_params"])
def test_how_actions_are_drawn(imported, section):
    for name, value, outcome in DRAWN:
        key = f"{section}.{name}"
        result = imported(TOKENS, f"+{key}={value}")
        assert result.problems == ()
        if isinstance(outcome, str):
            assert outcome in refused(result).get(key, ""), (key, value)
        else:
            assert (refused(result), result.native.get("policy.temperature")) == ({}, outcome), (key, value)
        other = imported(EMBODIED, f"+{key}={value}")  # a policy that draws no tokens
        assert (refused(other), fates(other)[key]) == ({}, "no effect"), (key, value)


def test_the_older_section_gives_way(imported):
    result = imported(TOKENS, "+algorithm.sampling_params.top_k=50", "+rollout.sampling_params.temperature_train=1.5")
    assert refused(result) == {}
    assert result.native["policy.temperature"] == 1.5

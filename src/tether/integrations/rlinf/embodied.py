"""Rows of embodied runs (`runner.task_type: embodied`): control policies in simulators, with a separate critic.

The conversion functions return the value of the native key, or UNSET.
"""

from __future__ import annotations

from collections.abc import Mapping

from tether.control.policies.config import VLA_TYPES
from tether.integrations.rlinf import robot_simulators
from tether.integrations.rlinf.older_names import OLDER_EMBODIED
from tether.integrations.rlinf.openpi import OPENPI, OPENPI_ROWS, WITH_RTC, flow_type
from tether.integrations.rlinf.other_runs import ONLY_EMBODIED, OTHERS
from tether.integrations.rlinf.robot_simulators import (
    WRAPPED,
    carried_over,
    check_policy,
    fixed_starts,
    ordered_starts,
    suite_id,
    wrapped_arguments,
)
from tether.integrations.rlinf.rows import (
    LOSSES,
    NO_PRECISION,
    PRECISIONS,
    UNSET,
    Convert,
    Mapped,
    NoEffect,
    Refused,
    Table,
    Unsupported,
    Values,
    adapter_rank,
    betas,
    choice,
    only,
    path,
    positive_int,
    to,
)
from tether.integrations.rlinf.sampling import OLDER, TODAY, sampling
from tether.integrations.rlinf.schedule import fsdp_schedule
from tether.integrations.rlinf.shared import ACTOR, MEMORY, NAME, SHARDS, SHARED
from tether.types import JsonObject

OPTIM = "actor.optim"
NATIVE_OPTIM = f"{ACTOR}.optim"
FP32 = (*(name for name, dtype in PRECISIONS.items() if dtype == "float32"), *NO_PRECISION)
ESTIMATORS = {"gae": "gae", "grpo": "grpo", "raw": "raw"}
OTHER_ALGORITHMS = {"embodied_sac": "SAC", "embodied_dagger": "DAgger", "embodied_nft": "NFT", "offline_iql": "IQL"}
"""Value of `algorithm.adv_type` or `algorithm.loss_type` -> the algorithm, which tether does not have."""
IN_FP32 = "leave it out, or set fp32"
FROM_SPACES = NoEffect("the environment's spaces say so")
SIMULATOR = NoEffect("read by the simulator of that name only")
TEXT_ONLY = NoEffect("a key of policies that write text, which this one does not")
SPEED = NoEffect("changes speed, and no result")
UNSHAPED = NoEffect("returns of tests are sums of the simulator's own rewards, here")
QUEUES = NoEffect("a queue between processes, of which there is one")
START = "actor_rollout_ref.model.path"
MANISKILL = "maniskill"
ROBOT = "actor.model.policy_setup"
CONTROL_MODES = {
    "panda-qpos": "pd_joint_delta_pos",
    "panda-ee-dpos": "pd_ee_delta_pos",
    "panda-ee-target-dpos": "pd_ee_target_delta_pose",
    "widowx": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",
}
"""Robot in `actor.model.policy_setup` -> control_mode of ManiSkill's environments, which overrides the file's."""
WITHOUT_CAMERAS = {"PickCube3View-v1": "PickCube-v1"}
"""RLinf's task that adds cameras to a task of ManiSkill -> ManiSkill's task, which has the same states."""
OF_PICTURES = ("obs_mode", "sensor_configs")
"""ManiSkill's arguments about images in observations."""
NO_SIMULATOR = "what a file says about this simulator is not carried over"


def training_steps(value: object, values: Values) -> object:
    """Return the training steps: the epochs, which have one step each, limited by `max_steps` unless it is negative."""
    limits = []
    for key in ("runner.max_epochs", "runner.max_steps"):
        steps = values.get(key, -1)
        if type(steps) is not int:
            raise Unsupported("it is not a whole number", key)
        limits += [steps] if steps >= 0 else []
    return min(limits, default=UNSET)


def env_id(role: str) -> Convert:
    """Return the conversion to the task, which may be in `id`, `gym_id`, `init_params.id` or the name of a suite."""

    def convert(value: object, values: Values) -> object:
        section = f"env.{role}"
        in_arguments = _arguments(values.get(f"{section}.init_params")).get("id")
        named = (values.get(f"{section}.id"), values.get(f"{section}.gym_id"), in_arguments, suite_id(role, values))
        name = next((name for name in named if name is not None), UNSET)
        return WITHOUT_CAMERAS.get(name, name) if isinstance(name, str) else name

    return convert


def _arguments(written: object) -> JsonObject:
    """Return a copy of the constructor's arguments; empty if the value is no mapping, which its own row refuses."""
    return dict(written) if isinstance(written, dict) else {}


def env_arguments(role: str) -> Convert:
    """Return the conversion of the constructor's arguments, without the task and arguments that tether itself sets."""

    def convert(value: object, values: Values) -> object:
        init_params = values.get(f"env.{role}.init_params")
        arguments = _arguments(values.get("env.train.init_params") if init_params is None else init_params)
        if init_params is not None and not isinstance(init_params, dict):
            why = "arguments of an environment are a section, as {id: Pendulum-v1}"
            raise Unsupported(why, f"env.{role}.init_params")
        arguments.pop("id", None)
        if carried_over(values, role):
            return wrapped_arguments(role, values)
        if values.get(f"env.{role}.env_type") == MANISKILL:
            if _shows_state(role, values):
                arguments = {name: value for name, value in arguments.items() if name not in OF_PICTURES}
                arguments["obs_mode"] = "state"
            for name in ("num_envs", "render_mode"):
                arguments.pop(name, None)
            mode = _control_mode(values.get(ROBOT)) or arguments.pop("control_mode", None)
            arguments |= {} if mode in (None, "None") else {"control_mode": mode}
        return arguments

    return convert


def _control_mode(robot: object) -> str | None:
    if robot in CONTROL_MODES:
        return CONTROL_MODES[robot]
    return CONTROL_MODES["widowx"] if "widowx" in str(robot) else None


def robot_arguments(role: str) -> Convert:
    """Return the conversion of the robot to constructor arguments, for ManiSkill, the only simulator that reads it."""

    def convert(value: object, values: Values) -> object:
        if values.get(f"env.{role}.env_type") != MANISKILL or value in (None, ""):
            return UNSET
        if _control_mode(value) is None:
            raise Unsupported(f"ManiSkill has no such robot (supported: {', '.join(CONTROL_MODES)})")
        return env_arguments(role)(value, values)

    return convert


def env_type(role: str) -> Convert:
    """Return the conversion of the simulator; ManiSkill is supported with observations of the state only."""

    def convert(value: object, values: Values) -> object:
        if value in WRAPPED:
            check_policy(values, role)
            return value
        observed = _arguments(values.get(f"env.{role}.init_params")).get("obs_mode", "state")
        fine = ("gymnasium", "envpool", MANISKILL, *WRAPPED)
        fix = f"give env.{role}.env_type, id and init_params as tether's"
        if value not in fine:
            raise Unsupported(f"{NO_SIMULATOR} (supported: {', '.join(fine)})", fix=fix)
        if value == MANISKILL and observed != "state" and not _shows_state(role, values):
            why = f"ManiSkill is carried over with state observations only, not obs_mode={observed}"
            raise Unsupported(why, fix=fix)
        return value

    return convert


def _shows_state(role: str, values: Values) -> bool:
    """Whether ManiSkill renders images that the policy does not read, because it gets the state in addition."""
    section = f"env.{role}"
    observed = _arguments(values.get(f"{section}.init_params")).get("obs_mode")
    reads_state = values.get(f"{section}.wrap_obs_mode") == "simple" and values.get(f"{section}.use_full_state") is True
    return observed == "rgb" and reads_state and is_mlp(values)


def episodes(value: object, values: Values) -> object:
    """Return the episodes per evaluation: as many as fit into RLinf's steps per environment, and at least one each."""
    envs = positive_int(values, "env.eval.total_num_envs", None)
    if envs is None:
        return UNSET
    rounds = positive_int(values, "env.eval.rollout_epoch", positive_int(values, "algorithm.eval_rollout_epoch", 1))
    steps = positive_int(values, "env.eval.max_steps_per_rollout_epoch", None)
    length = positive_int(values, "env.eval.max_episode_steps", None)
    return envs * rounds * max(1, (steps // length) if steps and length else 1)


def critic_warmup(value: int | None, values: Values) -> object:
    """Return the first training step that updates the policy; RLinf counts the critic's optimizer steps before it."""
    if not value:
        return 0
    envs = positive_int(values, "env.train.total_num_envs", 0) * positive_int(values, "env.train.rollout_epoch", 1)
    steps = positive_int(values, "env.train.max_steps_per_rollout_epoch", 0)
    decisions = envs * steps // positive_int(values, "actor.model.num_action_chunks", 1)
    batch = positive_int(values, "actor.global_batch_size", 1)
    updates = decisions // batch * positive_int(values, "algorithm.update_epoch", 1)
    if not updates or decisions % batch or value % updates:
        raise Unsupported(
            f"it counts optimizer steps, of which a training step has {decisions / batch:g} an epoch; set "
            "trainer.critic_warmup, which counts training steps"
        )
    return value // updates + 1


def estimator(value: object, values: Values) -> object:
    """Return the advantage estimator."""
    named = OTHER_ALGORITHMS.get(str(value))
    why = f"{named} is not available" if named else "this estimator is not for embodied runs"
    return choice(ESTIMATORS, why)(value, values)


def loss(value: object, values: Values) -> object:
    """Return the policy loss; the estimator determines whether there is also a critic."""
    if str(value) in OTHER_ALGORITHMS:
        raise Unsupported(f"{OTHER_ALGORITHMS[str(value)]} is not available (supported: {', '.join(LOSSES)})")
    with_critic = values.get("algorithm.adv_type", "gae") == "gae"
    if value not in LOSSES or with_critic == (value == "actor"):
        fitting = [name for name in LOSSES if with_critic != (name == "actor")]
        raise Unsupported(f"with this algorithm.adv_type use one of {', '.join(fitting)}")
    return LOSSES[value]


def aggregation(value: object, values: Values) -> object:
    """Return the aggregation; without auto_reset RLinf ignores it and weighs episodes equally, as tether's default."""
    if value not in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        raise Unsupported("no such aggregation")
    return UNSET if values.get("env.train.auto_reset") is False else value


def start(value: object, values: Values) -> object:
    """Return the checkpoint from which a run starts; it must be tether's, where RLinf reads one of its own models."""
    return path(value, values) or UNSET


def asynchronous(value: int | None, values: Values) -> object:
    """Return the async mode for the key of RLinf's asynchronous runs; with 0, sampling and training alternate."""
    if value and values.get("env.train.auto_reset", True):
        raise Unsupported("rollouts that are sampled meanwhile begin their own episodes (env.train.auto_reset: False)")
    return "fully_async" if value else "off"


def max_staleness(value: int | None, values: Values) -> object:
    """Return the maximum number of updates between the policy that acts and the one that is trained."""
    return value or UNSET


def rollout_epoch(value: object, values: Values) -> object:
    """Return the value unless `env.train.rollout_epoch`, which takes precedence, is in the file."""
    return UNSET if "env.train.rollout_epoch" in values else value


def is_mlp(values: Values) -> bool:
    """Whether the policy is RLinf's MLP."""
    return values.get("actor.model.model_type") == "mlp_policy"


def policy_type(value: object, values: Values) -> object:
    """Return the type of the policy; RLinf's CNN is refused, because it differs from tether's."""
    if value == "cnn_policy":
        raise Unsupported(
            "in RLinf it is a pretrained ResNet that is not trained; for a CNN that is, set "
            "actor.model.model_type=mlp_policy policy.model_type=cnn_policy"
        )
    if value == OPENPI:
        return flow_type(values)
    return only(("mlp_policy", *VLA_TYPES), "this policy is not supported yet")(value, values)


def of_vla(value: object, values: Values) -> object:
    """Return the value for VLA policies; policies of other types do not read the key."""
    is_read = values.get("actor.model.model_type") in VLA_TYPES and value not in (None, False)
    return value if is_read else UNSET


def without_numbers(value: object, values: Values) -> object:
    """Refuse a VLA policy that reads numbers: only the official OpenVLA-OFT has a network for them, in its files."""
    if value and values.get("actor.model.model_type") in VLA_TYPES:
        raise Unsupported("published policies read no numbers of an observation")
    return UNSET


def compute_format(value: object, values: Values) -> object:
    """Return the dtype, which only policies with action tokens can choose."""
    if value in FP32:
        return UNSET
    if PRECISIONS.get(value) == "bfloat16" and values.get("actor.model.model_type") in VLA_TYPES:
        return "bfloat16"
    raise Unsupported("control policies compute in fp32, and OpenVLA and OpenVLA-OFT in bf16, too", fix=IN_FP32)


def acting_format(value: object, values: Values) -> object:
    """Return the dtype of the policy that acts, which must be that of training, because it is the same policy."""
    learning = (values.get("actor.model.precision"), values.get("actor.fsdp_config.mixed_precision.param_dtype"))
    found = compute_format(value, values)
    if found == "bfloat16" and not any(PRECISIONS.get(other) == found for other in learning):
        raise Unsupported("the policy that acts is the one that learns, in fp32", fix=IN_FP32)
    return found


def attention(value: object, values: Values) -> object:
    """Refuse sdpa for OpenVLA-OFT, whose fork of transformers makes attention bidirectional with sdpa only."""
    if value == "sdpa" and values.get("actor.model.model_type") == "openvla_oft":
        raise Unsupported("with sdpa RLinf's OpenVLA-OFT looks ahead; here it does not, as with flash_attention_2")
    return UNSET


def where_recorded(value: object, values: Values) -> object:
    """Return the value if videos are enabled; RLinf's presets have these keys even if they are not."""
    return value if values.get("env.eval.video_cfg.save_video") else UNSET


def _env(role: str) -> Table:
    """Rows of `env.train` or `env.eval`."""
    section = f"env.{role}"
    names = to(f"{section}.id", by=env_id(role))
    return {
        f"{section}.id": names,
        f"{section}.gym_id": names,
        f"{section}.init_params": Mapped(
            {f"{section}.id": env_id(role), f"{section}.init_params": env_arguments(role)}
        ),
        f"{section}.env_type": to(f"{section}.env_type", by=env_type(role)),
        f"{section}.max_episode_steps": to(f"{section}.max_episode_steps"),
        f"{section}.ignore_terminations": to(f"{section}.ignore_terminations"),
        f"{section}.seed": to(f"{section}.seed"),
        f"{section}.is_eval": NoEffect("the section says so"),
        f"{section}.enable_offload": MEMORY,
        f"{section}.enable_init_offload": MEMORY,
        f"{section}.reward_mode": Refused(
            "rewards are taken as the simulator gives them", fine=("raw", "default", None)
        ),
        f"{section}.reward_render_mode": SIMULATOR,
        f"{section}.use_ordered_reset_state_ids": NoEffect("start states follow from the seed of the section"),
        **robot_simulators.rows(role, env_id(role)),
        **_VIDEOS[role],
        f"{section}.data_collection.enabled": to(f"{section}.id", by=lambda value, values: UNSET),
        f"{section}.data_collection.*": NoEffect("acts with data_collection.enabled only"),
        **{f"{section}.{name}": SIMULATOR for name in SIMULATOR_KEYS},
        f"{section}.chunk_pause_seconds": WITH_RTC,
    }


_VIDEOS: Mapping[str, Table] = {
    "train": {
        "env.train.video_cfg.save_video": NoEffect("videos are recorded of tests only, with env.eval.video_cfg"),
        "env.train.video_cfg.*": NoEffect("acts with save_video only"),
    },
    "eval": {
        "env.eval.video_cfg.save_video": to("env.eval.video_cfg.save_video"),
        "env.eval.video_cfg.video_base_dir": to("env.eval.video_cfg.video_base_dir", by=where_recorded),
        "env.eval.video_cfg.fps": to("env.eval.video_cfg.fps", by=where_recorded),
        "env.eval.video_cfg.*": NoEffect("videos show what the simulator draws"),
    },
}
SIMULATOR_KEYS = (
    "wrap_obs_mode", "use_full_state", "use_3rd_view_as_extra", "obs_mode", "obs_format", "state_key", "state_keys",
    "render", "headless", "enable_rt", "sim_device", "gym_config_path", "wm_env_type", "base_config_name",
    "override_cfg.*", "override_cfgs", "omnigibson_cfg.*", "main_image_key", "no_gripper", "use_spacemouse",
)  # fmt: skip

_VLA: Table = {
    "actor.model.implement_version": Refused("policies are RLinf's own OpenVLA-OFT", fine=("rlinf", None)),
    "actor.model.unnorm_key": to("policy.unnorm_key", by=of_vla),
    "actor.model.lora_path": Refused(
        "adapters of such policies are not loaded from elsewhere; merge them into the model"
    ),
    "actor.model.center_crop": to("policy.center_crop", by=of_vla),
    "actor.model.num_images_in_input": FROM_SPACES,
    "actor.model.use_proprio": to("policy.model_type", by=without_numbers),
    "actor.model.use_wrist_image": FROM_SPACES,
    "actor.model.use_film": Refused("text does not modulate the picture's features", fine=(False, None)),
    "actor.model.value_type": NoEffect("algorithm.reward_type says what has a value"),
    "actor.model.gradient_checkpointing": MEMORY,
    "actor.model.low_cpu_mem_usage": MEMORY,
    "actor.model.attn_implementation": to("policy.model_type", by=attention),
    "actor.model.force_musa_eager_sdpa": SPEED,
    "actor.model.trust_remote_code": NoEffect("the policy's classes are tether's"),
    "actor.model.image_num": FROM_SPACES,
    "actor.model.image_size": FROM_SPACES,
    "actor.model.rewrite_chunk_gripper": WITH_RTC,
    "actor.model.max_prompt_length": to("policy.max_prompt_length", by=of_vla),
    "actor.model.vocab_size": NoEffect("the policy's own tokens"),
    "actor.model.hidden_size": NoEffect("policy.hidden_dim of a new policy; a published or trained one has its own"),
    "actor.tokenizer.*": NoEffect("the policy reads its instructions itself"),
}
"""Keys of RLinf's presets and files of OpenVLA and OpenVLA-OFT."""

_ROWS: Table = {
    **OTHERS,
    **SHARED,
    **OLDER_EMBODIED,
    **ONLY_EMBODIED,
    **_VLA,
    **OPENPI_ROWS,
    **_env("train"),
    **_env("eval"),
    "env.group_name": NAME,
    "env.enable_offload": MEMORY,
    "env.data_collection.*": NoEffect("read by RLinf's script that records demonstrations, and by no training"),
    "env.train.total_num_envs": to("env.train.total_num_envs"),
    "env.train.max_steps_per_rollout_epoch": to("env.train.max_steps_per_rollout_epoch"),
    "env.train.rollout_epoch": to("env.train.rollout_epoch"),
    "env.train.auto_reset": to("env.train.auto_reset"),
    "env.train.group_size": to("env.train.group_size"),
    "env.train.use_fixed_reset_state_ids": to("env.train.use_fixed_reset_state_ids", by=fixed_starts),
    "env.train.use_ordered_reset_state_ids": to("env.train.seed", by=ordered_starts),
    "env.train.use_rel_reward": to("env.train.use_rel_reward"),
    "env.train.reward_coef": to("env.train.reward_coef"),
    "env.eval.total_num_envs": Mapped(
        {"env.eval.total_num_envs": lambda value, values: value, "env.eval.num_episodes": episodes}
    ),
    "env.eval.max_steps_per_rollout_epoch": to("env.eval.num_episodes", by=episodes),
    "env.eval.rollout_epoch": to("env.eval.num_episodes", by=episodes),
    "env.eval.auto_reset": NoEffect("a test counts whole episodes"),
    "env.eval.group_size": Refused("a test begins each episode in a state of its own", fine=(1, None)),
    "env.eval.use_fixed_reset_state_ids": NoEffect("every test begins in the same states, those of env.eval.seed"),
    "env.eval.use_rel_reward": UNSHAPED,
    "env.eval.reward_coef": UNSHAPED,
    "runner.max_epochs": to("trainer.total_training_steps", by=training_steps),
    "runner.max_steps": to("trainer.total_training_steps", by=training_steps),
    "runner.only_eval": Refused("a checkpoint is tested with `tether eval`", fine=(False, None)),
    "runner.rtc.enabled": Refused("chunks are not replanned while they are carried out", fine=(False, None)),
    "runner.rtc.*": WITH_RTC,
    "runner.stop_eval_on_keyboard_success": WITH_RTC,
    "runner.seq_length": TEXT_ONLY,
    "runner.max_prompt_length": TEXT_ONLY,
    "algorithm.normalize_advantages": to("algorithm.normalize_advantages", default=True),
    "algorithm.group_size": to("env.train.group_size", default=1),
    "algorithm.adv_type": to("algorithm.adv_estimator", by=estimator),
    "algorithm.loss_type": to(f"{ACTOR}.policy_loss.loss_mode", by=loss),
    "algorithm.loss_agg_func": to(f"{ACTOR}.loss_agg_mode", by=aggregation),
    "algorithm.filter_rewards": to("algorithm.filter_rewards", default=False),
    "algorithm.rewards_lower_bound": to("algorithm.rewards_lower_bound"),
    "algorithm.rewards_upper_bound": to("algorithm.rewards_upper_bound"),
    "algorithm.rollout_micro_batch_size": NoEffect("all environments are one forward pass, with the same result"),
    "algorithm.logprob_forward_micro_batch_size": NoEffect("the policy's log-probs are kept while it acts"),
    "algorithm.entropy_bonus": to(f"{ACTOR}.entropy_coeff", default=0.0),
    "algorithm.value_clip": to("critic.cliprange_value", default=None),
    "algorithm.huber_delta": to("critic.huber_delta", default=None),
    "algorithm.reward_type": to("algorithm.reward_type"),
    "algorithm.logprob_type": to("algorithm.logprob_type"),
    "algorithm.entropy_type": to("algorithm.entropy_type"),
    "algorithm.bootstrap_type": to("algorithm.bootstrap_type", default="standard"),
    "algorithm.rollout_epoch": to("env.train.rollout_epoch", by=rollout_epoch),
    "algorithm.eval_rollout_epoch": to("env.eval.num_episodes", by=episodes),
    "algorithm.reward_coef": NoEffect("environments read their own, env.train.reward_coef"),
    "algorithm.staleness_threshold": Mapped(
        {"trainer.async_mode": asynchronous, "actor_rollout_ref.rollout.max_staleness": max_staleness}
    ),
    "algorithm.kl_beta": Refused("embodied runs have no reference policy", fine=(0, None)),
    "algorithm.kl_penalty": NoEffect("acts with kl_beta only"),
    "algorithm.sampling_params.*": TEXT_ONLY,
    "algorithm.length_params.*": TEXT_ONLY,
    "actor.training_backend": NoEffect("control policies have one trainer, for any number of devices"),
    "actor.micro_batch_size": MEMORY,
    "actor.global_batch_size": to(f"{ACTOR}.ppo_mini_batch_size"),
    "actor.enable_sft_co_train": Refused("mixing in supervised examples is not supported yet", fine=(False, None)),
    "actor.sft_loss_weight": NoEffect("acts with enable_sft_co_train only"),
    "actor.openpi_data.*": NoEffect("acts with enable_sft_co_train only"),
    "actor.fsdp_config.mixed_precision.param_dtype": to("policy.dtype", by=compute_format),
    "actor.fsdp_config.*": SHARDS,
    "actor.model.model_type": to("policy.model_type", by=policy_type),
    "actor.model.model_path": to(START, by=start),
    "actor.model.hidden_dim": to("policy.hidden_dim"),
    "actor.model.num_action_chunks": to("policy.num_action_chunks"),
    "actor.model.obs_dim": FROM_SPACES,
    "actor.model.action_dim": FROM_SPACES,
    ROBOT: Mapped({f"env.{role}.init_params": robot_arguments(role) for role in ("train", "eval")}),
    "actor.model.precision": to("policy.dtype", by=compute_format),
    "actor.model.add_value_head": NoEffect("algorithm.adv_type decides whether there is a critic"),
    "actor.model.is_lora": to("actor_rollout_ref.model.lora_rank", by=adapter_rank("actor")),
    "actor.model.lora_rank": NoEffect("acts with is_lora only, which gives it"),
    f"{OPTIM}.value_lr": to("critic.optim.lr"),
    f"{OPTIM}.adam_beta1": to(f"{NATIVE_OPTIM}.betas", by=betas(OPTIM)),
    f"{OPTIM}.adam_beta2": to(f"{NATIVE_OPTIM}.betas", by=betas(OPTIM)),
    f"{OPTIM}.adam_eps": to(f"{NATIVE_OPTIM}.eps", default=1e-8),
    f"{OPTIM}.weight_decay": to(f"{NATIVE_OPTIM}.weight_decay", default=0.01),
    f"{OPTIM}.critic_warmup_steps": to("trainer.critic_warmup", by=critic_warmup),
    **fsdp_schedule(
        OPTIM, NATIVE_OPTIM, lambda values: 1, lambda values: training_steps(None, values), default="constant"
    ),
    "critic.use_critic_model": to("policy.share_critic", by=lambda _, values: False if is_mlp(values) else UNSET),
    "env.channel.*": QUEUES,
    "rollout.channel.*": QUEUES,
    "actor.channel.*": QUEUES,
    "actor.sync_precision": NoEffect("weights are not sent"),
    "rollout.mode": NoEffect("the policy acts in this process"),
    "rollout.generation_backend": NoEffect("the policy acts in this process"),
    "rollout.backend": NoEffect("the policy acts in this process"),
    "rollout.pipeline_stage_num": NoEffect("environments step together: overlapping them in stages gained too little"),
    "rollout.enable_torch_compile": SPEED,
    "rollout.torch_compile_mode": SPEED,
    "rollout.enable_cuda_graph": SPEED,
    "rollout.collect_prev_infos": Refused("log-probs and values are always kept", fine=(True,)),
    "rollout.collect_final_values": Refused("the unfinished tail of a rollout is always bootstrapped", fine=(True,)),
    "rollout.collect_transitions": Refused("embodied runs learn from whole rollouts", fine=(False, None)),
    "rollout.recompute_logprobs": Refused("the policy's log-probs are kept while it acts", fine=(False, None)),
    "rollout.model.model_path": to(START, by=start),
    "rollout.model.precision": to("policy.dtype", by=acting_format),
    **sampling(TODAY),
    **sampling(OLDER),
    "rollout.sampling_params.*": TEXT_ONLY,
    "data.*": NoEffect("embodied runs have no prompts"),
    "reward.use_reward_model": Refused("learned rewards of images are not supported yet", fine=(False,)),
    "reward.*": NoEffect("acts with reward.use_reward_model only, which is not supported yet"),
}  # fmt: skip
ONLY_TESTED = NoEffect("read with runner.only_eval; in training the policy that acts is actor.model")
EMBODIED: Table = {
    **{key.replace("actor", "rollout", 1): ONLY_TESTED for key in _ROWS if key.startswith("actor.model.")},
    **_ROWS,
}
"""All keys of embodied runs in RLinf's PPO documentation and its recipes with an MLP policy."""

FIXED: Mapping[str, object] = {"critic.loss_coef": 1.0, "policy.normalize_rewards": False}
"""Native key -> RLinf's fixed behaviour, for keys that RLinf lacks and whose default in tether depends on the task."""
FIXED_MLP: Mapping[str, object] = {
    "policy.hidden_dim": 256,
    "policy.num_layers": 3,
    "policy.activation": "tanh",
    "policy.init_logstd": -0.5,
    "policy.share_critic": False,
    "policy.normalize_observations": False,
}
"""The same as `FIXED`, for RLinf's MLP only."""


def fixed(values: Values) -> Mapping[str, object]:
    """Return native key -> RLinf's fixed behaviour, for the policy in a file."""
    return {**FIXED, **FIXED_MLP} if is_mlp(values) else FIXED

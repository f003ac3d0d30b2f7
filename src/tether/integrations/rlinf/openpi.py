"""Rows of `actor.model.openpi`: pi0 and pi0.5 with random denoising steps.

The conversion functions return the value of the native key, or UNSET.
"""

from __future__ import annotations

from tether.integrations.rlinf.rows import UNSET, Convert, Mapped, NoEffect, Refused, Table, Unsupported, Values, to

MODEL = "actor.model.model_type"
SECTION = "actor.model.openpi"
OPENPI = "openpi"
PI05 = "pi05"
STEPS = 10
"""RLinf's default of `num_steps`."""
OFF = (False, None)
FOLDERS = NoEffect("sizes of the network are those of its folder")
WITH_RTC = NoEffect("acts with runner.rtc.enabled only, which is not supported")
RELATIVE = {
    "pi0_libero": 6, "pi0_libero_horizon10": 6, "pi0_behavior": 6, "pi0_droid_polaris": 7, "pi05_droid_polaris": 7,
}  # fmt: skip
"""Name of a configuration -> number of leading action columns that are relative to the state (openpi's delta
actions)."""
RELATIVE_OTHERWISE = ("pi0_aloha_robotwin", "pi05_aloha_robotwin", "pi05_dualfranka_tcp_rot6d")
"""Names of configurations whose relative actions are not the leading columns."""
STATE_IN_PROMPT = (
    "pi05_rlt_maniskill_joint", "pi05_franka_state", "pi05_aloha_robotwin", "pi05_behavior", "pi05_droid_polaris",
    "pi05_robocasa365_pretrain_human300",
)  # fmt: skip
"""Names of pi0.5's configurations that write the state into the prompt; with others of RLinf it does not see the
state."""
SIZES = ("action_horizon", "action_dim", "max_token_len", "paligemma_variant", "action_expert_variant")
"""Keys of openpi's model configuration that the section may override."""


def config_name(values: Values) -> str:
    """Return the name of openpi's configuration; older files have a flag instead."""
    return str(values.get(f"{SECTION}.config_name", "pi05_libero" if values.get(f"{SECTION}.pi05") else "pi0_libero"))


def flow_type(values: Values) -> str:
    """Return the policy type, pi0 or pi0.5, from the name of the configuration."""
    name = config_name(values)
    if name.startswith("pi05_"):
        return PI05
    if name.startswith("pi0_"):
        return "pi0"
    raise Unsupported(f"{name} is no configuration of pi0 or pi0.5", f"{SECTION}.config_name")


def flow_only(value: object, values: Values) -> object:
    """Return the value for openpi policies; others do not read the section."""
    return value if values.get(MODEL) == OPENPI else UNSET


def checked_name(value: object, values: Values) -> object:
    """Return the type of the policy, so that the name is checked."""
    return flow_type(values) if values.get(MODEL) == OPENPI else UNSET


def relative_actions(value: object, values: Values) -> object:
    """Return the number of action columns that are relative to the state."""
    if values.get(MODEL) != OPENPI:
        return UNSET
    name = config_name(values)
    if name in RELATIVE_OTHERWISE:
        raise Unsupported(f"{name} makes actions relative to the state in a way of its own", f"{SECTION}.config_name")
    return RELATIVE.get(name, UNSET)


def state_in_prompt(value: object, values: Values) -> object:
    """Return whether pi0.5's prompt includes the state."""
    if values.get(MODEL) != OPENPI or flow_type(values) != PI05:
        return UNSET
    return config_name(values) in STATE_IN_PROMPT


def older_type(value: object, values: Values) -> object:
    """Return the type of the policy from the flag in older files, which a name must not contradict."""
    if values.get(MODEL) == OPENPI and bool(value) != (flow_type(values) == PI05):
        raise Unsupported(f"config_name says {flow_type(values)}")
    return checked_name(value, values)


def method(value: object, values: Values) -> object:
    """Return the noise method of denoising steps."""
    if value not in ("flow_sde", "flow_noise", "flow_cps"):
        raise Unsupported("noise methods are flow_sde, flow_noise and flow_cps")
    return flow_only(value, values)


def of_steps(value: object, values: Values) -> object:
    """Return how log-probs of steps are combined: RLinf's joint log-prob is the mean over all random steps."""
    return flow_only("mean", values) if value else UNSET


def where_values_are_read(value: object, values: Values) -> object:
    """Refuse other inputs of the critic than the vision-language model's output for pi0.5, the action expert's for
    pi0."""
    if values.get("algorithm.adv_type", "gae") != "gae":
        return UNSET  # there is no critic
    if values.get(MODEL) == OPENPI and bool(value) != (flow_type(values) == PI05):
        raise Unsupported("critics of pi05 read the vision-language part, those of pi0 the action expert")
    return UNSET


def _flow(key: str, by: Convert = flow_only, default: object = UNSET) -> Mapped:
    return to(f"policy.{key}", by=by, default=default)


OPENPI_ROWS: Table = {
    f"{SECTION}.config_name": Mapped(
        {
            "policy.model_type": checked_name,
            "policy.relative_actions": relative_actions,
            "policy.discrete_state_input": state_in_prompt,
        },
        default=None,  # other keys determine the name
    ),
    f"{SECTION}.num_steps": _flow("num_steps", default=STEPS),
    f"{SECTION}.noise_method": _flow("noise_method", method),
    f"{SECTION}.noise_level": _flow("noise_level"),
    f"{SECTION}.noise_logvar_range": _flow("noise_logvar_range"),
    f"{SECTION}.joint_logprob": Mapped({"policy.joint_logprob": flow_only, "policy.step_logprobs": of_steps}),
    f"{SECTION}.detach_critic_input": _flow("detach_critic_input"),
    f"{SECTION}.train_expert_only": _flow("train_expert_only"),
    f"{SECTION}.action_chunk": _flow("num_action_chunks"),
    f"{SECTION}.value_after_vlm": to("policy.model_type", by=where_values_are_read),
    f"{SECTION}.value_vlm_mode": Refused("critics read the mean of all tokens", fine=("mean_token", None)),
    f"{SECTION}.chunk_critic_input": Refused("the critic reads no actions, which are noise", fine=OFF),
    f"{SECTION}.noise_anneal": Refused("the level of noise stays as it is", fine=OFF),
    f"{SECTION}.noise_params": NoEffect("acts with noise_anneal only"),
    f"{SECTION}.safe_get_logprob": Refused("log-probabilities are those of the Gaussian", fine=OFF),
    f"{SECTION}.double_layer": Refused("a decision has one random step, or all are", fine=OFF),
    f"{SECTION}.ignore_last": Refused("each step may be the random one", fine=OFF),
    f"{SECTION}.use_dsrl": Refused("DSRL is not supported", fine=OFF),
    f"{SECTION}.is_nft": Refused("NFT is not supported", fine=OFF),
    f"{SECTION}.dsrl_*": NoEffect("acts with use_dsrl only"),
    f"{SECTION}.rtc_*": WITH_RTC,
    f"{SECTION}.pytorch_compile_mode": NoEffect("changes speed, and no result"),
    f"{SECTION}.add_value_head": NoEffect("algorithm.adv_type decides whether there is a critic"),
    f"{SECTION}.num_images_in_input": NoEffect("the environment's spaces say so"),
    f"{SECTION}.action_env_dim": NoEffect("the environment's spaces say so"),
    f"{SECTION}.pi05": to("policy.model_type", by=older_type),
    **{f"{SECTION}.{name}": FOLDERS for name in SIZES},
    "actor.model.openpi_data.*": Refused(
        "rows are not changed as openpi changes them: the environment's spaces and the folder's "
        "policy_preprocessor.json say what the policy reads"
    ),
    "actor.model.num_steps": NoEffect("read where actor.model.openpi.num_steps names it"),
}
"""Keys of RLinf's presets and files of pi0 and pi0.5."""

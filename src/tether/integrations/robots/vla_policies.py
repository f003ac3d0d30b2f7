"""Builds vision-language-action policies: new ones, ones with a checkpoint's spec, or published ones."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tether.config.schema import ModelConfig
from tether.control.build_policies import START, find_pictures
from tether.control.envs.protocol import ContinuousActions, VectorEnv
from tether.control.policies.config import PolicyConfig
from tether.integrations.robots.vla import VlaSpec
from tether.types import JsonObject

if TYPE_CHECKING:
    from tether.integrations.robots.vla.policy import VlaPolicy

PROMPT_LENGTH = 50
"""Default length of prompts, as in RLinf."""


def weights_folder(path: str) -> Path | None:
    """Return the path if it is the folder of a model in transformers' format, or None."""
    is_published = path and importlib.import_module("tether.integrations.robots.vla.pretrained").is_published(
        Path(path)
    )
    return Path(path) if is_published else None


def new_policy(
    policy: PolicyConfig,
    model: ModelConfig,
    env: VectorEnv,
    value_width: int,
    seed: int,
    known_fields: Mapping[str, object] | None = None,
) -> VlaPolicy:
    """Return a policy for the environment, with weights initialised by the seed or loaded from a published folder.

    Args:
        policy: section of the policy.
        model: section of the weights.
        env: the environment.
        value_width: number of values per observation, V.
        seed: seed of the weights.
        known_fields: fields of the spec that are already known: ``low`` and ``high`` of recorded episodes, or
            `VlaPolicy.inherited_fields` of a checkpoint.

    Raises:
        ValueError: the actions are discrete or unbounded, or the published policy does not fit.
    """
    if not isinstance(env.actions, ContinuousActions):
        raise ValueError(
            f"policy.model_type={policy.model_type}: its action tokens stand for numbers, and the actions of "
            f"{env.id} are choices. Use mlp_policy or cnn_policy."
        )
    folder, fields = weights_folder(model.path), dict(known_fields or {})
    if folder is not None:
        fields = _published_fields(policy, env, folder, fields)
    else:
        _check_own_keys(policy, model.path, published="network" in fields)
    if "network" in fields:
        _check_view(env, policy.model_type)
    elif any(entry.kind == "image" for entry in env.layout):
        find_pictures(env, policy.model_type)
    sizes = {"hidden_dim": policy.hidden_dim, "num_layers": policy.num_layers, "num_heads": policy.num_heads}
    spec: JsonObject = {
        "model_type": policy.model_type,
        "layout": env.layout,
        "action_width": env.actions.width,
        "num_action_chunks": policy.num_action_chunks,
        "value_width": value_width,
        "temperature": policy.temperature,
        "dtype": policy.dtype,
        "center_crop": policy.center_crop,
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": model.target_modules,
        **sizes,
        **(fields if "low" in fields else {**_ranges_of_space(env), **fields}),
    }
    # Imported on first use: transformers takes seconds to load, and peft is an extra.
    made: VlaPolicy = importlib.import_module("tether.integrations.robots.vla.policy").VlaPolicy(VlaSpec(**spec), seed)
    if folder is not None:
        importlib.import_module("tether.integrations.robots.vla.pretrained").load_weights(made, folder)
    return made


def _published_fields(
    policy: PolicyConfig, env: VectorEnv, folder: Path, known_fields: Mapping[str, object]
) -> dict[str, object]:
    """Return the fields of a published folder; action ranges are its own if configured, or if no others are known.

    Raises:
        ValueError: the policy is not supported, or its actions have a different width.
    """
    pretrained = importlib.import_module("tether.integrations.robots.vla.pretrained")
    published = pretrained.read_published(folder, policy.max_prompt_length or PROMPT_LENGTH)
    if policy.unnorm_key is None and "low" in known_fields:
        return {**known_fields, **published.fields}
    low, high = pretrained.ranges(published, policy.unnorm_key)
    if len(low) != env.actions.width:
        raise ValueError(
            f"policy.unnorm_key={policy.unnorm_key or 'null'}: actions with {len(low)} columns there, and "
            f"{env.actions.width} in {env.id}. Name other statistics, or another environment."
        )
    return {"low": low, "high": high, **published.fields}


def _check_own_keys(policy: PolicyConfig, path: str, *, published: bool) -> None:
    """Refuse keys that apply only to a published folder, if the run does not start from one.

    Raises:
        ValueError: such a key is set.
    """
    configured = {"unnorm_key": policy.unnorm_key, "max_prompt_length": policy.max_prompt_length}
    configured |= {} if published else {"center_crop": policy.center_crop or None}
    for name, value in configured.items():
        if value is not None:
            raise ValueError(
                f"policy.{name}={value}: acts where {START} is the folder of a published policy (with a config.json), "
                f"and it is {path or 'not set'}. Leave the key out."
            )


def _check_view(env: VectorEnv, model_type: str) -> None:
    """Check that the observations have the images and the instruction that a published network reads.

    Raises:
        ValueError: some are missing, or there are too many.
    """
    kinds = [entry.kind for entry in env.layout]
    if "image" not in kinds or "text" not in kinds:
        missing = "picture of bytes" if "image" not in kinds else "text"
        raise ValueError(
            f"policy.model_type={model_type}: a published policy reads a picture and an instruction, and {env.id} "
            f"shows no {missing}. Add it, for example in a wrapper (env.train.wrappers)."
        )
    pictures = find_pictures(env, model_type)
    if model_type == "openvla" and len(pictures) > 1:
        raise ValueError(
            f"policy.model_type=openvla: it reads one picture, and {env.id} shows {', '.join(pictures)}. Leave others "
            f"out with env.train.drop_observations=[{','.join(pictures[1:])}], or use openvla_oft."
        )
    for entry in env.layout:
        if entry.kind == "image" and entry.shape[2] != 3:
            raise ValueError(
                f"policy.model_type={model_type}: {entry.name} of {env.id} has {entry.shape[2]} channels; a published "
                "policy reads pictures of 3."
            )


def _ranges_of_space(env: VectorEnv) -> dict[str, object]:
    assert isinstance(env.actions, ContinuousActions)
    checked = importlib.import_module("tether.integrations.robots.action_bins").check_bounds(
        env.id, env.actions.low, env.actions.high
    )
    return {"low": checked.low, "high": checked.high}

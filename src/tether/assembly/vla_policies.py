"""From a configuration to a vision-language-action policy: a new one, one of a checkpoint's shape, a published one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tether.assembly.pictures import find_pictures
from tether.config import RunConfig
from tether.envs import ContinuousActions, VectorEnv
from tether.models.vla import VlaSpec
from tether.types import JsonObject

if TYPE_CHECKING:
    from tether.models.vla.policy import VlaPolicy

START = "actor_rollout_ref.model.path"
PROMPT_LENGTH = 50
"""Tokens of prompts, where nothing is said; RLinf's."""
FROM_START = ("low", "high")
OF_NETWORK = ("network", "hidden_dim", "num_layers", "num_heads")
"""Fields of the shape that a run takes over from the policy that it starts from; the latter of a published network."""


def published_folder(config: RunConfig) -> Path | None:
    """The folder of a model in transformers' layout that the run starts from; None: there is none."""
    path = config.actor_rollout_ref.model.path
    found = path and importlib.import_module("tether.models.vla.pretrained").is_published(Path(path))
    return Path(path) if found else None


def fields_of(spec: VlaSpec) -> dict[str, object]:
    """The fields that a run takes over from a policy."""
    names = FROM_START if spec.network is None else FROM_START + OF_NETWORK
    return {name: getattr(spec, name) for name in names}


def new_vla_policy(
    config: RunConfig, env: VectorEnv, value_width: int, known: Mapping[str, object] | None = None
) -> VlaPolicy:
    """A policy for the environment, with the weights of the seed, or those of a published folder.

    Args:
        config: the configuration.
        env: the environment.
        value_width: V.
        known: fields of the shape that are known already: ``low`` and ``high`` of recorded episodes, or `fields_of` a
            checkpoint.

    Raises:
        ValueError: the actions are choices, or have no bounds; or the published policy does not fit.
    """
    policy, model = config.policy, config.actor_rollout_ref.model
    if not isinstance(env.actions, ContinuousActions):
        raise ValueError(
            f"policy.model_type={policy.model_type}: its action tokens stand for numbers, and the actions of "
            f"{env.id} are choices. Use mlp_policy or cnn_policy."
        )
    folder, fields = published_folder(config), dict(known or {})
    if folder is not None:
        fields = _published_fields(config, env, folder, fields)
    else:
        _check_own_keys(config, published="network" in fields)
    if "network" in fields:
        _check_view(env, policy.model_type)
    elif any(part.kind == "image" for part in env.layout):
        find_pictures(env, policy.model_type)
    sizes = {"hidden_dim": policy.hidden_dim, "num_layers": policy.num_layers, "num_heads": policy.num_heads}
    given: JsonObject = {
        "model_type": policy.model_type,
        "layout": env.layout,
        "action_width": env.actions.width,
        "num_action_chunks": policy.num_action_chunks,
        "value_width": value_width,
        "temperature": policy.temperature,
        "center_crop": policy.center_crop,
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": model.target_modules,
        **sizes,
        **(fields if "low" in fields else {**_ranges_of_space(env), **fields}),
    }
    # Imported where it is asked for: transformers takes seconds to load, and peft is an extra.
    made: VlaPolicy = importlib.import_module("tether.models.vla.policy").VlaPolicy(
        VlaSpec(**given), config.trainer.seed
    )
    if folder is not None:
        importlib.import_module("tether.models.vla.pretrained").load_weights(made, folder)
    return made


def _published_fields(
    config: RunConfig, env: VectorEnv, folder: Path, known: Mapping[str, object]
) -> dict[str, object]:
    """Of a published folder; ranges of actions are its own where they are asked for, or no others are known.

    Raises:
        ValueError: it is not supported, or of actions of another width.
    """
    policy, pretrained = config.policy, importlib.import_module("tether.models.vla.pretrained")
    found = pretrained.read_published(folder, policy.max_prompt_length or PROMPT_LENGTH)
    if policy.unnorm_key is None and "low" in known:
        return {**known, **found.fields}
    low, high = pretrained.ranges(found, policy.unnorm_key)
    if len(low) != env.actions.width:
        raise ValueError(
            f"policy.unnorm_key={policy.unnorm_key or 'null'}: actions with {len(low)} columns there, and "
            f"{env.actions.width} in {env.id}. Name other statistics, or another environment."
        )
    return {"low": low, "high": high, **found.fields}


def _check_own_keys(config: RunConfig, *, published: bool) -> None:
    """Keys that are read where a run starts from a published folder.

    Raises:
        ValueError: one is set, and the run does not.
    """
    policy = config.policy
    given = {"unnorm_key": policy.unnorm_key, "max_prompt_length": policy.max_prompt_length}
    given |= {} if published else {"center_crop": policy.center_crop or None}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"policy.{name}={value}: acts where {START} is the folder of a published policy (with a config.json), "
                f"and it is {config.actor_rollout_ref.model.path or 'not set'}. Leave the key out."
            )


def _check_view(env: VectorEnv, model_type: str) -> None:
    """A published network reads pictures and an instruction.

    Raises:
        ValueError: the environment shows no, or too many.
    """
    kinds = [part.kind for part in env.layout]
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
    for part in env.layout:
        if part.kind == "image" and part.shape[2] != 3:
            raise ValueError(
                f"policy.model_type={model_type}: {part.name} of {env.id} has {part.shape[2]} channels; a published "
                "policy reads pictures of 3."
            )


def _ranges_of_space(env: VectorEnv) -> dict[str, object]:
    assert isinstance(env.actions, ContinuousActions)
    checked = importlib.import_module("tether.envs.spaces.action_bins").check_bounds(
        env.id, env.actions.low, env.actions.high
    )
    return {"low": checked.low, "high": checked.high}

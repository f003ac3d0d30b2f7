"""Builds flow-matching policies: new ones, ones with a checkpoint's spec, or ones from lerobot's files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tether.config.schema import ModelConfig
from tether.control.build_policies import START, find_pictures
from tether.control.envs.protocol import ContinuousActions, VectorEnv
from tether.control.policies.config import PolicyConfig
from tether.integrations.robots.flow import FlowSpec, Scale
from tether.observations import Array, Observation, ObsLayout, row_width

if TYPE_CHECKING:
    from tether.integrations.robots.flow.policy import FlowPolicy

PROMPT_LENGTH = 200
"""Default length of prompts made by a tokenizer."""
QUANTILES = (0.01, 0.99)
"""Quantiles of recorded numbers that pi0.5 scales to -1 and 1."""


def weights_folder(path: str) -> Path | None:
    """Return the path if it is the folder of a policy in lerobot's format, or None."""
    is_pretrained = path and importlib.import_module("tether.integrations.robots.flow.pretrained").is_pretrained(
        Path(path)
    )
    return Path(path) if is_pretrained else None


def new_policy(
    policy: PolicyConfig,
    model: ModelConfig,
    env: VectorEnv,
    value_width: int,
    seed: int,
    known_fields: Mapping[str, object] | None = None,
) -> FlowPolicy:
    """Return a policy for the environment, with weights initialised by the seed or loaded from lerobot's folder.

    Args:
        policy: section of the policy.
        model: section of the weights.
        env: the environment.
        value_width: number of values per observation, V.
        seed: seed of the weights.
        known_fields: fields of the spec that are already known: scales of recorded episodes, or
            `FlowPolicy.inherited_fields` of a checkpoint.

    Raises:
        ValueError: the actions are discrete, the images are not RGB, or the folder's policy does not fit.
    """
    actions = env.actions
    if not isinstance(actions, ContinuousActions):
        raise ValueError(
            f"policy.model_type={policy.model_type}: it generates numbers, and the actions of {env.id} are choices. "
            "Use mlp_policy or cnn_policy."
        )
    _check_pictures(env, policy.model_type)
    folder = weights_folder(model.path)
    fields = _new_fields(policy, env) if folder is None else _pretrained_fields(policy, env, folder)
    fields |= {
        name: value for name, value in (known_fields or {}).items() if folder is None or fields.get(name) is None
    }
    width = row_width(_numbers(env.layout))
    if policy.relative_actions > min(width, actions.width):
        raise ValueError(
            f"policy.relative_actions={policy.relative_actions}: {env.id} shows {width} numbers and takes actions of "
            f"{actions.width}, and each of these columns needs one of both. Set 0 for absolute actions, or less."
        )
    fields["action_scale"] = fields["action_scale"] or _scale_of_space(actions)
    fields["state_scale"] = fields["state_scale"] or ((0.0,) * width, (1.0,) * width)
    spec = FlowSpec(
        layout=env.layout,
        action_dim=actions.width,
        num_action_chunks=policy.num_action_chunks,
        value_width=value_width,
        num_steps=policy.num_steps,
        noise_method=policy.noise_method,
        noise_level=policy.noise_level,
        noise_logvar_range=policy.noise_logvar_range,
        joint_logprob=policy.joint_logprob,
        step_logprobs=policy.step_logprobs,
        detach_critic_input=policy.detach_critic_input,
        train_expert_only=policy.train_expert_only,
        relative_actions=policy.relative_actions,
        discrete_state_input=policy.discrete_state_input,
        **fields,
    )
    made: FlowPolicy = importlib.import_module("tether.integrations.robots.flow.policy").FlowPolicy(spec, seed)
    if folder is not None:
        importlib.import_module("tether.integrations.robots.flow.pretrained").load_weights(made, folder)
    return made


def scales_of_data(
    policy: PolicyConfig, layout: ObsLayout, obs: Sequence[Observation], actions: Sequence[Array]
) -> dict[str, Scale]:
    """Return the scales for recorded episodes: from mean and standard deviation for pi0, from quantiles for pi0.5.

    Args:
        policy: section of the policy.
        layout: layout of an observation.
        obs: observations [T, ...] of each episode.
        actions: actions [T, D] of each episode.
    """
    torch = importlib.import_module("torch")
    row = importlib.import_module("tether.control.policies.spec").FlatRow(_numbers(layout) or layout)
    seen = {entry.name: torch.from_numpy(np.concatenate([episode[entry.name] for episode in obs])) for entry in layout}
    rows = {"action_scale": np.concatenate(actions)}
    if _numbers(layout):
        rows["state_scale"] = row(seen).numpy()
    if columns := policy.relative_actions:  # relative to its own observation; later actions of a chunk differ more
        rows["action_scale"] = rows["action_scale"].copy()
        rows["action_scale"][:, :columns] -= rows["state_scale"][:, :columns]
    return {name: _scale_of_rows(values.astype(np.float64), policy.model_type) for name, values in rows.items()}


def _scale_of_rows(rows: Array, model_type: str) -> Scale:
    if model_type == "pi0":
        offset, scale = rows.mean(axis=0), rows.std(axis=0)
    else:
        low, high = np.quantile(rows, QUANTILES, axis=0)
        offset, scale = (low + high) / 2, (high - low) / 2
    scale = np.where(scale < 1e-6, 1.0, scale)  # a constant column
    return tuple(offset.tolist()), tuple(scale.tolist())


def _scale_of_space(actions: ContinuousActions) -> Scale:
    """Return the offset and scale that map the bounds to -1 and 1; a column without bounds is unchanged."""
    low, high = (np.array(bound or (np.inf,) * actions.width) for bound in (actions.low, actions.high))
    bounded = np.isfinite(low) & np.isfinite(high)
    low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    return tuple(((low + high) / 2).tolist()), tuple(((high - low) / 2).tolist())


def _numbers(layout: ObsLayout) -> ObsLayout:
    return tuple(entry for entry in layout if entry.kind not in ("image", "text", "mask"))


def _check_pictures(env: VectorEnv, model_type: str) -> None:
    pictures = [entry for entry in env.layout if entry.kind == "image"]
    if pictures:
        find_pictures(env, model_type)
    for entry in pictures:
        if entry.shape[2] != 3:
            raise ValueError(
                f"policy.model_type={model_type}: {entry.name} of {env.id} has {entry.shape[2]} channels; it reads "
                f"pictures of 3. Leave it out with env.train.drop_observations=[{entry.name}]."
            )


def _new_fields(policy: PolicyConfig, env: VectorEnv) -> dict[str, Any]:
    """Return the fields of a new small policy, no larger than the environment requires."""
    backbone = importlib.import_module("tether.integrations.robots.flow.backbone")
    prompts = importlib.import_module("tether.integrations.robots.flow.prompts")
    width = row_width(_numbers(env.layout))
    sides = [max(entry.shape[:2]) for entry in env.layout if entry.kind == "image"]
    image_size = 4 * -(-max(sides, default=4) // 4)
    text = next((entry.shape[0] for entry in env.layout if entry.kind == "text"), 0)
    with_state = policy.model_type == "pi05" and policy.discrete_state_input
    longest = PROMPT_LENGTH if policy.tokenizer_path else prompts.max_prompt_length(with_state, text, width)
    length = policy.max_prompt_length or longest
    vocabulary = prompts.FlowPrompts(length, policy.tokenizer_path).vocab_size
    sizes = backbone.Sizes.of(policy.hidden_dim, policy.num_layers, image_size, vocabulary)
    return {
        "model_type": policy.model_type,
        "action_scale": None,
        "state_scale": None,
        "horizon": policy.num_action_chunks,
        "latent_dim": env.actions.width,
        "state_dim": max(1, width),
        "prompt_length": length,
        "tokenizer": policy.tokenizer_path,
        "image_size": image_size,
        "sizes": dict(vars(sizes)),
    }


def _pretrained_fields(policy: PolicyConfig, env: VectorEnv, folder: Path) -> dict[str, Any]:
    """Return the fields of the policy in lerobot's folder.

    Raises:
        ValueError: the policy has a different type, or is too small for the environment.
    """
    pretrained = importlib.import_module("tether.integrations.robots.flow.pretrained").read_pretrained(folder)
    if pretrained.model_type != policy.model_type:
        raise ValueError(f"{START}={folder}: a {pretrained.model_type}; set policy.model_type={pretrained.model_type}")
    if pretrained.relative_actions and not policy.relative_actions:
        raise ValueError(
            f"{START}={folder}: its actions are relative to the state (use_relative_actions). Set "
            "policy.relative_actions to the number of their leading columns that are."
        )
    width = row_width(_numbers(env.layout))
    shown = sum(entry.kind == "image" for entry in env.layout)
    sizes = (
        ("actions of a chunk (policy.num_action_chunks)", policy.num_action_chunks, pretrained.horizon),
        ("columns of an action", env.actions.width, pretrained.latent_dim),
        ("numbers of an observation", width, pretrained.state_dim),
        ("pictures", shown, pretrained.cameras),
    )
    for what, needed, room in sizes:
        if needed > room:
            raise ValueError(f"{START}={folder}: {needed} {what} in {env.id}, but the policy has room for {room}")
    fields = {
        "model_type": pretrained.model_type,
        "action_scale": pretrained.action_scale,
        "state_scale": pretrained.state_scale,
        "horizon": pretrained.horizon,
        "latent_dim": pretrained.latent_dim,
        "state_dim": pretrained.state_dim,
        "prompt_length": pretrained.prompt_length,
        "tokenizer": _tokenizer(policy.tokenizer_path, folder, pretrained.sizes),
        "image_size": pretrained.image_size,
        "sizes": pretrained.sizes,
        "empty_cameras": pretrained.cameras - shown,
    }
    for name, scale, columns in (
        ("action", pretrained.action_scale, env.actions.width), ("state", pretrained.state_scale, width)
    ):  # fmt: skip
        if scale is not None and len(scale[0]) != columns:
            raise ValueError(
                f"{START}={folder}: was trained on {len(scale[0])} columns of {name}, and {env.id} has {columns}"
            )
    return fields


def _tokenizer(path: str | None, folder: Path, sizes: Mapping[str, int] | None) -> str | None:
    """Return the folder of the tokenizer; None: bytes are the tokens.

    Raises:
        ValueError: there is no tokenizer, and the network's vocabulary is not of bytes.
    """
    if path is not None:
        return path
    if (folder / "tokenizer_config.json").is_file():
        return str(folder)
    if (
        sizes is not None
        and sizes["vocab_size"] == importlib.import_module("tether.integrations.robots.flow.prompts").VOCAB_SIZE
    ):
        return None
    raise ValueError(
        f"policy.tokenizer_path: {folder} has no tokenizer beside its weights. Give the folder of PaliGemma's "
        "(google/paligemma-3b-pt-224), or put its files into this one."
    )

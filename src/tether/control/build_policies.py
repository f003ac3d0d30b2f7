"""Builds the initial policy of a run, and converts its environments to the actions of the policy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

from tether.checkpoints import find_checkpoint
from tether.config.schema import AlgorithmConfig, ModelConfig
from tether.config.support.live_keys import is_own_function
from tether.control.envs.layers import ActionCode, ActionCodeEnv
from tether.control.envs.protocol import ContinuousActions, DiscreteActions, MixedActions, VectorEnv, choices_of
from tether.control.learning.advantages import CRITIC
from tether.control.learning.rollouts import POLICY
from tether.control.policies.config import FLOW_TYPES, VLA_TYPES, PolicyConfig
from tether.control.policies.mlp_policy import ControlPolicy, Policy, load_policy, make_policy
from tether.control.policies.network_policy import SMALLEST, NetworkPolicy
from tether.control.policies.spec import PolicySpec
from tether.integrations import integration
from tether.observations import describe, row_width
from tether.types import JsonObject

START = "actor_rollout_ref.model.path"
_WITHOUT_TRANSFORMERS = (ControlPolicy, NetworkPolicy)
"""Policies whose actions are the environment's, without an encoding."""


def start_policy(policy: PolicyConfig, model: ModelConfig, env: VectorEnv, value_width: int, seed: int) -> Policy:
    """Return the initial policy of a run: the saved policy in ``actor_rollout_ref.model.path``, or a new one.

    A saved policy keeps its observation statistics: some entries hardly vary in demonstrations, so updating the
    statistics in the first rollouts would change the policy's inputs completely.

    Raises:
        ValueError: no policy fits the environment, or the path has no policy, or one of a different shape.
    """
    path, robots = model.path, _robot_policies(policy.model_type)
    # new_policy loads the weights of published policies itself.
    if not path or (robots is not None and robots.weights_folder(path) is not None):
        return new_policy(policy, model, env, value_width, seed)
    start = saved_policy(Path(path), START)
    made = new_policy(policy, model, env, value_width, seed, _inherited_fields(start))
    _copy_weights(made, start, path)
    if made.normalizer:
        made.normalizer.fixed = True
    return made


def _robot_policies(model_type: str) -> ModuleType | None:
    """Return the module that makes policies of this type, or None for tether's own networks."""
    if model_type in VLA_TYPES:
        return integration("robots", "vla_policies")
    return integration("robots", "flow_policies") if model_type in FLOW_TYPES else None


def new_policy(
    policy: PolicyConfig,
    model: ModelConfig,
    env: VectorEnv,
    value_width: int,
    seed: int,
    known_fields: Mapping[str, object] | None = None,
) -> Policy:
    """Return a policy for the environment, with weights initialized by the seed.

    Args:
        policy: section of the policy.
        model: section with the path of the weights and the adapters of transformer policies.
        env: the environment.
        value_width: number of values per observation, V.
        seed: seed of the weights.
        known_fields: fields of the spec that are already known, for a vision-language-action or flow-matching policy.

    Raises:
        ValueError: this kind of policy does not support the environment's observations or actions.
    """
    if robots := _robot_policies(policy.model_type):
        robot_policy: Policy = robots.new_policy(policy, model, env, value_width, seed, known_fields)
        return robot_policy
    actions = env.actions
    refuse_texts(env, policy.model_type)
    if policy.use_sde and isinstance(actions, DiscreteActions):
        raise ValueError(
            f"policy.use_sde: the actions of {env.id} are choices, which have no such noise. Leave it out."
        )
    if isinstance(actions, MixedActions) and (policy.use_sde or policy.num_action_chunks > 1):
        key = "use_sde=True" if policy.use_sde else f"num_action_chunks={policy.num_action_chunks}"
        raise ValueError(f"policy.{key}: the actions of {env.id} are both choices and numbers. Leave it out.")
    _check_mask(env, policy.num_action_chunks)
    pictures = find_pictures(env, policy.model_type) if policy.model_type == "cnn_policy" else ()
    rows = [entry.name for entry in env.layout if entry.name not in pictures and entry.width]
    if missing := [name for name in policy.normalize_only if name not in rows]:
        raise ValueError(
            f"policy.normalize_only: {env.id} shows no {missing[0]} that is read as numbers, but "
            f"{', '.join(rows) or 'none'}. Correct the name, or set policy.normalize_only=[]."
        )
    spec = PolicySpec(
        obs_dim=row_width(tuple(entry for entry in env.layout if entry.name not in pictures)),
        layout=env.layout,
        choices=choices_of(actions) or None,
        action_width=actions.width,
        num_action_chunks=policy.num_action_chunks,
        value_width=value_width,
        share_critic=policy.share_critic,
        hidden_dim=policy.hidden_dim,
        num_layers=policy.num_layers,
        critic_hidden_dim=_none_if_equal(policy.critic_hidden_dim, policy.hidden_dim),
        critic_num_layers=_none_if_equal(policy.critic_num_layers, policy.num_layers),
        activation=policy.activation,
        init_logstd=policy.init_logstd,
        normalize_observations=policy.normalize_observations,
        normalize_only=policy.normalize_only,
        clip_observations=policy.clip_observations,
        pictures=pictures,
        cnn_type=select_cnn(policy.cnn_type, env, pictures),
        pixel_scale=policy.pixel_scale,
        dtype=policy.dtype,
        network=policy.model_type if is_own_function(policy.model_type) else None,
        features_extractor=policy.features_extractor,
        lstm_dim=policy.lstm_dim,
        use_sde=policy.use_sde,
        sde_sample_freq=policy.sde_sample_freq if policy.sde_sample_freq > 0 else None,
    )
    return make_policy(spec, seed)


def _check_mask(env: VectorEnv, chunk: int) -> None:
    """Check that an action mask in the observations fits the actions of one step."""
    for entry in env.layout:
        if entry.kind != "mask":
            continue
        entries, alternatives = entry.shape[0], sum(choices_of(env.actions))
        if entries != alternatives:
            raise ValueError(
                f"{env.id}: its observations have {entries} entries of {entry.name}, and its actions {alternatives} "
                f"alternatives. Leave the part out with env.train.drop_observations=[{entry.name}], or rename it."
            )
        if chunk > 1:
            raise ValueError(
                f"policy.num_action_chunks={chunk}: {env.id} tells which choices are allowed in the next step only. "
                "Set 1, or env.train.action_masks=false."
            )


def refuse_texts(env: VectorEnv, model_type: str) -> None:
    """Refuse text observations, which policies of numbers and pictures do not support.

    Raises:
        ValueError: the environment has a text observation.
    """
    texts = [entry.name for entry in env.layout if entry.kind == "text"]
    if texts:
        raise ValueError(
            f"{env.id}: policy.model_type={model_type} reads no text, such as {texts[0]}. Use openvla, or leave it "
            f"out with env.train.drop_observations=[{texts[0]}]."
        )


def find_pictures(env: VectorEnv, model_type: str) -> tuple[str, ...]:
    """Return ``PolicySpec.pictures``: the names of the pictures in an observation.

    Raises:
        ValueError: there are no pictures, or their sizes differ.
    """
    pictures = [entry for entry in env.layout if entry.kind == "image"]
    if len({entry.shape[:2] for entry in pictures}) != 1:
        what = "pictures of different sizes" if pictures else "no picture of bytes"
        raise ValueError(
            f"policy.model_type={model_type}: {env.id} shows {what} ({describe(env.layout)}). Use mlp_policy, or leave "
            "a part out with env.train.drop_observations."
        )
    return tuple(entry.name for entry in pictures)


def select_cnn(cnn_type: str, env: VectorEnv, pictures: tuple[str, ...]) -> str:
    """Return the ``PolicySpec.cnn_type`` for pictures: the configured one, or for ``auto`` one that fits their size.

    Raises:
        ValueError: the pictures are too small for it.
    """
    if not pictures:
        return "small"
    height, width = next(entry.shape[:2] for entry in env.layout if entry.name in pictures)
    fits = min(height, width) >= SMALLEST["nature"]
    if cnn_type == "nature" and not fits:
        raise ValueError(
            f"policy.cnn_type=nature: it needs pictures of {SMALLEST['nature']} x {SMALLEST['nature']}, and those of "
            f"{env.id} have {height} x {width}. Use small, or auto."
        )
    return cnn_type if cnn_type != "auto" else "nature" if fits else "small"


def saved_policy(path: Path, key: str) -> Policy:
    """Load the policy of a checkpoint: a ``global_step_N`` folder, or the folder of a run (its last checkpoint).

    Args:
        path: the folder.
        key: configuration key or option that names it, for messages.

    Raises:
        ValueError: the folder has no checkpoint of a control policy.
        CheckpointDamaged: a file differs from the saved one.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        published = ", or that of a published OpenVLA policy (with its config.json)" if key == START else ""
        raise ValueError(
            f"{key}={path}: no checkpoint here. Give a global_step_N folder or the folder of a run{published}."
        )
    return load_policy(checkpoint / POLICY)


def published_exporter(policy: Policy, checkpoint: Path) -> Callable[[Path], None]:
    """Return a function that exports a policy in the format of the published policy that it was initialised from.

    Raises:
        ValueError: it was not initialised from one, or the folder of that policy no longer exists.
    """
    network = None if isinstance(policy, _WITHOUT_TRANSFORMERS) else getattr(policy.spec, "network", None)
    if network is None:
        raise ValueError(
            f"{checkpoint}: its policy did not begin as a published OpenVLA policy, whose layout is written"
        )
    source = Path(network.tokenizer)
    if not source.is_dir():
        raise ValueError(
            f"{checkpoint}: the folder {source} is gone, from which the files beside the weights are taken"
        )
    return partial(integration("robots", "vla.pretrained").write_published, policy, source)


def env_for_policy(env: VectorEnv, policy: Policy) -> VectorEnv:
    """Return the environments, wrapped to accept the policy's encoded actions if it encodes them."""
    code = get_action_code(policy)
    if code is None or not isinstance(env.actions, ContinuousActions) or env.actions.width != code.action_dim:
        return env
    return ActionCodeEnv(env, code)


def spaces_of(env: VectorEnv) -> JsonObject:
    """Return the spaces of one environment as JSON, as they are saved with a policy."""
    saved: JsonObject = importlib.import_module("tether.control.envs.spaces").spaces_as_json(env.spaces)
    return saved


def get_action_code(policy: Policy) -> ActionCode | None:
    """Return the policy's action encoding (action tokens or a flow's denoising chain); None if it has none."""
    return None if isinstance(policy, _WITHOUT_TRANSFORMERS) else policy.action_code()


def _inherited_fields(policy: Policy) -> dict[str, object] | None:
    """Return the ``known_fields`` of `new_policy` that an initial policy determines."""
    return None if isinstance(policy, _WITHOUT_TRANSFORMERS) else policy.inherited_fields()


def _none_if_equal(size: int, actors: int) -> int | None:
    return None if size == actors else size


def _copy_weights(policy: Policy, start: Policy, path: str) -> None:
    """Copy the weights and statistics of `start` to `policy`; a critic of a different width stays untrained."""
    set_by_run = ("value_width",) if isinstance(policy, _WITHOUT_TRANSFORMERS) else policy.set_by_run
    for field, wanted in vars(policy.spec).items():
        actual = getattr(start.spec, field, None)
        if field not in set_by_run and actual != wanted:
            raise ValueError(
                f"{START}={path}: its policy has {field}={actual}, this run {wanted}. Give the policy.* keys, and the "
                "environment, that it was made with."
            )
    same_critic = start.spec.value_width == policy.spec.value_width
    weights = start.state_dict() if isinstance(start, _WITHOUT_TRANSFORMERS) else start.plain_state()
    weights = {name: value for name, value in weights.items() if same_critic or not _is_critic_weight(name)}
    if isinstance(policy, _WITHOUT_TRANSFORMERS):
        policy.load_state_dict(weights, strict=same_critic)
    else:
        policy.load_plain(weights)


def _is_critic_weight(name: str) -> bool:
    return name.startswith("critic")


def value_width(algorithm: AlgorithmConfig, policy: PolicyConfig) -> int:
    """Return the number of values that the critic predicts for an observation; 0 without a critic."""
    if algorithm.adv_estimator != CRITIC:
        return 0
    return 1 if algorithm.reward_type == "chunk_level" else policy.num_action_chunks

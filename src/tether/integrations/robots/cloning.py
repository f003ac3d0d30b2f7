"""Builds the recording of episodes in a simulator, and the training of a policy that imitates them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tether.config import LoadedConfig, RunConfig
from tether.control.build import env_options, make_env, observation_fields
from tether.control.build_policies import get_action_code, new_policy, saved_policy, spaces_of, value_width
from tether.control.envs.config import SELF_RESETTING
from tether.control.envs.protocol import DiscreteActions, VectorEnv
from tether.control.policies.config import FLOW_TYPES, VLA_TYPES
from tether.control.policies.mlp_policy import Policy
from tether.integrations.robots.behaviour_cloning import Cloning, CloningData, CloningOptions, split_episodes, windows
from tether.integrations.robots.demonstrations import Demonstration
from tether.integrations.robots.flow import FlowSpec
from tether.integrations.robots.flow_policies import scales_of_data
from tether.integrations.robots.lerobot import read_dataset
from tether.integrations.robots.vla import VlaSpec
from tether.observations import Array, Observation, played
from tether.runtime.global_rng import seed_rng
from tether.runtime.machine import set_threads
from tether.runtime.user_files import import_python_file

SOURCE = "--from"
SCRIPTED = "scripted"
"""Name of the source that is the simulator's scripted policy."""


@dataclass(frozen=True)
class EpisodeRecording:
    """Episodes to record, and metadata for their file."""

    episodes: Iterator[Demonstration]
    fps: int
    env_id: str


def build_recording(
    loaded: LoadedConfig, source: str, episodes: int, seed: int | None, *, only_successful: bool
) -> EpisodeRecording:
    """Play episodes in one of the environments of ``env.train``.

    Args:
        loaded: the configuration.
        source: a checkpoint, whose policy acts without noise; ``file.py:function``; or ``scripted``, the simulator's
            scripted policy.
        episodes: number of episodes.
        seed: seed of the start states; None: ``env.train.seed``.
        only_successful: whether to drop episodes without success.

    Raises:
        ValueError: a single environment cannot be made, the source does not exist, or its actions do not fit.
    """
    config = loaded.config
    set_threads(config.trainer.num_threads)
    seed_rng(config.trainer.seed)
    section = config.env.train
    if section.env_type in SELF_RESETTING:
        kind = section.env_type
        raise ValueError(f"env.train.env_type: {kind} makes no single environment to record. Use gymnasium.")
    # First, to report if Gymnasium is missing.
    options = env_options(section, "env.train", {}, observation_fields(section))
    record = importlib.import_module("tether.integrations.robots.demonstration_recorder")
    make = importlib.import_module("tether.control.envs.make")
    env = make.make_one(options)
    name, _, function = source.rpartition(":")
    if source == SCRIPTED or name.endswith(".py"):
        codec = importlib.import_module("tether.control.envs.conversion").ActionCodec.of(env.action_space, options.id)
        act = make.scripted(options) if source == SCRIPTED else _function(name, function)
        decide = record.scripted(act, codec)
    else:
        policy = saved_policy(Path(source), SOURCE)
        code = get_action_code(policy)
        decode = _unchanged if code is None else code.decode
        decide = record.of_policy(policy.acting(), policy.spec.num_action_chunks, policy.state_width, decode)
    first = section.seed if seed is None else seed
    fps = round(env.metadata.get("render_fps") or 30)

    def play() -> Iterator[Demonstration]:
        with closing(env):
            yield from record.record(env, options.id, decide, episodes, first, only_successful=only_successful)

    return EpisodeRecording(play(), fps, options.id)


def build_cloning(
    config: RunConfig, folder: Path, options: CloningOptions, held_out: float, quantiles: tuple[float, float]
) -> tuple[Cloning, Policy]:
    """Build a new policy for ``env.train`` and its training on recorded episodes.

    Args:
        config: the configuration.
        folder: folder of the dataset.
        options: options of the training.
        held_out: share of the episodes for validation.
        quantiles: quantiles of the recorded actions, which become the bounds of action tokens.

    Raises:
        ValueError: the dataset is not usable or does not fit the environments, or the policy is recurrent.
    """
    set_threads(config.trainer.num_threads)
    seed_rng(config.trainer.seed)
    if config.policy.lstm_dim is not None:
        raise ValueError("policy.lstm_dim: imitation trains no memory so far. Leave it out.")
    if config.trainer.device not in ("auto", "cpu"):
        raise ValueError(
            f"trainer.device={config.trainer.device}: imitation is learned on the CPU so far. Leave it out."
        )
    episodes = read_dataset(folder)
    with closing(make_env(config.env.train, "env.train", {}, observation_fields(config.env.train))) as env:
        obs = _observations(episodes, env, folder)
        actions = [_actions(episode, env, folder) for episode in episodes]
        for index, (seen, chosen) in enumerate(zip(obs, actions, strict=True)):
            _refuse_forbidden(env, seen, chosen, f"{folder}: episode {index}")
        kind = config.policy.model_type
        bounds = _bounds(actions, quantiles) if kind in VLA_TYPES else None
        scales = scales_of_data(config.policy, env.layout, obs, actions) if kind in FLOW_TYPES else None
        width, model = value_width(config.algorithm, config.policy), config.actor_rollout_ref.model
        policy = new_policy(config.policy, model, env, width, config.trainer.seed, bounds or scales)
        policy.spaces = spaces_of(env)
    spec = policy.spec
    if isinstance(spec, VlaSpec):  # a published policy may have its own bounds
        actions = [_bins(spec).encode(columns) for columns in actions]
    chunk = spec.horizon if isinstance(spec, FlowSpec) else spec.num_action_chunks
    learned, validation = split_episodes(len(episodes), held_out, config.trainer.seed)

    def data(which: list[int]) -> CloningData:
        return windows([obs[i] for i in which], [actions[i] for i in which], chunk)

    learn_from = data(learned)
    policy.update_statistics(learn_from.obs)
    # A Gaussian's standard deviation is not trained, because imitation would shrink it to zero.
    trained = [
        value for name, value in policy.named_parameters() if value.requires_grad and not name.endswith("logstd")
    ]
    return Cloning(policy, trained, learn_from, data(validation), options, config.trainer.seed), policy


def _bounds(actions: list[Array], quantiles: tuple[float, float]) -> dict[str, object]:
    bins = importlib.import_module("tether.integrations.robots.action_bins").ActionBins.of_data(
        np.concatenate(actions), quantiles
    )
    return {"low": bins.low, "high": bins.high}


def _bins(spec: VlaSpec) -> Any:
    return importlib.import_module("tether.integrations.robots.action_bins").ActionBins(spec.low, spec.high)


def _unchanged(actions: Array) -> Array:
    return actions


def _function(file: str, name: str) -> Callable[[Any, Any], Any]:
    function = vars(import_python_file(file, SOURCE)).get(name)
    if not callable(function):
        raise ValueError(f"{SOURCE}={file}:{name}: the file defines no function {name}(env, obs)")
    return function


def _observations(episodes: list[Demonstration], env: VectorEnv, folder: Path) -> list[Observation]:
    try:
        return [played(env.layout, episode.observations) for episode in episodes]
    except ValueError as error:
        raise ValueError(f"{folder}: not recorded in {env.id}: {error}") from error


def _actions(episode: Demonstration, env: VectorEnv, folder: Path) -> Array:
    """Return the actions of an episode in the policy's dtype.

    Raises:
        ValueError: the actions are of a different action space.
    """
    is_discrete = isinstance(env.actions, DiscreteActions)
    kind, wanted = episode.actions.dtype.kind, "choices" if is_discrete else "numbers"
    if episode.actions.shape[1] != env.actions.width or (kind in "iu") != is_discrete:
        columns = f"{episode.actions.shape[1]} columns of {episode.actions.dtype}"
        raise ValueError(f"{folder}: not recorded in {env.id}: actions of {columns}, not {env.actions.width} {wanted}")
    return episode.actions.astype(np.int64 if is_discrete else np.float32)


def _refuse_forbidden(env: VectorEnv, obs: Observation, actions: Array, where: str) -> None:
    """Refuse actions that the recorded masks forbid: the policy can never choose them, so their loss would be huge.

    Raises:
        ValueError: the message names the first such action.
    """
    mask = next((entry.name for entry in env.layout if entry.kind == "mask"), None)
    if mask is None or not isinstance(env.actions, DiscreteActions):
        return
    offsets = np.cumsum((0, *env.actions.choices[:-1]))
    forbidden = ~np.take_along_axis(obs[mask].astype(bool), actions + offsets, axis=1)
    if forbidden.any():
        step, column = np.argwhere(forbidden)[0]
        raise ValueError(
            f"{where}, step {step}: the action {actions[step].tolist()} was taken, and its {mask} forbids choice "
            f"{actions[step, column]}. Record without it, or set env.train.action_masks=false."
        )

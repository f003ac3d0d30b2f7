"""From the id of an environment to a vector of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from tether.envs.protocol import VectorEnv
from tether.envs.sync import SyncVectorEnv
from tether.envs.vector import GymnasiumVectorEnv

EXTRAS = {"mujoco": "mujoco", "imageio": "mujoco", "envpool": "envpool"}
"""Module that an environment could not import -> extra of tether that brings it."""


@dataclass(frozen=True)
class EnvOptions:
    """Which environments, how many, and how they are stepped; the keys of ``env.train`` and ``env.eval``."""

    id: str
    num_envs: int
    env_type: str = "gymnasium"
    vectorization: str = "auto"
    autoreset_mode: str = "same_step"
    num_workers: int = 1
    max_episode_steps: int | None = None
    ignore_terminations: bool = False
    init_params: Mapping[str, Any] = field(default_factory=dict)
    role: str = "env.train"
    """Section of the configuration, for messages."""


def make_vector_env(options: EnvOptions) -> VectorEnv:
    """Make `num_envs` environments of an id.

    Raises:
        ValueError: the id is unknown, what it needs is not installed, it does not take the arguments, or no policy fits
            its spaces.
    """
    try:
        if options.env_type == "envpool":
            adapter = importlib.import_module("tether.envs.envpool_env")
            return adapter.make_envpool(options)
        return _make_gymnasium(options)
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        raise ValueError(_missing(options, error)) from error


def _make_gymnasium(options: EnvOptions) -> VectorEnv:
    spec = _find(options)
    arguments = dict(options.init_params)
    if options.max_episode_steps is not None:
        arguments["max_episode_steps"] = options.max_episode_steps

    def make() -> gymnasium.Env[Any, Any]:
        try:
            return gymnasium.make(spec, disable_env_checker=True, **arguments)
        except TypeError as error:
            raise ValueError(
                f"{options.role}.init_params: {options.id} does not take its arguments ({error}). Correct the names in "
                f"{options.role}.init_params={dict(options.init_params)}."
            ) from error

    own_code = spec.vector_entry_point is not None and not options.ignore_terminations
    if options.vectorization == "subprocess":
        mode = AutoresetMode[options.autoreset_mode.upper()]
        return GymnasiumVectorEnv(options.id, AsyncVectorEnv([make] * options.num_envs, autoreset_mode=mode))
    if options.vectorization == "vector" or (options.vectorization == "auto" and own_code and options.num_envs >= 8):
        if not own_code:
            what = "has no vector code of its own" if spec.vector_entry_point is None else "cannot ignore terminations"
            raise ValueError(f"{options.role}.vectorization: {options.id} {what}. Use auto, sync or subprocess.")
        env = gymnasium.make_vec(spec, options.num_envs, vectorization_mode="vector_entry_point", **arguments)
        return GymnasiumVectorEnv(options.id, env)
    return SyncVectorEnv(options.id, make, options.num_envs, ignore_terminations=options.ignore_terminations)


def _find(options: EnvOptions) -> EnvSpec:
    """The registered environment; ``module:Name-v0`` imports the module first."""
    module, _, name = options.id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    near = get_close_matches(name, gymnasium.registry, n=3)
    fix = f"Did you mean {' or '.join(near)}?" if near else "gymnasium.pprint_registry() lists those that there are."
    raise ValueError(f"{options.role}.id: no environment is registered as {name}. {fix}")


def _missing(options: EnvOptions, error: Exception) -> str:
    text = f"{error} {error.__cause__ or ''}"
    extra = next((extra for module, extra in EXTRAS.items() if module in text), None)
    fix = f"Run: pip install 'tether[{extra}]'" if extra else "Install it."
    return f"{options.role}.id: {options.id} needs a package that is not installed ({error}). {fix}"

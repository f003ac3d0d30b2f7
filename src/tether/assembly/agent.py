"""A saved control policy with the spaces of its environment, for predicting actions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tether.assembly.control import env_options, view_of
from tether.assembly.policies import code_of
from tether.config import RunConfig
from tether.models.control import load_policy
from tether.runtime.machine import set_threads
from tether.trainer.control import POLICY

if TYPE_CHECKING:
    from tether.envs.gymnasium_types import Env
    from tether.rollout.env.agent import EnvAgent


def build_agent(config: RunConfig, checkpoint: Path, seed: int) -> tuple[EnvAgent, Callable[[], Env]]:
    """Build the `tether.rollout.env.agent.EnvAgent` of a checkpoint, and a factory of environments of ``env.eval``.

    Args:
        config: configuration of the run.
        checkpoint: the ``global_step_N`` folder.
        seed: seed of the noise for sampling actions.

    Raises:
        ValueError: the spaces of the environment cannot be looked up, or a package is missing.
    """
    set_threads(config.trainer.num_threads)
    section = config.env.eval
    options = env_options(section, "env.eval", {}, view_of(config))
    make = importlib.import_module("tether.envs.make")
    policy = load_policy(checkpoint / POLICY)
    code = code_of(policy)
    decode = None if code is None else code.decode
    agent_type = importlib.import_module("tether.rollout.env.agent").EnvAgent
    return agent_type(policy, *make.spaces_of(options), options.id, decode, seed), partial(make.make_one, options)

"""A saved control policy with the spaces of its environment, for predicting actions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tether.config import RunConfig
from tether.control.build import env_options, view_of
from tether.control.build_policies import code_of
from tether.control.learning.rollouts import POLICY
from tether.control.policies import load_policy
from tether.runtime.machine import set_threads

if TYPE_CHECKING:
    from tether.control.collecting.agent import EnvAgent
    from tether.control.envs.gymnasium_types import Env


def build_agent(config: RunConfig, checkpoint: Path, seed: int) -> tuple[EnvAgent, Callable[[], Env]]:
    """Build the `tether.control.collecting.agent.EnvAgent` of a checkpoint, and a factory of environments of
    ``env.eval``.

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
    make = importlib.import_module("tether.control.envs.make")
    policy = load_policy(checkpoint / POLICY)
    code = code_of(policy)
    decode = None if code is None else code.decode
    agent_type = importlib.import_module("tether.control.collecting.agent").EnvAgent
    return agent_type(policy, *make.spaces_of(options), options.id, decode, seed), partial(make.make_one, options)

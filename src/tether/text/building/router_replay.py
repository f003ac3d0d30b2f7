"""Runs that replay the chosen experts of a mixture: checks before a model loads, and the mode of each pass."""

from __future__ import annotations

from pathlib import Path

from tether.config import RunConfig, replay_of
from tether.runtime.objects import held, is_object
from tether.text.learning.packing import Experts
from tether.text.models.expert_choice import experts_per_token
from tether.text.models.load import is_gguf, load_config

RECOMPUTED: dict[str, Experts] = {"disabled": "chosen", "R2": "recorded", "R3": "replayed"}
"""Mode -> experts in the pass that computes the old log-probs."""
UPDATED: dict[str, Experts] = {"disabled": "chosen", "R2": "replayed", "R3": "replayed"}
"""Mode -> experts in the update."""


def replays(config: RunConfig) -> bool:
    """Whether the update reuses the experts of an earlier pass."""
    return replay_of(config)[1] != "disabled"


def check_router_replay(config: RunConfig, policy: Path | str) -> None:
    """Refuse a policy without experts, before it loads.

    Args:
        config: configuration of the run.
        policy: location of its config.

    Raises:
        ValueError: the policy has no experts.
    """
    key, mode = replay_of(config)
    if mode == "disabled" or is_gguf(policy):  # a GGUF file, which is checked when it is loaded
        return
    trust = config.actor_rollout_ref.model.trust_remote_code
    model_config = held(str(policy)).config if is_object(policy) else load_config(policy, trust_remote_code=trust)
    if experts_per_token(model_config) is None:
        raise ValueError(
            f"{key}={mode}: {type(model_config).__name__} (actor_rollout_ref.model.path) has no experts, so there is "
            f"no choice to replay. Leave {key} out, or take a mixture of experts."
        )

"""Runs that replay the experts of a mixture: what is refused before a model loads, and what each pass does."""

from __future__ import annotations

from pathlib import Path

from tether.config import RunConfig, replay_of
from tether.models.language.expert_choice import experts_per_token
from tether.models.language.load import is_gguf, load_config
from tether.runtime.objects import held, is_object
from tether.training.text import Experts

RECOMPUTED: dict[str, Experts] = {"disabled": "chosen", "R2": "recorded", "R3": "replayed"}
"""Mode -> the experts of the pass that computes the old log-probs."""
UPDATED: dict[str, Experts] = {"disabled": "chosen", "R2": "replayed", "R3": "replayed"}
"""Mode -> those of the update."""


def replays(config: RunConfig) -> bool:
    """Whether the update chooses experts as an earlier pass did."""
    return replay_of(config)[1] != "disabled"


def check_router_replay(config: RunConfig, policy: Path | str) -> None:
    """Refuse a policy that has no experts, before it loads.

    Args:
        config: of the run.
        policy: where its config is.

    Raises:
        ValueError: there is nothing to replay.
    """
    key, mode = replay_of(config)
    if mode == "disabled" or is_gguf(policy):  # a file of its own kind, which tells what it is once it is read
        return
    trust = config.actor_rollout_ref.model.trust_remote_code
    found = held(str(policy)).config if is_object(policy) else load_config(policy, trust_remote_code=trust)
    if experts_per_token(found) is None:
        raise ValueError(
            f"{key}={mode}: {type(found).__name__} (actor_rollout_ref.model.path) has no experts, so there is no "
            f"choice to replay. Leave {key} out, or take a mixture of experts."
        )

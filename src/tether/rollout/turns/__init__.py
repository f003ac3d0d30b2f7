"""Conversations: what the policy says, what tools and environments answer, and how both become one row of a batch.

`template` tokenizes what stands between two turns; `conversations` is the partner of a rollout engine.
"""

from tether.rollout.turns.conversations import Conversations, Talk, TurnLimits
from tether.rollout.turns.template import TurnTemplate

__all__ = ["Conversations", "Talk", "TurnLimits", "TurnTemplate"]

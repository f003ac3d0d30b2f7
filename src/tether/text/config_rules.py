"""All rules of a text run's configuration.

A rule's message has the full path of each key that it mentions, so that the rule can be skipped if one of them is
invalid by itself.
"""

from __future__ import annotations

from tether.config.rules.shapes import Rule
from tether.config.rules.shared import SHARED_RULES
from tether.text.data.config_rules import DATA_RULES
from tether.text.learning.config_rules import LEARNING_RULES
from tether.text.rewards.config_rules import REWARD_RULES
from tether.text.sampling.config_rules import SAMPLING_RULES
from tether.text.turns.config_rules import TURN_RULES

RULES: tuple[Rule, ...] = (*DATA_RULES, *SHARED_RULES, *SAMPLING_RULES, *TURN_RULES, *REWARD_RULES, *LEARNING_RULES)

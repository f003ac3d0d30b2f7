"""All rules between keys, each of which reports one contradiction in a configuration before a model is loaded.

They are defined in `config_rules` modules next to the code that reads the keys; `tether.config.rules` has the rules
that several packages share.
"""

from __future__ import annotations

from tether.config.problems import Problem
from tether.config.schema.root import RunConfig
from tether.control.config_rules import RULES as CONTROL_RULES
from tether.text.config_rules import RULES as TEXT_RULES


def contradictions(cfg: RunConfig) -> list[Problem]:
    """Return all contradictions of a config."""
    rules = TEXT_RULES if cfg.env.train.id is None else CONTROL_RULES
    return [problem for rule in rules if (problem := rule(cfg)) is not None]

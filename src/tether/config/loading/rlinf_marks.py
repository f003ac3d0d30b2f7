"""Recognises RLinf's files. Apart from the tables that import them, which take a moment to load."""

from __future__ import annotations

from collections.abc import Mapping

from tether.config.keys import sections

ENV_KEY = "env.train.id"
POLICY_KEY = "policy.model_type"
NOT_SUPPORTED = "not_supported"
"""Section of a translated file: key of RLinf's -> why the file is refused as long as the line stands there."""
MARKS = ("cluster", "runner", "actor", "rollout", "weight_syncer")
"""A file with one of these sections, and no native section but the shared ones, is RLinf's."""
ALGORITHM_MARKS = ("adv_type", "loss_type", "gae_lambda")
SHARED_SECTIONS = ("algorithm", "cluster", "critic", "data", "env")
"""Sections that RLinf's files and native ones both have."""


def is_rlinf(tree: Mapping[object, object]) -> bool:
    """Whether a YAML file is one of RLinf's, by its sections."""
    algorithm = tree.get("algorithm")
    marked = any(name in tree for name in MARKS) or (
        isinstance(algorithm, Mapping) and any(name in algorithm for name in ALGORITHM_MARKS)
    )
    native = {path.split(".")[0] for path in sections()} - set(SHARED_SECTIONS)
    return marked and not native & set(map(str, tree))

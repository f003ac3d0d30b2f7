"""Recognises RLinf's files; a module of its own, because the tables that import such files are slow to load."""

from __future__ import annotations

from collections.abc import Mapping

from tether.config.keys import sections

ENV_KEY = "env.train.id"
POLICY_KEY = "policy.model_type"
NOT_SUPPORTED = "not_supported"
"""Section of a translated file: RLinf's key -> why the file is refused unless that entry is deleted."""
MARKS = ("cluster", "runner", "actor", "rollout", "weight_syncer")
"""A file with one of these sections, and with no native section except the shared ones, is RLinf's."""
ALGORITHM_MARKS = ("adv_type", "loss_type", "gae_lambda")
SHARED_SECTIONS = ("algorithm", "cluster", "critic", "data", "env")
"""Sections that exist in both RLinf's files and native ones."""


def is_rlinf(tree: Mapping[object, object]) -> bool:
    """Whether a YAML file is one of RLinf's, by its sections."""
    algorithm = tree.get("algorithm")
    marked = any(name in tree for name in MARKS) or (
        isinstance(algorithm, Mapping) and any(name in algorithm for name in ALGORITHM_MARKS)
    )
    native = {path.split(".")[0] for path in sections()} - set(SHARED_SECTIONS)
    return marked and not native & set(map(str, tree))

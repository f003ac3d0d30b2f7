"""Unknown keys: which real one was meant."""

from __future__ import annotations

from difflib import get_close_matches

from tether.config.keys import keys, sections
from tether.config.problems import Problem

MISSPELLINGS = {
    "algorithm.gemma": "algorithm.gamma",
    "actor_rollout.ref": "actor_rollout_ref",
    "actor_rollout_ref.critic": "critic",
    "actor_rollout_ref.algorithm": "algorithm",
}
"""Prefixes that public documents of verl spell wrong -> the real ones."""

FOREIGN = {
    "defaults": "is Hydra's list of files to compose; verl's defaults are built in",
    "hydra": "configures Hydra's own command line, which is not used",
}
"""Sections that belong to Hydra itself -> why they have no place here."""


def unknown_key(path: str) -> Problem:
    """Say that `path` is no key, and name the nearest one."""
    top = path.split(".", 1)[0]
    if top in FOREIGN:
        return Problem(path, FOREIGN[top], "leave it out")
    meant = nearest(path)
    return Problem(path, "unknown key", f"did you mean {meant}?" if meant else "see `tether config show` for all keys")


def nearest(path: str) -> str | None:
    """The key or section that was most likely meant by `path`; None where nothing is like it."""
    known = [*keys(), *sections()]
    respelled = _respell(path)
    if respelled in known:
        return respelled
    leaf = respelled.rsplit(".", 1)[-1]
    misplaced = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    best = get_close_matches(respelled, misplaced, n=1, cutoff=0.0) or get_close_matches(respelled, known, n=1)
    return best[0] if best else None


def _respell(path: str) -> str:
    for wrong, right in MISSPELLINGS.items():
        if path == wrong or path.startswith(wrong + "."):
            return right + path.removeprefix(wrong)
    return path

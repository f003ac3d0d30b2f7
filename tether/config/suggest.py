"""Unknown keys: which real one was meant."""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches

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
    return Problem(path, "unknown key", f"did you mean {meant}?" if meant else f"see `tether config {_listing(path)}`")


def nearest(path: str) -> str | None:
    """The key that was most likely meant by `path`; None where nothing is like it."""
    respelled = _respell(path)
    leaf = _leaf(respelled)
    misplaced = [key for key in keys() if _leaf(key) == leaf]
    best = get_close_matches(respelled, misplaced, n=1, cutoff=0.0) or get_close_matches(respelled, keys(), n=1)
    return best[0] if best and _is_like(leaf, _leaf(best[0])) else None


def _respell(path: str) -> str:
    for wrong, right in MISSPELLINGS.items():
        if path == wrong or path.startswith(wrong + "."):
            return right + path.removeprefix(wrong)
    return path


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _is_like(name: str, other: str) -> bool:
    # Of names this short, one letter is too much to ask for.
    return min(len(name), len(other)) <= 2 or SequenceMatcher(None, name, other).ratio() >= 0.6


def _listing(path: str) -> str:
    """The subcommand that lists the keys around `path`."""
    parts = path.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    section = next((name for name in around if name in sections()), None)
    return f"explain {section}" if section else "show"

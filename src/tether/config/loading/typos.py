"""Unknown keys: which real one was meant."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import SequenceMatcher

from tether.config.keys import keys, sections
from tether.config.loading.foreign_words import KEYS, VALUES, WITHOUT_KEY
from tether.config.problems import Problem
from tether.config.support.verl_keys import unread_keys
from tether.spelling import closest

MISSPELLINGS = {
    "algorithm.gemma": "algorithm.gamma",
    "actor_rollout.ref": "actor_rollout_ref",
    "actor_rollout_ref.critic": "critic",
    "actor_rollout_ref.algorithm": "algorithm",
}
"""Prefixes that public documents of verl spell wrong -> the real ones."""

HYDRA = {
    "defaults": "is Hydra's list of files to compose; verl's defaults are built in",
    "hydra": "configures Hydra's own command line, which is not used",
}
"""Sections that belong to Hydra itself -> why they have no place here."""


def unknown_key(path: str) -> Problem:
    """Say that `path` is no key, and name the nearest one."""
    top = path.split(".", 1)[0]
    if path == "hydra.searchpath":
        fix = "write it in the run's file, hydra: {searchpath: [...]}"
        return Problem(path, "says where presets are, which are read before overrides", fix)
    if top in HYDRA:
        return Problem(path, HYDRA[top], "leave it out")
    if instead := WITHOUT_KEY.get(_split(path)[1]):
        return Problem(path, "unknown key", instead)
    meant = " or ".join(KEYS.get(path, ())) or nearest(path)
    return Problem(path, "unknown key", f"did you mean {meant}?" if meant else f"see `tether config {_listing(path)}`")


def value_meant(key: str, value: str, choices: Collection[str]) -> str | None:
    """The choice that was most likely meant by `value`; None if none is like it."""
    other = VALUES.get(key.rpartition(".")[2], {}).get(value.lower().replace("-", "_"))
    return other or next(iter(closest(value, choices)), None)


def nearest(path: str, known: Collection[str] | None = None) -> str | None:
    """The key that was most likely meant by `path`, among those of the schema or `known` ones; None if none is like it.

    Tried in this order: a key that is one slip away, the first key whose end it is, the same name in another section,
    another library's name, a similar name in this section, a similar path.
    """
    respelled = _respell(path)
    names = [*keys(), *unread_keys()] if known is None else known
    if path in KEYS and KEYS[path][0] in names:
        return KEYS[path][0]
    if slipped := next((name for name in names if _is_one_slip(respelled, name)), None):
        return slipped
    section, leaf = _split(respelled)
    if section and (whole := next((name for name in names if name.endswith(f".{respelled}")), None)):
        return whole
    misplaced = [key for key in names if _split(key)[1] == leaf]
    if misplaced:
        return closest(respelled, misplaced, cutoff=0.0)[0]
    if (foreign := _foreign(section, leaf)) in names:
        return foreign
    siblings = [_split(key)[1] for key in names if _split(key)[0] == section]
    if similar := closest(leaf, siblings):
        return f"{section}.{similar[0]}"
    best = next(iter(closest(respelled, names)), None)
    return best if best and _is_like(leaf, _split(best)[1]) else None


def key_written_as(option: str) -> str | None:
    """The key that was written as an option of a command, such as --trainer.seed; None if there is none like it."""
    name = option.lstrip("-").replace("-", "_")
    return name if name in keys() else next(iter(KEYS.get(name, ())), None)


def _foreign(section: str, leaf: str) -> str | None:
    """The key that another library calls `leaf`; the critic's, where the section is the critic's."""
    meant = KEYS[leaf][0] if leaf in KEYS else None
    if meant is None or section.split(".")[0] != "critic":
        return meant
    critics = re.sub(r"^actor_rollout_ref\.(actor\.)?", "critic.", meant)
    return critics if critics in keys() else meant


def _respell(path: str) -> str:
    for wrong, right in MISSPELLINGS.items():
        if path == wrong or path.startswith(wrong + "."):
            return right + path.removeprefix(wrong)
    return path


def _is_one_slip(word: str, other: str) -> bool:
    """Whether one letter was added, left out or mistyped, or two neighbours were swapped."""
    at = next((i for i, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other)))
    swapped = word[at : at + 2][::-1] + word[at + 2 :]
    return other[at:] in (word[at + 1 :], swapped) or other[at + 1 :] in (word[at:], word[at + 1 :])


def _split(path: str) -> tuple[str, str]:
    section, _, leaf = path.rpartition(".")
    return section, leaf


def _is_like(name: str, other: str) -> bool:
    # Of names this short, one letter is too much to ask for.
    return min(len(name), len(other)) <= 2 or SequenceMatcher(None, name, other).ratio() >= 0.6


def _listing(path: str) -> str:
    """The subcommand that lists the keys around `path`."""
    parts = path.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    section = next((name for name in around if name in sections()), None)
    if section:
        return f"explain {section}"
    # A search that finds nothing would be a hint that leads nowhere.
    found = any(parts[-1].lower() in f"{key.path} {key.doc}".lower() for key in keys().values())
    return f"explain --search {parts[-1]}" if found else "explain"

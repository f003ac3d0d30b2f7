"""Suggestions for unknown keys."""

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
}
"""Misspelt prefixes in verl's public documents -> the correct ones."""

HYDRA = {
    "defaults": "is Hydra's list of files to compose; verl's defaults are built in",
    "hydra": "configures Hydra's own command line, which is not used",
}
"""Sections of Hydra itself -> why they are not used here."""


def unknown_key(path: str) -> Problem:
    """Return the problem of an unknown key; the fix suggests the nearest key."""
    top = path.split(".", 1)[0]
    if path == "hydra.searchpath":
        fix = "write it in the run's file, hydra: {searchpath: [...]}"
        return Problem(path, "names folders of presets, which are read before overrides", fix)
    if top in HYDRA:
        return Problem(path, HYDRA[top], "leave it out")
    if instead := WITHOUT_KEY.get(_split(path)[1]):
        return Problem(path, "unknown key", instead)
    meant = " or ".join(KEYS.get(path, ())) or nearest(path)
    return Problem(path, "unknown key", f"did you mean {meant}?" if meant else f"see `tether config {_listing(path)}`")


def value_meant(key: str, value: str, choices: Collection[str]) -> str | None:
    """Return the choice most likely meant by `value`; None if none is similar."""
    other = VALUES.get(key.rpartition(".")[2], {}).get(value.lower().replace("-", "_"))
    return other or next(iter(closest(value, choices)), None)


def nearest(path: str, candidates: Collection[str] | None = None) -> str | None:
    """Return the key most likely meant by `path`, among `candidates` or all keys; None if none is similar.

    It is the first match of: a key with one typo, a key that ends with the path, the same name in another section,
    another library's name, a similar name in this section, a similar path.
    """
    corrected = _corrected(path)
    names = [*keys(), *unread_keys()] if candidates is None else candidates
    if path in KEYS and KEYS[path][0] in names:
        return KEYS[path][0]
    if one_typo := next((name for name in names if _is_one_typo(corrected, name)), None):
        return one_typo
    section, leaf = _split(corrected)
    if section and (extended := next((name for name in names if name.endswith(f".{corrected}")), None)):
        return extended
    misplaced = [key for key in names if _split(key)[1] == leaf]
    if misplaced:
        return closest(corrected, misplaced, cutoff=0.0)[0]
    if (foreign := _foreign(section, leaf)) in names:
        return foreign
    siblings = [_split(key)[1] for key in names if _split(key)[0] == section]
    if similar := closest(leaf, siblings):
        return f"{section}.{similar[0]}"
    best = next(iter(closest(corrected, names)), None)
    return best if best and _is_like(leaf, _split(best)[1]) else None


def key_written_as(option: str) -> str | None:
    """Return the key that was written as a command-line option, such as --trainer.seed; None if no key matches."""
    name = option.lstrip("-").replace("-", "_")
    return name if name in keys() else next(iter(KEYS.get(name, ())), None)


def _foreign(section: str, leaf: str) -> str | None:
    """Return tether's key for the name `leaf` of another library; the critic's key if `section` is the critic's."""
    meant = KEYS[leaf][0] if leaf in KEYS else None
    if meant is None or section.split(".")[0] != "critic":
        return meant
    critics = re.sub(r"^actor_rollout_ref\.(actor\.)?", "critic.", meant)
    return critics if critics in keys() else meant


def _corrected(path: str) -> str:
    for wrong, right in MISSPELLINGS.items():
        if path == wrong or path.startswith(wrong + "."):
            return right + path.removeprefix(wrong)
    return path


def _is_one_typo(word: str, other: str) -> bool:
    """Whether the words differ by one added, omitted or replaced letter, or by two swapped adjacent letters."""
    index = next((i for i, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other)))
    swapped = word[index : index + 2][::-1] + word[index + 2 :]
    return other[index:] in (word[index + 1 :], swapped) or other[index + 1 :] in (word[index:], word[index + 1 :])


def _split(path: str) -> tuple[str, str]:
    section, _, leaf = path.rpartition(".")
    return section, leaf


def _is_like(name: str, other: str) -> bool:
    # Such short names need no letter in common.
    return min(len(name), len(other)) <= 2 or SequenceMatcher(None, name, other).ratio() >= 0.6


def _listing(path: str) -> str:
    """Return the subcommand that lists keys similar to `path`."""
    names = path.split(".")
    parents = (".".join(names[:count]) for count in range(len(names), 0, -1))
    section = next((name for name in parents if name in sections()), None)
    if section:
        return f"explain {section}"
    # Do not suggest a search that would match nothing.
    matches = any(names[-1].lower() in f"{key.path} {key.doc}".lower() for key in keys().values())
    return f"explain --search {names[-1]}" if matches else "explain"

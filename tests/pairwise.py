"""Parametrisation of a test over several options without their full product in the default selection."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest


def pairs_of(case: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    """Return every two values of a case, each with the index of its option."""
    return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}


def pairwise(cases: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Choose cases that contain every pair of values that any case contains, the case with most new pairs first."""
    pairs = {case: pairs_of(case) for case in cases}
    missing = set().union(*pairs.values())
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        yield best


def in_turn(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as many cases as the longest option has values; each value of each option is in one of them at least.

    Shorter options begin again one value later each time, so that values meet different ones.
    """
    cases = range(max(map(len, options)))
    return [tuple(values[(i + i // len(values)) % len(values)] for values in options) for i in cases]


def in_turn_parameters(*options: Sequence[Any]) -> list[Any]:
    """Return the product of the options for `pytest.mark.parametrize`; all but the cases `in_turn` are slow."""
    return _slow_but_for(set(in_turn(*options)), options)


def pairwise_parameters(*options: Sequence[Any]) -> list[Any]:
    """Return the product of the options for `pytest.mark.parametrize`; what a pairwise cover leaves out is slow."""
    return _slow_but_for(set(pairwise(list(itertools.product(*options)))), options)


def _slow_but_for(quick: set[tuple[Any, ...]], options: Sequence[Sequence[Any]]) -> list[Any]:
    cases = itertools.product(*options)
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]

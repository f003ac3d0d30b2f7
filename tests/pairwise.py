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


def pairwise_parameters(*options: Sequence[Any]) -> list[Any]:
    """Return the product of the options for `pytest.mark.parametrize`; what a pairwise cover leaves out is slow."""
    cases = list(itertools.product(*options))
    cover = set(pairwise(cases))
    return [pytest.param(*case, marks=() if case in cover else pytest.mark.slow) for case in cases]

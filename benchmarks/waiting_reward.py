"""The reward of `benchmarks.algorithms`, which waits, as for a judge that is elsewhere: one call in fifty is slow."""

from __future__ import annotations

import random
import time

from benchmarks.algorithms.reward import compute_score as score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> dict[str, float]:
    """See `benchmarks.algorithms.reward`."""
    time.sleep(0.2 if random.random() < 0.02 else 0.001)
    return score(data_source, solution_str, ground_truth, extra_info)

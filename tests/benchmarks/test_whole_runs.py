"""Whole runs on forked ranks, as the benchmark compares them."""

import pytest
import torch

from benchmarks.whole_runs import GOAL, HYBRID, SHARED, rows, worst_weight


def test_differences_are_relative_to_how_far_weights_moved() -> None:
    start = {"layer": torch.tensor([1.0, 1.0])}
    one = {"layer": torch.tensor([1.0, 1.5]), "head": torch.tensor([2.0])}
    other = {"layer": torch.tensor([1.0, 1.25]), "head": torch.tensor([2.5])}
    assert worst_weight(start, one, other) == 0.5  # 0.25 of 0.5; of the new head 0.5 of 2


@pytest.mark.slow
def test_whole_runs_end_as_in_one_process() -> None:
    layouts = {"1 rank": (1, []), "SP 2": (2, SHARED), "HSDP 1 x 2": (2, HYBRID)}
    found = {name: measured for name, *measured in rows(layouts, 3)}
    assert found.pop("1 rank") == [0, 0.0, 0.0]
    for name, (differ, weights, metrics) in found.items():
        assert differ == 0, name
        assert 0 < weights < GOAL, name
        assert metrics < 1e-4, name

"""The tests of this folder compute on one thread."""

import pytest
import torch


@pytest.fixture(scope="module")
def of_module() -> int:
    return torch.get_num_threads()


def test_a_fixture_of_a_module_computes_as_its_tests_do(of_module: int) -> None:
    assert (of_module, torch.get_num_threads()) == (1, 1)
    torch.set_num_threads(2)


def test_what_a_test_leaves_does_not_reach_the_next() -> None:
    assert torch.get_num_threads() == 1

"""One thread: sums in a fixed order, and tiny models are slower on more."""

import torch

from tests.runs.conftest import _reward_of_this_process  # noqa: F401  # the function that `LIGHT` names


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)

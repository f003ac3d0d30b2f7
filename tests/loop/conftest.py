"""One thread: sums in a fixed order, and tiny models are slower on more."""

import torch


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)

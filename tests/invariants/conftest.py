"""One thread: sums in a fixed order, and tiny models are slower on more."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_two_threads: None) -> None:
    torch.set_num_threads(1)

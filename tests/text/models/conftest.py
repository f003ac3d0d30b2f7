"""Packed inputs for tiny models."""

import pytest
import torch
from torch import Tensor

from tests.tiny import VOCAB_SIZE
from tether.text.models.layers import Packed

LENGTHS = (7, 11, 3, 1)


@pytest.fixture
def packed() -> tuple[Tensor, Tensor, Packed]:
    """Token ids [1, N], position ids [1, N] and layout of four short sequences; two are longer than the window."""
    generator = torch.Generator().manual_seed(7)
    layout = Packed(LENGTHS)
    return torch.randint(4, VOCAB_SIZE, (1, sum(LENGTHS)), generator=generator), layout.position_ids(), layout

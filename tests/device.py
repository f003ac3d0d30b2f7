"""The device that the tests' runs and engines are on: ``TETHER_TEST_DEVICE``, the CPU by default.

With ``TETHER_TEST_DEVICE=cuda`` the same tests say what holds on a GPU.
"""

import os

import torch

DEVICE = os.environ.get("TETHER_TEST_DEVICE", "cpu")


def on_device(model: torch.nn.Module) -> torch.nn.Module:
    """Moved there; a rank of several is a forked process, and stays on the CPU."""
    return model if torch.distributed.is_initialized() else model.to(DEVICE)

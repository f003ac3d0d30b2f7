"""Settings and state of a GPU, on a machine that need not have one."""

import ctypes
import random
import time
from collections.abc import Callable

import psutil
import pytest
import torch

from tether.runtime import machine
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.runtime.machine import deterministic_kernels, release_memory, release_memory_periodically


def test_kernels_are_deterministic_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    found: list[bool] = []

    def fail() -> None:
        with deterministic_kernels():
            found.append(torch.are_deterministic_algorithms_enabled())
            found.append(torch.is_deterministic_algorithms_warn_only_enabled())  # where attention keeps its own kernel
            found.append(torch.utils.deterministic.fill_uninitialized_memory)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert found == [True, False, False]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled


def test_what_the_caller_had_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_kernels():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_a_gpu_in_use_nothing_changes() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU")
    with deterministic_kernels():
        assert not torch.are_deterministic_algorithms_enabled()


def test_the_state_of_generators_needs_no_gpu_that_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process of environments sees a GPU that it cannot use, and CUDA would raise there."""

    def refuse(*_: object) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", refuse)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", refuse)
    state = rng_state()
    assert "cuda" not in state
    drawn = random.random(), torch.rand(1)
    set_rng_state(state | {"cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert (random.random(), torch.rand(1)) == drawn


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc_trim is glibc's")
def test_freed_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks between others that stay: glibc alone gives none of them back."""

    def goes_back(returned: Callable[[], None]) -> bool:
        blocks = [torch.ones(25_000) for _ in range(4000)]  # 400 MB, in blocks that malloc takes from its heap
        stays = blocks[::100]
        del blocks
        before = psutil.Process().memory_info().rss
        returned()
        after = psutil.Process().memory_info().rss
        return before - after > 200e6 and len(stays) == 40

    assert goes_back(release_memory)
    monkeypatch.setattr(machine, "_returned", time.monotonic())
    assert not goes_back(release_memory_periodically), "it was returned just now"
    monkeypatch.setattr(machine, "BETWEEN_RETURNS", 0.0)
    assert goes_back(release_memory_periodically)

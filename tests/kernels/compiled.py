"""Kernels that one process compiles for all, before the tests that use them: no test is charged for it.

Where kernels were compiled before, in another run, numba finds them on the disk.
"""

from collections.abc import Iterable
from types import ModuleType

import pytest
import torch

from tests.made_once import made_once
from tether.kernels.dispatch import REFERENCE, kernels_for


def compile_kernels(modules: Iterable[ModuleType]) -> None:
    """Compile the kernels of these modules, which leaves them in numba's cache on the disk."""
    from tether.kernels.cpu.openmp_loop import Kernel

    for kernel in (value for module in modules for value in vars(module).values() if isinstance(value, Kernel)):
        assert kernel.address


@pytest.fixture(scope="session")
def compiled_attention(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernels of packed attention, where this processor has the instructions."""
    if kernels_for(torch.zeros(1, dtype=torch.bfloat16)) is REFERENCE:
        return
    from tether.kernels.cpu import avx512_instructions, packed_attention

    if avx512_instructions.has_avx512_bf16():
        made_once("compiled_attention", lambda _: compile_kernels([packed_attention]), tmp_path_factory)


@pytest.fixture(scope="session")
def compiled_kernels(compiled_attention: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All kernels that tests of bfloat16 on this processor may use."""
    bfloat16 = kernels_for(torch.zeros(1, dtype=torch.bfloat16))
    if bfloat16 is REFERENCE:
        return
    from tether.kernels.cpu import causal_attention, decode_attention, elementwise, linear_plain, vocabulary

    modules = [causal_attention, decode_attention, elementwise, linear_plain, vocabulary]
    if bfloat16.linear_kernels is not None:
        modules.append(bfloat16.linear_kernels)
    made_once("compiled_kernels", lambda _: compile_kernels(modules), tmp_path_factory)

"""Compile the CPU kernels before the first run needs them: ``python -m tether.kernels.precompile``.

Compiled code is cached on the disk, beside the package or in the user's cache, until the kernels or numba change.
Without this command, each kernel is compiled when it is first called.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType

import torch

from tether.kernels.dispatch import REFERENCE, kernels_for
from tether.runtime.package_warnings import quiet_fork
from tether.runtime.threads import usable_cores


def kernel_modules() -> list[ModuleType]:
    """Return the modules whose kernels bfloat16 models use on this processor."""
    chosen = kernels_for(torch.zeros(1, dtype=torch.bfloat16))
    if chosen is REFERENCE:
        return []
    from tether.kernels.cpu import (
        avx512_instructions,
        causal_attention,
        decode_attention,
        elementwise,
        linear_plain,
        packed_attention,
        vocabulary,
    )
    from tether.kernels.cpu.backend import Cpu

    modules = [causal_attention, decode_attention, elementwise, linear_plain, vocabulary]
    if (linear_kernels := Cpu().linear_kernels) is not None:
        modules.append(linear_kernels)
    if avx512_instructions.has_avx512_bf16():
        modules.append(packed_attention)
    return modules


def compile_kernels(modules: Iterable[ModuleType]) -> None:
    """Compile the kernels of these modules, as many at a time as there are cores."""
    from tether.kernels.cpu.openmp_loop import Kernel

    kernels = [
        (module, name) for module in modules for name, value in vars(module).items() if isinstance(value, Kernel)
    ]
    # A forked process has already imported what it compiles, and the cache on the disk is all that it has to return.
    with quiet_fork(), ProcessPoolExecutor(usable_cores(), multiprocessing.get_context("fork")) as pool:
        list(pool.map(_compile, [module.__name__ for module, _ in kernels], [name for _, name in kernels]))


def _compile(module: str, name: str) -> None:
    assert getattr(sys.modules[module], name).address


if __name__ == "__main__":
    compile_kernels(kernel_modules())

"""The declaration of a compiled kernel's arguments, from which both the calling and the compiled code are generated.

A kernel is written as a function whose annotations declare each argument::

    @kernel
    def scaled(
        x: Annotated[int, bfloat16("rows", "width", strides=("x_stride",))],  # compiled code gets the address
        out: Annotated[BFloat16s, bfloat16("rows", "width")],  # compiled code gets an array of that shape
        factor: float,
        rows: int,
        width: int,
        x_stride: int,
    ) -> None: ...

and is called with keyword arguments only: ``scaled(x=x, out=out, factor=2.0)``. Names of sizes and strides are read off
the tensors. A tensor with another dtype or memory order is refused, and so are two tensors with different values of one
size. Callers do not pass ``queue: int``: it is the address of a number that is 0 when the kernel starts, for
`tether.kernels.cpu.openmp_loop.tasks`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BFloat16s: TypeAlias = NDArray[np.uint16]
"""bfloat16 numbers as compiled code sees them: their bits."""
Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
QUEUE = "queue"
"""The last number in the array of arguments, also of kernels that do not use it."""


@dataclass(frozen=True)
class TensorArgument:
    """The declaration of a tensor argument on the CPU."""

    dtype: torch.dtype
    sizes: tuple[str | int, ...]
    """The name of each size, or the size itself."""
    strides: tuple[str, ...]
    """Names of the strides of the first dimensions, which are unrestricted; the other dimensions are contiguous."""
    optional: bool
    """Whether None is allowed; its address is 0."""

    def __str__(self) -> str:
        """Describe the declaration for an error message."""
        return f"{self.dtype} {list(self.sizes)} on the CPU, {'its last dimensions ' if self.strides else ''}contiguous"

    def checks(self, name: str, bound: set[str]) -> Iterator[str]:
        """Yield lines of code that refuse the tensor `name` if it differs from the declaration, and bind its sizes and
        strides."""
        indices = range(len(self.sizes))
        sizes, strides = (", ".join(f"{kind}{i}" for i in indices) + "," for kind in "nt")
        dense = [f"(n{i} == 1 or t{i} == {' * '.join(f'n{k}' for k in indices[i + 1 :]) or 1})" for i in indices]
        yield f"if not (isinstance({name}, Tensor) and {name}.dtype is {self.dtype} and {name}.is_cpu"
        yield f"        and {name}.dim() == {len(self.sizes)}):"
        yield f"    refuse({name!r}, {name})"
        yield f"{sizes} = {name}.shape"
        if self.strides:
            yield f"{strides} = {name}.stride()"
            is_dense = " and ".join(dense[len(self.strides) :])
        else:
            is_dense = f"{name}.is_contiguous()"
        expected = [
            is_dense,
            *(f"n{i} == {size}" for i, size in enumerate(self.sizes) if size in bound or isinstance(size, int)),
        ]
        yield f"if not ({' and '.join(expected)}):"
        yield f"    refuse({name!r}, {name})"
        for kind, names in (("n", self.sizes), ("t", self.strides)):
            yield from (f"{x} = {kind}{i}" for i, x in enumerate(names) if isinstance(x, str) and x not in bound)


def bfloat16(*sizes: str | int, strides: tuple[str, ...] = (), optional: bool = False) -> TensorArgument:
    """Declare a bfloat16 tensor with sizes of these names."""
    return TensorArgument(torch.bfloat16, sizes, strides, optional)


def float32(*sizes: str | int, strides: tuple[str, ...] = ()) -> TensorArgument:
    """Declare a float32 tensor with sizes of these names."""
    return TensorArgument(torch.float32, sizes, strides, False)


def int64(*sizes: str | int) -> TensorArgument:
    """Declare an int64 tensor with sizes of these names."""
    return TensorArgument(torch.int64, sizes, (), False)


def uint8(*sizes: str | int) -> TensorArgument:
    """Declare a uint8 tensor with sizes of these names."""
    return TensorArgument(torch.uint8, sizes, (), False)


class Signature:
    """The declared arguments of a kernel; each is one 64-bit number in the array that compiled code receives."""

    def __init__(self, body: Callable[..., None]) -> None:
        self.name = body.__name__
        self._kinds: dict[str, object] = get_type_hints(body)
        self._kinds.pop("return")
        hints = get_type_hints(body, include_extras=True)
        self._tensors: dict[str, TensorArgument] = {
            name: get_args(hints[name])[1] for name in self._kinds if get_origin(hints[name]) is Annotated
        }
        read_off = [name for x in self._tensors.values() for name in (*x.sizes, *x.strides) if isinstance(name, str)]
        self._parameters = [name for name in self._kinds if name not in read_off and name != QUEUE]
        self._slots = [*(name for name in dict.fromkeys([*self._kinds, *read_off]) if name != QUEUE), QUEUE]

    @cached_property
    def pack(self) -> Callable[..., ctypes.Array[ctypes.c_int64]]:
        """Return the function that takes the arguments by name and packs them into an array.

        Raises:
            TypeError: an argument is missing, or there is none of that name.
            ValueError: a tensor is not as declared, or disagrees with another one on a size.
        """
        lines, bound = [f"def pack(*, {', '.join(self._parameters)}):"], set[str]()
        for name, declared in self._tensors.items():
            checks = [*declared.checks(name, bound), f"{name} = {name}.data_ptr()"]
            new = [x for x in (*declared.sizes, *declared.strides) if isinstance(x, str) and x not in bound]
            if declared.optional:
                nothing = f"    {' = '.join([name, *new])} = 0"
                checks = [f"if {name} is None:", nothing, "else:", *(f"    {line}" for line in checks)]
            bound.update(new)
            lines += [f"    {line}" for line in checks]
        lines.append(f"    return array(numbers({', '.join(self._slots[:-1])}, 0))")
        numbers = struct.Struct("".join("d" if self._kinds.get(slot) is float else "q" for slot in self._slots)).pack
        array = (ctypes.c_int64 * len(self._slots)).from_buffer_copy
        space: dict[str, Any] = {
            "torch": torch,
            "Tensor": Tensor,
            "refuse": self._refuse,
            "numbers": numbers,
            "array": array,
        }
        exec("\n".join(lines), space)
        packer: Callable[..., ctypes.Array[ctypes.c_int64]] = space["pack"]
        return packer

    def _refuse(self, name: str, value: object) -> None:
        if isinstance(value, Tensor):
            value = f"{value.dtype} {list(value.shape)} on {value.device} with strides {list(value.stride())}"
        raise ValueError(f"{self.name}: {name} is {value}, declared {self._tensors[name]}; sizes of one name are equal")

    def unpacking(self) -> str:
        """Return the code of the compiled function that calls the body with the numbers of the array."""

        def value(name: str) -> str:
            if name == QUEUE:
                return f"address_of(a) + {8 * self._slots.index(QUEUE)}"
            slot = f"a[{self._slots.index(name)}]"
            if self._kinds[name] is float:
                return f"float_of({slot})"
            if self._kinds[name] is int:
                return slot
            declared = self._tensors[name]
            shape = ", ".join(f"a[{self._slots.index(x)}]" if isinstance(x, str) else str(x) for x in declared.sizes)
            return f"array_{str(declared.dtype).removeprefix('torch.')}({slot}, ({shape},))"

        values = ", ".join(value(name) for name in self._kinds)
        return f"def {self.name}(p):\n    fingerprint\n    a = carray(p, ({len(self._slots)},))\n    body({values})\n"

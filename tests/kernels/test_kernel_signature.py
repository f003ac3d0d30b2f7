"""The arguments that a kernel declares are those that its callers must give and what its compiled code gets."""

from typing import Annotated

import pytest
import torch
from torch import Tensor

from tether.kernels.dispatch import REFERENCE, kernels_for

BF16 = torch.bfloat16
if kernels_for(torch.zeros(1, dtype=BF16)) is REFERENCE:
    pytest.skip("no GNU OpenMP here", allow_module_level=True)

from tether.kernels.cpu.kernel_signature import BFloat16s, Floats, bfloat16, float32  # noqa: E402
from tether.kernels.cpu.openmp_loop import array_bfloat16, kernel, load, share  # noqa: E402


@kernel
def scaled(
    x: Annotated[int, bfloat16("rows", "width", strides=("row_stride",))],
    weight: Annotated[BFloat16s, bfloat16("width")],
    out: Annotated[Floats, float32("rows", "width")],
    bias: Annotated[int, bfloat16("width", optional=True)],
    factor: float,
    power: int,
    rows: int,
    width: int,
    row_stride: int,
) -> None:
    """(x [N, E] * weight + bias) * factor ** power."""
    first, last = share(rows)
    for row in range(first, last):
        of = array_bfloat16(x + 2 * row * row_stride, (width,))
        for e in range(width):
            value = load(of[e]) * load(weight[e])
            if bias != 0:
                value += load(array_bfloat16(bias, (width,))[e])
            for _ in range(power):
                value *= factor
            out[row, e] = value


def arguments(**changed: object) -> dict[str, object]:
    x = torch.tensor([[1, 2, 9], [3, 4, 9]], dtype=BF16)[:, :2]
    tensors = {"x": x, "weight": torch.tensor([1, 10], dtype=BF16), "out": torch.zeros(2, 2), "bias": None}
    return {**tensors, "factor": 0.5, "power": 2, **changed}


@pytest.mark.parametrize("order", [1, -1])
def test_arguments_go_by_name(order: int) -> None:
    given = arguments()
    scaled(**dict(list(given.items())[::order]))
    assert given["out"].tolist() == [[0.25, 5], [0.75, 10]]


def test_an_optional_tensor() -> None:
    given = arguments(bias=torch.tensor([4, 8], dtype=BF16))
    scaled(**given)
    assert given["out"].tolist() == [[1.25, 7], [1.75, 12]]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("x", torch.zeros(2, 2)),
        ("x", torch.zeros(2, dtype=BF16)),
        ("x", torch.zeros(2, 4, dtype=BF16)[:, ::2]),
        ("x", torch.zeros(2, 2, dtype=BF16, device="meta")),
        ("x", None),
        ("weight", torch.zeros(3, dtype=BF16)),
        ("weight", torch.zeros(4, dtype=BF16)[::2]),
        ("weight", 7),
        ("out", torch.zeros(3, 2)),
        ("bias", torch.zeros(1, dtype=BF16)),
    ],
)
def test_a_tensor_that_is_not_as_declared_is_refused(name: str, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=f"scaled: {name} is .*, declared torch"):
        scaled(**arguments(**{name: wrong}))


def test_names_are_checked() -> None:
    given = arguments()
    with pytest.raises(TypeError, match="unexpected keyword argument 'width'"):
        scaled(**given, width=2)
    del given["weight"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'weight'"):
        scaled(**given)
    with pytest.raises(TypeError, match="positional"):
        scaled(*arguments().values())

"""Recorded kernels compute on new numbers what they computed on the old ones, in order, and nothing is left out."""

import pytest
import torch
from torch import Tensor

from tether.kernels.dispatch import REFERENCE, kernels_for

BF16 = torch.bfloat16
if kernels_for(torch.zeros(1, dtype=BF16)) is REFERENCE:
    pytest.skip("no GNU OpenMP here", allow_module_level=True)

from tether.kernels.cpu import elementwise, linear_plain, openmp_loop, recording  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def chained(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Each product needs all of the one before, from whichever thread it came."""
    for weight in weights:
        normed, scale = torch.empty_like(x), x.new_empty(len(x), 1, dtype=torch.float32)
        heads = {"x": x[:, None], "out": normed[:, None], "scale": scale}
        elementwise.rms_norm(**heads, weight=weight[0], offset=0.0, eps=1e-6)
        out = x.new_empty(len(x), len(weight))
        nothing = {"bias": None, "other": None, "epilogue": linear_plain.PLAIN}
        linear_plain.linear_few_rows(x=normed, weight=weight, out=out, **nothing)
        x = out
    return x


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_on_new_numbers_in_the_same_places(threads: int) -> None:
    weights, x = [drawn(96, 96, seed=i) for i in range(20)], drawn(2, 96, seed=99)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, recorded = recording.record(lambda: chained(x, weights))
        assert recorded is not None
        for seed in range(30):
            other = drawn(2, 96, seed=100 + seed)
            expected = chained(other, weights)
            x.copy_(other)
            out.zero_()
            recorded.run()
            assert torch.equal(out, expected)
    finally:
        torch.set_num_threads(before)


def test_what_pytorch_computes_in_between_is_noticed() -> None:
    """The negative control: replayed, it would be left out."""
    x = drawn(2, 8)
    weights = [drawn(8, 8)]
    for harmless in (lambda: chained(x.view(2, 8), weights), lambda: chained(x, weights).unsqueeze(0).split(1, dim=1)):
        assert recording.record(harmless)[1] is not None
    for computing in (
        lambda: chained(x, weights) + 1,
        lambda: chained(x * 2, weights),
        lambda: chained(x, weights).add_(1),
        lambda: chained(x[:, torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])], weights),
        lambda: chained(torch.zeros(2, 8, dtype=BF16), weights),
        lambda: chained(x.T.contiguous().T.contiguous(), weights),
    ):
        assert recording.record(computing)[1] is None


def test_nothing_is_written_down_outside() -> None:
    x, weights = drawn(2, 8), [drawn(8, 8)]
    with pytest.raises(ZeroDivisionError):
        recording.record(lambda: chained(x, weights) if 1 / 0 else x)
    assert openmp_loop.recorded.get() is None

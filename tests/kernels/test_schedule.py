"""Threads take tasks as they are ready for them: each task is done once, and no result depends on who did it."""

from collections.abc import Iterator
from typing import Annotated

import pytest
import torch
from torch import Tensor

from tether.kernels.dispatch import REFERENCE, kernels_for

BF16 = torch.bfloat16
if kernels_for(torch.zeros(1, dtype=BF16)) is REFERENCE:
    pytest.skip("no GNU OpenMP here", allow_module_level=True)

from tether.kernels.cpu import causal_attention, elementwise, vocabulary  # noqa: E402
from tether.kernels.cpu.kernel_signature import Ints, int64  # noqa: E402
from tether.kernels.cpu.openmp_loop import address_of, chunks, fetch_and_add, kernel, tasks  # noqa: E402

MAX_WAIT = 100_000_000


@kernel
def counted(done: Annotated[Ints, int64("count")], count: int, queue: int) -> None:
    """Count how often each task is done."""
    for task in tasks(queue, count):
        fetch_and_add(address_of(done) + 8 * task, 1)


@kernel
def counted_in_ranges(done: Annotated[Ints, int64("count")], multiple: int, count: int, queue: int) -> None:
    """Count the same for ranges; one that begins elsewhere than at a multiple counts as many."""
    for first, last in chunks(queue, count, multiple):
        for i in range(first, last):
            fetch_and_add(address_of(done) + 8 * i, 1 if first % multiple == 0 else 100)


@kernel
def waiting(
    done: Annotated[Ints, int64(1)], waited: Annotated[Ints, int64(1)], others: int, limit: int, count: int, queue: int
) -> None:
    """Task 0 waits until so many others are done."""
    for task in tasks(queue, count):
        if task == 0:
            while fetch_and_add(address_of(done), 0) < others and waited[0] < limit:
                waited[0] += 1
        fetch_and_add(address_of(done), 1)


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 31, 33, 1000])
def test_each_task_is_done_once(count: int, threads: int) -> None:
    done = torch.zeros(count, dtype=torch.int64)
    counted(done=done)
    assert done.eq(1).all()
    done.zero_()
    counted_in_ranges(done=done, multiple=8)
    assert done.eq(1).all()


def test_a_thread_that_waits_leaves_its_share_to_the_others() -> None:
    """Divided beforehand, half of the tasks would lie behind the one that waits for them."""
    torch.set_num_threads(2)
    done, waited = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    waiting(done=done, waited=waited, others=62, limit=MAX_WAIT, count=64)
    assert done.item() == 64
    assert waited.item() < MAX_WAIT


def drawn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results() -> list[Tensor]:
    """What the kernels of a training step write that no other test runs on different numbers of threads."""
    gate, up, grad = (drawn(4001, seed=seed) for seed in range(3))
    product, grad_gate, grad_up = (torch.empty_like(gate) for _ in range(3))
    elementwise.silu_mul(gate=gate, up=up, out=product)
    elementwise.silu_mul_backward(gate=gate, up=up, grad=grad, grad_gate=grad_gate, grad_up=grad_up)
    heads, rotated = drawn(37, 3, 8, seed=3), torch.empty(37, 3, 8, dtype=BF16)
    angles = {"cosine": drawn(37, 8, seed=4), "sine": drawn(37, 8, seed=5)}
    elementwise.rotate(x=heads, **angles, out=rotated, sign=1.0)
    logits, sums = drawn(37, 301, seed=6), torch.tensor([-1e30, 0, 0, 0]).repeat(37, 1)
    largest, blocks = torch.empty(37), torch.empty(37, 5)
    vocabulary.exp_sums(logits=logits, largest=largest, sums=blocks, block=64, factor=1.25)
    vocabulary.add_log_sums(logits=logits, sums=sums, factor=1.25)
    statistics, column = drawn(37, 4, seed=7, dtype=torch.float32), torch.arange(37) - 1
    vocabulary.log_probs_backward(logits=logits, statistics=statistics, column=column, factor=1.25)
    scores, grad_weights = (drawn(36, 12, seed=seed, dtype=torch.float32) for seed in (8, 9))
    weights, grad_scores = (torch.empty(36, 12, dtype=BF16) for _ in range(2))
    rows = {"log_sum": drawn(36, seed=10, dtype=torch.float32), "out": drawn(36, 8, seed=11)}
    causal_attention.weights_backward(
        scores=scores,
        grad_weights=grad_weights,
        **rows,
        grad_out=drawn(36, 8, seed=12),
        weights=weights,
        grad_scores=grad_scores,
        scale=0.5,
    )
    written = [product, grad_gate, grad_up, rotated, largest, blocks, sums, logits, weights, grad_scores]
    return [x.clone() for x in written]


def test_the_number_of_threads_changes_no_bit() -> None:
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found += [results() for _ in range(3)]
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))

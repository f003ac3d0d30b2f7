"""One draw: the right token, the probability it was really drawn with, and never a token of probability zero."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.kernels import dispatch
from tether.text.sampling import generation
from tether.text.sampling.generation import sample_tokens
from tether.text.sampling.protocol import SamplingParams

ALMOST_ONE = 1 - 2.0**-53


def params(temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_logits(rows: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2).to(dtype)


def expected_distribution(logits: Tensor, settings: SamplingParams) -> Tensor:
    """Softmax, top-k and top-p one row and one token at a time; ties do not occur in what it is given."""
    rows = []
    for row in (logits.double() / settings.temperature).softmax(-1):
        order = row.argsort(descending=True).tolist()
        order = order[: settings.top_k] if settings.top_k > 0 else order
        total, mass, kept = float(row[order].sum()), 0.0, []
        for i in order:
            if mass < settings.top_p:
                kept.append(i)
            mass += float(row[i]) / total
        new = torch.zeros_like(row)
        new[kept] = row[kept] / row[kept].sum()
        rows.append(new)
    return torch.stack(rows)


def test_inverts_the_cumulative_distribution() -> None:
    u = numbers(0.0, 0.499, 0.501, 0.749, 0.751, 0.874, 0.876, ALMOST_ONE)
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(len(u), 4)
    token, log_prob, _ = sample_tokens(logits, u, params())
    assert token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.allclose(log_prob, torch.tensor([0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125]).log())


CHOICES = [params(), params(0.7), params(1.5, top_k=20), params(0.9, top_p=0.8), params(1.2, top_k=50, top_p=0.6)]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_frequencies_and_log_probs_are_those_of_the_stated_distribution(choice: SamplingParams) -> None:
    logits = random_logits(3, 300)
    expected = expected_distribution(logits, choice)
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    for row in range(3):
        token, log_prob, kept = sample_tokens(logits[row].expand(len(grid), -1), grid, choice, with_candidates=True)
        assert torch.equal(kept, (expected[row] > 0).expand_as(kept))
        frequency = torch.bincount(token, minlength=300) / len(grid)
        assert torch.allclose(frequency.double(), expected[row], atol=1.01 / len(grid))
        assert torch.allclose(log_prob, expected[row, token].log(), atol=1e-12, rtol=0)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    for top_p, kept in (
        (0.01, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.79, {1, 3}),
        (0.81, {0, 1, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        u = torch.linspace(0, 0.999, 200, dtype=torch.float64)
        assert set(sample_tokens(logits.expand(200, 4), u, params(top_p=top_p)).token.tolist()) == kept


def test_top_p_looks_as_far_as_it_must() -> None:
    """A flat row needs 4500 of 5000 tokens; a peaked row beside it needs one."""
    flat = torch.linspace(0, 1e-3, 5000, dtype=torch.float64)
    peaked = torch.zeros(5000, dtype=torch.float64)
    peaked[77] = 50.0
    token, log_prob, _ = sample_tokens(torch.stack([flat, peaked]), numbers(0.0, 0.5), params(top_p=0.9))
    assert token.tolist() == [500, 77]  # 499.75 tokens are cut; ties and steps of 2e-7 leave no doubt
    assert math.isclose(log_prob[0], math.log(1 / 4500), abs_tol=1e-3)
    assert math.isclose(log_prob[1], 0.0, abs_tol=1e-12)


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    u = torch.linspace(0, 0.999, 100, dtype=torch.float64)
    for choice in (params(top_k=2), params(top_p=0.75)):  # 0.686 + 0.093 reaches 0.75
        token, log_prob, kept = sample_tokens(logits.expand(100, 5), u, choice, with_candidates=True)
        assert set(token.tolist()) == {0, 1, 2, 4}
        assert kept.nonzero()[:, 1].tolist() == [0, 1, 2, 4] * 100
        assert torch.allclose(log_prob, logits[0, [0, 1, 2, 4]].logsumexp(0).neg() + logits[0, token])


@given(
    forbidden=st.lists(st.booleans(), min_size=2, max_size=300).filter(lambda x: not all(x)),
    u=st.sampled_from([0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-24, ALMOST_ONE]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    scale=st.sampled_from([0.0, 1.0, 300.0]),
    choice=st.sampled_from([*CHOICES, params(0.0), params(1e-3)]),
    with_candidates=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_never_draws_a_token_of_probability_zero(
    forbidden: list[bool], u: float, dtype: torch.dtype, scale: float, choice: SamplingParams, with_candidates: bool
) -> None:
    logits = (random_logits(1, len(forbidden)) * scale).to(dtype)
    logits[0, torch.tensor(forbidden)] = -torch.inf
    token, log_prob, kept = sample_tokens(logits, numbers(u), choice, with_candidates=with_candidates)
    assert not forbidden[int(token)]
    assert kept.numel() == 0 if choice.temperature == 0 or not with_candidates else kept[0, token]
    assert torch.isfinite(log_prob).all()
    assert log_prob <= 1e-6


def test_greedy_is_the_first_argmax_with_the_log_prob_of_the_softmax() -> None:
    logits = random_logits(4, 300)
    logits[1, [7, 200]] = 30.0
    token, log_prob, _ = sample_tokens(logits, numbers(0.9, 0.9, 0.9, 0.9), params(0.0, top_k=5, top_p=0.1))
    assert token.tolist() == [*logits[:1].argmax(-1), 7, *logits[2:].argmax(-1)]
    assert torch.allclose(log_prob, logits.log_softmax(-1).gather(-1, token[:, None])[:, 0], atol=1e-12)


@pytest.mark.parametrize(("dtype", "top_p"), [(torch.float64, 0.9), (torch.bfloat16, 0.9), (torch.bfloat16, 1.0)])
def test_a_row_without_a_distribution_shows_it_and_spoils_no_other(dtype: torch.dtype, top_p: float) -> None:
    for temperature, bad in itertools.product((0.0, 1.0), (torch.nan, torch.inf, None)):
        logits = random_logits(3, 300, dtype)
        good = sample_tokens(logits, numbers(0.3, 0.3, 0.3), params(temperature, top_p=top_p))
        logits[1] = -torch.inf
        if bad is not None:
            logits[1, 5] = bad
        token, log_prob, _ = sample_tokens(logits, numbers(0.3, 0.3, 0.3), params(temperature, top_p=top_p))
        assert torch.isfinite(log_prob).tolist() == [True, False, True], (temperature, bad)
        assert torch.equal(token[[0, 2]], good.token[[0, 2]])
        assert torch.equal(log_prob[[0, 2]], good.log_prob[[0, 2]])


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_logits_are_summed_in_fp32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_kernels: bool
) -> None:
    if not with_kernels:
        monkeypatch.setattr(dispatch, "backend", lambda *_: dispatch.REFERENCE)
    logits = random_logits(8, 5000, dtype)
    u = torch.linspace(0.01, 0.99, 8, dtype=torch.float64)
    low, high = sample_tokens(logits, u, params(0.8)), sample_tokens(logits.double(), u, params(0.8))
    assert low.log_prob.dtype == torch.float32
    assert torch.equal(low.token, high.token)
    assert torch.allclose(low.log_prob.double(), high.log_prob, atol=2e-6)


def test_large_batches_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, u = random_logits(7, 300), torch.linspace(0, 0.99, 7, dtype=torch.float64)
    whole = sample_tokens(logits, u, params(top_p=0.9), with_candidates=True)
    monkeypatch.setattr(generation, "rows_in_scratch", lambda _: 2)
    parts = sample_tokens(logits, u, params(top_p=0.9), with_candidates=True)
    assert torch.equal(whole.candidates, parts.candidates)
    assert torch.equal(whole.token, parts.token)
    assert torch.equal(whole.log_prob, parts.log_prob)

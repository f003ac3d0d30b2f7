"""Promise 7: a sample is named by (seed, step, sample, token); who runs it, beside what and when, does not matter.

tests/text/sampling/test_native.py states it for slots and prefill sizes; here a whole step is dealt out to workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.text.learning.batches import make_policy
from tether.text.sampling import generation
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

KEY = NoiseKey(seed=5, step=9)
N = 3
SAMPLINGS = {
    "full": SamplingParams(max_new_tokens=10, n=N, temperature=0.9),
    "top_p": SamplingParams(max_new_tokens=10, n=N, temperature=0.9, top_p=0.8),
    "top_k": SamplingParams(max_new_tokens=10, n=N, top_k=20),
    "both": SamplingParams(max_new_tokens=10, n=N, top_k=20, top_p=0.9),
}
EOS = frozenset(range(0, 260, 15))
LENGTHS = (4, 1, 9, 2, 6, 3)
PROMPTS = [[4 + (17 * i + 5 * j) % 250 for j in range(length)] for i, length in enumerate(LENGTHS)]

Samples = dict[int, tuple[tuple[int, ...], torch.Tensor]]
"""Number of the sample within the step -> its tokens and their log-probabilities."""


def engine(max_num_seqs: int = 64) -> NativeEngine:
    return NativeEngine(make_policy(), eos_token_ids=EOS, max_num_seqs=max_num_seqs)


def sample(
    worker: NativeEngine, prompts: list[list[int]], key: NoiseKey = KEY, sampling: SamplingParams = SAMPLINGS["full"]
) -> Samples:
    batch = worker.generate(prompts, sampling, key)
    rows = zip(batch.response_ids, batch.rollout_log_probs, batch.response_length.tolist(), strict=True)
    return {key.first_sample + row: (tuple(ids[:n].tolist()), probs[:n]) for row, (ids, probs, n) in enumerate(rows)}


def assert_same(found: Samples, expected: Samples) -> None:
    """The same tokens; log-probs up to the order of sums in matrix products of other heights."""
    assert {number: tokens for number, (tokens, _) in found.items()} == {
        number: tokens for number, (tokens, _) in expected.items()
    }
    for number, (_, log_probs) in expected.items():
        torch.testing.assert_close(found[number][1], log_probs, rtol=0, atol=1e-10)


slow = pytest.mark.slow


def each_sampling(parameter: str, full: Sequence[object], both: Sequence[object], others: Sequence[object] = ()) -> Any:
    """Combine all values of a parameter with each sampling; `full` and `both` are quick with some, the others slow."""
    quick = {"full": full, "both": both}
    cases = [
        pytest.param(name, value, marks=() if value in quick.get(name, ()) else slow)
        for name in SAMPLINGS
        for value in (*full, *both, *others)
    ]
    return pytest.mark.parametrize(("sampling", parameter), cases, indirect=["sampling"])


@pytest.fixture(scope="module", params=[pytest.param("full", marks=slow), "both"])
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def expected(sampling: SamplingParams) -> Samples:
    samples = sample(engine(), PROMPTS, sampling=sampling)
    assert len({len(tokens) for tokens, _ in samples.values()}) > 2
    return samples


@each_sampling("max_num_seqs", full=[1], both=[3])
def test_any_number_of_slots(expected: Samples, sampling: SamplingParams, max_num_seqs: int) -> None:
    """With fewer slots than rows a slot is filled again as soon as its row ends, beside rows that are half done."""
    assert_same(sample(engine(max_num_seqs), PROMPTS, sampling=sampling), expected)


@each_sampling("workers", full=[2], both=[6], others=[3])
def test_any_number_of_workers_in_any_order(expected: Samples, sampling: SamplingParams, workers: int) -> None:
    """Each worker has contiguous prompts and the number of its first sample; the last worker runs first."""
    assert_same(sample_by_workers(workers, sampling), expected)


def sample_by_workers(workers: int, sampling: SamplingParams) -> Samples:
    size = len(PROMPTS) // workers
    found: Samples = {}
    for first in reversed(range(0, len(PROMPTS), size)):
        key = replace(KEY, first_sample=N * first)
        found |= sample(engine(4), PROMPTS[first : first + size], key, sampling)
    return found


def test_other_prompts_behind_change_nothing(expected: Samples, sampling: SamplingParams) -> None:
    found = sample(engine(7), [*PROMPTS, [8, 9], [100] * 12], sampling=sampling)
    assert_same({number: found[number] for number in expected}, expected)


@pytest.mark.parametrize("top_p", [pytest.param(1.0, marks=slow), 0.8])
def test_a_global_generator_lets_the_batch_choose_the_samples(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: noise drawn in the order of the work, from one seed, as other samplers do it."""
    sampling = replace(SAMPLINGS["full"], top_p=top_p)
    generator = torch.Generator()

    def in_order(seed: int, step: int, sample: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return torch.rand(sample.shape, generator=generator, dtype=torch.float64)

    monkeypatch.setattr(generation, "uniform", in_order)

    def samples(of: Callable[[], Samples]) -> list[tuple[int, ...]]:
        generator.manual_seed(KEY.seed)
        return [tokens for _, (tokens, _) in sorted(of().items())]

    whole = samples(lambda: sample(engine(), PROMPTS, sampling=sampling))
    assert samples(lambda: sample(engine(), PROMPTS, sampling=sampling)) == whole
    for other in (lambda: sample(engine(3), PROMPTS, sampling=sampling), lambda: sample_by_workers(2, sampling)):
        different = [a != b for a, b in zip(samples(other), whole, strict=True)]
        assert sum(different) > len(different) // 2


@each_sampling("key", full=[replace(KEY, seed=6), replace(KEY, first_sample=1)], both=[replace(KEY, step=10)])
def test_another_name_gives_other_samples(expected: Samples, sampling: SamplingParams, key: NoiseKey) -> None:
    """The other negative control: the samples do depend on their name."""
    found = [tokens for tokens, _ in sample(engine(), PROMPTS, key, sampling).values()]
    different = [a != b for a, (b, _) in zip(found, expected.values(), strict=True)]
    assert sum(different) > len(different) // 2

"""Decoding steps that are recorded and run again, as on CUDA, give what steps that are called give."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.kernels.graph_on_cpu import GraphsOnCpu
from tests.pairwise import pairwise
from tests.text.sampling.test_native import KEY, PROMPTS, responses
from tests.tiny import tiny_model
from tether.batch import RolloutBatch
from tether.kernels import dispatch
from tether.kernels.cuda.backend import Cuda
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import SamplingParams

LONG = SamplingParams(max_new_tokens=40, n=2)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphsOnCpu]:
    backend = GraphsOnCpu()
    monkeypatch.setattr(dispatch, "_choose", lambda *_: backend)
    dispatch.backend.cache_clear()
    yield backend
    dispatch.backend.cache_clear()


def generated(sampling: SamplingParams, name: str, slots: int, device: str = "cpu") -> RolloutBatch:
    model = tiny_model(name, dtype=torch.float64 if device == "cpu" else torch.float32).to(device)
    return NativeEngine(model, eos_token_ids=frozenset(range(4, 16)), max_num_seqs=slots).generate(
        PROMPTS, sampling, KEY
    )


KINDS = {
    "plain": LONG,
    "greedy": replace(LONG, temperature=0.0),
    "top-p": replace(LONG, top_p=0.7, record_kept=True),
    "limited": replace(LONG, max_length=31, ignore_eos=True),
}


@pytest.mark.parametrize(("kind", "name", "slots"), pairwise([*itertools.product(KINDS, ("llama", "gemma3"), (64, 5))]))
def test_what_is_run_again_is_what_is_called(kind: str, name: str, slots: int, request: pytest.FixtureRequest) -> None:
    sampling = KINDS[kind]
    expected = generated(sampling, name, slots)
    graphs: GraphsOnCpu = request.getfixturevalue("graphs")
    found = generated(sampling, name, slots)
    assert responses(found) == responses(expected)
    torch.testing.assert_close(found.rollout_log_probs, expected.rollout_log_probs)
    assert found.truncated.equal(expected.truncated)
    assert sum(graph.runs for graph in graphs.graphs) > 20
    assert len(graphs.graphs) < 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_cuda_graphs_give_what_calls_give(sampling: SamplingParams, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    capture = Cuda.capture
    monkeypatch.setattr(Cuda, "capture", lambda *given: recorded.append(given) or capture(*given))
    found = generated(sampling, name, 64, "cuda")
    assert recorded
    monkeypatch.setattr(Cuda, "captures", False)
    called = generated(sampling, name, 64, "cuda")
    assert responses(found) == responses(called)
    torch.testing.assert_close(found.rollout_log_probs, called.rollout_log_probs, rtol=1e-4, atol=1e-5)


def test_a_model_of_transformers_own_forward_is_not_recorded(graphs: GraphsOnCpu) -> None:
    assert generated(LONG, "qwen3_moe", 64).response_length.max() > 9
    assert not graphs.graphs


def test_what_a_step_needs_of_the_host_cannot_be_recorded(graphs: GraphsOnCpu) -> None:
    """The negative control of the emulation."""
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(lambda: torch.ones(2).sum().item())


def test_rows_are_a_few_numbers_and_never_more_than_there_are_slots(graphs: GraphsOnCpu) -> None:
    sizes = [graphs.rows_at_once(active, 500) for active in range(1, 501)]
    assert all(active <= size <= 500 for active, size in enumerate(sizes, start=1))
    assert all(size - active < max(8, active / 4 + 1) for active, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 30

"""Decoding steps that are kernels alone are replayed, and sample what they would have sampled without."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from tether.batch import RolloutBatch, WeightUpdate
from tether.kernels.dispatch import REFERENCE, kernels_for
from tether.kernels.reference import Reference
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(kernels_for(torch.zeros(1, dtype=BF16)) is REFERENCE, reason="no GNU OpenMP here")
MADE_OF_KERNELS = ("llama", "qwen2", "qwen3", "mistral")
WIDE = {"intermediate_size": 64, "head_dim": 64}
"""For AMX."""


def sample(model: PreTrainedModel, prompts: list[list[int]], slots: int = 2, step: int = 1) -> RolloutBatch:
    """Rows end at different lengths, and the cache grows on the way."""
    engine = NativeEngine(model, eos_token_ids=frozenset(range(4, 12)), max_num_seqs=slots)
    return engine.generate(prompts, SamplingParams(max_new_tokens=70), NoiseKey(seed=0, step=step))


def same(left: RolloutBatch, right: RolloutBatch) -> bool:
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in ("response_ids", "rollout_log_probs"))


@pytest.fixture
def backend() -> Reference:
    return kernels_for(torch.zeros(1, dtype=BF16))


@pytest.fixture
def runs(backend: Reference, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events: a recording is made, or replayed."""
    happened: list[str] = []
    record = backend.record

    class Noted:
        def __init__(self, recording):
            self.recording = recording

        def run(self):
            happened.append("run")
            self.recording.run()

    def noted_record(function, *, watched):
        result, recording = record(function, watched=watched)
        happened.append("refused" if recording is None else "recorded")
        return result, recording and Noted(recording)

    monkeypatch.setattr(backend, "record", noted_record)
    return happened


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("llama", 2), *((name, 5) for name in MADE_OF_KERNELS)])
def test_the_same_samples(
    name: str, rows: int, runs: list[str], backend: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name, dtype=BF16)
    prompts = [[40 + i, 50, 60][: 1 + i % 3] for i in range(rows)]
    found = sample(model, prompts)
    assert runs.count("run") > 3 * runs.count("recorded") > 0
    assert "refused" not in runs
    done = len(runs)
    monkeypatch.setattr(backend, "record", REFERENCE.record)
    assert same(found, sample(model, prompts))
    assert len(runs) == done


def test_changed_weights_are_seen(runs: list[str]) -> None:
    model = tiny_model("llama", dtype=BF16)
    engine = NativeEngine(model, eos_token_ids=frozenset(), max_num_seqs=1)
    before, after = [], []
    for found in (before, after):
        for step in range(3):
            found.append(engine.generate([[40, 50]], SamplingParams(max_new_tokens=20), NoiseKey(0, step)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        engine.load_weights(WeightUpdate(1, model.state_dict().items()))
    assert "run" in runs
    assert not any(same(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_layers_that_are_not_made_of_kernels_alone_run_as_ever(name: str, runs: list[str]) -> None:
    sample(tiny_model(name, dtype=BF16), [[40, 50]])
    assert set(runs) == {"refused"}
    assert len(runs) < 5  # not tried again at every step


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # with biases and with norms of queries
def test_many_rows_are_replayed_where_products_are_kernels(
    name: str, runs: list[str], backend: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name, dtype=BF16, **WIDE)
    prompts = [[40 + i, 50, 60][: 1 + i % 3] for i in range(40)]
    found = sample(model, prompts, slots=24)
    assert "run" in runs
    assert ("refused" in runs) == (backend.linear_kernels is None)
    monkeypatch.setattr(backend, "record", REFERENCE.record)
    assert same(found, sample(model, prompts, slots=24))


def test_other_dtypes_and_products_of_the_library_are_not_replayed(runs: list[str]) -> None:
    sample(tiny_model("llama", dtype=torch.float32), [[40, 50]])
    assert runs == []
    model = tiny_model("llama", dtype=BF16)  # its MLP is 48 wide
    engine = NativeEngine(model, eos_token_ids=frozenset(), max_num_seqs=4)
    engine.generate([[40, 50]] * 4, SamplingParams(max_new_tokens=20), NoiseKey(0, 1))
    assert runs == ["refused"]

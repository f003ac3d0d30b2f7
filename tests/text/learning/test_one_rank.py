"""A model that has one of several devices to itself: what its rank gives and takes is what a rank with shards does."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.text.learning.batches import (
    make_batch,
    make_critic,
    make_engine,
    make_policy,
    same_bits,
    weights,
)
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec, MicroBatchTooLarge, OptimizerOptions, OutOfMemory, UpdatePlan
from tether.text.learning.engines.one_rank import OneRankEngine
from tether.text.learning.engines.shares import join_shares
from tether.text.learning.losses import PolicyForward, PolicyLoss
from tether.text.learning.packing import MicroBatching
from tether.text.models.load import load_causal_lm
from tether.text.models.save import write_model

LOSS = LossSpec(PolicyForward(), PolicyLoss())
PLAN = UpdatePlan(mini_batch_rows=3)
FOUR_ROWS = MicroBatching(max_rows=4, key="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")


def make_one(**options: Any) -> OneRankEngine[Any]:
    model, micro = options.pop("model", None) or make_policy(), options.pop("micro", FOUR_ROWS)
    return OneRankEngine(model, micro, OptimizerOptions(lr=1e-2), save=write_model, **options)


def make_rows() -> TrainBatch:
    return make_batch(make_policy(), make_critic())


def test_a_checkpoint_resumes_with_the_same_bits(tmp_path: Path) -> None:
    batch, engine, undisturbed = make_rows(), make_one(), make_engine(make_policy(), FOUR_ROWS)
    undisturbed.update(batch, LOSS, PLAN, 0)
    engine.update(batch, LOSS, PLAN, 0)
    part = tmp_path / "parts" / "0"
    part.mkdir(parents=True)
    engine.begin_saving(part, "actor")
    engine.update(batch, LOSS, PLAN, 7)  # while it is written
    while not engine.writing()[0]:
        time.sleep(0.01)
    assert engine.writing() == (True, None)
    join_shares([part], tmp_path / "actor", tmp_path / "actor.pt")

    resumed = make_one(model=load_causal_lm(tmp_path / "actor", dtype=torch.float64))
    assert resumed.load_state(tmp_path / "actor.pt") == 1
    for one in (undisturbed, resumed):
        one.update(batch, LOSS, PLAN, 1)
    assert same_bits(weights(resumed.model), weights(undisturbed.model))
    assert resumed.version == 2
    (weights_only := tmp_path / "parts" / "1").mkdir()
    resumed.begin_saving(weights_only, "critic", False)
    while not resumed.writing()[0]:
        time.sleep(0.01)
    join_shares([weights_only], tmp_path / "critic", None)
    assert same_bits(weights(load_causal_lm(tmp_path / "critic", dtype=torch.float64)), weights(resumed.model))
    assert not (weights_only / "state.pt").exists()


def test_a_disk_that_fails_is_an_answer(tmp_path: Path) -> None:
    engine = make_one()
    (tmp_path / "part").write_text("a file where a folder is needed")
    engine.begin_saving(tmp_path / "part", "actor")
    while not (answer := engine.writing())[0]:
        time.sleep(0.01)
    assert isinstance(answer[1], OSError)


def test_tied_weights_travel_once() -> None:
    engine = make_one(model=make_policy(tie_word_embeddings=True))
    names, values = zip(*engine.whole_weights(), strict=True)
    assert set(names) == set(engine.model.state_dict())
    first = names.index("model.embed_tokens.weight")
    assert names[first + 1] == "lm_head.weight"
    assert values[first] is values[first + 1]


def test_weights_travel_in_the_format_of_the_forward_pass() -> None:
    engine = make_one(model=make_policy(dtype=torch.float32), compute_dtype=torch.bfloat16)
    assert {value.dtype for _, value in engine.whole_weights()} == {torch.bfloat16}
    assert {weight.dtype for weight in engine.trained} == {torch.float32}


def refuse(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("rows", "instead"), [(4, (FOUR_ROWS.key, 1)), (1, None)])
def test_a_micro_batch_that_does_not_fit_ends_the_rank(rows: int, instead: tuple[str, int] | None) -> None:
    """The run starts it again with a smaller one, and says so; a split here would be in the log of the rank only."""
    engine = make_one(micro=MicroBatching(max_rows=rows, key=FOUR_ROWS.key))
    engine.model.base_model.embed_tokens.register_forward_pre_hook(refuse)
    with pytest.raises(OutOfMemory, match=FOUR_ROWS.key) as caught:
        engine.update(make_rows(), LOSS, PLAN, 0)
    assert (caught.value.instead if isinstance(caught.value, MicroBatchTooLarge) else None) == instead

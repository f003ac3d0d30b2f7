"""Promises 5 and 6: a key that several parts read reaches each of them, and not only the first."""

import pytest
import torch

from tests.text.learning.batches import make_engine, make_policy
from tests.text.learning.test_packing import example
from tether.batch import TrainBatch
from tether.config import RunConfig, load_config
from tether.text.learning.build import build_actor, build_critic, build_reference
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, PolicyOutputs


@pytest.fixture(scope="module")
def config() -> RunConfig:
    named = ["actor_rollout_ref.model.path=model", "data.train_files=rows.jsonl", "algorithm.adv_estimator=gae"]
    return load_config(None, [*named, "actor_rollout_ref.rollout.temperature=0.7", "trainer.seed=7"]).config


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return make_engine(make_policy(num_hidden_layers=1))


def test_all_log_probs_are_at_the_temperature_of_the_sampler(config: RunConfig, engine: LocalEngine) -> None:
    """Those before the update, those in it, and the reference's: else a KL compares two distributions of one policy."""
    actor = build_actor(config, engine, total_steps=1)
    reference = build_reference(config.actor_rollout_ref, [engine])
    forwards = (actor.forward, actor.loss.forward, reference.keywords["forward"])
    assert [forward.temperature for forward in forwards] == [0.7] * 3


class Constant:
    """Gives every token the same log-prob."""

    def __init__(self, value: float) -> None:
        self.value, self.rows = value, list[int]()

    def infer(self, batch: TrainBatch, forward: PolicyForward) -> PolicyOutputs:
        self.rows += batch.uid.tolist()
        return PolicyOutputs(log_probs=torch.full(batch.response_ids.shape, self.value), batch_size=batch.batch_size)


def test_each_row_is_scored_by_its_teacher(config: RunConfig) -> None:
    """Rows 0 and 2 are of the third teacher, row 1 of the first; the second has none and is not asked."""
    teachers = [Constant(-1.0), Constant(-2.0), Constant(-3.0)]
    reference = build_reference(config.actor_rollout_ref, teachers)
    batch = torch.cat([example(), example()])[:3]
    batch.uid, batch.teacher = torch.arange(3), torch.tensor([2, 0, 2])
    found = reference(batch).log_probs
    assert found[:, 0].tolist() == [-3.0, -1.0, -3.0]
    assert [teacher.rows for teacher in teachers] == [[1], [], [0, 2]]


def test_all_shuffles_follow_from_the_seed_of_the_run(config: RunConfig, engine: LocalEngine) -> None:
    learners = (build_actor(config, engine, total_steps=1), build_critic(config, engine))
    assert [learner.plan.seed for learner in learners] == [7, 7]

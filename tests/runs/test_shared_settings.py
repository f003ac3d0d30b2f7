"""Promises 5 and 6: a key that several parts read reaches each of them, and not only the first."""

import pytest

from tests.text.learning.batches import make_engine, make_policy
from tether.config import RunConfig, load_config
from tether.text.learning.build import build_actor, build_critic, build_reference
from tether.text.learning.engines.local import LocalEngine


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
    reference = build_reference(config.actor_rollout_ref, engine)
    forwards = (actor.forward, actor.loss.forward, reference.keywords["forward"])
    assert [forward.temperature for forward in forwards] == [0.7] * 3


def test_all_shuffles_follow_from_the_seed_of_the_run(config: RunConfig, engine: LocalEngine) -> None:
    learners = (build_actor(config, engine, total_steps=1), build_critic(config, engine))
    assert [learner.plan.seed for learner in learners] == [7, 7]

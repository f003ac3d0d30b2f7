"""The keys of the losses: each reaches the object that computes it, and every loss trains."""

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.runs.tiny_run import FAST, GAE, GRPO, LIGHT, base_overrides
from tether.algorithms import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES
from tether.batch import TrainBatch
from tether.config import ConfigError, RunConfig, asks_reference, load_config, models_of
from tether.config.keys import keys
from tether.loop.engine import Learner
from tether.metrics.keys import describe
from tether.text.build import Run, build_run
from tether.text.inputs import build_inputs
from tether.text.learning.build import (
    actor_engine,
    build_actor,
    build_critic,
    critic_engine,
    load_policy,
    load_references,
    load_value_model,
)
from tether.text.learning.losses import (
    Aggregation,
    CriticLoss,
    PolicyForward,
    PolicyLoss,
    PolicyOutputs,
    TokenSelection,
)

ACTOR = "actor_rollout_ref.actor"
MODE = f"{ACTOR}.policy_loss.loss_mode"
CPU = torch.device("cpu")
DEFAULTS = {
    "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05,
    "ppo_kl_coef": 0.1, "dro_beta": 1.0, "behave_weight_threshold": None,
}  # fmt: skip
SELECTION_DEFAULTS = {
    "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0,
    "kl_cov_ratio": 2e-4, "m2_threshold": 0.04,
}  # fmt: skip


def by_width(mode: str = "token-mean", scale_factor: float | None = None) -> Aggregation:
    """Modes that divide by a width divide by the longest response allowed, not by the longest in the batch."""
    return Aggregation(mode, scale_factor, width=8)


def test_the_names_of_the_config_are_those_of_the_algorithms() -> None:
    assert set(keys()[MODE].choices) == set(POLICY_LOSSES)
    of_distillation = set(keys()["distillation.distillation_loss.loss_mode"].choices)
    assert of_distillation == {*KL_ESTIMATORS, "full+", "forward_kl_topk"}
    assert set(keys()[f"{ACTOR}.loss_agg_mode"].choices) == {*AGGREGATIONS, "masked_mean_ratio"}
    for key in (f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty"):
        assert set(keys()[key].choices) == {*KL_ESTIMATORS, "full+"}
        with pytest.raises(ConfigError, match=f"{key}: full\\+ is refused"):
            load_config(None, [*base_overrides(Path("unread"), Path("unused")), f"{key}=full+"])


def config_of(inputs: Path, *overrides: str) -> RunConfig:
    return load_config(None, [*base_overrides(inputs, Path("unused")), *FAST, *overrides]).config


def actor_of(config: RunConfig, policy: PreTrainedModel | None = None) -> Learner[TrainBatch, PolicyOutputs]:
    inputs = build_inputs(config)
    policy = policy or load_policy(
        config.actor_rollout_ref.model, inputs.model_path, CPU, None, seed=config.trainer.seed
    )
    reference = load_references(config, inputs.reference_paths, policy, CPU).get("reference")
    return build_actor(
        config, actor_engine(config, policy, reference, inputs.tokenizer, 3, Path("unused")), total_steps=3
    )


@pytest.fixture(scope="module")
def run(inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    """One run; its actor is put in place of each loss's in turn."""
    folder = tmp_path_factory.mktemp("losses")
    built = build_run(load_config(None, [*base_overrides(inputs, folder), *GRPO, *LIGHT]))
    yield built
    built.close()


@pytest.fixture
def policy(run: Run) -> PreTrainedModel:
    return run.trainer.actor.engine.model


def test_options_of_the_policy_loss(inputs: Path, policy: PreTrainedModel) -> None:
    for override, name, option in (
        (f"{ACTOR}.clip_ratio_c=5", "decoupled", {"clip_ratio_c": 5.0}),
        (f"{ACTOR}.clip_ratio=0.1", "gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        (f"{ACTOR}.clip_ratio_high=0.3", "cispo", {"clip_ratio_high": 0.3}),
        (f"{ACTOR}.tau_pos=2", "sapo", {"tau_pos": 2.0}),
        (f"{ACTOR}.tau_neg=3", "sapo", {"tau_neg": 3.0}),
        (f"{ACTOR}.policy_loss.ppo_kl_coef=0.5", "kl_cov", {"ppo_kl_coef": 0.5}),
        (f"{ACTOR}.policy_loss.dro_beta=2", "dro", {"dro_beta": 2.0}),
        (f"{ACTOR}.clip_ratio_c=20", "dppo_tv", {"clip_ratio_c": 20.0}),
        (f"{ACTOR}.policy_loss.behave_weight_threshold=2", "decoupled", {"behave_weight_threshold": 2.0}),
    ):
        loss = actor_of(config_of(inputs, f"{MODE}={name}", override), policy).loss.function
        aggregation = by_width("seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean")
        assert loss == PolicyLoss(name, DEFAULTS | option, aggregation), override


def test_options_of_the_selection(inputs: Path, policy: PreTrainedModel) -> None:
    for override, name, option in (
        ("clip_cov_ratio=0.1", "clip_cov", {"clip_cov_ratio": 0.1}),
        ("clip_cov_lb=2", "clip_cov", {"clip_cov_lb": 2.0}),
        ("clip_cov_ub=9", "clip_cov", {"clip_cov_ub": 9.0}),
        ("kl_cov_ratio=0.1", "kl_cov", {"kl_cov_ratio": 0.1}),
        ("m2_threshold=0.1", "m2po", {"m2_threshold": 0.1}),
    ):
        config = config_of(inputs, f"{MODE}={name}", f"{ACTOR}.policy_loss.{override}")
        assert actor_of(config, policy).loss.prepare == TokenSelection(name, SELECTION_DEFAULTS | option), override
    assert actor_of(config_of(inputs), policy).loss.prepare is None


def test_clip_range_and_entropy_bonus_fall_to_0(inputs: Path, policy: PreTrainedModel) -> None:
    falls = [f"{ACTOR}.clip_ratio_schedule=linear", f"{ACTOR}.entropy_coeff=0.3", f"{ACTOR}.clip_ratio_high=0.3"]
    config = config_of(inputs, f"{MODE}=clip_cov", f"{ACTOR}.entropy_coeff_schedule=linear", *falls)
    loss_at = actor_of(config, policy).loss_at
    assert loss_at
    for step, low, high, entropy in [(0, 0.2, 0.3, 0.3), (1, 0.4 / 3, 0.2, 0.2), (2, 0.2 / 3, 0.1, 0.1), (9, 0, 0, 0)]:
        loss, logged = loss_at(step)
        function, prepare = loss.function, loss.prepare
        assert isinstance(function, PolicyLoss)
        assert isinstance(prepare, TokenSelection)
        for sides in (function.options, prepare.options, logged):
            assert (sides["clip_ratio_low"], sides["clip_ratio_high"]) == pytest.approx((low, high))
        assert function.entropy_coeff == logged["entropy_coeff"] == pytest.approx(entropy)
        assert function.options["clip_ratio_c"] == 3.0
    constant = actor_of(config_of(inputs, *falls[1:]), policy)
    assert constant.loss_at is None


def test_aggregation(inputs: Path, policy: PreTrainedModel) -> None:
    for overrides, expected in (
        ([], by_width()),
        ([f"{MODE}=geo_mean"], by_width("seq-mean-token-mean")),
        ([f"{MODE}=geo_mean", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], by_width("seq-mean-token-mean")),
        ([f"{ACTOR}.loss_agg_mode=masked_mean_ratio"], by_width("masked_mean_ratio")),
        (
            [f"{ACTOR}.loss_agg_mode=masked_mean_ratio", f"{ACTOR}.loss_scale_factor=80"],
            by_width("masked_mean_ratio", 80.0),
        ),
    ):
        loss = actor_of(config_of(inputs, *overrides), policy).loss.function
        assert isinstance(loss, PolicyLoss)
        assert loss.aggregation == expected, overrides
        assert loss.penalty_aggregation is None or loss.penalty_aggregation == expected, overrides
    loss = actor_of(config_of(inputs, f"{MODE}=gspo", f"{ACTOR}.loss_agg_mode=token-mean"), policy).loss.function
    assert isinstance(loss, PolicyLoss)
    assert (loss.aggregation, loss.penalty_aggregation) == (by_width("seq-mean-token-mean"), by_width())


def test_the_value_loss(inputs: Path, tmp_path: Path) -> None:
    for overrides, expected in (
        ([], CriticLoss(0.5, None, by_width())),
        (["critic.huber_delta=10"], CriticLoss(0.5, 10.0, by_width())),
        (["critic.value_clip=0.2"], CriticLoss(0.2, None, by_width())),
        ([f"{ACTOR}.loss_agg_mode=masked_mean_ratio"], CriticLoss(0.5, None, by_width("masked_mean_ratio"))),
        ([f"{MODE}=gspo"], CriticLoss(0.5, None, by_width())),  # the critic has no ratio of whole responses
    ):
        config = config_of(inputs, *GAE, *overrides)
        read = build_inputs(config)
        model = load_value_model(config.critic.model, read.critic_path, CPU, None, seed=config.trainer.seed)
        critic = build_critic(config, critic_engine(config, model, read.tokenizer, 3, tmp_path))
        assert critic.loss.function == expected, overrides


def test_the_reference_runs_where_a_kl_needs_it(inputs: Path, policy: PreTrainedModel) -> None:
    """Beside the policy in each update for the full KL, and apart, once a rollout, for one of sampled tokens."""
    use_loss, full = f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"
    in_reward, full_in_reward = "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full"
    for overrides, in_update, before_it, apart in (
        ([], False, False, False),
        ([use_loss], False, False, True),
        ([use_loss, full], True, False, False),
        ([use_loss, full, in_reward], True, False, True),
        ([in_reward], False, False, True),
        ([in_reward, full_in_reward], False, True, False),
        ([in_reward, full_in_reward, use_loss], False, True, True),
        ([in_reward, full_in_reward, use_loss, full], True, True, False),
    ):
        config = config_of(inputs, *overrides)
        actor = actor_of(config, policy)
        assert isinstance(actor.loss.forward, PolicyForward)
        assert isinstance(actor.forward, PolicyForward)
        assert (actor.loss.forward.with_full_kl, actor.forward.with_full_kl) == (in_update, before_it), overrides
        assert (actor.engine.reference is not None) == (in_update or before_it), overrides
        assert asks_reference(config) == ("reference" in models_of(config)) == apart, overrides


TRAINED = {
    **{name: [f"{MODE}={name}"] for name in POLICY_LOSSES if name != "bypass_mode"},
    "masked_mean_ratio": [f"{ACTOR}.loss_agg_mode=masked_mean_ratio"],
    "full": [f"{ACTOR}.kl_loss_type=full"],
    "full-lora": [f"{ACTOR}.kl_loss_type=full", "actor_rollout_ref.model.lora_rank=2"],
}


@pytest.mark.parametrize("name", TRAINED)
def test_every_loss_trains(run: Run, inputs: Path, name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    trainer = run.trainer
    if "lora" in name:  # adapters change the model
        built = build_run(load_config(None, [*base_overrides(inputs, tmp_path), *GRPO, *LIGHT, *TRAINED[name]]))
        request.addfinalizer(built.close)
        trainer = built.trainer
    else:
        trainer.actor = actor_of(config_of(inputs, *GRPO, *TRAINED[name]), trainer.actor.engine.model)
    before = [p.detach().clone() for p in trainer.actor.engine.trained]
    metrics = trainer.step([trainer.source.dataset[row] for row in range(2)])
    assert not [key for key in metrics if describe(key) is None]
    assert all(math.isfinite(value) for key, value in metrics.items() if key.startswith("actor/"))
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/kl_loss"] > 0
    assert any(not torch.equal(p, old) for p, old in zip(trainer.actor.engine.trained, before, strict=True))

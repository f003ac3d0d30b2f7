"""Every advantage estimator in a tiny run: it gets what it asks for, and its advantages are the pure function's."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs.steps import Stepped, stepped
from tests.runs.tiny_run import LIGHT, base_overrides, reward_function
from tether.algorithms import ADVANTAGE_ESTIMATORS, length_adaptive_lambda, needs
from tether.config.keys import keys
from tether.config.schema.algorithm import COMPARES_RESPONSES
from tether.metrics.keys import describe
from tether.runtime.objects import register_objects

REWARD = '''
"""Likes letters; has no verdict on responses whose length leaves 2 when divided by 4."""

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if len(solution_str) % 4 == 2:
        return None
    letters = sum(c.isalpha() for c in solution_str)
    return {"score": letters / 8, "digits": sum(c.isdigit() for c in solution_str), "why": "letters", "big": 1e39}
'''
VAPO = [
    "algorithm.lam=0.7",
    "algorithm.lam_critic=0.9",
    "algorithm.bootstrap_truncated=True",
    "algorithm.use_kl_in_reward=True",
    "data.max_response_length=3",
    "actor_rollout_ref.actor.optim.lr=1e-4",  # the policy goes on as it began: some responses are cut
    "critic.optim.lr=0.1",
]
ADAPTIVE = ["algorithm.lam_critic=1", "algorithm.lam_actor_alpha=0.5"]

RUNS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "gae": (VAPO, {"lam": 0.7, "critic_lam": 0.9}),
    "grpo": (["algorithm.norm_adv_by_std_in_grpo=False"], {"norm_adv_by_std_in_grpo": False}),
    "grpo_vectorized": ([], {}),
    "grpo_passk": ([], {}),
    "rloo": (["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=6"], {}),
    "rloo_vectorized": (["algorithm.normalize_rewards=batch"], {}),
    "reinforce_plus_plus": (["algorithm.gamma=0.9", "algorithm.normalize_rewards=running"], {"gamma": 0.9}),
    "reinforce_plus_plus_baseline": ([], {}),
    "remax": (["actor_rollout_ref.rollout.n=2", "trainer.seed=2"], {}),  # whose greedy and sampled responses differ
    "opo": ([], {}),
    "gpg": ([], {}),
    "gdpo": (
        ["algorithm.gdpo_reward_keys=[score,digits]", "algorithm.gdpo_reward_weights=[1,0.5]"],
        {"component_weights": torch.tensor([1.0, 0.5])},
    ),
    "optimal_token_baseline": (["actor_rollout_ref.rollout.temperature=0.7"], {}),
    "tir_optimal_token_baseline": ([], {}),
    "raw": (["actor_rollout_ref.rollout.n=1"], {}),
}
"""Name of the estimator -> overrides, and the keywords that they mean."""


def overrides_of(name: str, inputs: Path, folder: Path) -> list[str]:
    return [
        *base_overrides(inputs, folder / "run"),
        *LIGHT,
        f"algorithm.adv_estimator={name}",
        "actor_rollout_ref.rollout.n=4",
        "custom_reward_function.path=object:abstains",
        *RUNS[name][0],
    ]


Runs = Callable[[str], Stepped]


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory) -> Iterator[Runs]:
    """Return a function from the name of an estimator to its first step, done once; of GAE to two steps."""
    with register_objects({"abstains": reward_function(REWARD)}):
        yield cache(
            lambda name: stepped(overrides_of(name, inputs, tmp_path_factory.mktemp(name)), 2 if name == "gae" else 1)
        )


def test_every_estimator_that_a_key_names_has_a_run():
    assert set(RUNS) == set(ADVANTAGE_ESTIMATORS) == set(keys()["algorithm.adv_estimator"].choices)


WATCHED = {
    "gae": {"critic/bootstrap_value_mean", "critic/vf_explained_var"},
    "rloo": {"reward/overlong_penalty_mean", "reward/overlong_fraction"},
    "reinforce_plus_plus": {"reward/running_mean", "reward/running_std"},
    "remax": {"baseline/score_mean", "baseline/beaten_fraction", "baseline/response_tokens", "timing_s/gen_max"},
    "gdpo": {"gdpo/score/zero_std_fraction", "gdpo/digits/zero_std_fraction", "gdpo/digits/score_std_mean"},
    "optimal_token_baseline": {"actor/sum_pi_squared"},
    "tir_optimal_token_baseline": {"actor/sum_pi_squared"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_with_each_estimator(name: str, runs: Runs):
    """It gets what it asks for and nothing else, its keys reach it, and rows without a score are left out."""
    found = runs(name)
    estimator, keywords = ADVANTAGE_ESTIMATORS[name], RUNS[name][1]
    asked = needs(estimator) | ({"bootstrap_values"} if name == "gae" else set())
    for batch in found.batches:
        given = {key: getattr(batch, key) for key in (*needs(estimator), "bootstrap_values")}
        expected = estimator(batch.token_level_rewards, batch.response_mask, **given, **keywords)
        assert torch.equal(batch.advantages, expected.advantages)
        assert torch.equal(batch.returns, expected.returns)
        assert batch.advantages.isfinite().all()
        assert batch.advantages.any()
        for field in ("values", "bootstrap_values", "sum_pi_squared", "reward_baselines", "reward_components"):
            assert (getattr(batch, field) is not None) == (field in asked), field
        assert 0 < int((~batch.scored).sum()) < len(batch)
        assert not batch.advantages[~batch.scored].any()
        assert not batch.response_mask[~batch.scored].any()
    assert found.metrics[0]["reward/excluded_rows"] == int((~found.batches[0].scored).sum())
    watched = {"critic/advantages/nonzero_fraction", "critic/score/nonzero_fraction", "group/single_fraction"}
    for metrics in found.metrics:
        assert watched | WATCHED.get(name, set()) <= metrics.keys()
        assert not {key for key in metrics if describe(key) is None}
        assert metrics["actor/grad_norm"] > 0


def test_truncated_responses_end_in_the_critics_value(runs: Runs):
    first, second = runs("gae").batches
    assert not first.bootstrap_values.any()  # the critic's head starts at zero
    assert torch.equal(second.bootstrap_values != 0, second.truncated)
    assert 0 < int(second.truncated.sum()) < len(second)


def test_the_baseline_of_remax_is_greedy(runs: Runs, inputs: Path):
    recorded, reward = runs("remax"), reward_function(REWARD)
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokenizer, batch = recorded.trainer.rollouts.tokenizer, recorded.batches[0]
    for row in range(0, len(batch), 2):
        prompt = batch.prompt_ids[row : row + 1, : batch.prompt_length[row]]
        # transformers reads the tokens that end a response from the model's generation config
        whole = model.generate(prompt, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(prompt))
        response = tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)
        result = reward("tiny/sums", response, None)
        pair = slice(row, row + 2)
        if result is None:
            assert not batch.scored[pair].any()
        else:
            assert batch.reward_baselines[pair].tolist() == [result["score"]] * 2
    greedy = batch.reward_baselines[::2]
    assert len(greedy.unique()) > 1


def test_components_are_the_numbers_in_the_rewards_dict(runs: Runs):
    recorded = runs("gdpo")
    tokenizer, batch = recorded.trainer.rollouts.tokenizer, recorded.batches[0]
    for row in range(len(batch)):
        text = tokenizer.decode(batch.response_ids[row, : batch.response_length[row]], skip_special_tokens=True)
        expected = [sum(c.isalpha() for c in text) / 8, sum(c.isdigit() for c in text)] if batch.scored[row] else [0, 0]
        assert batch.reward_components[row].tolist() == expected


def test_length_adaptive_lambda_is_the_actors_alone(runs: Runs, inputs: Path, tmp_path: Path):
    (batch,) = stepped([*overrides_of("gae", inputs, tmp_path), *ADAPTIVE, "algorithm.lam=1"]).batches
    expected = ADVANTAGE_ESTIMATORS["gae"](
        batch.token_level_rewards,
        batch.response_mask,
        values=batch.values,
        bootstrap_values=batch.bootstrap_values,
        lam=length_adaptive_lambda(batch.response_mask, 0.5),
        critic_lam=1.0,
    )
    assert torch.equal(batch.advantages, expected.advantages)
    assert torch.equal(batch.returns, expected.returns)


@pytest.mark.parametrize(
    ("component", "seen"),
    [("format", "nothing of that name, only score, digits, why, big"), ("why", "'letters'"), ("big", "1e\\+39")],
)
def test_a_missing_component_is_one_clear_error(component: str, seen: str, runs: Runs, inputs: Path, tmp_path: Path):
    overrides = [*overrides_of("gdpo", inputs, tmp_path), f"algorithm.gdpo_reward_keys=[score,{component}]"]
    with pytest.raises(
        ValueError, match=rf"^algorithm\.gdpo_reward_keys: for '{component}' the reward returned {seen}"
    ):
        stepped(overrides)


def test_the_config_knows_which_estimators_compare_responses():
    assert set(COMPARES_RESPONSES) == {name for name, fn in ADVANTAGE_ESTIMATORS.items() if "uid" in needs(fn)}

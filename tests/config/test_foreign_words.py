"""Names of TRL, Stable-Baselines3, OpenRLHF and transformers lead to the key that means the same."""

import pytest

from tests.config.loading import problems_of
from tether.config.keys import keys
from tether.config.loading.foreign_words import KEYS, VALUES, WITHOUT_KEY
from tether.config.loading.typos import nearest
from tether.config.support.verl_keys import unread

ACTOR = "actor_rollout_ref.actor"


FIXES = {
    "lr": f"did you mean {ACTOR}.optim.lr?",
    "learning_rate": f"did you mean {ACTOR}.optim.lr?",
    "trainer.learning_rate": f"did you mean {ACTOR}.optim.lr?",
    "critic.learning_rate": "did you mean critic.optim.lr?",
    "critic.lr": "did you mean critic.optim.lr?",
    "critic.model_name_or_path": "did you mean critic.model.path?",
    "batch_size": f"did you mean {ACTOR}.ppo_mini_batch_size or data.train_batch_size?",
    "num_generations": "did you mean actor_rollout_ref.rollout.n?",
    "n_samples_per_prompt": "did you mean actor_rollout_ref.rollout.n?",
    "gae_lambda": "did you mean algorithm.lam?",
    "algorithm.gae_lambda": "did you mean algorithm.lam?",
    "clip_range": f"did you mean {ACTOR}.clip_ratio?",
    "n_steps": "did you mean env.train.max_steps_per_rollout_epoch?",
    "seed": "did you mean trainer.seed?",
    "rollout.name": "did you mean actor_rollout_ref.rollout.name?",
    "rollout.n": "did you mean actor_rollout_ref.rollout.n?",
    "model.path": "did you mean actor_rollout_ref.model.path?",
    "optim.lr": f"did you mean {ACTOR}.optim.lr?",
    "beta": f"did you mean {ACTOR}.kl_loss_coef?",
    "algorithm.adv_estimatr": "did you mean algorithm.adv_estimator?",
}


def test_a_word_of_another_library_leads_to_its_key():
    assert problems_of(*(f"{word}=1" for word in FIXES)) == {
        word: f"{word}: unknown key. {fix}" for word, fix in FIXES.items()
    }


def test_a_word_without_a_key_is_answered_with_what_happens_instead():
    assert not WITHOUT_KEY.keys() & ({path.rpartition(".")[2] for path in keys()} | KEYS.keys())
    assert problems_of(
        "logging_steps=10", "actor_rollout_ref.rollout.min_p=0.1", "kl=1", "push_to_hub=True", "vllm_num_engines=2"
    ) == {
        "logging_steps": "logging_steps: unknown key. every step is logged",
        "actor_rollout_ref.rollout.min_p": "actor_rollout_ref.rollout.min_p: unknown key. sampling is cut by "
        "actor_rollout_ref.rollout.top_p and actor_rollout_ref.rollout.top_k only",
        "vllm_num_engines": "vllm_num_engines: unknown key. trainer.n_gpus_per_node and trainer.nnodes share a run "
        "among devices",
        "kl": "kl: unknown key. see `tether config explain --search kl`",
        "push_to_hub": "push_to_hub: unknown key. see `tether config explain`",  # no key or description has this word
    }


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("algorithm.adv_estimator=ppo", "gae"),
        ("algorithm.adv_estimator=reinforce-baseline", "reinforce_plus_plus_baseline"),
        (f"{ACTOR}.policy_loss.loss_mode=dapo", f"vanilla, with {ACTOR}.clip_ratio_high above clip_ratio_low"),
        (f"{ACTOR}.policy_loss.loss_mode=GSPO", "gspo?"),
        (f"{ACTOR}.loss_agg_mode=dr_grpo", "seq-mean-token-sum-norm?"),
        ("policy.model_type=MlpPolicy", "mlp_policy?"),
        ("env.train.vectorization=SubprocVecEnv", "subprocess?"),
    ],
)
def test_a_value_of_another_library_leads_to_ours(override, meant):
    (text,) = problems_of(override).values()
    assert f"did you mean {meant}" in text


@pytest.mark.parametrize(
    ("word", "meant"), [("env", "env.train.id"), ("policy", "policy.model_type"), ("critic", None)]
)
def test_a_section_that_is_given_a_value_names_the_key_that_is_meant(word, meant):
    fix = f"did you mean {meant}?" if meant else f"see `tether config explain {word}`"
    assert problems_of(f"{word}=x")[word].startswith(f"{word}: is a section, which cannot be x. {fix}")


def test_every_word_leads_to_keys_that_exist():
    assert {word: key for word, found in KEYS.items() for key in found if key not in keys() and not unread(key)} == {}
    assert [word for word in KEYS if word in keys() or nearest(word) != KEYS[word][0]] == []


def test_every_value_leads_to_a_choice_that_exists():
    for name, values in VALUES.items():
        choices = {choice for key in keys().values() if key.path.endswith(f".{name}") for choice in key.allowed}
        assert {value.split(",")[0] for value in values.values()} <= choices
        assert not choices & set(values)

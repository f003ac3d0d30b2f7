"""The pages that tether began with: each key, value and script of theirs acts, or is an error naming the real key.

These are verl's page on PPO in two editions, RLinf's page on PPO (its examples: `rlinf/test_pages.py`), and verl's
folder of PPO scripts with its own page.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.config.loading import load, problems_of
from tether.commands.cli import app
from tether.config import ConfigError, load_config
from tether.config.keys import keys, values_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
IN_LOSS, IN_REWARD = f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"
KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

DEFAULTS = {
    f"{ROLLOUT}.n": 1,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
}
"""The defaults that the pages name."""
STATEMENTS: list[tuple[str, ...]] = [
    (f"{ROLLOUT}.n=5",),
    ("data.train_batch_size=512",),
    (f"{ACTOR}.ppo_micro_batch_size=2",),
    ("critic.ppo_micro_batch_size=2",),
    (f"{ACTOR}.ppo_mini_batch_size=64",),
    ("critic.ppo_mini_batch_size=32",),
    (f"{ACTOR}.clip_ratio=0.1",),
    (f"{ACTOR}.clip_ratio_c=4.0",),
    (f"{ACTOR}.ppo_epochs=2",),
    ("critic.ppo_epochs=3",),
    ("algorithm.gamma=0.9",),
    ("algorithm.lam=0.8",),
    *((f"algorithm.adv_estimator={name}", f"{ROLLOUT}.n=2")
      for name in ("gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized")),
    (IN_LOSS,),
    (f"{ACTOR}.kl_loss_coef=0.1", IN_LOSS),
    *((f"{ACTOR}.kl_loss_type={kind}", IN_LOSS) for kind in (*KINDS, "full", *(f"{kind}+" for kind in KINDS))),
    (IN_REWARD,),
    *((f"algorithm.kl_penalty={kind}", IN_REWARD) for kind in (*KINDS, "full")),
    ("algorithm.kl_ctrl.kl_coef=0.1", IN_REWARD),
    *((f"algorithm.kl_ctrl.type={kind}", IN_REWARD) for kind in ("fixed", "adaptive")),
    ("algorithm.kl_ctrl.horizon=100", IN_REWARD, "algorithm.kl_ctrl.type=adaptive"),
    ("algorithm.kl_ctrl.target_kl=0.2", IN_REWARD, "algorithm.kl_ctrl.type=adaptive"),
]  # fmt: skip
"""A key with a value that the pages speak of, and what has to be set so that it acts."""
MISSPELLINGS = {
    "actor_rollout.ref.rollout.n": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.critic.ppo_mini_batch_size": "critic.ppo_mini_batch_size",
    "actor_rollout_ref.critic.model.path": "critic.model.path",
    "algorithm.gemma": "algorithm.gamma",
}
"""What the pages misspell -> the real key. In verl these are errors, too."""


def scripts() -> dict[str, list[str]]:
    """Return the settings of each script of verl's folder, at the time of its page and today."""
    found: dict[str, list[str]] = {}
    text = Path(__file__).with_name("ppo_trainer.txt").read_text(encoding="utf-8")
    for line in text.splitlines()[1:]:
        if line.startswith("  "):
            found[list(found)[-1]].append(line.removeprefix("  "))
        elif line:
            found[line] = []
    return found


def test_every_key_and_value_of_verls_pages_acts():
    wrong = {}
    values = values_of(load().config)
    for key, value in DEFAULTS.items():
        if values[key] != value:
            wrong[key] = values[key]
    for statement, *context in STATEMENTS:
        key, text = statement.split("=")
        key = keys()[key].alias_of or key
        loaded = load(statement, *context)
        idle = [note for note in loaded.notes if "no effect" in note]
        if str(values_of(loaded.config)[key]) != text or idle:
            wrong[statement] = idle or values_of(loaded.config)[key]
    assert wrong == {}
    epochs = load(f"{ACTOR}.ppo_epochs=2").config
    assert epochs.critic.ppo_epochs == 2


def test_what_verls_pages_misspell_names_the_real_key():
    wrong = {name: text for name, meant in MISSPELLINGS.items()
             if not (text := problems_of(f"{name}=1")[name]).endswith(f"did you mean {meant}?")}  # fmt: skip
    assert wrong == {}


def test_a_critic_goes_with_gae_alone():
    for estimator, has_critic in (("gae", True), ("grpo", False), ("rloo", False)):
        config = load(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=2").config
        assert config.critic.enable is has_critic, estimator


def test_every_script_of_verls_folder_resolves():
    refused, results = {}, {}
    for name, words in scripts().items():
        results[name] = CliRunner().invoke(app, ["config", "check", "--no-files", *words])
        if isinstance(error := results[name].exception, ConfigError):
            refused[name] = {problem.path for problem in error.problems}
    # A comment behind a backslash ends this script's command before its files and its model are named, in verl as well.
    assert refused == {"v0.4/run_deepseek7b_llm_pfppo.sh": {"data.train_files", "actor_rollout_ref.model.path"}}
    assert [name for name in results if not (name in refused or results[name].output.endswith("sound\n"))] == []
    assert [sum(name.startswith(version) for name in results) for version in ("v0.4/", "2026-08/")] == [16, 2]


@pytest.mark.parametrize("logger", ["trainer.logger=['console']", "trainer.logger=console"])
def test_the_example_of_verls_pages_resolves(logger):
    page = [
        "trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1", logger,
        "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.ppo_micro_batch_size=2",
        "critic.ppo_micro_batch_size=2",
    ]  # fmt: skip
    config = load_config(None, [*scripts()["v0.4/run_gemma.sh"], *page]).config
    models = config.actor_rollout_ref.actor, config.critic
    assert (config.data.train_batch_size, config.trainer.logger) == (256, ("console",))
    assert [model.ppo_micro_batch_size_per_gpu for model in models] == [2, 2]

"""The table of metrics and what runs log are one: no key is logged undescribed, none is described and never logged."""

import importlib
import re
from pathlib import Path

import pytest

from tests.runs.tiny_run import GAE, GRPO, LIGHT, base_overrides, train
from tether.config import load_config
from tether.metrics.keys import METRICS, MetricInfo, describe
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.objects import register_objects

CORRECTION = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss"
RUNS = {
    "gae": [*GAE, "algorithm.bootstrap_truncated=True", "algorithm.normalize_rewards=running"],
    "grpo": [*GRPO, f"{LOSS}.loss_mode=decoupled", f"{LOSS}.behave_weight_threshold=2"],
    "remax": ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=2", f"{LOSS}.loss_mode=kl_cov"],
    "gdpo": [
        "actor_rollout_ref.actor.clip_ratio_schedule=linear",
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        "actor_rollout_ref.actor.entropy_coeff_schedule=linear",
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[score,acc]",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.top_k=20",
        "actor_rollout_ref.actor.early_stop_imp_ratio=5",
    ],
    "corrected": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=[token_k1,seq_mean_k3]",
        f"{CORRECTION}.rollout_rs_threshold='2,2'",
        f"{CORRECTION}.rollout_token_veto_threshold=0.01",
        "algorithm.filter_groups.enable=True",
        "algorithm.use_pf_ppo=True",
    ],
    "bypassed": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", f"{CORRECTION}.bypass_mode=True"],
    "baseline": [
        "algorithm.adv_estimator=optimal_token_baseline",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=4",
    ],
}
"""Between them they have all parts."""
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    letters = sum(c.isalpha() for c in solution_str)
    return {"score": letters / 8, "acc": float(letters > 2), "pred": solution_str[:1]}


@pytest.fixture(scope="module")
def logged(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every key that one step of these runs logs."""
    folder = tmp_path_factory.mktemp("metrics")
    options = [
        f"{VALIDATION}.do_sample=True",
        f"{VALIDATION}.temperature=1",
        f"{VALIDATION}.n=2",
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={folder / 'samples'}",
    ]
    found: set[str] = set()
    with register_objects({"letters": compute_score}):
        for name, algorithm in RUNS.items():
            often = int(name == "gae")  # what a validation and a checkpoint log is the same in all
            schedule = [f"trainer.test_freq={often or -1}", f"trainer.save_freq={often}"]
            run = train([*base_overrides(inputs, folder / name), *LIGHT, *algorithm, *options, *schedule])
            found |= {key for metrics in read_metrics(run).values() for key in metrics}
    found |= {key for metrics in read_metrics(train_control(folder / "control")).values() for key in metrics}
    return found


def train_control(directory: Path) -> Path:
    """An embodied run; its episodes tell of success."""
    toys = pytest.importorskip("tests.control.envs.toys", reason="needs gymnasium")
    toys.register()
    control = importlib.import_module("tether.control.build")
    overrides = [
        "env.train.id=tether/Countdown-v0",
        "env.train.init_params={ends: 4}",
        "env.train.total_num_envs=2",
        "env.train.max_steps_per_rollout_epoch=16",
        "env.eval.num_episodes=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "policy.normalize_rewards=True",
        f"trainer.default_local_dir={directory}",
        "trainer.logger=file",
        *("trainer.total_training_steps=1", "trainer.test_freq=1", "trainer.save_freq=1"),
    ]
    run = control.build_control_run(load_config(None, overrides))
    try:
        run.trainer.fit()
    finally:
        run.close()
    return directory


def test_what_is_logged_is_described(logged: set[str]) -> None:
    assert {key for key in logged if describe(key) is None} == set()


def test_what_is_described_is_logged(logged: set[str]) -> None:
    described = {id(describe(key)) for key in logged}
    assert sorted(key for key, info in METRICS.items() if id(info) not in described and info.when is None) == []


def test_a_rare_metric_says_where_it_is_logged() -> None:
    assert all(re.match(r"(on|in|with|while|where|under) ", info.when) for info in METRICS.values() if info.when)


def test_a_key_that_nothing_logs_would_show(logged: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setitem(METRICS, "actor/of_no_run", MetricInfo("Nothing."))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="actor/of_no_run"):
        test_what_is_described_is_logged(logged)

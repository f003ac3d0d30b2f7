"""The plan of a run in a simulator: what is counted, what is measured, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tether.commands.plan import Check, PlanOptions, show_plan
from tether.config import LoadedConfig, load_config

WORDS = [
    "env.train.id=CartPole-v1",
    "env.train.total_num_envs=2",
    "env.train.max_steps_per_rollout_epoch=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.total_env_steps=320",
]


def load(words: Sequence[str], check: Check = lambda config: []) -> LoadedConfig:
    return load_config(None, words, check)


def test_cartpole_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Policy 4-64-64-2 and critic 4-64-64-1, with 2 operations for each weight of a matrix."""
    words = [*WORDS, f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert show_plan(words, PlanOptions(as_json=True), load) == 0
    data = json.loads(capsys.readouterr().out)
    matrices = 2 * (4 * 64 + 64 * 64) + 64 * 2 + 64
    assert 2 * matrices <= data["operations_per_decision"] <= 1.5 * 2 * matrices  # and those of last observations
    assert data["parameters"] == matrices + 4 * 64 + 2 + 1
    assert data["memory"]["policy, gradients and optimizer"] == 16 * data["parameters"]
    assert data["memory"]["a rollout, and the samples of it"] >= 2 * 2 * 16 * (4 + 1) * 4
    low, middle, high = data["seconds"]["step"]
    parts = [data["seconds"][phase][1] for phase in ("gen", "old_log_prob", "adv", "update_actor")]
    assert 0 < low < middle < high
    assert sum(parts) == pytest.approx(middle)
    assert data["seconds"]["env"][1] < data["seconds"]["gen"][1]
    assert data["steps_per_second"][1] == pytest.approx(2 * 16 / middle)
    assert data["steps"] == 10
    assert data["hours"][1] == pytest.approx(10 * middle / 3600)
    assert not (tmp_path / "run").exists(), "the folder of the run stays as it is"


def test_a_run_in_a_simulator_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(load(WORDS).to_yaml())
    lines = [{"step": step, "timing_s/step": seconds} for step, seconds in ((1, 9.0), (2, 2.0), (3, 4.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert show_plan([str(tmp_path)], PlanOptions(as_json=True), load) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["phase"], row["measured"]) == ("step", "3 s")


def test_large_robot_policies_are_refused() -> None:
    words = ["env.train.id=CartPole-v1", "policy.model_type=pi0"]
    with pytest.raises(ValueError, match=r"^policy\.model_type=pi0: runs of vision-language-action and flow policies"):
        show_plan(words, PlanOptions(), load)

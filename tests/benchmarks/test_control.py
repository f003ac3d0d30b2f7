"""The control benchmark: its tasks are configurations, its curves are thinned to means, a run gives what is shown."""

from dataclasses import replace

import pytest
import torch

from benchmarks.control.report import difference, show, thinned
from benchmarks.control.sides import PEERS, SIDES, over_last, run_tether, sb3_options
from benchmarks.control.speed import ROWS, SPEED, table, what_is_missing
from benchmarks.control.tasks import TASKS, overrides
from tether.config import load_config
from tether.control.learning.losses import value_gradient


@pytest.mark.parametrize("name", [*TASKS, *SPEED])
def test_a_task_is_a_configuration(name, tmp_path) -> None:
    task = {**TASKS, **SPEED}[name]
    config = load_config(None, overrides(name, task, 3, 1, tmp_path)).config
    assert config.env.train.id == (task.env_id or name)
    assert config.trainer.total_env_steps == task.steps
    assert config.trainer.seed == 3


def test_curves_are_thinned_to_means() -> None:
    assert thinned([[1, 10.0], [3, 20.0], [5, 0.0], [7, 2.0]], points=2) == [[2.0, 15.0], [6.0, 1.0]]
    assert thinned([[1, 10.0]]) == [[1.0, 10.0]]
    assert thinned([]) == []


def test_a_point_of_a_curve_is_the_mean_of_the_last_hundred_episodes() -> None:
    # After the third log: 60 episodes of 2 and 40 of the 50 of 8, without the first 70.
    assert over_last([(1.0, 70), (8.0, 50), (2.0, 60)]) == [1.0, (50 + 400) / 100, (320 + 120) / 100]


def test_a_difference_of_means_and_its_interval() -> None:
    assert difference([3.0, 3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0, 2.0)
    assert difference([0.0, 10.0], [1.0]) == (4.0, -1.0, 9.0)  # a quarter of the resamples are all 0, a quarter all 10


def test_a_peer_with_its_defaults_has_those_of_its_documentation() -> None:
    assert sb3_options(TASKS["InvertedDoublePendulum-v5"]) == {
        "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95,
        "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5, "clip_range_vf": None, "max_grad_norm": 0.5,
    }  # fmt: skip


def test_the_critic_weighs_alike_on_all_sides() -> None:
    # V = 3, R = 1: tether's gradient is c (V - R), that of the squared error 2 c' (V - R).
    task, values, returns = TASKS["InvertedDoublePendulum-v5"], torch.tensor([[3.0]]), torch.tensor([[1.0]])
    ours = task.value_coeff * value_gradient(values, values, returns, cliprange_value=None, huber_delta=None)
    assert ours.item() == 2.0
    assert sb3_options(task)["vf_coef"] * 2 * (3.0 - 1.0) == 2.0


def test_a_constant_rate_stays_constant(tmp_path) -> None:
    task = TASKS["InvertedDoublePendulum-v5"]
    actor = load_config(
        None, overrides("InvertedDoublePendulum-v5", task, 1, 1, tmp_path)
    ).config.actor_rollout_ref.actor
    assert task.schedule == actor.optim.lr_scheduler_type == "constant"


def test_every_peer_is_a_side() -> None:
    assert set(SIDES) == {"tether", *PEERS}


def test_a_task_with_a_memory_names_its_lstm_and_only_sides_that_have_one(tmp_path) -> None:
    name = "MiniGrid-MemoryS7-v0"
    policy = load_config(None, overrides(name, TASKS[name], 1, 1, tmp_path)).config.policy
    assert (policy.model_type, policy.lstm_dim) == ("cnn_policy", 128)
    assert TASKS[name].sides == ("tether", "sb3")
    assert all(set(task.sides) <= set(SIDES) for task in TASKS.values())


def test_a_run_too_short_for_an_episode_is_shown(capsys) -> None:
    run = {"sps": 1.0, "return": 9.0, "curve": []}
    show("CartPole-v1", TASKS["CartPole-v1"], {"sb3": [run]})
    assert "nan" in capsys.readouterr().out


def test_a_run_gives_what_the_table_shows(capsys) -> None:
    task = replace(TASKS["CartPole-v1"], steps=2048)
    result = run_tether("CartPole-v1", task, seed=1, threads=1)
    assert result["sps"] > 0
    assert 0 < result["return"] <= 500
    assert 1900 < result["curve"][-1][0] <= 2048  # without steps that only reset
    show("CartPole-v1", task, {"tether": [result], "sb3": [{"sps": 1.0, "return": 9.0, "curve": [[1, 8.0]]}]})
    assert "update" in capsys.readouterr().out


def test_a_row_of_speed_counts_compilation_where_it_says_so_and_names_what_it_lacks() -> None:
    name = "CartPole, 8 x 128"
    runs = {
        "tether": [{"cpu_sps": 200.0}, {"cpu_sps": 300.0}],
        "purejaxrl": [{"cpu_sps": 400.0, "cpu_sps_with_compilation": 100.0}] * 2,
    }
    missing = {row.title: "" if row.task == name else what_is_missing(row, None) or "needs X" for row in ROWS}
    lines = table(SPEED, {name: runs}, missing).splitlines()[2:]
    last = [line.removesuffix(" |").rpartition("| ")[2] for line in lines]
    assert last[:2] == ["0.62 (0.50 to 0.75)", "2.50 (2.00 to 3.00)"]
    assert last[2] == "not run: needs a clone of github.com/luchris429/purejaxrl: --purejaxrl FOLDER"
    assert all(one.startswith("not run: needs ") for one in last[3:])

"""The control benchmark: its tasks are configurations, its curves are thinned to means, a run gives what is shown."""

from dataclasses import replace

import pytest

from benchmarks.control.report import show, thinned
from benchmarks.control.sides import PEERS, SIDES, run_tether
from benchmarks.control.tasks import TASKS, overrides
from tether.config import load_config


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_configuration(name, tmp_path) -> None:
    config = load_config(None, overrides(name, TASKS[name], 3, 1, tmp_path)).config
    assert config.env.train.id == name
    assert config.trainer.total_env_steps == TASKS[name].steps
    assert config.trainer.seed == 3


def test_curves_are_thinned_to_means() -> None:
    assert thinned([[1, 10.0], [3, 20.0], [5, 0.0], [7, 2.0]], points=2) == [[2.0, 15.0], [6.0, 1.0]]
    assert thinned([[1, 10.0]]) == [[1.0, 10.0]]
    assert thinned([]) == []


def test_every_peer_is_a_side() -> None:
    assert set(SIDES) == {"tether", *PEERS}


def test_a_run_gives_what_the_table_shows(capsys) -> None:
    task = replace(TASKS["CartPole-v1"], steps=2048)
    result = run_tether("CartPole-v1", task, seed=1, threads=1)
    assert result["sps"] > 0
    assert 0 < result["return"] <= 500
    assert 1900 < result["curve"][-1][0] <= 2048  # without steps that only reset
    show("CartPole-v1", task, {"tether": [result], "sb3": [{"sps": 1.0, "return": 9.0}]})
    assert "update" in capsys.readouterr().out

"""Inputs of tiny runs, written once; every test has its own run folder. Golden runs, trained once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.made_once import made_once
from tests.runs.golden import Golden, train_golden
from tests.runs.loops import Control, Loop, Text
from tests.runs.tiny_run import LIGHT, REWARD, base_overrides, reward_function, write_inputs
from tether.runtime.objects import register_objects


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, train.jsonl, val.jsonl and reward.py; to be read only."""
    return made_once("tiny_inputs", write_inputs, tmp_path_factory)


@pytest.fixture
def base(inputs: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run on `inputs` whose folder is tmp_path/run."""
    return base_overrides(inputs, tmp_path / "run")


@pytest.fixture(scope="session", autouse=True)
def _reward_of_this_process() -> Iterator[None]:
    """What ``object:letters`` stands for, which `LIGHT` names: the function of reward.py."""
    with register_objects({"letters": reward_function(REWARD)}):
        yield


@pytest.fixture(params=["text", "control"])
def loop(request: pytest.FixtureRequest, inputs: Path) -> Loop:
    """Return both kinds of runs in turn."""
    if request.param == "control":
        pytest.importorskip("gymnasium")
        return Control()
    return Text(inputs, *LIGHT)


@pytest.fixture
def golden(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Return the run of the loop that all tests of the session read."""
    name = f"golden_{type(loop).__name__.lower()}"
    return Golden(loop, made_once(name, lambda folder: train_golden(loop, folder), tmp_path_factory))

"""Planted runs, written once."""

from pathlib import Path

import pytest

from tests.made_once import made_once
from tests.runs.conftest import _reward_of_this_process, golden, inputs, loop  # noqa: F401
from tests.view.planted import write_all


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of `tests.view.planted`; to be read only."""
    return made_once("planted_runs", write_all, tmp_path_factory)

"""Inputs of tiny runs, written once; every test has its own run folder."""

from pathlib import Path

import pytest

from tests.trainer.tiny_run import base_overrides, write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, train.jsonl, val.jsonl and reward.py; to be read only."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def base(inputs: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run on `inputs` whose folder is tmp_path/run."""
    return base_overrides(inputs, tmp_path / "run")

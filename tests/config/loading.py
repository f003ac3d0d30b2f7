"""The shortest valid config, and ways to load it."""

import pytest

from tether.config import ConfigError, load_config

BASE = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]


def load(*overrides, path=None):
    return load_config(path, [*BASE, *overrides])


def problems_of(*overrides, path=None, base=BASE):
    """Load what cannot be loaded; returns the problems as text by their path."""
    with pytest.raises(ConfigError) as error:
        load_config(path, [*base, *overrides])
    texts = {problem.path: str(problem) for problem in error.value.problems}
    assert len(texts) == len(error.value.problems)
    assert str(error.value).splitlines() == [str(problem) for problem in error.value.problems]
    return texts

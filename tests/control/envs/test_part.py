"""Promise 7 where the environments of a run are divided among processes: each begins as it would in one process."""

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from tether.control.envs.make import EnvOptions, ResetPolicy, make_vector_env


@pytest.mark.parametrize(
    "reset_policy",
    [ResetPolicy(), ResetPolicy(chunk=2), ResetPolicy(group_size=2), ResetPolicy(group_size=2, fixed_seed=5)],
    ids=["alone", "chunks", "groups", "fixed"],
)
def test_the_second_half_begins_as_the_second_half_of_all(reset_policy: ResetPolicy) -> None:
    def first_observations(num_envs: int, first: int = 0) -> np.ndarray:
        options = EnvOptions("CartPole-v1", num_envs, vectorization="sync", reset_policy=reset_policy, first=first)
        return make_vector_env(options).reset(3)["state"].copy()

    every = first_observations(4)
    assert (every[:2] != every[2:]).any()
    assert np.array_equal(first_observations(2, first=2), every[2:])

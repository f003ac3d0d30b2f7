"""The view of MiniGrid's environments is the one that MiniGrid itself makes."""

import numpy as np
import pytest

from tether.control.envs.minigrid import SuccessByReward, view

minigrid = pytest.importorskip("minigrid")
gymnasium = pytest.importorskip("gymnasium")

# Keys that are carried and dropped, doors in each state, lava, balls that move, walls to see through, a small view.
TASKS = {
    "MiniGrid-DoorKey-8x8-v0": {},
    "MiniGrid-LavaGapS7-v0": {},
    "MiniGrid-Dynamic-Obstacles-6x6-v0": {},
    "MiniGrid-ObstructedMaze-1Dlhb-v0": {},
    "MiniGrid-MultiRoom-N4-S5-v0": {},
    "MiniGrid-Empty-Random-6x6-v0": {},
    "MiniGrid-FourRooms-v0": {"agent_view_size": 3},
    "BabyAI-GoToLocal-v0": {},
}


@pytest.mark.parametrize(("name", "options"), TASKS.items(), ids=TASKS)
def test_the_view_is_minigrids(name, options):
    env = SuccessByReward(gymnasium.make(name, **options))
    inner = env.unwrapped
    rng = np.random.default_rng(0)
    for episode in range(20):
        obs, _ = env.reset(seed=episode)
        for _ in range(60):
            expected = type(inner).gen_obs(inner)
            assert obs.keys() == expected.keys()
            assert np.array_equal(obs["image"], expected["image"])
            assert obs["image"].dtype == expected["image"].dtype
            assert (obs["direction"], obs["mission"]) == (expected["direction"], expected["mission"])
            obs, _, terminated, truncated, _ = env.step(int(rng.integers(6)))
            if terminated or truncated:
                break


def test_a_view_of_its_own_is_left_alone():
    class Blind(minigrid.envs.EmptyEnv):
        def gen_obs(self):
            return super().gen_obs() | {"image": np.zeros((7, 7, 3), dtype=np.uint8)}

    env = SuccessByReward(Blind(size=5))
    obs, _ = env.reset(seed=0)
    assert not obs["image"].any()
    assert view(env.unwrapped).any()

"""What is recorded of episodes: success, also of an earlier rollout, seeds, and the task of each."""

from pathlib import Path

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from tether.control.collecting.collector import EnvCollector  # noqa: E402
from tether.control.envs.layers import ResetPolicyEnv  # noqa: E402
from tether.control.envs.loop import SyncVectorEnv  # noqa: E402
from tether.control.learning.recording import EpisodeRecorder  # noqa: E402
from tether.loop.protocol import Experience  # noqa: E402
from tether.metrics.records import RECORDS_FILE, RecordFile, heads, read_record, unpack  # noqa: E402

TASKS = ("walk", "stand up, héro")


class Tasks(gymnasium.Env):
    """Episodes of three steps whose tasks alternate; the first one is solved in the second step."""

    observation_space = gymnasium.spaces.Dict(
        {
            "speed": gymnasium.spaces.Box(-9, 9, (1,), np.float32),
            "mission": gymnasium.spaces.Text(20, charset="".join(TASKS)),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)
    episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.steps += 1
        solved = self.steps == 2 and self.episode % 2 == 0
        return self._obs(), 1.0, False, self.steps == 3, {"success": solved}

    def _obs(self):
        return {"speed": np.ones(1, dtype=np.float32), "mission": TASKS[self.episode % 2]}


def recorded(env, folder: Path, rollouts: int, steps: int, chunk: int = 1) -> list[dict]:
    """Columns and task names of some rollouts of an environment."""
    collector = EnvCollector(env, steps, chunk=chunk)

    def decide(obs, noise, state):
        return np.zeros((len(state), chunk), dtype=np.int64), state

    collector.restart(seed=7)
    file = RecordFile(folder, 1_000_000, None)
    for step in range(1, rollouts + 1):
        batch = collector.collect(decide, torch.zeros(1, steps // chunk, env.num_envs, 1))
        EpisodeRecorder(file, env.layout).record(step, Experience(batch, None), None, None)
    path = folder / RECORDS_FILE
    read = [read_record(path, head) for head in heads(path) if head.kind == "columns"]
    return [
        {name: unpack(value).tolist() if isinstance(value, dict) else value for name, value in one.items()}
        for one in read
    ]


def test_success_seed_and_task_of_each_episode(tmp_path: Path) -> None:
    """Rollouts of four steps: the third begins in the last step of an episode that was solved before."""
    one, two, three = recorded(SyncVectorEnv("tasks", Tasks, 1), tmp_path, rollouts=3, steps=4)
    assert [one["length"], two["length"], three["length"]] == [[3, 1], [2, 2], [1, 3]]
    assert [one["seed"], two["seed"], three["seed"]] == [[7, -1], [-1, -1], [-1, -1]]
    assert [one["success"], two["success"], three["success"]] == [[True, False], [False, True], [True, False]]
    for columns, tasks in ((one, [0, 1]), (two, [1, 0]), (three, [0, 1])):
        assert [columns["tasks"][task] for task in columns["task"]] == [TASKS[task] for task in tasks]


def test_episodes_that_wait_for_the_end_of_a_chunk_have_their_own_seed_and_task(tmp_path: Path) -> None:
    """Chunks of two: after three steps an environment waits for one, and a group begins with a seed of its own."""
    env = ResetPolicyEnv(SyncVectorEnv("tasks", Tasks, 2, holds=True), chunk=2, group_size=2)
    (columns,) = recorded(env, tmp_path, rollouts=1, steps=8, chunk=2)
    assert columns["length"] == [3, 3] * 2
    assert columns["seed"][:2] == columns["seed"][2:], "groups begin alike"
    assert columns["seed"][0] != columns["seed"][1] >= 0
    assert columns["success"] == [True, False] * 2
    assert [columns["tasks"][task] for task in columns["task"]] == [*TASKS, *TASKS]

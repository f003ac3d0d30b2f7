"""LIBERO's environment and benchmark without its simulator and files: two tasks, of three start states and of two."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import torch


class Libero:
    """LIBERO's `ControlEnv`: robosuite's tuple of four. The state counts steps after the start state; 13 is success."""

    def __init__(self, bddl_file_name, **arguments):
        self.file, self.arguments, self.closed = bddl_file_name, arguments, False

    def _raw(self):
        picture = np.zeros((2, 3, 3), dtype=np.uint8)
        picture[0] = 255  # the lowest row, as OpenGL has it
        picture[1:, 0] = 9  # the left column of the others
        half = np.sqrt(0.5)  # a quarter turn about z
        return {
            "robot0_proprio-state": np.array([self._t, self._start]), "object-state": np.zeros(1),
            "agentview_image": picture, "robot0_eye_in_hand_image": picture // 2,
            "robot0_eef_pos": np.array([self._t, self._start, int(self.file[5])]),
            "robot0_eef_quat": np.array([0.0, 0.0, half, half]), "robot0_gripper_qpos": np.array([0.1, -0.1]),
        }  # fmt: skip

    def seed(self, seed):
        self.seeded = seed

    def reset(self):
        self._t, self._start = 0, -1
        return self._raw()

    def set_init_state(self, state):
        self._start = state[0]
        return self._raw()

    def step(self, action):
        assert len(action) == 7
        self._t += 1
        return self._raw(), float(self._t == 13), self._t == 13, {}

    def close(self):
        self.closed = True


class Spatial:
    def get_num_tasks(self):
        return 2

    def get_task_bddl_file_path(self, number):
        return f"task-{number}.bddl"

    def get_task_init_states(self, number):
        return torch.tensor([[5.0], [6.0], [7.0]][: 3 - number])

    def get_task(self, number):
        return SimpleNamespace(language=["pick up the bowl", "open it"][number])


def install(monkeypatch):
    """Let this be the package libero."""
    suites = {"libero_spatial": Spatial}
    modules = {
        "libero": {}, "libero.libero": {}, "libero.libero.envs": {},
        "libero.libero.benchmark": {"get_benchmark": suites.get, "get_benchmark_dict": lambda: suites},
        "libero.libero.envs.env_wrapper": {"ControlEnv": Libero},
    }  # fmt: skip
    for name, contents in modules.items():
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
    sys.modules.pop("tether.integrations.robots.libero", None)

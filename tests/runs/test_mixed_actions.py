"""Actions of several parts: a gripper that is a choice beside an arm of numbers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402

import tether  # noqa: E402
from tests.runs.control_run import assert_ratios_are_one, assert_resume_is_exact, train  # noqa: E402
from tests.runs.test_control import learned  # noqa: E402
from tether.control.envs.conversion import ActionCodec  # noqa: E402
from tether.control.envs.protocol import ContinuousActions, DiscreteActions, MixedActions  # noqa: E402
from tether.control.policies.networks import ActionSampler, MixedHead  # noqa: E402

ACTIONS = spaces.Dict(
    arm=spaces.Box(np.array([-1, -2], np.float32), np.array([1, 2], np.float32)),
    gripper=spaces.Tuple([spaces.Discrete(3, start=5), spaces.MultiBinary(1)]),
)


class Reach(gymnasium.Env):
    """Worth a point: the choice that is shown, and an arm at 0.5; an action of the wrong kind is an error."""

    observation_space, action_space = spaces.Box(0, 1, (3,), np.float32), ACTIONS

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.shown = 0, int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.shown], self._info()

    def _info(self) -> dict[str, Any]:
        return {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        reward = float(action["gripper"][0] == 5 + self.shown) - float(np.abs(action["arm"] - 0.5).mean())
        self.shown = int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.shown], reward, False, self.steps == 8, self._info()


class Masked(Reach):
    """The first choice is never allowed; any of it is an error."""

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array([0, 1, 1, 1, 1], np.int8)}

    def step(self, action: Any) -> Any:
        assert action["gripper"][0] > 5
        return super().step(action)


@pytest.fixture(autouse=True)
def _registered() -> Any:
    gymnasium.register("tests/Reach-v0", Reach)
    gymnasium.register("tests/MaskedReach-v0", Masked)
    yield
    for name in ("tests/Reach-v0", "tests/MaskedReach-v0"):
        del gymnasium.registry[name]


def test_columns_become_the_parts_of_an_action_and_back() -> None:
    codec = ActionCodec.of(ACTIONS, "toy")
    assert codec.spec == MixedActions((3, 2), ContinuousActions(2))  # choices first
    assert codec.spec.numbers.low == (-1, -2)  # type: ignore[union-attr]
    columns = np.array([[2, 1, 0.5, -9], [0, 0, 4, 1.5]], np.float32)
    decoded = codec.decode(columns)
    assert decoded["arm"].tolist() == [[0.5, -2], [1, 1.5]]
    assert [part.tolist() for part in decoded["gripper"]] == [[7, 5], [[1], [0]]]
    rows = list(codec.rows(decoded))
    assert all(ACTIONS.contains(row) for row in rows)
    assert [codec.encode(row).tolist() for row in rows] == [[2, 1, 0.5, -2], [0, 0, 1, 1.5]]
    whole = ActionCodec.of(spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([3, 4])]), "toy")
    assert whole.spec == DiscreteActions((2, 3, 4))
    assert whole.encode((np.int64(1), np.array([2, 3]))).tolist() == [1, 2, 3]


def test_head_by_hand_and_its_gradient_by_autograd() -> None:
    head, generator = MixedHead((3, 2), 2, -0.5).double(), torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    outputs = torch.randn(4, head.outputs, generator=generator, dtype=torch.float64, requires_grad=True)
    actions = torch.tensor([[0, 1, 0.3, -1], [2, 0, 1, 1], [1, 1, 0, 0], [0, 0, -2, 0.5]], dtype=torch.float64)
    done = head.evaluate(outputs, actions)
    std = math.exp(-0.5)
    normal = -0.5 * ((0.3 - float(outputs[0, 5])) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
    assert float(done.log_probs[0, 2]) == pytest.approx(normal)
    assert float(done.log_probs[0, 0]) == pytest.approx(float(outputs[0, :3].log_softmax(0)[0]))
    for columns in (head.width, 1):
        by_log_prob, by_entropy = (torch.randn(4, columns, generator=generator, dtype=torch.float64) for _ in range(2))
        again = head.evaluate(outputs, actions)
        loss = (again.log_probs * by_log_prob).sum() + (again.entropy * by_entropy).sum()
        wanted = torch.autograd.grad(loss, [outputs, head.numbers.logstd])
        with torch.no_grad():
            grad = head.backward(again, actions, by_log_prob, by_entropy)
        torch.testing.assert_close([grad, head.numbers.logstd.grad], list(wanted))


def test_samples_have_the_distribution_of_the_head() -> None:
    head = MixedHead((3,), 1, -0.5)
    outputs = np.tile(np.array([[0.0, 1.0, -1.0, 0.25]], np.float32), (20000, 1))
    noise = head.noise((20000,), torch.Generator().manual_seed(0)).numpy()
    actions = ActionSampler(head)(outputs, noise)
    assert actions.dtype == np.float32
    shares = np.bincount(actions[:, 0].astype(int)) / 20000
    np.testing.assert_allclose(shares, torch.tensor(outputs[0, :3]).softmax(0).numpy(), atol=0.015)
    assert (actions[:, 1].mean(), actions[:, 1].std()) == pytest.approx((0.25, math.exp(-0.5)), abs=0.015)
    assert ActionSampler(head)(outputs[:1], None).tolist() == [[1, 0.25]]


ACTOR = "actor_rollout_ref.actor"
RUN = [
    "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16", f"{ACTOR}.ppo_mini_batch_size=64",
    f"{ACTOR}.ppo_epochs=1", "policy.hidden_dim=8", "trainer.total_training_steps=2", "trainer.test_freq=-1",
    "trainer.val_before_train=False", "trainer.logger=file", "trainer.log_freq=1",
]  # fmt: skip


IN_PROCESSES = ["env.train.vectorization=subprocess", "env.train.num_workers=2"]


@pytest.mark.parametrize("more", [[], pytest.param(IN_PROCESSES, marks=pytest.mark.slow)], ids=str)
def test_a_run_acts_with_all_parts_and_resumes_exactly(more: list[str], tmp_path: Path) -> None:
    overrides = ["env.train.id=tests/Reach-v0", *RUN, *more]
    whole = assert_resume_is_exact(tmp_path, overrides, 2)
    assert_ratios_are_one(whole.directory, 1e-6)
    policy = tether.load(whole.directory)
    assert ACTIONS.contains(policy.predict(np.eye(3, dtype=np.float32)[0]))
    assert policy.predict(np.eye(3, dtype=np.float32))["gripper"][1].shape == (3, 1)


def test_both_kinds_are_learned(tmp_path: Path) -> None:
    more = ["env.train.max_steps_per_rollout_epoch=16", "algorithm.gamma=0", "policy.init_logstd=-1"]
    gymnasium.register("tether/Reach-v0", Reach)
    more += [f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.ppo_epochs=4", "env.eval.num_episodes=20"]
    assert learned(tmp_path, "Reach", 12, *more) > 6  # of 8; at random 8 (1/3 - 0.6)


def test_masks_hold_for_the_choices_of_a_policy_with_a_memory(tmp_path: Path) -> None:
    folder = f"trainer.default_local_dir={tmp_path}"
    run = train(["env.train.id=tests/MaskedReach-v0", *RUN, folder, "env.train.action_masks=True", "policy.lstm_dim=4"])
    assert_ratios_are_one(run.directory, 1e-6)


CHUNKS = ["policy.num_action_chunks=2", f"{ACTOR}.ppo_mini_batch_size=32"]


def test_chunks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy\.num_action_chunks=2: .* both choices and numbers"):
        train(["env.train.id=tests/Reach-v0", *RUN, *CHUNKS, f"trainer.default_local_dir={tmp_path}"])

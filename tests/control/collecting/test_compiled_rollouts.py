"""Rollouts that environments carry out in one call."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode  # noqa: E402

from benchmarks.control.compiled_cartpole import CartPole  # noqa: E402
from tests.runs.control_run import RUN, assert_resume_is_exact  # noqa: E402
from tether.control.collecting.collector import EnvCollector  # noqa: E402
from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv  # noqa: E402
from tether.control.envs.make import EnvOptions, make_vector_env  # noqa: E402
from tether.control.policies.mlp_policy import make_policy  # noqa: E402
from tether.control.policies.networks import Actor  # noqa: E402
from tether.control.policies.spec import PolicySpec  # noqa: E402

pytestmark = pytest.mark.slow  # numba and JAX compile for seconds
FILE = Path(__file__).parents[3] / "benchmarks/control/compiled_cartpole.py"
PUSHED = '''
import gymnasium
import numpy as np


class Pushed:
    """A place that an action moves, in Dict observations; far away an episode ends."""

    observation_space = gymnasium.spaces.Dict(place=gymnasium.spaces.Box(-9, 9, (2, 1), np.float32))
    action_space = gymnasium.spaces.Box(-0.5, 0.5, (1, 2), np.float32)

    def reset(self, key):
        import jax

        place = jax.random.uniform(key, (2, 1))
        return {"place": place}, place

    def step(self, key, state, action):
        place = state + action.T
        return {"place": place}, place, place.sum(), (place > 2).any(), (place < -1).any()
'''


def step_by_step(act: Actor) -> Any:
    """The same policy, of which no environment sees more than its actions."""
    return lambda *arguments: act(*arguments)


@pytest.mark.parametrize(
    ("id", "options", "spec"),
    [
        (f"{FILE}:CartPole", {}, {"choices": (2,), "activation": "tanh"}),
        (f"{FILE}:CartPole", {}, {"choices": (2,), "activation": "relu", "normalize_observations": False}),
        ("jax", {"env_type": "jax"}, {"activation": "elu"}),
    ],
)
@pytest.mark.parametrize("always", [False, True])
def test_they_are_those_of_single_steps(
    id: str, options: dict[str, Any], spec: dict[str, Any], always: bool, tmp_path: Path
) -> None:
    """Actions, ends, episodes and bootstrapped observations are the same, over two rollouts; numbers up to rounding."""
    if id == "jax":
        pytest.importorskip("jax")
        (tmp_path / "pushed.py").write_text(PUSHED)
        id = f"{tmp_path}/pushed.py:Pushed"
    batches = []
    for wrap in (lambda act: act, step_by_step):
        env = make_vector_env(EnvOptions(id, 3, **options))
        size, width = env.layout[0].shape[0], env.actions.width
        more = {"choices": None, "hidden_dim": 16, "normalize_observations": True} | spec
        policy = make_policy(PolicySpec(size, action_width=width, layout=env.layout, **more), 3)
        policy.update_statistics({env.layout[0].name: torch.arange(50.0 * size).view(50, size).sin()})
        with torch.no_grad():
            policy.actor.layers[-1].weight.mul_(100)  # so that a mistake in the networks changes actions
        collector = EnvCollector(env, steps=60, bootstrap_terminations=always)
        collector.restart(5)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            noise = policy.head.noise(collector.noise_shape, generator)
            batch = collector.collect(wrap(policy.acting()), noise)
            batches.append({name: value.clone() for name, value in vars(batch).items() if torch.is_tensor(value)})
            batches[-1] |= {"obs": batch.obs[env.layout[0].name].clone(), "at": torch.stack(batch.final_at).clone()}
            batches[-1] |= {"final_obs": batch.final_obs[env.layout[0].name].clone(), "episodes": batch.episodes}
    assert batches[1]["episodes"]
    assert len(batches[1]["at"][0]) > 0 or not (always or options)  # CartPole is cut after 500 steps
    for one, other in zip(batches[:2], batches[2:], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name == "episodes":
                assert [episode.length for episode in value] == [episode.length for episode in other[name]]
            else:
                torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "named",
    [
        [f"env.train.id={FILE}:CartPole"],
        [f"env.train.id={FILE}:JaxCartPole", "env.train.env_type=jax", "env.train.max_episode_steps=12"],
    ],
)
def test_a_run_of_them_resumes_exactly(named: list[str], tmp_path: Path) -> None:
    assert_resume_is_exact(tmp_path, [*named, *RUN], 2)


def test_compiled_cartpoles_are_gymnasiums() -> None:
    """Single steps from random states; the table of speed compares trainings in them with those of Gymnasium's."""
    random, one, compiled = np.random.default_rng(0), gymnasium.make("CartPole-v1").unwrapped, CartPole(1)
    compiled.reset(seed=1)
    for _ in range(200):
        state, action = random.uniform(-1, 1, 4) * [2.5, 3, 0.22, 3], int(random.integers(2))
        one.reset()
        one.state = state.copy()
        obs, reward, terminated, *_ = one.step(action)
        compiled.state, compiled.steps = state[None].copy(), np.zeros(1, np.int64)
        seen, rewards, ends, _, info = compiled.step(np.array([action]))
        np.testing.assert_allclose(info["final_obs"] if ends[0] else seen, obs[None], rtol=1e-5, atol=1e-6)
        assert (rewards.tolist(), ends.tolist()) == ([reward], [terminated])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("rows.obs[1, 3, 2] = np.nan", "wrong: entry 2 of the observation (state) is nan in environment 1 at step 3"),
        ("rows.rewards[0, 2:] = np.nan", "wrong: the reward is nan in environment 0 at step 3"),
        ("rows.actions[:] = 5", "wrong: rollout() wrote the action [5] for environment 0 at step 1, and the policy ch"),
        ("rows.truncated[1, 2] = True; rows.last_obs[1, 2] = np.nan", "last observation (state) is nan in environment"),
        ("rows.rewards[:] = np.zeros((5, 2))", "could not broadcast input array from shape (5,2) into shape (2,5)"),
    ],
)
def test_a_wrong_rollout_is_refused(change: str, error: str) -> None:
    """Whatever it forgets to write, or writes that the policy does not choose."""

    class Wrong(CartPole):
        def rollout(self, policy: Any, noise: Any, rows: Any) -> None:
            super().rollout(policy, noise, rows)
            exec(change)

    policy = make_policy(PolicySpec(4, (2,), 1), 1)
    collector = EnvCollector(GymnasiumVectorEnv("wrong", Wrong(2)), steps=5)
    collector.restart(1)
    noise = policy.head.noise(collector.noise_shape, torch.Generator())
    with pytest.raises(ValueError, match=re.escape(error)):
        collector.collect(policy.acting(), noise)


def test_what_a_rollout_does_not_write_is_refused() -> None:
    class Half(CartPole):
        def rollout(self, policy: Any, noise: Any, rows: Any) -> None:
            super().rollout(policy, noise[:3], rows)

    policy = make_policy(PolicySpec(4, (2,), 1), 1)
    collector = EnvCollector(GymnasiumVectorEnv("half", Half(2)), steps=5)
    collector.restart(1)
    with pytest.raises(ValueError, match=re.escape("half: entry 0 of the observation (state) is nan in environment 0")):
        collector.collect(policy.acting(), policy.head.noise(collector.noise_shape, torch.Generator()))


def test_a_rollout_without_a_reset_of_its_own_is_refused() -> None:
    class Later(CartPole):
        metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    with pytest.raises(ValueError, match=re.escape("later: has a rollout(), which resets where an episode ends")):
        GymnasiumVectorEnv("later", Later(2))

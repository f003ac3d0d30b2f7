"""Experience from simulators: what is collected, what is counted, and the true returns in every autoreset mode."""

import math
import signal
import warnings
from itertools import count

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from tests.control.envs import toys  # noqa: E402
from tests.control.envs.test_vector import ENVS, LIMIT, MAKERS  # noqa: E402
from tether.algorithms import episodic_gae  # noqa: E402
from tether.batch import Episode  # noqa: E402
from tether.control.collecting import evaluation  # noqa: E402
from tether.control.collecting.collector import (  # noqa: E402
    EnvCollector,
    EpisodeTracker,
    episode_metrics,
)
from tether.control.collecting.evaluation import evaluate  # noqa: E402
from tether.control.envs.make import EnvOptions, ObservationOptions, make_vector_env  # noqa: E402
from tether.control.envs.protocol import DiscreteActions, EnvStep  # noqa: E402
from tether.observations import ObsPart  # noqa: E402
from tether.runtime import interrupt  # noqa: E402

GAMMA = 0.9


def act(obs, noise, state):
    return np.zeros((len(state), 1), dtype=np.int64), state


def value(obs):
    """The true value of Countdown when its limit is not the end: sum of gamma^k (t + 1 + k)."""
    return (obs + 1) / (1 - GAMMA) + GAMMA / (1 - GAMMA) ** 2


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("name", MAKERS)
def test_returns_are_the_true_discounted_sums(name, lam):
    # With the true value of the endless task as critic, bootstrapping at the limit leaves no advantage anywhere, and
    # the returns are the discounted sums to infinity, whatever lambda is.
    collector = EnvCollector(MAKERS[name](), steps=17)
    collector.restart(seed=0)
    for _ in range(2):  # the second rollout begins in the middle of an episode
        rollout = collector.collect(act, torch.zeros(1, 17, ENVS, 1))
        values = value(rollout.obs["state"][..., 0].double())
        after = values[:, 1:].clone()
        after[rollout.terminated] = 0
        after[rollout.final_at] = value(rollout.final_obs["state"][:, 0].double())
        ends, valid = rollout.terminated | rollout.truncated, rollout.valid
        result = episodic_gae(
            rollout.token_level_scores.double(), values[:, :-1], after, ends, valid, gamma=GAMMA, lam=lam
        )
        torch.testing.assert_close(result.advantages, torch.zeros_like(result.advantages), atol=1e-9, rtol=0)
        torch.testing.assert_close(result.returns[valid], values[:, :-1][valid])
        assert bool(rollout.truncated.any())
    collector.env.close()


@pytest.mark.parametrize("name", MAKERS)
def test_termination_is_worth_nothing(name):
    collector = EnvCollector(MAKERS[name](3), steps=9)
    collector.restart(seed=0)
    rollout = collector.collect(act, torch.zeros(1, 9, ENVS, 1))
    assert len(rollout.final_obs) == 0
    assert {(episode.reward, episode.length) for episode in rollout.episodes} == {(6.0, 3)}
    assert all(episode.success_once and not episode.success_at_end for episode in rollout.episodes)


def test_the_end_of_every_episode_can_be_kept():
    collector = EnvCollector(MAKERS["loop"](3), steps=6, bootstrap_terminations=True)
    collector.restart(seed=0)
    rollout = collector.collect(act, torch.zeros(1, 6, ENVS, 1))
    assert rollout.final_obs["state"][:, 0].tolist() == [3.0] * 2 * ENVS
    assert rollout.final_at[1].tolist() == [2] * ENVS + [5] * ENVS


@pytest.mark.parametrize(
    ("poison", "what"), [("reward", "the reward is nan"), ("obs", r"entry 0 of the observation \(state\) is inf")]
)
def test_what_is_not_finite_is_named(poison, what):
    toys.register()
    options = EnvOptions("tether/Countdown-v0", 2, max_episode_steps=20, init_params={"poison": poison})
    collector = EnvCollector(make_vector_env(options), steps=2)
    collector.restart(seed=0)
    collector.env._envs[1].unwrapped._poison_at = 4
    collector.collect(act, torch.zeros(1, 2, 2, 1))
    with pytest.raises(ValueError, match=f"tether/Countdown-v0: {what} in environment 1 at step 4"):
        collector.collect(act, torch.zeros(1, 2, 2, 1))


@pytest.mark.parametrize(
    ("poison", "what"), [("reward", "the reward is nan"), ("obs", r"the observation \(state\) is inf")]
)
def test_what_is_not_finite_is_named_in_a_test_of_the_policy(poison, what):
    toys.register()
    options = EnvOptions("tether/Countdown-v0", 2, max_episode_steps=20, init_params={"poison": poison})
    env = make_vector_env(options)
    env._envs[1].unwrapped._poison_at = 4
    with pytest.raises(ValueError, match=f"tether/Countdown-v0: {what} in environment 1 at step 4"):
        evaluate(env, act, 2, seed=0)


class OddAtFirst(toys.Countdown):
    """A reset, or the step `at`, gives an observation that is not finite; continuous actions then are not, either."""

    def __init__(self, space, at=0):
        super().__init__()
        self.action_space, self._odd = space, at

    def _obs(self):
        return super()._obs() * (np.nan if self._t == self._odd else 1)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("space", [gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(-1, 1, (1,))], ids=str)
def test_what_is_not_finite_is_not_blamed_on_the_policy(space, at):
    def follows(obs, noise, state):  # as networks do
        return (obs["state"] if isinstance(space, gymnasium.spaces.Box) else act(obs, noise, state)[0]), state

    def env():
        return make_vector_env(EnvOptions(name, 2, init_params={"space": space, "at": at}))

    if (name := "tether/OddAtFirst-v0") not in gymnasium.registry:
        gymnasium.register(name, entry_point=OddAtFirst)
    said = rf"OddAtFirst-v0: .*the observation \(state\) is nan in environment 0 at step {at}\. Fix the environment"
    collector = EnvCollector(env(), steps=4)
    collector.restart(seed=0)
    with pytest.raises(ValueError, match=said):
        collector.collect(follows, torch.zeros(1, 4, 2, 1))
    with pytest.raises(ValueError, match=said):
        evaluate(env(), follows, 2, seed=0)


class Stuck(toys.Allowed):
    """After two steps no alternative of the second choice is allowed; the episode ends then, or goes on."""

    def __init__(self, ends):
        super().__init__()
        self._ends = ends

    def step(self, action):
        self._t += 1
        mask = (np.ones(4, np.int8), np.full(3, self._t < 2, np.int8))
        return np.zeros(1, np.float32), 0.0, self._ends and self._t == 2, False, {"action_mask": mask}


@pytest.mark.parametrize("ends", [False, True])
def test_a_mask_that_allows_nothing_is_named_unless_the_episode_ends_with_it(ends):
    def both(obs, noise, state):
        return np.zeros((len(state), 2), dtype=np.int64), state

    def env():
        view = ObservationOptions(action_masks=True)
        return make_vector_env(EnvOptions(name, 2, init_params={"ends": ends}, max_episode_steps=4, view=view))

    if (name := "tether/Stuck-v0") not in gymnasium.registry:
        gymnasium.register(name, entry_point=Stuck)
    collector = EnvCollector(env(), steps=5)
    collector.restart(seed=0)
    if ends:
        assert len(collector.collect(both, torch.zeros(1, 5, 2, 1)).episodes) == 4
        assert len(evaluate(env(), both, 4, seed=0)) == 4
        return
    said = r"Stuck-v0: action_mask allows none of the alternatives of a choice in environment 0 at step 2\. Fix"
    with pytest.raises(ValueError, match=said):
        collector.collect(both, torch.zeros(1, 5, 2, 1))
    with pytest.raises(ValueError, match=said):
        evaluate(env(), both, 2, seed=0)


def test_a_test_whose_episodes_never_end_can_be_stopped(monkeypatch):
    """A signal comes in step 5."""
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.1)
    toys.register()
    env = make_vector_env(EnvOptions("tether/Countdown-v0", 2, max_episode_steps=10**9))
    calls = count()

    def asked(obs, noise, state):
        if next(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return act(obs, noise, state)

    said = r"SIGTERM: no episode of the evaluation ended for 0\.1 s"
    with interrupt.graceful_interrupt(), pytest.raises(interrupt.Interrupted, match=said):
        evaluate(env, asked, 2, seed=0)


class Uneven:
    """Two environments, of which the first ends each episode after 3 steps and the second never."""

    id, num_envs, actions = "Uneven-v0", 2, DiscreteActions((2,))
    layout = (ObsPart("state", "vector", (4,)),)

    def __init__(self):
        self.steps = 0

    def reset(self, seed):
        return {"state": np.zeros((2, 4), np.float32)}

    def step(self, actions):
        self.steps += 1
        ended = np.array([self.steps % 3 == 0, False])
        return EnvStep(self.reset(0), np.ones(2, np.float32), ended, np.zeros(2, np.bool_), self.reset(0))


def test_an_evaluation_whose_episodes_never_end_says_what_bounds_them(monkeypatch):
    """Episodes of 40 steps, and a warning after 10; at 30 of an episode that may well never end, an error."""
    monkeypatch.setattr(evaluation, "WARN_AFTER_STEPS", 10)
    toys.register()
    warned = r"environment 0 .* in 10 steps.*env\.eval\.max_episode_steps"
    with pytest.warns(RuntimeWarning, match=warned) as said:
        evaluate(make_vector_env(EnvOptions("tether/Countdown-v0", 2, max_episode_steps=40)), act, 2, seed=0)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(make_vector_env(EnvOptions("tether/Countdown-v0", 2, max_episode_steps=10)), act, 6, seed=0)
        assert len(evaluate(Uneven(), act, 1, seed=0)) == 1  # none is wanted of the second
    monkeypatch.setattr(evaluation, "MAX_EPISODE_STEPS", 30)
    with (
        pytest.warns(RuntimeWarning, match="environment 1 "),
        pytest.raises(ValueError, match=r"Uneven-v0: environment 1 .* 30 steps, .*Set env\.eval\.max_episode_steps"),
    ):
        evaluate(Uneven(), act, 2, seed=0)


class Seen:
    """A picture and three numbers, of which one diverges at once."""

    id, num_envs, actions = "Seen-v0", 2, DiscreteActions((2,))
    layout = (ObsPart("image", "image", (2, 2, 1), "uint8"), ObsPart("speed", "vector", (3,)))

    def reset(self, seed):
        return {part.name: part.zeros(2) for part in self.layout}

    def step(self, actions):
        obs, no = self.reset(0), np.zeros(2, dtype=bool)
        obs["speed"][1, 2] = np.inf
        return EnvStep(obs, np.zeros(2, dtype=np.float32), no, no)


def test_what_is_not_finite_is_named_beside_a_picture():
    collector = EnvCollector(Seen(), steps=2)
    collector.restart(seed=0)
    with pytest.raises(
        ValueError, match=r"Seen-v0: entry 2 of the observation \(speed\) is inf in environment 1 at step 1"
    ):
        collector.collect(act, torch.zeros(1, 2, 2, 1))


def test_observations_keep_their_types():
    collector = EnvCollector(Seen(), steps=1, bootstrap_terminations=True)
    now = collector.state_dict()["now"]
    assert {name: part.dtype for name, part in now.items()} == {"image": torch.uint8, "speed": torch.float32}
    assert collector._final_obs([(0, 0, {"image": np.full((2, 2, 1), 7), "speed": np.ones(3)})])["image"].unique() == 7


def test_episodes_reach_over_rollouts():
    tracker = EpisodeTracker(2)
    rewards = np.ones((2, 2), dtype=np.float32)
    valid = np.array([[True, True], [True, False]])
    ended = np.array([[False, False], [True, False]])
    success = np.array([[True, False], [False, False]])
    assert tracker.add(rewards, ended, valid, success) == (Episode(1.0, 1, False, False),)
    ended = np.array([[True, False], [False, True]])
    found = tracker.add(rewards, ended, np.ones((2, 2), dtype=bool), np.zeros((2, 2), dtype=bool))
    assert found == (Episode(3.0, 3, True, False), Episode(2.0, 2, False, False))


def test_every_environment_contributes_its_first_episodes():
    env = MAKERS["loop"]()
    episodes = evaluate(env, act, 7, seed=0)
    assert len(episodes) == 7
    assert {episode.length for episode in episodes} == {LIMIT}


def test_metrics_by_hand():
    episodes = [Episode(1.0, 2, True, True), Episode(3.0, 3, False, False)]
    metrics = episode_metrics(episodes, "eval", confidence=0.95)
    assert metrics["eval/return"] == 2.0
    assert metrics["eval/episode_len"] == 2.5
    assert metrics["eval/reward"] == 0.75
    assert metrics["eval/success_once"] == 0.5
    # The standard error of 1 and 3 is 1.
    assert metrics["eval/return_high"] - 2.0 == pytest.approx(1.959964, abs=1e-5)
    # Wilson for 1 of 2, z = 1.96.
    z2 = 1.959964**2
    half = 1.959964 / (1 + z2 / 2) * math.sqrt(0.125 + z2 / 16)
    assert metrics["eval/success_once_low"] == pytest.approx(0.5 - half, abs=1e-5)
    assert episode_metrics([], "env") == {}
    assert "env/success_once" not in episode_metrics([Episode(1.0, 1, None, None)], "env")


def test_what_an_environment_raises_says_where():
    collector = EnvCollector(MAKERS["loop"](), steps=2)
    collector.restart(seed=0)
    collector.collect(act, torch.zeros(1, 2, ENVS, 1))
    with pytest.raises(AssertionError) as error:
        collector.collect(lambda obs, noise, state: (act(obs, noise, state)[0] + 7, state), torch.zeros(1, 2, ENVS, 1))
    where = [f"raised by environment 0 of the {ENVS} in its process"]
    assert error.value.__notes__ == [*where, "raised by tether/Countdown-v0 at step 3 of its environments"]
    with pytest.raises(AssertionError) as error:
        evaluate(MAKERS["loop"](), lambda obs, noise, state: (act(obs, noise, state)[0] + 7, state), 2, seed=0)
    assert error.value.__notes__ == [*where, "raised by tether/Countdown-v0 at step 1 of its environments"]

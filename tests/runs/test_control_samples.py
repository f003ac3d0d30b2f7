"""From rollouts to samples: levels, masks, groups and weights, with numbers worked by hand."""

import pytest
import torch
from tensordict import TensorDict

gymnasium = pytest.importorskip("gymnasium")

from tests.control.envs import toys  # noqa: E402
from tests.runs.control_samples import make_samples  # noqa: E402
from tether.algorithms import masked_mean_ratio  # noqa: E402
from tether.batch import EnvBatch, Episode  # noqa: E402
from tether.control.collecting.collector import EnvCollector  # noqa: E402
from tether.control.envs.layers import ResetPolicyEnv  # noqa: E402
from tether.control.envs.loop import SyncVectorEnv  # noqa: E402
from tether.control.envs.make import EnvOptions, ResetPolicy, make_vector_env  # noqa: E402
from tether.control.learning.advantages import EnvRewards, RelativeRewards  # noqa: E402
from tether.control.learning.losses import loss_weights  # noqa: E402
from tether.control.policies.mlp_policy import ControlPolicy, PolicySpec  # noqa: E402

VALUE = 10.0
PLAIN = {"gamma": 0.5, "lam": 1.0, "normalize_advantages": False}


def constant_policy(chunk=1, values=1, obs_dim=1):
    """A policy whose critic says `VALUE` of everything."""
    policy = ControlPolicy(PolicySpec(obs_dim, (2,), 1, num_action_chunks=chunk, value_width=values, hidden_dim=4), 0)
    with torch.no_grad():
        policy.critic.linear[-1][0].zero_()
        policy.critic.linear[-1][1].fill_(VALUE)
    return policy


def countdown(policy, steps, chunk=1, epochs=1, **reset_policy):
    """A rollout of Countdown: rewards 1 to 5, then cut."""
    toys.register()
    env = make_vector_env(EnvOptions("tether/Countdown-v0", 2, reset_policy=ResetPolicy(chunk=chunk, **reset_policy)))
    collector = EnvCollector(env, steps, chunk=chunk, epochs=epochs)
    collector.restart(0)
    noise = policy.head.noise(collector.noise_shape, torch.Generator().manual_seed(0))
    return collector.collect(policy.acting(), noise, () if reset_policy.get("auto_reset", True) else range(epochs))


def first(columns, decisions=3):
    """The decisions of the first of two environments."""
    return columns.view(decisions, 2, -1)[:, 0].tolist()


def test_returns_of_actions_in_chunks():
    policy = constant_policy(chunk=2, values=2)
    rollout = countdown(policy, 6, chunk=2)
    samples, _ = make_samples(rollout, policy, **PLAIN)
    r5 = 5 + 0.5 * VALUE
    r4 = 4 + 0.5 * r5
    r3 = 3 + 0.5 * r4
    r2 = 2 + 0.5 * r3
    assert first(samples.mask) == [[True, True], [True, True], [True, False]]
    assert first(samples.returns) == [[1 + 0.5 * r2, r2], [r3, r4], [r5, 0]]
    assert first(samples.advantages) == [[1 + 0.5 * r2 - VALUE, r2 - VALUE], [r3 - VALUE, r4 - VALUE], [r5 - VALUE, 0]]
    assert samples.old_log_probs.shape == (6, 2)


def test_returns_of_chunks():
    policy = constant_policy(chunk=2)
    rollout = countdown(policy, 6, chunk=2)
    options = {**PLAIN, "reward_level": "chunk_level", "logprob_level": "chunk_level"}
    samples, metrics = make_samples(rollout, policy, **options)
    r3 = 5 + 0.5 * VALUE
    r2 = 3 + 4 + 0.5 * r3
    assert first(samples.returns) == [[1 + 2 + 0.5 * r2], [r2], [r3]]
    assert samples.old_log_probs.shape == samples.advantages.shape == (6, 1)
    assert metrics["critic/rewards/mean"] == 5.0
    # One action of the last chunk was carried out: its log-probability is that of this action alone.
    columns = policy.head.evaluate(policy.actor(samples.obs), samples.actions).log_probs
    torch.testing.assert_close(samples.old_log_probs[4:, 0], columns[4:, 0])


def test_the_tail_of_a_rollout_is_worth_what_the_critic_says():
    policy = constant_policy()
    rollout = countdown(policy, 3)
    samples, _ = make_samples(rollout, policy, **PLAIN)
    assert first(samples.returns)[-1] == [3 + 0.5 * VALUE]


def test_without_auto_reset_what_follows_an_end_is_no_sample():
    policy = constant_policy()
    rollout = countdown(policy, 8, auto_reset=False, epochs=2)
    samples, _ = make_samples(rollout, policy, **PLAIN)
    assert len(samples) == 5 * 4
    assert rollout.valid.sum(dim=1).tolist() == [5] * 4
    assert rollout.episodes == (Episode(15.0, 5, True, False),) * 4
    # The limit cuts the episode, which is worth something afterwards: RLinf lacks this bootstrap here.
    assert samples.returns[-4:].unique().tolist() == [5 + 0.5 * VALUE]


def test_chunks_of_one_are_no_chunks():
    rollouts = []
    for paced in (False, True):
        loop = SyncVectorEnv("CartPole-v1", lambda: gymnasium.make("CartPole-v1"), 3, holds=paced)
        policy = ControlPolicy(PolicySpec(4, (2,), 1, hidden_dim=4), 0)
        collector = EnvCollector(ResetPolicyEnv(loop) if paced else loop, 60)
        collector.restart(5)
        noise = policy.head.noise(collector.noise_shape, torch.Generator().manual_seed(0))
        rollouts.append(collector.collect(policy.acting(), noise))
    plain, paced = (vars(rollout) for rollout in rollouts)
    assert plain["episodes"] == paced["episodes"] != ()
    for name in ("obs", "actions", "token_level_scores", "terminated", "valid", "final_obs"):
        assert (plain[name] == paced[name]).all(), name


def made_up(rewards, lengths, lost=()):
    """A rollout of one-step decisions: a column is an episode of some length that terminates, or is lost."""
    rewards = torch.tensor(rewards)
    columns, steps = rewards.shape
    valid = torch.arange(steps) < torch.tensor(lengths)[:, None]
    last = torch.arange(steps) == torch.tensor(lengths)[:, None] - 1
    cut = torch.zeros_like(valid)
    for column in lost:
        last[column], cut[column, lengths[column]] = False, True
    seen = torch.randn(columns, steps + 1, 1, generator=torch.Generator().manual_seed(0))
    return EnvBatch(
        obs=TensorDict({"state": seen}, batch_size=seen.shape[:2]),
        actions=torch.zeros(columns, steps, 1, dtype=torch.int64),
        token_level_scores=torch.where(valid, rewards, torch.nan),
        terminated=last, truncated=cut, valid=valid,
        starts=torch.zeros(columns, steps + 1, dtype=torch.bool), state=torch.zeros(columns, 0),
        final_obs=TensorDict({"state": torch.zeros(0, 1)}, batch_size=[0]),
        final_at=(torch.zeros(0).long(), torch.zeros(0).long()), episodes=(),
    )  # fmt: skip


REWARDS = [[1.0, 0.0, 0.0], [0.0, 3.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 5.0]]
LENGTHS = [1, 2, 3, 3]


def test_groups_by_hand():
    policy = ControlPolicy(PolicySpec(1, (2,), 1, value_width=0, hidden_dim=4), 0)
    options = {"gamma": 0.9, "lam": 1.0, "estimator": "grpo", "group_size": 2}
    rollout = made_up(REWARDS, LENGTHS)
    samples, metrics = make_samples(rollout, policy, **options)
    # Scores 1 and 3: mean 2, std sqrt(2); 5 and 5: no advantage. Rows are steps, in each the episodes still alive.
    up = 1 / 2**0.5
    torch.testing.assert_close(
        samples.advantages[:, 0], torch.tensor([-up, up, 0, 0, up, 0, 0, 0, 0]), atol=1e-5, rtol=0
    )
    assert samples.values is None
    assert metrics["group/zero_std_fraction"] == 0.5


def test_a_lost_episode_has_no_score():
    policy = ControlPolicy(PolicySpec(1, (2,), 1, value_width=0, hidden_dim=4), 0)
    rollout = made_up(REWARDS, [1, 2, 2, 3], lost=[2])
    samples, _ = make_samples(rollout, policy, 0.9, 1.0, estimator="grpo", group_size=2)
    assert len(samples) == 1 + 2 + 3


def test_groups_outside_the_bounds_teach_nothing():
    policy = constant_policy()
    rollout = made_up(REWARDS, LENGTHS)
    options = {**PLAIN, "group_size": 2, "reward_bounds": (2.5, 5.0)}
    samples, metrics = make_samples(rollout, policy, **options)
    assert len(samples) == 6
    assert metrics["group/kept_fraction"] == 0.5
    nothing, _ = make_samples(rollout, policy, **PLAIN, group_size=2, reward_bounds=(8.0, 9.0))
    assert len(nothing) == 0


def test_episodes_weigh_alike_as_in_rlinf():
    policy = constant_policy()
    rollout = made_up(REWARDS, LENGTHS)
    samples, _ = make_samples(rollout, policy, **PLAIN, episode_length=7)
    loss = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(LENGTHS)[:, None]
    expected = masked_mean_ratio(
        loss, rollout.valid, episode_length=lengths, max_episode_length=7, num_elements=loss.numel()
    )
    rows = loss.T[rollout.valid.T][:, None]  # samples are in the order of time
    found = (rows * loss_weights("masked_mean_ratio", rows, None, samples.weights, None)).sum()
    torch.testing.assert_close(found, expected)


def test_relative_rewards_by_hand():
    relative = RelativeRewards(1)
    rewards = torch.tensor([[1.0, 4.0, 2.0, 9.0]])
    ended = torch.tensor([[False, True, False, False]])
    valid = torch.tensor([[True, True, True, True]])
    starts, goes_on = torch.tensor([True]), torch.tensor([False])
    assert relative(rewards, starts, ended, valid).tolist() == [[1.0, 3.0, 2.0, 7.0]]
    assert relative(rewards, goes_on, ended, valid)[0, 0] == 1.0 - 9.0
    assert relative(rewards, starts, ended, valid)[0, 0] == 1.0
    shaping = EnvRewards(1, coef=2.0, relative=True, scaler=None)
    rollout = made_up([[1.0, 4.0, 2.0], [1.0, 4.0, 2.0]], [3, 3])
    rollout.starts[:, 0] = True
    shaping.apply(rollout)
    assert rollout.token_level_rewards.tolist() == [[2.0, 6.0, -4.0]] * 2

"""Rules between the keys of the advantage estimators and of reward shaping (see `tether.config.rules.text`)."""

from __future__ import annotations

from tether.config.problems import Problem
from tether.config.schema.root import RunConfig

RESPONSES = "actor_rollout_ref.rollout.n"
COMPARES_RESPONSES = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg",
    "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
"""Estimators whose baseline is the other responses to a prompt, which need `uid` in `tether.algorithms`."""

WITHOUT_PEERS = ("grpo", "grpo_vectorized", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Estimators with which the advantage of a single response is its score, as in verl."""


def group_has_peers(cfg: RunConfig) -> Problem | None:
    """A group of one response is its own mean, so that every advantage is zero or has no baseline."""
    estimator = cfg.algorithm.adv_estimator
    if estimator not in COMPARES_RESPONSES or estimator in WITHOUT_PEERS or cfg.actor_rollout_ref.rollout.n > 1:
        return None
    what = f"1 response a prompt carries no signal for algorithm.adv_estimator={estimator}, which compares responses"
    return Problem(RESPONSES, what, f"set {RESPONSES} to 2 or more, or use algorithm.adv_estimator=gae")


def gdpo_has_components(cfg: RunConfig) -> Problem | None:
    """GDPO adds up the components of the reward, each with its weight."""
    keys, weights = cfg.algorithm.gdpo_reward_keys, cfg.algorithm.gdpo_reward_weights
    if cfg.algorithm.adv_estimator != "gdpo":
        return None
    if not keys:
        what = "empty, and algorithm.adv_estimator=gdpo adds up the components that it names"
        return Problem("algorithm.gdpo_reward_keys", what, "name numbers of the reward's dict, for example [score,acc]")
    if weights and len(weights) != len(keys):
        what = f"{len(weights)} weights for {len(keys)} components in algorithm.gdpo_reward_keys"
        return Problem("algorithm.gdpo_reward_weights", what, f"give {len(keys)}, or leave it out for all 1")
    return None


def gdpo_reads_components_only(cfg: RunConfig) -> Problem | None:
    """GDPO ignores settings that change the score of a row."""
    changes = {
        "algorithm.use_kl_in_reward": cfg.algorithm.use_kl_in_reward,
        "algorithm.normalize_rewards": cfg.algorithm.normalize_rewards != "none",
        "reward_model.overlong_buffer.enable": cfg.reward_model.overlong_buffer.enable,
    }
    key = next((key for key, on in changes.items() if on), None)
    if key is None or cfg.algorithm.adv_estimator != "gdpo":
        return None
    what = "changes the score, but algorithm.adv_estimator=gdpo learns from algorithm.gdpo_reward_keys"
    return Problem(key, what, "turn it off: let the reward return such a component, and put a KL in the loss")


def remax_scores_keep_their_scale(cfg: RunConfig) -> Problem | None:
    """The score of the greedy answer, which is the baseline, is not normalised."""
    how = cfg.algorithm.normalize_rewards
    if how == "none" or cfg.algorithm.adv_estimator != "remax":
        return None
    what = f"{how} moves scores away from the greedy answer's, which algorithm.adv_estimator=remax subtracts"
    return Problem("algorithm.normalize_rewards", what, "leave it out: the greedy score is the baseline already")


def lambda_is_used(cfg: RunConfig) -> Problem | None:
    """Nothing reads lam if both actor and critic have lambdas of their own; its default is allowed."""
    algorithm = cfg.algorithm
    if algorithm.lam_actor_alpha is None or algorithm.lam_critic == algorithm.lam or algorithm.lam == 1:
        return None
    what = f"{algorithm.lam} is read by neither half: algorithm.lam_actor_alpha and algorithm.lam_critic are set"
    return Problem("algorithm.lam", what, "leave algorithm.lam out, or algorithm.lam_critic")


def overlong_buffer_fits(cfg: RunConfig) -> Problem | None:
    """The buffer is at most as long as the longest response."""
    buffer, limit = cfg.reward_model.overlong_buffer, cfg.data.max_response_length
    if not buffer.enable or 0 < buffer.len <= limit:
        return None
    what = f"{buffer.len} tokens do not fit in data.max_response_length={limit}"
    return Problem("reward_model.overlong_buffer.len", what, f"set it from 1 to {limit}, or leave the buffer off")


def gae_has_a_critic(cfg: RunConfig) -> Problem | None:
    """GAE needs values."""
    if cfg.critic.enable or cfg.algorithm.adv_estimator != "gae":
        return None
    what = "False leaves algorithm.adv_estimator=gae without values"
    return Problem("critic.enable", what, "leave critic.enable out, or choose an estimator that needs no critic")


ADVANTAGE_RULES = (
    group_has_peers,
    gae_has_a_critic,
    lambda_is_used,
    gdpo_has_components,
    gdpo_reads_components_only,
    remax_scores_keep_their_scale,
    overlong_buffer_fits,
)

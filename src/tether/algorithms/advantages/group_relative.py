"""Estimators that compare the score of a row with the other answers to its prompt, without a critic.

The score s of a row is the sum of its rewards, its group is the rows with the same ``uid``, and k is the size of the
group. Rows without a valid token are ignored in all statistics. All tokens of a row get the same advantage, and the
returns are the advantages.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algorithms.advantages.groups import score_groups
from tether.algorithms.advantages.result import Advantages, outcome
from tether.algorithms.masking import masked_whiten, spread, widen
from tether.algorithms.registry import Positive
from tether.algorithms.shapes import GroupIds, Mask, Tokens

EPSILON = 1e-6
"""Added to a standard deviation before division, as in verl."""


def grpo(
    token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds, norm_adv_by_std_in_grpo: bool = True
) -> Advantages:
    """Score in standard deviations above the group's mean (GRPO, Shao et al. 2024, arXiv 2402.03300).

    A = (s - mean) / (std + 1e-6), with the unbiased std. norm_adv_by_std_in_grpo=False: A = s - mean (Dr. GRPO, Liu et
    al. 2025, arXiv 2503.20783). For a group of one, mean 0 and std 1 are used, so that its advantage is its score.

    Assumes: the mean of a group is close to the value of its prompt. The division gives very easy and very hard prompts
        at least the weight of other prompts.
    Use it: without a critic, with 4 or more answers per prompt and a score at the end.
    Watch: `group/zero_std_fraction`, the share of groups without a signal. Near 1 the prompts are too easy or too hard.
    Keys: `algorithm.adv_estimator=grpo`, `algorithm.norm_adv_by_std_in_grpo`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    advantages = groups.over_mean(scores)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + EPSILON)
    return outcome(advantages, response_mask)


def grpo_vectorized(
    token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds, norm_adv_by_std_in_grpo: bool = True
) -> Advantages:
    """`grpo` with a lower bound of 1e-3 on the std, the only difference of verl's function of this name.

    A = (s - mean) / (max(std, 1e-3) + 1e-6).

    Assumes: the same as `grpo`.
    Use it: in place of `grpo` where scores of a group differ by less than about 1e-3, which is noise.
    Watch: `group/score_std_mean`: near 1e-3, the lower bound takes effect.
    Keys: `algorithm.adv_estimator=grpo_vectorized`, `algorithm.norm_adv_by_std_in_grpo`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    advantages = groups.over_mean(scores)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores).clamp(min=1e-3) + EPSILON)
    return outcome(advantages, response_mask)


def grpo_passk(
    token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds, norm_adv_by_std_in_grpo: bool = True
) -> Advantages:
    """Reward only the best answer of a group, by its lead over the second best (Pass@k training, arXiv 2503.19595).

    A = (max - second max) / (std + 1e-6) at the best row and 0 at all others; without the division if
    norm_adv_by_std_in_grpo is False. A tie for the best and a group of one, which has no second best, give 0.

    Assumes: only the best of k answers will be used, so the other answers need not be good.
    Use it: to optimise pass@k, with many answers per prompt; only one row of a group contributes a gradient.
    Watch: `critic/advantages/nonzero_fraction`: with scores 0 and 1, a group with two right answers has no signal
        either.
    Keys: `algorithm.adv_estimator=grpo_passk`, `algorithm.norm_adv_by_std_in_grpo`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    best = groups.max(scores)
    is_best = groups.valid & (scores == best)
    second = groups.max(torch.where(is_best, -torch.inf, scores))
    sole = is_best & (groups.sum(is_best.to(scores.dtype)) == 1) & (groups.size() > 1)
    lead = torch.where(best.isnan(), best, torch.where(sole, scores - second, 0.0))
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(scores) + EPSILON)
    return outcome(lead, response_mask)


def rloo(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds) -> Advantages:
    """Score minus the mean of the group's *other* scores (RLOO, Ahmadian et al. 2024, arXiv 2402.14740).

    A = s - mean of the other scores = k / (k - 1) (s - mean). The advantage of a group of one is its score.

    Assumes: the answers of a group are independent, so the mean of the other scores is an unbiased baseline.
    Use it: without a critic, as an unbiased alternative to `grpo`; two answers per prompt are enough.
    Watch: `group/zero_std_fraction`: the share of groups without a signal.
    Keys: `algorithm.adv_estimator=rloo`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    size = groups.size()
    others = groups.centre(scores) * size / (size - 1).clamp(min=1)
    return outcome(torch.where(size > 1, others, scores), response_mask)


def rloo_vectorized(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds) -> Advantages:
    """`rloo`, but a group of one gets 0, as in verl's function of this name.

    A = k / (k - 1) (s - mean) for k > 1.

    Assumes: the same as `rloo`.
    Use it: in place of `rloo` where groups can shrink to one row, which should then have no effect.
    Watch: `group/single_fraction`, the share of groups of one.
    Keys: `algorithm.adv_estimator=rloo_vectorized`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    size = groups.size()
    return outcome(groups.centre(scores) * size / (size - 1).clamp(min=1), response_mask)


def reinforce_plus_plus_baseline(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds) -> Advantages:
    """Score minus the group's mean, whitened over the tokens of the batch (REINFORCE++, arXiv 2501.03262, baseline).

    A = (s - mean), normalised to mean 0 and variance 1 over tokens (`masked_whiten`). In a group of one, s itself is
    normalised.

    Assumes: the same as `grpo`, and that scores have a similar spread in all groups, so that one std fits the batch.
    Use it: without a critic, where `grpo`'s division amplifies groups with nearly equal scores.
    Watch: `group/zero_std_fraction`: the share of groups without a signal.
    Keys: `algorithm.adv_estimator=reinforce_plus_plus_baseline`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    whitened = masked_whiten(spread(groups.over_mean(scores), response_mask), response_mask)
    return Advantages(whitened, whitened)


def opo(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds) -> Advantages:
    """Score minus the group's length-weighted mean (OPO, Hao et al. 2025, arXiv 2505.23585).

    A = s - sum_i n_i s_i / sum_i n_i with n_i the tokens of row i: the minimum-variance baseline if the gradient of
    a token has the same size everywhere. The advantage of a group of one is its score.

    Assumes: every token adds the same variance to the gradient, so that rows weigh in the baseline by their length.
    Use it: without a critic, on-policy, where the answers of a group differ much in length.
    Watch: `response_length/max` and `response_length/mean`: with equal lengths it equals `grpo` without std.
    Keys: `algorithm.adv_estimator=opo`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    length = response_mask.bool().sum(dim=-1).to(scores.dtype)
    # As in Groups.centre, this makes equal scores give exactly 0.
    shifted = torch.where(groups.valid, scores - groups.max(scores), 0.0)
    advantages = shifted - groups.sum(length * shifted) / groups.sum(length).clamp(min=1)
    return outcome(torch.where(groups.size() > 1, advantages, scores), response_mask)


def gpg(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds, f_norm: Positive = 1.0) -> Advantages:
    """Score minus the group's mean, scaled up where many scores are 0 (GPG, Chu et al. 2025, arXiv 2504.02546).

    A = alpha (s - mean) / f_norm with alpha = rows / rows with a score other than 0, both over the full batch, not
    counting rows without a token. The advantage of a group of one is its score times alpha / f_norm.

    Assumes: a score of 0 means that the row failed; with other scales alpha has no meaning.
    Use it: with 0/1 scores and few successes, together with the policy loss of the same name.
    Watch: `critic/score/nonzero_fraction`, which is 1 / alpha: at 0.01, advantages are scaled up a hundredfold.
    Keys: `algorithm.adv_estimator=gpg`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    informative = groups.valid & (scores != 0)
    scaled = groups.over_mean(scores) * groups.valid.sum() / informative.sum().clamp(min=1)
    return outcome(scaled / f_norm, response_mask)


def gdpo(
    token_level_rewards: Tokens,
    response_mask: Mask,
    *,
    uid: GroupIds,
    reward_components: Float[Tensor, "B R"],
    component_weights: Float[Tensor, " R"] | None = None,
) -> Advantages:
    """Normalise each component of the reward in its group, add them up, whiten (GDPO, Liu et al. 2026, 2601.05242).

    A = whiten(sum_r w_r (s_r - mean_r) / (std_r + 1e-6)), whitened over the tokens of the batch. If rewards of
    different scale and rarity are summed first, they collapse onto a few advantages; normalising first preserves the
    contribution of each. In a group of one, each component is its score. The components are the entire reward:
    token_level_rewards is not read. (NeMo RL whitens over rows.)

    Assumes: every component should count by its weight, not by its scale.
    Use it: with several rewards of different scale or rarity, such as format, length and correctness.
    Watch: `gdpo/<key>/zero_std_fraction` of each component: near 1 it has no signal.
    Keys: `algorithm.adv_estimator=gdpo`, `algorithm.gdpo_reward_keys`, `algorithm.gdpo_reward_weights`,
        `actor_rollout_ref.rollout.n`.

    Args:
        token_level_rewards: not read.
        response_mask: the policy's tokens.
        uid: prompt group of each row.
        reward_components: one score for each row and component.
        component_weights: w_r; None uses 1 for all.
    """
    _, groups = score_groups(token_level_rewards, response_mask, uid)
    reward_components = widen(reward_components)
    if component_weights is None:
        component_weights = reward_components.new_ones(reward_components.shape[1])
    total = reward_components.new_zeros(len(reward_components))
    for scores, weight in zip(reward_components.unbind(dim=1), component_weights, strict=True):
        total = total + weight * groups.over_mean(scores) / (groups.std(scores) + EPSILON)
    whitened = masked_whiten(spread(total, response_mask), response_mask)
    return Advantages(whitened, whitened)

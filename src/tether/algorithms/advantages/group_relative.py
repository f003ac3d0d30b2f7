"""Estimators that compare the score of a row with the other answers to its prompt, without a critic.

The score s of a row is the sum of its rewards, its group the rows with the same ``uid``, k their number. Rows without
a valid token are ignored in all statistics. All tokens of a row get the same advantage, and the returns are the
advantages.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algorithms.advantages.groups import score_groups
from tether.algorithms.advantages.result import Advantages, outcome
from tether.algorithms.checks import Positive
from tether.algorithms.masking import masked_whiten, spread, widen
from tether.algorithms.shapes import GroupIds, Mask, Tokens

EPSILON = 1e-6
"""Added to a standard deviation before division, as in verl."""


def grpo(
    token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds, norm_adv_by_std_in_grpo: bool = True
) -> Advantages:
    """Score in standard deviations above the group's mean (GRPO, Shao et al. 2024, arXiv 2402.03300).

    A = (s - mean) / (std + 1e-6), with the unbiased std. norm_adv_by_std_in_grpo=False: A = s - mean (Dr. GRPO, Liu et
    al. 2025, arXiv 2503.20783). A group of one has mean 0 and std 1: it keeps its score.

    Assumes: the mean of a group is near the value of its prompt. The division gives very easy and very hard prompts the
        weight of the others, or more.
    Use it: without a critic, with 4 or more answers to each prompt and a score at the end.
    Watch: `group/zero_std_fraction`: the groups that teach nothing. Near 1 the prompts are too easy or too hard.
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
    """`grpo` with a floor of 1e-3 under the std, which is all that verl's function of this name does differently.

    A = (s - mean) / (max(std, 1e-3) + 1e-6).

    Assumes: as `grpo`.
    Use it: in place of `grpo` where scores of a group differ by less than about 1e-3, which is noise.
    Watch: `group/score_std_mean`: near 1e-3, the floor decides.
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
    """Only the best answer of a group learns: its lead over the second best (Pass@k training, arXiv 2503.19595).

    A = (max - second max) / (std + 1e-6) at the best row and 0 at the others; without the division if
    norm_adv_by_std_in_grpo is False. A tie for the best, and a group of one, which has no second, give 0.

    Assumes: only the best of k answers will be used, so the others need not be good.
    Use it: where pass@k is what counts, with many answers to each prompt; it learns from one row of a group.
    Watch: `critic/advantages/nonzero_fraction`: with scores 0 and 1, a group that has two right answers teaches
        nothing either.
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

    A = s - mean of the others = k / (k - 1) (s - mean). A group of one keeps its score.

    Assumes: the answers of a group are independent, so the others' mean is a baseline without bias.
    Use it: without a critic, as an unbiased alternative to `grpo`; two answers to each prompt are enough.
    Watch: `group/zero_std_fraction`: the groups that teach nothing.
    Keys: `algorithm.adv_estimator=rloo`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    size = groups.size()
    others = groups.centre(scores) * size / (size - 1).clamp(min=1)
    return outcome(torch.where(size > 1, others, scores), response_mask)


def rloo_vectorized(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds) -> Advantages:
    """`rloo`, but a group of one gets 0, as in verl's function of this name.

    A = k / (k - 1) (s - mean) for k > 1.

    Assumes: as `rloo`.
    Use it: in place of `rloo` where groups can shrink to one row, which then should not teach.
    Watch: `group/single_fraction`.
    Keys: `algorithm.adv_estimator=rloo_vectorized`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    size = groups.size()
    return outcome(groups.centre(scores) * size / (size - 1).clamp(min=1), response_mask)


def reinforce_plus_plus_baseline(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds) -> Advantages:
    """Score minus the group's mean, whitened over the tokens of the batch (REINFORCE++, arXiv 2501.03262, baseline).

    A = (s - mean) brought to mean 0 and variance 1 over tokens (`masked_whiten`). A group of one keeps its score,
    before that.

    Assumes: as `grpo`, but the spread of scores is alike in all groups: one std serves the batch.
    Use it: without a critic, where `grpo`'s division blows up groups of nearly equal scores.
    Watch: `group/zero_std_fraction`: the groups that teach nothing.
    Keys: `algorithm.adv_estimator=reinforce_plus_plus_baseline`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    whitened = masked_whiten(spread(groups.over_mean(scores), response_mask), response_mask)
    return Advantages(whitened, whitened)


def opo(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds) -> Advantages:
    """Score minus the group's length-weighted mean (OPO, Hao et al. 2025, arXiv 2505.23585).

    A = s - sum_i n_i s_i / sum_i n_i with n_i the tokens of row i: the baseline of least variance if the gradient of
    a token has the same size everywhere. A group of one keeps its score.

    Assumes: every token adds the same variance to the gradient, so that long rows have a say in the baseline by their
        length.
    Use it: without a critic, on-policy, where answers of a group differ much in length.
    Watch: `response_length/max` against `response_length/mean`: with equal lengths it is `grpo` without std.
    Keys: `algorithm.adv_estimator=opo`, `actor_rollout_ref.rollout.n`.
    """
    scores, groups = score_groups(token_level_rewards, response_mask, uid)
    length = response_mask.bool().sum(dim=-1).to(scores.dtype)
    # As in Groups.centre, equal scores give exactly 0.
    shifted = torch.where(groups.valid, scores - groups.max(scores), 0.0)
    advantages = shifted - groups.sum(length * shifted) / groups.sum(length).clamp(min=1)
    return outcome(torch.where(groups.size() > 1, advantages, scores), response_mask)


def gpg(token_level_rewards: Tokens, response_mask: Mask, *, uid: GroupIds, f_norm: Positive = 1.0) -> Advantages:
    """Score minus the group's mean, scaled up where many scores are 0 (GPG, Chu et al. 2025, arXiv 2504.02546).

    A = alpha (s - mean) / f_norm with alpha = rows / rows with a score other than 0, both over the full batch, not
    counting rows without a token. A group of one keeps its score (times alpha / f_norm).

    Assumes: a score of 0 means that the row failed; with other scales alpha has no meaning.
    Use it: with 0/1 scores and few successes, together with the policy loss of the same name.
    Watch: `critic/score/nonzero_fraction`, which is 1 / alpha: at 0.01 the step is a hundred times as large.
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

    A = whiten(sum_r w_r (s_r - mean_r) / (std_r + 1e-6)), whitened over the tokens of the batch. Summed first, rewards
    of different size and rarity collapse onto a few advantages; normalised first, each keeps its say. In a group of
    one each component keeps its score. The components are the entire reward: token_level_rewards is not read. (NeMo RL
    whitens over rows.)

    Assumes: every component is meant to count, by its weight and not by its scale.
    Use it: with several rewards of different scale or rarity, such as format, length and correctness.
    Watch: `gdpo/<key>/zero_std_fraction` of each component: near 1 it teaches nothing.
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

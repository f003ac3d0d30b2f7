"""On-policy distillation: the policy learns to follow a teacher, a frozen model, on responses that it sampled itself.

A token's KL is computed by an estimator of `kl` with the teacher as the reference, or by `forward_kl_topk`. There are
two ways to minimise it:

- Its own gradient, as in a supervised loss (GKD, Agarwal et al. 2023, arXiv 2306.13649). ``k2``, each kind with ``+``
  and ``full`` follow the gradient of KL(policy, teacher), ``k3`` and ``forward_kl_topk`` that of KL(teacher, policy).
- A policy gradient whose advantage at each token is the negative KL (MiniLLM, Gu et al. 2023, arXiv 2306.08543, but
  without the tokens after it). ``k1`` follows the gradient of KL(policy, teacher) at each token.

Either one is the entire loss, or is added to the policy loss of the rewards.

Watch: `distillation/kl`, which falls; `actor/entropy`, which approaches that of the teacher.
Keys: `distillation.enabled`, `distillation.teacher_models`, `distillation.distillation_loss.loss_mode`,
    `distillation.distillation_loss.use_task_rewards`, `distillation.distillation_loss.distillation_loss_coef`.
"""

from tether.algorithms.aggregation import Mean, Metric, TokenLoss
from tether.algorithms.masking import clip, select
from tether.algorithms.policy_losses.clipped import vanilla
from tether.algorithms.registry import NonNegative, Positive
from tether.algorithms.shapes import Mask, Tokens


def distillation_loss(
    kl: Tokens,
    log_probs: Tokens,
    old_log_probs: Tokens,
    response_mask: Mask,
    *,
    loss_max_clamp: Positive | None = None,
    use_policy_gradient: bool = False,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """Return the loss of each token, computed as in verl from its KL clamped to +-loss_max_clamp.

    The loss is the KL itself or, with use_policy_gradient, the `vanilla` policy loss with -KL as a constant advantage;
    log_probs, old_log_probs and rollout_is_weights are only read in the second case.

    Assumes: the responses were sampled by the policy.
    Use it: where a larger model with the same tokenizer already solves the task: a signal at every token is richer than
        one reward at the end of the response.
    Watch: `distillation/kl`, `distillation/loss`, `distillation/pg_clipfrac`.
    Keys: `distillation.distillation_loss.loss_max_clamp`, `distillation.distillation_loss.use_policy_gradient`,
        `distillation.distillation_loss.clip_ratio`, `distillation.distillation_loss.clip_ratio_low`,
        `distillation.distillation_loss.clip_ratio_high`.
    """
    kl = select(kl, response_mask)
    metrics: dict[str, Metric] = {"distillation/kl": Mean.of(kl, response_mask)}
    if loss_max_clamp is not None:
        kl = clip(kl, -loss_max_clamp, loss_max_clamp)
    if not use_policy_gradient:
        return TokenLoss(kl, metrics)
    clipped = vanilla(
        log_probs,
        old_log_probs.detach(),
        -kl.detach(),
        response_mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        rollout_is_weights=rollout_is_weights,
    )
    return TokenLoss(clipped.loss, metrics | {"distillation/pg_clipfrac": clipped.metrics["actor/pg_clipfrac"]})

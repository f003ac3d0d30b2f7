"""Rules between keys of what stands between sampling and update: rollout correction and dynamic sampling."""

from __future__ import annotations

from tether.config.kl import full_kl_in_reward
from tether.config.problems import Problem
from tether.config.schema.algorithm import RolloutCorrectionConfig
from tether.config.schema.root import RunConfig

CORRECTION = "algorithm.rollout_correction"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def rejection_modes_have_bounds(cfg: RunConfig) -> Problem | None:
    """Every mode needs its bound: a positive number, for a ratio (k1) also a lower one before it."""
    correction = cfg.algorithm.rollout_correction
    modes, threshold = correction.rollout_rs, correction.rollout_rs_threshold
    key = f"{CORRECTION}.rollout_rs_threshold"
    if modes is None:
        return None
    if threshold is None:
        return Problem(key, f"missing with {CORRECTION}.rollout_rs={','.join(modes)}", "give one bound, or one a mode")
    if repeated := [mode for mode in modes if modes.count(mode) > 1]:
        return Problem(f"{CORRECTION}.rollout_rs", f"{repeated[0]} is named twice", "name each mode once")
    if len(str(threshold).split(",")) not in (1, len(modes)):
        what = f"{threshold} is no list of bounds for the {len(modes)} modes of {CORRECTION}.rollout_rs"
        return Problem(key, what, f"give 1 or {len(modes)}")
    for mode, bound in _bounds(correction):
        numbers = [_number(text) for text in bound.split("_")]
        if len(numbers) > (2 if mode.endswith("k1") else 1) or min(numbers) == 0 or numbers[0] > numbers[-1]:
            what = f"{bound!r} is no bound of {mode} in {CORRECTION}.rollout_rs"
            return Problem(key, what, "give a number above 0; for k1 also 'lower_upper'")
        if mode.endswith("k1") and len(numbers) == 1 and numbers[0] < 1 and not correction.rollout_rs_threshold_lower:
            what = f"{bound} alone lets no ratio of {mode} in {CORRECTION}.rollout_rs pass"
            return Problem(key, what, "give a number of 1 or above, or 'lower_upper'")
    return None


def weights_have_bounds(cfg: RunConfig) -> Problem | None:
    """A weight has an upper bound, which leaves the weight of equal probabilities alone, or two bounds."""
    correction = cfg.algorithm.rollout_correction
    if correction.rollout_is is None:
        return None
    threshold = correction.rollout_is_threshold
    bounds = [_number(text) for text in str(threshold).split("_")]
    if len(bounds) > 2 or min(bounds) == 0 or bounds[0] > bounds[-1]:
        what = f"{threshold!r} is no bound of weights"
    elif bounds[-1] < 1 or (len(bounds) == 2 and bounds[0] > 1):
        what = f"{threshold} changes the weight of a token that both policies give the same probability, which is 1"
        if len(bounds) == 1:
            what += " (unquoted, 0.5_5 is the number 0.55)"
    else:
        return None
    fix = "give a number of 1 or above, or 'lower_upper' in quotes"
    return Problem(f"{CORRECTION}.rollout_is_threshold", what, fix)


def rejection_has_one_lower_bound(cfg: RunConfig) -> Problem | None:
    """Only a ratio (k1) has a lower bound, which may stand in either of two keys."""
    correction = cfg.algorithm.rollout_correction
    lower, key = correction.rollout_rs_threshold_lower, f"{CORRECTION}.rollout_rs_threshold_lower"
    if lower is None or correction.rollout_rs is None:
        return None
    ratios = [bound for mode, bound in _bounds(correction) if mode.endswith("k1")]
    if not ratios:
        return Problem(key, f"{lower} bounds a ratio, and {CORRECTION}.rollout_rs has no k1", f"leave {key} out")
    if doubled := [bound for bound in ratios if "_" in bound]:
        what = f"{lower} is a second lower bound beside {CORRECTION}.rollout_rs_threshold={doubled[0]}"
        return Problem(key, what, f"leave {key} out")
    if lower > min(map(_number, ratios)):
        what = f"{lower} is above {CORRECTION}.rollout_rs_threshold={min(ratios, key=_number)}"
        return Problem(key, what, "set it lower")
    return None


def bypass_is_said_once(cfg: RunConfig) -> Problem | None:
    """Bypass mode is a policy loss of its own."""
    bypass = cfg.algorithm.rollout_correction.bypass_mode
    mode = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    if bypass and mode not in ("vanilla", "bypass_mode"):
        what = f"{mode} contradicts {CORRECTION}.bypass_mode=True, which has its own loss ({CORRECTION}.loss_type)"
        return Problem(LOSS_MODE, what, f"leave {LOSS_MODE} out, or set {CORRECTION}.bypass_mode=False")
    if mode == "bypass_mode" and not bypass:
        what = f"bypass_mode contradicts {CORRECTION}.bypass_mode=False"
        return Problem(LOSS_MODE, what, f"set {CORRECTION}.bypass_mode=True")
    return None


def decoupled_corrects_once(cfg: RunConfig) -> Problem | None:
    """The decoupled loss has the token weight in it."""
    level = cfg.algorithm.rollout_correction.rollout_is
    if level is None or cfg.actor_rollout_ref.actor.policy_loss.loss_mode != "decoupled":
        return None
    what = f"{level} would weigh a second time: {LOSS_MODE}=decoupled already weighs tokens by the ratio to the sampler"
    return Problem(f"{CORRECTION}.rollout_is", what, f"set it to null, or {LOSS_MODE}=vanilla")


def bypass_has_no_mean_weight(cfg: RunConfig) -> Problem | None:
    """The weights of bypass mode change as the policy learns, so that their mean over a batch is not known."""
    correction = cfg.algorithm.rollout_correction
    acts = correction.rollout_is is not None and correction.loss_type == "reinforce"
    if not (correction.bypass_mode and acts and correction.rollout_is_batch_normalize):
        return None
    what = f"True needs the weights of the whole batch, which {CORRECTION}.bypass_mode=True computes per mini-batch"
    return Problem(f"{CORRECTION}.rollout_is_batch_normalize", what, "set it to False")


def bypass_has_no_token_baseline(cfg: RunConfig) -> Problem | None:
    """The optimal token baselines need outputs of the forward pass that bypass mode skips."""
    estimator = cfg.algorithm.adv_estimator
    if not cfg.algorithm.rollout_correction.bypass_mode or not estimator.endswith("optimal_token_baseline"):
        return None
    what = f"{estimator} needs the pass over the old policy that {CORRECTION}.bypass_mode=True leaves out"
    return Problem("algorithm.adv_estimator", what, f"set {CORRECTION}.bypass_mode=False, or take another estimator")


def bypass_has_no_full_kl_in_reward(cfg: RunConfig) -> Problem | None:
    """The KL over the vocabulary is computed in the forward pass that bypass mode skips."""
    if not cfg.algorithm.rollout_correction.bypass_mode or not full_kl_in_reward(cfg):
        return None
    what = f"full needs the pass over the old policy that {CORRECTION}.bypass_mode=True leaves out"
    return Problem("algorithm.kl_penalty", what, f"set {CORRECTION}.bypass_mode=False, or take kl")


def filtered_groups_have_peers(cfg: RunConfig) -> Problem | None:
    """The scores of a single response cannot differ."""
    if not cfg.algorithm.filter_groups.enable or cfg.actor_rollout_ref.rollout.n > 1:
        return None
    what = "1 response a prompt has no two scores, so algorithm.filter_groups.enable=True would drop every prompt"
    return Problem("actor_rollout_ref.rollout.n", what, "set actor_rollout_ref.rollout.n to 2 or more")


def dynamic_sampling_ends(cfg: RunConfig) -> Problem | None:
    """verl's 0 samples without end where no group ever differs."""
    if not cfg.algorithm.filter_groups.enable or cfg.algorithm.filter_groups.max_num_gen_batches > 0:
        return None
    key = "algorithm.filter_groups.max_num_gen_batches"
    return Problem(key, "0 would sample without end while no group has two different scores", "set a cap, such as 10")


def groups_are_filtered_before_the_kl(cfg: RunConfig) -> Problem | None:
    """The KL penalty is only known once the batch is complete."""
    if not cfg.algorithm.filter_groups.enable or cfg.algorithm.filter_groups.metric != "seq_final_reward":
        return None
    what = "seq_final_reward is known only after the batch is complete"
    return Problem("algorithm.filter_groups.metric", what, "set it to score, or to a key that the reward returns")


OFF_POLICY_RULES = (
    weights_have_bounds,
    rejection_modes_have_bounds,
    rejection_has_one_lower_bound,
    bypass_is_said_once,
    decoupled_corrects_once,
    bypass_has_no_mean_weight,
    bypass_has_no_token_baseline,
    bypass_has_no_full_kl_in_reward,
    filtered_groups_have_peers,
    dynamic_sampling_ends,
    groups_are_filtered_before_the_kl,
)


def _bounds(correction: RolloutCorrectionConfig) -> list[tuple[str, str]]:
    """Return each rejection mode with its bound as text."""
    modes, bounds = correction.rollout_rs or (), str(correction.rollout_rs_threshold).split(",")
    repeated = bounds * len(modes) if len(bounds) == 1 else bounds
    return [(mode, bound.strip()) for mode, bound in zip(modes, repeated, strict=False)]


def _number(text: str) -> float:
    """Parse a positive number; return 0 for any other text."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 < number < float("inf") else 0.0

"""Rules for the learning of a text run: advantages, losses, micro-batches, off-policy corrections, router replay."""

from __future__ import annotations

from functools import reduce

from tether.config.devices import device_count, misplaced, uses_megatron
from tether.config.kl import full_kl_in_loss, full_kl_in_reward
from tether.config.problems import Problem
from tether.config.router_replay import replay_of
from tether.config.rules.megatron import MEGATRON_RULES
from tether.config.rules.shapes import Condition, Rule, at_most, divides_devices, needs, set_once
from tether.config.schema.algorithm import COMPARES_RESPONSES, WITHOUT_PEERS, RolloutCorrectionConfig
from tether.config.schema.root import RunConfig
from tether.text.learning.config_distillation import TEACHERS, teacher_problems

ACTOR = "actor_rollout_ref.actor"
MODEL_OF = {ACTOR: "actor", "actor_rollout_ref.ref": "reference", "critic": "critic"}


SHARDED = {
    ACTOR: "actor", "actor_rollout_ref.ref": "reference", "critic.model": "critic", "reward_model.model": "reward_model"
}  # fmt: skip


def adaptive_kl_has_horizon_and_target(cfg: RunConfig) -> Problem | None:
    """The adaptive controller divides by its horizon and its target."""
    control = cfg.algorithm.kl_ctrl
    if control.type != "adaptive" or (control.horizon > 0 and control.target_kl > 0):
        return None
    name = "horizon" if control.horizon <= 0 else "target_kl"
    what = f"{getattr(control, name)} cannot be divided by, as algorithm.kl_ctrl.type=adaptive does"
    return Problem(f"algorithm.kl_ctrl.{name}", what, "set it above 0, or use algorithm.kl_ctrl.type=fixed")


def critic_warmup_has_a_critic(cfg: RunConfig) -> Problem | None:
    """Only a critic can be warmed up."""
    if cfg.trainer.critic_warmup <= 1 or cfg.critic.enable:
        return None
    what = f"{cfg.trainer.critic_warmup - 1} steps train a critic alone, and critic.enable is False"
    return Problem("trainer.critic_warmup", what, "set trainer.critic_warmup=0")


def shared_rows_are_packed(role: str, padding: str, when: Condition) -> Rule:
    """Devices can split rows only if the tokens are packed."""
    key = f"{role}.ulysses_sequence_parallel_size"

    def rule(cfg: RunConfig) -> Problem | None:
        ranks, packed = (reduce(getattr, path.split("."), cfg) for path in (key, padding))
        if device_count(cfg) == 1 or ranks == 1 or packed or not when(cfg):
            return None
        return Problem(key, f"{ranks} devices share packed rows only, and {padding} is False", f"set {padding}=True")

    return rule


def _critic_has_its_own_size(cfg: RunConfig) -> bool:
    """Whether the critic's size differs from the actor's; an inherited problem is reported once, for the actor."""
    return cfg.critic.enable and cfg.critic.ppo_mini_batch_size != cfg.actor_rollout_ref.actor.ppo_mini_batch_size


def _reference_has_its_own_ranks(cfg: RunConfig) -> bool:
    """Whether the reference's ranks differ from the actor's; an inherited problem is reported once, for the actor."""
    policy = cfg.actor_rollout_ref
    return policy.ref.ulysses_sequence_parallel_size != policy.actor.ulysses_sequence_parallel_size


ROLES: tuple[tuple[str, str, Condition], ...] = (
    (ACTOR, "actor_rollout_ref.model", lambda cfg: True),
    ("actor_rollout_ref.ref", "actor_rollout_ref.model", _reference_has_its_own_ranks),
    ("critic", "critic.model", lambda cfg: cfg.critic.enable),
)


RESPONSES = "actor_rollout_ref.rollout.n"


def group_has_peers(cfg: RunConfig) -> Problem | None:
    """A group of one response is its own mean, so every advantage is zero or lacks a baseline."""
    estimator = cfg.algorithm.adv_estimator
    if estimator not in COMPARES_RESPONSES or estimator in WITHOUT_PEERS or cfg.actor_rollout_ref.rollout.n > 1:
        return None
    what = f"1 response a prompt carries no signal for algorithm.adv_estimator={estimator}, which compares responses"
    return Problem(RESPONSES, what, f"set {RESPONSES} to 2 or more, or use algorithm.adv_estimator=gae")


def gdpo_has_components(cfg: RunConfig) -> Problem | None:
    """GDPO adds up components of the reward, each with a weight."""
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
    """The baseline, the score of the greedy response, is not normalised."""
    how = cfg.algorithm.normalize_rewards
    if how == "none" or cfg.algorithm.adv_estimator != "remax":
        return None
    what = f"{how} moves scores away from the greedy answer's, which algorithm.adv_estimator=remax subtracts"
    return Problem("algorithm.normalize_rewards", what, "leave it out: the greedy score is the baseline already")


def lambda_is_used(cfg: RunConfig) -> Problem | None:
    """Nothing reads lam if actor and critic both have their own lambda; its default is allowed."""
    algorithm = cfg.algorithm
    if algorithm.lam_actor_alpha is None or algorithm.lam_critic == algorithm.lam or algorithm.lam == 1:
        return None
    what = f"{algorithm.lam} is read by neither half: algorithm.lam_actor_alpha and algorithm.lam_critic are set"
    return Problem("algorithm.lam", what, "leave algorithm.lam out, or algorithm.lam_critic")


def overlong_buffer_fits(cfg: RunConfig) -> Problem | None:
    """The buffer must not be longer than the longest response."""
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


CORRECTION = "algorithm.rollout_correction"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def rejection_modes_have_bounds(cfg: RunConfig) -> Problem | None:
    """Every mode needs its bound, a positive number; a ratio (k1) may have a lower bound before it."""
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
    """A weight needs an upper bound, at least the weight of equal probabilities, or two bounds."""
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
    """Only a ratio (k1) has a lower bound, which may be set in either of two keys."""
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


def bypass_mode_matches_loss_mode(cfg: RunConfig) -> Problem | None:
    """Bypass mode is a policy loss in itself."""
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
    """The decoupled loss already contains the token weight."""
    level = cfg.algorithm.rollout_correction.rollout_is
    if level is None or cfg.actor_rollout_ref.actor.policy_loss.loss_mode != "decoupled":
        return None
    what = f"{level} would weigh a second time: {LOSS_MODE}=decoupled already weighs tokens by the ratio to the sampler"
    return Problem(f"{CORRECTION}.rollout_is", what, f"set it to null, or {LOSS_MODE}=vanilla")


def bypass_has_no_mean_weight(cfg: RunConfig) -> Problem | None:
    """The weights of bypass mode change during the update, so their mean over a batch is not known beforehand."""
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


def dynamic_sampling_has_a_limit(cfg: RunConfig) -> Problem | None:
    """verl's 0 would sample forever if no group ever has different scores."""
    if not cfg.algorithm.filter_groups.enable or cfg.algorithm.filter_groups.max_num_gen_batches > 0:
        return None
    key = "algorithm.filter_groups.max_num_gen_batches"
    return Problem(key, "0 would sample without end while no group has two different scores", "set a cap, such as 10")


def groups_are_filtered_before_the_kl(cfg: RunConfig) -> Problem | None:
    """The KL penalty is known only after the batch is complete."""
    if not cfg.algorithm.filter_groups.enable or cfg.algorithm.filter_groups.metric != "seq_final_reward":
        return None
    what = "seq_final_reward is known only after the batch is complete"
    return Problem("algorithm.filter_groups.metric", what, "set it to score, or to a key that the reward returns")


OFF_POLICY_RULES = (
    weights_have_bounds,
    rejection_modes_have_bounds,
    rejection_has_one_lower_bound,
    bypass_mode_matches_loss_mode,
    decoupled_corrects_once,
    bypass_has_no_mean_weight,
    bypass_has_no_token_baseline,
    bypass_has_no_full_kl_in_reward,
    filtered_groups_have_peers,
    dynamic_sampling_has_a_limit,
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


RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
BYPASS = "algorithm.rollout_correction.bypass_mode"
FUSED = "moe_router_fusion"


def router_replay_modes_agree(cfg: RunConfig) -> Problem | None:
    """Megatron's key inherits from the older one, and must not contradict it."""
    key, mode = replay_of(cfg)
    older = cfg.actor_rollout_ref.actor.router_replay.mode
    if older in ("disabled", mode):
        return None
    return Problem(key, f"{mode} contradicts {ACTOR}.router_replay.mode={older}", f"leave {key} out")


def r3_needs_recorded_experts(cfg: RunConfig) -> Problem | None:
    """R3 replays what the sampler records, and only R3 reads those records."""
    key, mode = replay_of(cfg)
    records = cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if records == (mode == "R3"):
        return None
    if records:
        return Problem(RECORDS, f"True records experts that {key}={mode} does not replay", f"set {key}=R3")
    return Problem(RECORDS, f"False records no experts, which {key}=R3 replays", f"set {RECORDS}=True")


def old_log_probs_are_recomputed(cfg: RunConfig) -> Problem | None:
    """R2 replays the experts of the pass that recomputes old log-probs."""
    key, mode = replay_of(cfg)
    if mode != "R2" or not cfg.algorithm.rollout_correction.bypass_mode:
        return None
    what = f"R2 replays the pass over the old policy that {BYPASS}=True leaves out"
    return Problem(key, what, f"set {key}=R3, or {BYPASS}=False")


def routers_can_replay_experts(cfg: RunConfig) -> Problem | None:
    """Transformer Engine's fused router cannot replay experts."""
    key, mode = replay_of(cfg)
    fused = cfg.actor_rollout_ref.actor.megatron.override_transformer_config.get(FUSED)
    if cfg.actor_rollout_ref.actor.strategy != "megatron" or mode == "disabled" or not fused:
        return None
    options = f"{ACTOR}.megatron.override_transformer_config"
    what = f"{mode} replays the choices of routers, which the fused router of {options}.{FUSED}=True does not support"
    return Problem(key, what, f"leave {FUSED} out")


ROUTER_REPLAY_RULES: tuple[Rule, ...] = (
    router_replay_modes_agree,
    r3_needs_recorded_experts,
    old_log_probs_are_recomputed,
    routers_can_replay_experts,
)


DISTILLATION = "distillation.distillation_loss"


def distillation_has_a_teacher(cfg: RunConfig) -> Problem | None:
    """Teachers must have a model and, if there are several, the data source of their rows."""
    return next(iter(teacher_problems(cfg.distillation.teacher_models)), None) if cfg.distillation.enabled else None


def the_teacher_is_the_only_reference(cfg: RunConfig) -> Problem | None:
    """The teacher is loaded in place of the initial policy."""
    keys = {
        f"{ACTOR}.use_kl_loss": cfg.actor_rollout_ref.actor.use_kl_loss,
        "algorithm.use_kl_in_reward": cfg.algorithm.use_kl_in_reward,
    }
    key = next((key for key, on in keys.items() if on), None)
    if not cfg.distillation.enabled or key is None:
        return None
    what = "True takes a KL from the first policy, and with distillation.enabled=True the teacher is the reference"
    return Problem(key, what, f"leave {key} out")


def distillation_has_a_gradient(cfg: RunConfig) -> Problem | None:
    """Some kinds of KL have an expected gradient of 0 as a loss; others do not depend on the sampled token."""
    options, key = cfg.distillation.distillation_loss, f"{DISTILLATION}.loss_mode"
    switch = f"{DISTILLATION}.use_policy_gradient"
    if not cfg.distillation.enabled:
        return None
    if options.loss_mode in ("kl", "k1") and not options.use_policy_gradient:
        what = f"{options.loss_mode} has an expected gradient of 0, whatever the teacher is"
        return Problem(key, what, f"set {switch}=True, or take {options.loss_mode}+")
    if full_kl_in_loss(cfg) and options.use_policy_gradient:
        what = f"{options.loss_mode} is the same whichever token was sampled, so it is no advantage ({switch}=True)"
        return Problem(key, what, f"set {switch}=False, or take k1")
    return None


def servers_score_tokens_at_a_temperature_of_1(cfg: RunConfig) -> Problem | None:
    """A server returns log-probs of single tokens only, and at a temperature of 1."""
    entries = cfg.distillation.teacher_models.items() if cfg.distillation.enabled else ()
    name = next((name for name, entry in entries if isinstance(entry, dict) and entry.get("server_url")), None)
    temperature, mode = cfg.actor_rollout_ref.rollout.temperature, cfg.distillation.distillation_loss.loss_mode
    if name is None or (temperature == 1 and not full_kl_in_loss(cfg)):
        return None
    key = f"{TEACHERS}.{name}.server_url"
    if full_kl_in_loss(cfg):
        what = f"{mode} ({DISTILLATION}.loss_mode) compares distributions, and a server returns those of single tokens"
        return Problem(key, what, f"take k1 with {DISTILLATION}.use_policy_gradient=True, or leave server_url out")
    what = f"a server computes at a temperature of 1, and actor_rollout_ref.rollout.temperature is {temperature}"
    return Problem(key, what, "set actor_rollout_ref.rollout.temperature=1, or leave server_url out")


def distillation_runs_on_fsdp(cfg: RunConfig) -> Problem | None:
    """Megatron's reference must have the same layers as the policy."""
    if not cfg.distillation.enabled or not uses_megatron(cfg):
        return None
    what = f"True is not supported with {ACTOR}.strategy=megatron"
    return Problem("distillation.enabled", what, f"set {ACTOR}.strategy=fsdp")


DISTILLATION_RULES = (
    distillation_has_a_teacher,
    the_teacher_is_the_only_reference,
    distillation_has_a_gradient,
    servers_score_tokens_at_a_temperature_of_1,
    distillation_runs_on_fsdp,
)


LEARNING_RULES: tuple[Rule, ...] = (
    at_most(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
    at_most("critic.ppo_mini_batch_size", "data.train_batch_size", when=_critic_has_its_own_size),
    adaptive_kl_has_horizon_and_target,
    set_once("critic.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps_ratio"),
    critic_warmup_has_a_critic,
    needs("trainer.critic_warmup_until_explained_variance", "critic.enable"),
    *(
        rule
        for role, model, when in ROLES
        for rule in (
            divides_devices(f"{role}.ulysses_sequence_parallel_size", MODEL_OF[role], when),
            shared_rows_are_packed(role, f"{model}.use_remove_padding", when),
        )
    ),
    *(divides_devices(f"{section}.fsdp_config.fsdp_size", model) for section, model in SHARDED.items()),
    misplaced,
    *ADVANTAGE_RULES,
    *OFF_POLICY_RULES,
    *MEGATRON_RULES,
    *ROUTER_REPLAY_RULES,
    *DISTILLATION_RULES,
)

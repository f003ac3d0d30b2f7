"""Rules that the configuration of control policies with a CNN, an LSTM or a transformer must satisfy."""

from __future__ import annotations

from tether.config.control_defaults import ACTOR, MODEL
from tether.config.problems import Problem
from tether.config.schema.root import RunConfig
from tether.control.policies.config import FLOW_TYPES, VLA_TYPES


def sequences_stay_whole(cfg: RunConfig) -> Problem | None:
    """Batch sizes of a recurrent policy must be multiples of a sequence, the decisions of one environment."""
    if cfg.policy.lstm_dim is None:
        return None
    decisions = cfg.env.train.max_steps_per_rollout_epoch // cfg.policy.num_action_chunks
    for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"):
        size = getattr(cfg.actor_rollout_ref.actor, name)
        if size % decisions:
            what = f"{size} is no whole number of sequences of {decisions} decisions (policy.lstm_dim is set)"
            return Problem(f"{ACTOR}.{name}", what, f"set it to a multiple of {decisions}")
    return None


def micro_batches_are_parts(cfg: RunConfig) -> Problem | None:
    """A micro-batch must not be larger than a mini-batch."""
    actor = cfg.actor_rollout_ref.actor
    micro, mini, key = actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size, "ppo_micro_batch_size_per_gpu"
    if micro <= mini:
        return None
    return Problem(f"{ACTOR}.{key}", f"{micro} is more than a mini-batch ({ACTOR}.ppo_mini_batch_size)", "leave it out")


def heads_fit_width(cfg: RunConfig) -> Problem | None:
    """The heads of a transformer must have an even width, for rotary position embeddings."""
    policy = cfg.policy
    if policy.model_type in FLOW_TYPES and policy.hidden_dim % 16:
        what = f"{policy.hidden_dim} is not divided into even widths by the 8 heads of {policy.model_type}"
        return Problem("policy.hidden_dim", what, "set a multiple of 16")
    if policy.model_type not in VLA_TYPES or policy.hidden_dim % (2 * policy.num_heads) == 0:
        return None
    what = f"{policy.num_heads} heads do not divide policy.hidden_dim={policy.hidden_dim} into even widths"
    return Problem("policy.num_heads", what, f"set policy.hidden_dim to a multiple of {2 * policy.num_heads}")


def adapters_are_in_a_transformer(cfg: RunConfig) -> Problem | None:
    """Only vision-language-action policies support adapters."""
    rank = cfg.actor_rollout_ref.model.lora_rank
    if not rank or cfg.policy.model_type in VLA_TYPES:
        return None
    what = f"{rank} asks for adapters, which policy.model_type={cfg.policy.model_type} does not have"
    return Problem(f"{MODEL}.lora_rank", what, "leave it out")


def one_reads_pictures(cfg: RunConfig) -> Problem | None:
    """A user-defined features extractor replaces the CNN, so only one of them can be configured."""
    policy = cfg.policy
    if policy.features_extractor is None or policy.cnn_type == "auto":
        return None
    what = f"{policy.cnn_type}, but policy.features_extractor reads the pictures"
    return Problem("policy.cnn_type", what, "keep one of the two")


def a_transformer_has_no_memory(cfg: RunConfig) -> Problem | None:
    """Only MLPs and CNNs support an LSTM."""
    if cfg.policy.lstm_dim is None or cfg.policy.model_type not in (*VLA_TYPES, *FLOW_TYPES):
        return None
    what = f"{cfg.policy.lstm_dim} asks for a memory, which policy.model_type={cfg.policy.model_type} does not have"
    return Problem("policy.lstm_dim", what, "leave it out")


def a_step_is_random(cfg: RunConfig) -> Problem | None:
    """At least one denoising step must have noise; the last step of ``flow_cps`` has none."""
    policy = cfg.policy
    if policy.model_type not in FLOW_TYPES or policy.noise_method != "flow_cps" or policy.num_steps > 1:
        return None
    return Problem("policy.num_steps", "1 leaves flow_cps no step with noise", "set 2 or more")


def noise_has_a_range(cfg: RunConfig) -> Problem | None:
    """The minimum of the noise range must not be above its maximum."""
    low, high = cfg.policy.noise_logvar_range
    if low <= high:
        return None
    return Problem("policy.noise_logvar_range", f"[{low}, {high}] is empty", f"set [{high}, {low}]")


NETWORK_RULES = (
    sequences_stay_whole,
    micro_batches_are_parts,
    heads_fit_width,
    adapters_are_in_a_transformer,
    one_reads_pictures,
    a_transformer_has_no_memory,
    a_step_is_random,
    noise_has_a_range,
)

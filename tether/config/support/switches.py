"""Keys that act only while another key switches them on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tether.config.keys import show
from tether.config.schema.env import VLA_TYPES


def is_own_function(value: Any) -> bool:
    """Whether a value is ``FILE.py:NAME``."""
    return isinstance(value, str) and value.rpartition(":")[0].endswith(".py")


@dataclass(frozen=True)
class Switch:
    """The key that decides; one of the two lists is given."""

    key: str
    on: tuple[Any, ...] | None = None
    """Only these values switch on."""
    off: tuple[Any, ...] | None = None
    """Only these values switch off."""

    other: Switch | None = None
    """A second switch, which is enough by itself."""
    own_function: bool = True
    """Whether a function of the user's switches on, too: it names what it reads in its signature."""

    def is_off(self, values: Mapping[str, Any]) -> bool:
        """Whether the switched keys do nothing, given the value of every key."""
        value = values[self.key]
        if is_own_function(value) and self.own_function:
            return False
        off = value not in self.on if self.on is not None else value in (self.off or ())
        return off and (self.other is None or self.other.is_off(values))

    def condition(self) -> str:
        """When the switched keys act, in words."""
        verb, values = ("is", self.on) if self.on is not None else ("is not", self.off or ())
        own = f"{self.key} {verb} {' or '.join(map(show, values))}"
        return own if self.other is None else f"{own} or {self.other.condition()}"

    def state(self, values: Mapping[str, Any]) -> str:
        """The values that switch off, in words."""
        own = f"{self.key} is {show(values[self.key])}"
        return own if self.other is None else f"{own} and {self.other.state(values)}"


EMBODIED = Switch("env.train.id", off=(None,))
OBS_NORM = Switch("policy.normalize_observations", on=(True,))
CHUNKS = Switch("policy.num_action_chunks", off=(1,))
REWARD_NORM = Switch("policy.normalize_rewards", on=(True,))
VLA = Switch("policy.model_type", on=VLA_TYPES)
PLAIN = Switch("policy.model_type", on=("mlp_policy", "cnn_policy"))
CNN = Switch("policy.model_type", on=("cnn_policy",))
VIDEO = Switch("env.eval.video_cfg.save_video", on=(True,))
FILTER = Switch("algorithm.filter_rewards", on=(True,))
GAE = Switch("algorithm.adv_estimator", on=("gae",))
GDPO = Switch("algorithm.adv_estimator", on=("gdpo",))
KL_LOSS = Switch("actor_rollout_ref.actor.use_kl_loss", on=(True,))
KL_REWARD = Switch("algorithm.use_kl_in_reward", on=(True,))
REFERENCE = Switch(KL_LOSS.key, on=(True,), other=KL_REWARD)
ADAPTIVE_KL = Switch("algorithm.kl_ctrl.type", on=("adaptive",))
IMPORTANCE = Switch("algorithm.rollout_correction.rollout_is", off=(None,))
REJECTION = Switch("algorithm.rollout_correction.rollout_rs", off=(None,))
FILTER_GROUPS = Switch("algorithm.filter_groups.enable", on=(True,))
CLIP_COV = Switch("actor_rollout_ref.actor.policy_loss.loss_mode", on=("clip_cov",))
KL_COV = Switch("actor_rollout_ref.actor.policy_loss.loss_mode", on=("kl_cov",))
SAPO = Switch("actor_rollout_ref.actor.policy_loss.loss_mode", on=("sapo",))
DECOUPLED = Switch("actor_rollout_ref.actor.policy_loss.loss_mode", on=("decoupled",))
CLIPPED = Switch("actor_rollout_ref.actor.policy_loss.loss_mode", off=("gpg", "sapo", "kl_cov"))
DUAL_CLIPPED = Switch("actor_rollout_ref.actor.policy_loss.loss_mode", on=("vanilla", "decoupled", "bypass_mode"))
ACTOR_COSINE = Switch("actor_rollout_ref.actor.optim.lr_scheduler_type", on=("cosine",))
CRITIC_COSINE = Switch("critic.optim.lr_scheduler_type", on=("cosine",))
LORA = Switch("actor_rollout_ref.model.lora_rank", off=(0,))
CRITIC_LORA = Switch("critic.model.lora_rank", off=(0,))
ACTOR_MIN_LR = Switch("actor_rollout_ref.actor.optim.lr_scheduler_type", on=("cosine", "linear"))
CRITIC_MIN_LR = Switch("critic.optim.lr_scheduler_type", on=("cosine", "linear"))

SWITCHED: Mapping[str, Switch | None] = {
    "algorithm.lam": GAE,
    "algorithm.lam_*": GAE,
    "algorithm.bootstrap_truncated": GAE,
    "algorithm.gamma": Switch("algorithm.adv_estimator", on=("gae", "reinforce_plus_plus")),
    "algorithm.normalize_advantages": GAE,
    "algorithm.bootstrap_type": EMBODIED,
    "algorithm.logprob_type": EMBODIED,
    "algorithm.entropy_type": EMBODIED,
    "algorithm.reward_type": CHUNKS,
    "algorithm.filter_rewards": EMBODIED,
    "algorithm.rewards_*": FILTER,
    "algorithm.norm_adv_by_std_in_grpo": Switch(
        "algorithm.adv_estimator", on=("grpo", "grpo_vectorized", "grpo_passk")
    ),
    "algorithm.gdpo_reward_*": GDPO,
    "algorithm.kl_penalty": KL_REWARD,
    "algorithm.kl_ctrl.type": KL_REWARD,
    "algorithm.kl_ctrl.kl_coef": KL_REWARD,
    "algorithm.kl_ctrl.*": ADAPTIVE_KL,
    "algorithm.pf_ppo.*": Switch("algorithm.use_pf_ppo", on=(True,)),
    "algorithm.filter_groups.enable": None,
    "algorithm.filter_groups.*": FILTER_GROUPS,
    "data.gen_batch_size": FILTER_GROUPS,
    "algorithm.rollout_correction.rollout_is_*": IMPORTANCE,
    "algorithm.rollout_correction.rollout_rs_*": REJECTION,
    "algorithm.rollout_correction.loss_type": Switch("algorithm.rollout_correction.bypass_mode", on=(True,)),
    "actor_rollout_ref.actor.kl_loss_*": KL_LOSS,
    "actor_rollout_ref.actor.clip_ratio_c": DUAL_CLIPPED,
    "actor_rollout_ref.actor.clip_ratio*": CLIPPED,
    "actor_rollout_ref.actor.loss_scale_factor": Switch(
        "actor_rollout_ref.actor.loss_agg_mode", on=("seq-mean-token-sum-norm", "masked_mean_ratio")
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": Switch(
        "actor_rollout_ref.actor.use_dynamic_bsz", on=(False,)
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Switch("actor_rollout_ref.actor.use_dynamic_bsz", on=(True,)),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": Switch(
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", on=(False,)
    ),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": Switch(
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", on=(True,)
    ),
    "actor_rollout_ref.ref.*": REFERENCE,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": Switch(
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", on=(False,)
    ),
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": Switch(
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", on=(True,)
    ),
    "actor_rollout_ref.actor.optim.min_lr_ratio": ACTOR_MIN_LR,
    "actor_rollout_ref.actor.optim.num_cycles": ACTOR_COSINE,
    "actor_rollout_ref.actor.policy_loss.clip_cov_*": replace(CLIP_COV, own_function=False),
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": replace(KL_COV, own_function=False),
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": KL_COV,
    "actor_rollout_ref.actor.policy_loss.behave_weight_threshold": DECOUPLED,
    "actor_rollout_ref.actor.tau_*": SAPO,
    "actor_rollout_ref.model.lora_alpha": LORA,
    "actor_rollout_ref.model.target_modules": LORA,
    "actor_rollout_ref.rollout.multi_turn.*": Switch("actor_rollout_ref.rollout.multi_turn.enable", on=(True,)),
    "actor_rollout_ref.rollout.trace.*": Switch("actor_rollout_ref.rollout.trace.backend", off=(None,)),
    "actor_rollout_ref.rollout.skip_dump_dir": Switch("actor_rollout_ref.rollout.skip_rollout", on=(True,)),
    "critic.optim.min_lr_ratio": CRITIC_MIN_LR,
    "critic.optim.num_cycles": CRITIC_COSINE,
    "critic.model.lora_alpha": CRITIC_LORA,
    "critic.model.target_modules": CRITIC_LORA,
    "critic.*_micro_batch_size_per_gpu": Switch("critic.use_dynamic_bsz", on=(False,)),
    "critic.*_max_token_len_per_gpu": Switch("critic.use_dynamic_bsz", on=(True,)),
    "critic.loss_coef": EMBODIED,
    "actor_rollout_ref.actor.target_kl": EMBODIED,
    "actor_rollout_ref.actor.target_kl_control": Switch("actor_rollout_ref.actor.target_kl", off=(None,)),
    "trainer.total_env_steps": EMBODIED,
    "trainer.log_freq": EMBODIED,
    "env.train.id": None,
    "env.eval.video_cfg.video_base_dir": VIDEO,
    "env.eval.video_cfg.fps": VIDEO,
    "env.*": EMBODIED,
    "policy.clip_observations": OBS_NORM,
    "policy.clip_rewards": REWARD_NORM,
    "policy.num_heads": VLA,
    "policy.temperature": VLA,
    **dict.fromkeys(
        (
            "policy.activation",
            "policy.share_critic",
            "policy.init_logstd",
            "policy.normalize_observations",
            "policy.lstm_dim",
        ),
        PLAIN,
    ),
    "policy.cnn_type": CNN,
    "policy.pixel_scale": CNN,
    "policy.*": EMBODIED,
    "critic.enable": None,
    "critic.*": Switch("critic.enable", on=(True,)),
    "custom_reward_function.*": Switch("custom_reward_function.path", off=(None,)),
    "reward_model.overlong_buffer.enable": None,
    "reward_model.overlong_buffer.*": Switch("reward_model.overlong_buffer.enable", on=(True,)),
    "reward_model.sandbox_fusion.*": Switch("reward_model.sandbox_fusion.url", off=(None,)),
    "trainer.val_before_train": Switch("data.val_files", off=((),), other=EMBODIED),
}
"""Key, or pattern of keys -> its switch. A key's own row goes before patterns, and earlier patterns first."""

"""Builds the components between sampling and update: dynamic sampling, rollout correction, PF-PPO, rollout files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tether.algorithms import TOKEN_SELECTIONS, parse_rejection, parse_weight_bounds
from tether.config import RunConfig, replay_of
from tether.config.schema import AlgorithmConfig, FilterGroupsConfig, RolloutCorrectionConfig
from tether.loop.config import TrainerConfig
from tether.loop.loop import OldLogProbs
from tether.loop.parts import RolloutCorrection
from tether.text.data.prompts import PromptDataset, PromptSampler
from tether.text.learning.advantages import asks_for
from tether.text.learning.collector import Collector
from tether.text.learning.dynamic_sampling import DynamicSampling
from tether.text.learning.pf_ppo import PolicyFiltration
from tether.text.learning.rollout_files import RolloutFiles


def build_dynamic_sampling(
    groups: FilterGroupsConfig,
    train_batch_size: int,
    collector: Collector,
    dataset: PromptDataset,
    sampler: PromptSampler,
    warn: Callable[[str], None],
) -> DynamicSampling | None:
    """Return the component that replaces groups without signal; None if ``filter_groups`` is off."""
    if not groups.enable:
        return None
    return DynamicSampling(
        collector,
        dataset,
        sampler,
        metric=groups.metric,
        num_groups=min(train_batch_size, len(dataset)),
        max_batches=groups.max_num_gen_batches,
        warn=warn,
    )


def build_rollout_correction(correction: RolloutCorrectionConfig) -> RolloutCorrection | None:
    """Return the correction of a batch by weights and rejections; None if it is off, or if the loss computes it (bypass
    mode).
    """
    options = (correction.rollout_is, correction.rollout_rs, correction.rollout_token_veto_threshold)
    if correction.bypass_mode or not any(options):
        return None
    threshold_lower, threshold = parse_weight_bounds(correction.rollout_is_threshold)
    return RolloutCorrection(
        importance=correction.rollout_is,
        threshold=threshold,
        threshold_lower=threshold_lower,
        batch_normalize=correction.rollout_is_batch_normalize,
        rejection=_rejection(correction),
        veto_threshold=correction.rollout_token_veto_threshold,
    )


def old_log_probs_from(config: RunConfig) -> OldLogProbs:
    """Return where the log-probs under the old policy come from.

    The update itself computes them if it makes one optimizer step per rollout, because its own log-probs are then the
    old ones, and if nothing before the update reads them or their experts.
    """
    algorithm, trainer, actor = config.algorithm, config.trainer, config.actor_rollout_ref.actor
    if algorithm.rollout_correction.bypass_mode:
        return "sampler"
    steps_once = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    are_read_before = (
        algorithm.use_kl_in_reward
        or algorithm.use_pf_ppo
        or asks_for(algorithm, "old_log_probs")
        or asks_for(algorithm, "sum_pi_squared")
        or build_rollout_correction(algorithm.rollout_correction) is not None
        or actor.policy_loss.loss_mode in TOKEN_SELECTIONS
        or replay_of(config)[1] == "R2"
    )
    may_not_update = trainer.critic_warmup > 1 or trainer.critic_warmup_until_explained_variance is not None
    return "update" if steps_once and not are_read_before and not may_not_update else "recomputed"


def bypass_options(correction: RolloutCorrectionConfig) -> dict[str, object]:
    """Return the keyword arguments of the policy loss ``bypass_mode``, except those of clipping."""
    threshold_lower, threshold = parse_weight_bounds(correction.rollout_is_threshold)
    return {
        "loss_type": correction.loss_type,
        "rollout_is": correction.rollout_is,
        "rollout_is_threshold": threshold,
        "rollout_is_threshold_lower": threshold_lower,
        "rollout_rs": _rejection(correction),
        "veto_threshold": correction.rollout_token_veto_threshold,
    }


def build_policy_filtration(algorithm: AlgorithmConfig, seed: int) -> PolicyFiltration | None:
    """Return PF-PPO's filtration; None if it is off."""
    if not algorithm.use_pf_ppo:
        return None
    options = algorithm.pf_ppo
    return PolicyFiltration(options.reweight_method, options.weight_pow, seed)


def build_rollout_files(trainer: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutFiles | None:
    """Return the writer of training samples to disk; None if no folder is configured."""
    return RolloutFiles(Path(trainer.rollout_data_dir), tokenizer) if trainer.rollout_data_dir else None


def _rejection(correction: RolloutCorrectionConfig) -> dict[str, tuple[float, float]]:
    if correction.rollout_rs is None:
        return {}
    assert correction.rollout_rs_threshold is not None  # ensured by a rule of the configuration
    lower, bounds = correction.rollout_rs_threshold_lower, str(correction.rollout_rs_threshold).split(",")
    if len(bounds) == 1:
        bounds *= len(correction.rollout_rs)
    if lower is not None:
        modes = zip(correction.rollout_rs, bounds, strict=True)
        bounds = [f"{lower}_{bound}" if mode.endswith("k1") else bound for mode, bound in modes]
    return parse_rejection(",".join(correction.rollout_rs), ",".join(bounds))

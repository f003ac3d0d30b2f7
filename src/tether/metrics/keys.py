"""Every metric key, with its meaning and the range of values in a healthy run.

Names are verl's where verl has the metric. ``<...>`` in a key is a placeholder, for example for the phase in
``timing_s/<phase>``. Documentation and plots read this table; a test compares it with the keys that runs log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

AHEAD = "with trainer.async_mode"


@dataclass(frozen=True)
class MetricInfo:
    """The meaning of a metric."""

    meaning: str
    """One line, with the unit if it has one."""
    healthy: str | None = None
    """The range of a healthy run, if there is a typical one."""
    when: str | None = None
    """The condition under which it is logged; None: it is logged by the runs of tests/runs/test_metric_keys.py."""


def _spread(prefix: str, what: str, healthy_mean: str | None = None) -> dict[str, MetricInfo]:
    return {
        f"{prefix}/mean": MetricInfo(f"Mean {what}.", healthy_mean),
        f"{prefix}/max": MetricInfo(f"Largest {what}."),
        f"{prefix}/min": MetricInfo(f"Smallest {what}."),
    }


REWARD_AND_CRITIC: Mapping[str, MetricInfo] = {
    **_spread("critic/score", "score of a response as the reward gave it", "rises over the run"),
    **_spread("critic/rewards", "score of a response after the KL penalty"),
    **_spread("critic/advantages", "advantage of a token", "near 0 where advantages are whitened"),
    **_spread("critic/returns", "return of a token: what the critic learns to predict"),
    **_spread("critic/values", "value that the critic predicts for a token", "near critic/returns/mean"),
    "critic/score/nonzero_fraction": MetricInfo(
        "Share of scored responses with a score other than 0; the advantages of `gpg` are divided by it.", "above 0"
    ),
    "critic/advantages/nonzero_fraction": MetricInfo(
        "Share of tokens whose advantage is not 0: those that the policy learns from.", "above 0.5"
    ),
    "critic/bootstrap_value_mean": MetricInfo(
        "Mean value of the critic after the last token of a truncated response.", "near critic/returns/mean"
    ),
    "critic/vf_explained_var": MetricInfo(
        "Share of the variance of the returns that the critic explains: 1 - Var(returns - values) / Var(returns); "
        "0 where the returns do not vary.",
        "above 0 after warm-up, then rising towards 1; below 0 is worse than a constant",
    ),
    "critic/vf_loss": MetricInfo("Value loss of the critic.", "falls, then stays level"),
    "critic/vf_clipfrac": MetricInfo("Share of tokens whose value update was clipped.", "below 0.2"),
    "critic/vpred_mean": MetricInfo("Mean value predicted during the critic's update."),
    "critic/grad_norm": MetricInfo("Norm of the critic's gradient before clipping.", "steady; spikes are clipped"),
    "critic/lr": MetricInfo("Learning rate of the critic."),
    "reward/excluded_rows": MetricInfo(
        "Responses excluded from all statistics: without a score (abstained, failed, empty), or rejected entirely.", "0"
    ),
    "reward/error_rate": MetricInfo("Share of responses on which the reward failed.", "0"),
    "reward/abstain_rate": MetricInfo("Share of responses on which the reward abstained."),
    "reward/call_s/p50": MetricInfo("Median time to score a response, in seconds."),
    "reward/call_s/p99": MetricInfo("Time to score a response that 99 % do not exceed, in seconds."),
    "reward/extra/<key>/mean": MetricInfo("Mean of a number that the reward returned with its score."),
    "reward/extra/<key>/missing_fraction": MetricInfo(
        "Share of scored responses that the mean leaves out, since the reward did not return this key.",
        "0",
        when="where there are any",
    ),
    "reward/overlong_penalty_mean": MetricInfo("Mean length penalty, added to the score of a response."),
    "reward/overlong_fraction": MetricInfo("Share of responses with a length penalty.", "falls over the run"),
    "reward/running_mean": MetricInfo("Mean of all scores so far, which running normalisation subtracts."),
    "reward/running_std": MetricInfo("Standard deviation of all scores so far, which it divides by.", "above 0"),
    "baseline/score_mean": MetricInfo(
        "Mean score of the greedy responses that `remax` compares with.", "above critic/score/mean"
    ),
    "baseline/beaten_fraction": MetricInfo("Share of responses that score above the greedy one.", "above 0"),
    "baseline/response_tokens": MetricInfo("Tokens generated for greedy responses: what the baseline costs."),
    "baseline/unscored_prompts": MetricInfo(
        "Prompts whose greedy response has no score; their responses are left out.", "0"
    ),
    "gdpo/<key>/zero_std_fraction": MetricInfo(
        "Share of prompt groups in which this component of the reward is equal everywhere.", "below 0.5"
    ),
    "gdpo/<key>/score_std_mean": MetricInfo(
        "Mean standard deviation of this component within a prompt group.", "above 0"
    ),
    "group/single_fraction": MetricInfo(
        "Share of prompt groups with one scored response only, which has nothing to be compared with.",
        "0 where estimators compare responses",
    ),
    "group/zero_std_fraction": MetricInfo(
        "Share of prompt groups in which all scores are equal: they teach a group baseline nothing.", "below 0.5"
    ),
    "group/score_std_mean": MetricInfo("Mean standard deviation of the scores within a prompt group.", "above 0"),
}

ACTOR: Mapping[str, MetricInfo] = {
    "actor/entropy": MetricInfo(
        "Mean entropy of the policy at a token, in nats; under top_k or top_p of the tokens that they kept.",
        "falls slowly; a drop to 0 within few steps is a collapse",
    ),
    "actor/sum_pi_squared": MetricInfo(
        "Mean probability that two draws of a token agree; asked for by the optimal token baselines.",
        "rises slowly; 1 is a collapse",
    ),
    "actor/pg_loss": MetricInfo("Policy loss.", "small; its level says little about progress"),
    "actor/pg_clipfrac": MetricInfo("Share of tokens whose policy update was clipped.", "0 to 0.2"),
    "actor/pg_clipfrac_lower": MetricInfo(
        "Share of tokens that the dual clip bounded (negative advantage, large ratio).", "near 0"
    ),
    "actor/ppo_kl": MetricInfo(
        "Estimated KL from the policy before the update to the policy being trained, in nats per token.", "below 0.05"
    ),
    "actor/ppo_kl_abs": MetricInfo(
        "Mean distance of the log-probs from those before the update, in nats per token (kl_cov)."
    ),
    "actor/behave_weight_mean": MetricInfo(
        "Mean weight p_old / p_rollout of a token (decoupled).", "close to 1; away from it the rollout is stale"
    ),
    "actor/behave_dropped": MetricInfo(
        "Share of tokens dropped for a weight above behave_weight_threshold (decoupled).", "near 0"
    ),
    "actor/kl_loss": MetricInfo("KL to the reference policy in the loss, in nats per token.", "rises slowly"),
    "actor/kl_coef": MetricInfo("Weight of the KL loss."),
    "distillation/loss": MetricInfo("Loss of distillation from the teacher.", when="with distillation.enabled"),
    "distillation/kl": MetricInfo(
        "KL between policy and teacher, in nats per token, as loss_mode computes it.",
        "falls",
        when="with distillation.enabled",
    ),
    "distillation/kl/<teacher>": MetricInfo(
        "The same over the rows of one of several teachers; absent in a step without such rows.",
        "falls",
        when="with several distillation.teacher_models",
    ),
    "distillation/pg_clipfrac": MetricInfo(
        "Share of tokens whose policy gradient towards the teacher was clipped.",
        "0 to 0.2",
        when="with distillation.distillation_loss.use_policy_gradient",
    ),
    "distillation/first_update/pg_clipfrac": MetricInfo(
        "The same at the first optimizer step.", "0", when="with distillation.distillation_loss.use_policy_gradient"
    ),
    "actor/reward_kl_penalty": MetricInfo(
        "KL to the reference policy taken off the reward, in nats per token.", "rises slowly; below 1"
    ),
    "actor/reward_kl_penalty_coeff": MetricInfo("Weight of the KL penalty in the reward."),
    "actor/grad_norm": MetricInfo("Norm of the actor's gradient before clipping.", "steady; spikes are clipped"),
    "actor/policy_grad_norm": MetricInfo(
        "Root mean square, over decisions, of the gradient of a decision's loss by the outputs of a control policy: "
        "without the critic's, which is part of actor/grad_norm there.",
        "falls slowly; 0 is a policy that learns no more",
        when="in embodied runs",
    ),
    "actor/lr": MetricInfo("Learning rate of the actor."),
    "actor/clip_ratio_low": MetricInfo("Lower side of the clip range, where it falls over the run."),
    "actor/clip_ratio_high": MetricInfo("Upper side of the clip range, where it falls over the run."),
    "actor/entropy_coeff": MetricInfo("Weight of the entropy bonus, where it falls over the run."),
    "actor/ratio_mean": MetricInfo("Mean raw importance ratio of a token, before any clipping.", "close to 1"),
    "actor/ratio_max": MetricInfo("Largest raw importance ratio of a token."),
    "actor/ratio_min": MetricInfo("Smallest raw importance ratio of a token."),
    **{
        f"actor/first_update/ratio_{name}": MetricInfo(
            f"{what} raw ratio at the step's first optimizer step alone: the policy is still the old one.",
            "1, up to rounding",
        )
        for name, what in (("mean", "Mean"), ("max", "Largest"), ("min", "Smallest"))
    },
    "actor/first_update/pg_clipfrac": MetricInfo("Share of tokens clipped at the first optimizer step.", "0"),
    "actor/first_update/pg_clipfrac_lower": MetricInfo("Share that the dual clip bounded there.", "0"),
    "actor/skipped_updates": MetricInfo("Optimizer steps skipped for a non-finite gradient.", "0"),
    "actor/early_stops": MetricInfo("Optimizer steps left out for a mean ratio above early_stop_imp_ratio.", "0"),
}

LENGTHS: Mapping[str, MetricInfo] = {
    **_spread("response_length", "length of a response, in tokens"),
    "response_length/clip_ratio": MetricInfo("Share of responses cut by the length limit.", "below 0.1"),
    **_spread("prompt_length", "length of a prompt, in tokens"),
    "prompt_length/clip_ratio": MetricInfo("Share of prompts that fill the prompt limit.", "near 0"),
    "global_seqlen/min": MetricInfo(
        "Smallest number of tokens of a device if rows were assigned in order, without balancing.",
        when="on several devices",
    ),
    "global_seqlen/max": MetricInfo(
        "Largest number of tokens of a device without balancing.", when="on several devices"
    ),
    "global_seqlen/minmax_diff": MetricInfo("The difference between these two.", when="on several devices"),
    "global_seqlen/balanced_min": MetricInfo("Smallest number of tokens of a device.", when="on several devices"),
    "global_seqlen/balanced_max": MetricInfo("Largest number of tokens of a device.", when="on several devices"),
    "global_seqlen/mean": MetricInfo("Mean number of tokens of a device.", when="on several devices"),
    "transfer/rows_to_ranks_bytes": MetricInfo(
        "Bytes of prompts and rows sent to other processes in the step.", when="on several devices"
    ),
    "transfer/rows_from_ranks_bytes": MetricInfo(
        "Bytes of responses, log-probs and values received from them.", when="on several devices"
    ),
    "transfer/weights_bytes": MetricInfo(
        "Bytes of policy weights sent to servers, or to the devices that sample, each of which receives all weights.",
        when="on several devices, or with servers",
    ),
    "transfer/server_failures": MetricInfo(
        "Number of restarts of servers that died or hung, and of servers that had lost their weights.",
        "0",
        when="with servers",
    ),
    "global_seqlen/busiest_over_mean": MetricInfo(
        "Work of the busiest device over the mean, of layers and attention, summed over mini-batches.",
        "near 1",
        when="on several devices",
    ),
    "response/identical_fraction": MetricInfo(
        "Share of the scored responses of a step that are its most frequent one; absent with a single prompt.",
        "falls with the length of replies; near 1 the policy ignores the prompt",
    ),
    "response/repeated_fraction": MetricInfo(
        "Share of a response's 4-grams that already occurred earlier in it; the mean over scored responses.",
        "steady; a rise towards 1 is a loop",
    ),
}

MISMATCH: Mapping[str, MetricInfo] = {
    "training/rollout_probs_diff_mean": MetricInfo(
        "Mean absolute difference between sampler and trainer in the probability of a sampled token.", "below 0.01"
    ),
    "training/rollout_probs_diff_max": MetricInfo("Largest such difference."),
    "training/rollout_probs_diff_std": MetricInfo("Standard deviation of such differences."),
    "training/rollout_actor_probs_pearson_corr": MetricInfo(
        "Correlation of the sampler's and the trainer's token probabilities.", "above 0.99"
    ),
    "training/rollout_mismatch_alarm": MetricInfo(
        "1 where `rollout_corr/k3_kl` is larger than rounding in the dtypes in use explains.", "0"
    ),
    "training/staleness": MetricInfo(
        "Updates between the weights that sampled the batch and those that learn from it.", when=AHEAD
    ),
    "training/partial_rows": MetricInfo(
        "Share of responses during which the weights changed.", when="where weights changed while the batch was sampled"
    ),
    **_spread("training/rollout_kept_tokens", "number of tokens that top_k and top_p kept"),
    "rollout_corr/kl": MetricInfo("KL from sampler to trainer, k1 estimate, in nats per token.", "below 0.001"),
    "rollout_corr/k3_kl": MetricInfo("KL from sampler to trainer, k3 estimate, in nats per token.", "below 0.001"),
    "rollout_corr/training_ppl": MetricInfo("Perplexity of a response under the trainer, mean over responses."),
    "rollout_corr/training_log_ppl": MetricInfo("Its logarithm, mean over responses."),
    "rollout_corr/rollout_ppl": MetricInfo("Perplexity of a response under the sampler, mean over responses."),
    "rollout_corr/rollout_log_ppl": MetricInfo("Its logarithm, mean over responses."),
    "rollout_corr/log_ppl_diff": MetricInfo(
        "Log-perplexity under the trainer minus under the sampler, mean.", "near 0"
    ),
    "rollout_corr/log_ppl_abs_diff": MetricInfo("Mean size of that difference.", "near 0"),
    "rollout_corr/log_ppl_diff_max": MetricInfo("Largest such difference."),
    "rollout_corr/log_ppl_diff_min": MetricInfo("Smallest such difference."),
    "rollout_corr/ppl_ratio": MetricInfo("Perplexity under the trainer over that under the sampler, mean.", "near 1"),
    "rollout_corr/chi2_token": MetricInfo("Chi-squared divergence from sampler to trainer, by tokens.", "near 0"),
    "rollout_corr/chi2_seq": MetricInfo("Chi-squared divergence from sampler to trainer, by responses."),
    "rollout_corr/rollout_is_mean": MetricInfo("Mean of the truncated importance weights.", "near 1"),
    "rollout_corr/rollout_is_max": MetricInfo("Largest weight; of responses before truncation."),
    "rollout_corr/rollout_is_min": MetricInfo("Smallest importance weight."),
    "rollout_corr/rollout_is_std": MetricInfo("Standard deviation of the truncated weights."),
    "rollout_corr/rollout_is_eff_sample_size": MetricInfo(
        "Effective sample size of the weights, as a share of their number.", "above 0.9"
    ),
    "rollout_corr/rollout_is_ratio_fraction_high": MetricInfo(
        "Share of weights above the threshold, before truncation.", "near 0"
    ),
    "rollout_corr/rollout_is_ratio_fraction_low": MetricInfo("Share of weights below 1 / threshold.", "near 0"),
    "rollout_corr/rollout_is_batch_norm_factor": MetricInfo("Mean of the truncated weights."),
    "rollout_corr/rollout_is_seq_<statistic>": MetricInfo("The same for the mean weight of each response."),
    "rollout_corr/rollout_rs_masked_fraction": MetricInfo("Share of tokens that are rejected.", "below 0.05"),
    "rollout_corr/rollout_rs_seq_masked_fraction": MetricInfo("Share of responses with a rejected token."),
    "rollout_corr/rollout_rs_<mode>_<statistic>": MetricInfo(
        "Divergence by which one mode rejects (mean, max), and the share of tokens and responses that it rejects."
    ),
    "rollout_corr/rollout_token_veto_fraction": MetricInfo("Share of responses rejected for one token.", "near 0"),
    "actor/rejected": MetricInfo("Bypass mode: share of tokens that the loss rejects.", "below 0.05"),
}

SELECTION: Mapping[str, MetricInfo] = {
    "train/num_gen_batches": MetricInfo("Dynamic sampling: batches of prompts sampled for the step."),
    "dynamic_sampling/wasted_fraction": MetricInfo(
        "Share of the sampled responses that the step does not learn from.", "below 0.5"
    ),
    "dynamic_sampling/uninformative_fraction": MetricInfo(
        "Share of the sampled prompts whose responses all scored the same, or not at all.", "below 0.5"
    ),
    "dynamic_sampling/missing_groups": MetricInfo(
        "Prompts missing from the batch because the limit on sampling was reached.", "0"
    ),
    "dynamic_sampling/sampled_score_mean": MetricInfo(
        "Mean score of all sampled responses; critic/score/mean covers the selected ones.", "rises over the run"
    ),
    "pf_ppo/distinct_fraction": MetricInfo("PF-PPO: share of the scored responses that were drawn at least once."),
    "pf_ppo/score_mean": MetricInfo("PF-PPO: mean score of the responses that were drawn."),
}

PROGRESS: Mapping[str, MetricInfo] = {
    "training/global_step": MetricInfo("Number of the training step, from 1."),
    "training/epoch": MetricInfo("Pass over the training data."),
    "critic/skipped_updates": MetricInfo("Optimizer steps of the critic skipped for a non-finite gradient.", "0"),
    "perf/total_num_tokens": MetricInfo("Tokens of the step, prompts and responses."),
    "perf/time_per_step": MetricInfo("Duration of the step, in seconds."),
    "perf/throughput": MetricInfo("Tokens a second and device, prompts and responses."),
    "perf/batches_ahead": MetricInfo(
        "Sampled batches that were ready when the step began, its own among them.", when=AHEAD
    ),
    "perf/cpu_wait_fraction": MetricInfo(
        "Share of the time in which threads of this process could run and waited for a core.",
        "near 0 on a machine of its own",
        when="on Linux",
    ),
    "perf/cpu_memory_peak_gb": MetricInfo("Peak memory of this process, in GiB."),
    "perf/max_memory_allocated_gb": MetricInfo("Largest GPU memory in use by tensors, in GiB.", when="on a GPU"),
    "perf/max_memory_reserved_gb": MetricInfo("Largest GPU memory held by the allocator, in GiB.", when="on a GPU"),
}


def _episodes(prefix: str, when: str) -> dict[str, MetricInfo]:
    return {
        f"{prefix}/return": MetricInfo(f"Mean sum of the environment's rewards over an episode {when}.", "rises"),
        f"{prefix}/episode_len": MetricInfo(f"Mean steps of an episode {when}."),
        f"{prefix}/reward": MetricInfo(f"Mean reward of a step, averaged over episodes {when}."),
        f"{prefix}/success_once": MetricInfo(f"Share of episodes {when} that solved the task in any step.", "rises"),
        f"{prefix}/success_at_end": MetricInfo(f"Share of episodes {when} that ended solved.", "rises"),
        f"{prefix}/info/<name>": MetricInfo(
            f"Mean over episodes {when} of a number in the info of the last step.", when="with env.train.info_metrics"
        ),
        f"{prefix}/num_trajectories": MetricInfo(f"Number of episodes {when}."),
    }


EMBODIED: Mapping[str, MetricInfo] = {
    **_episodes("env", "that ended in training since the last log"),
    **_episodes("eval", "without noise"),
    "eval/<metric>_low": MetricInfo("Lower end of its confidence interval (env.eval.confidence)."),
    "eval/<metric>_high": MetricInfo("Upper end of its confidence interval."),
    "bc/loss": MetricInfo("Mean negative log-probability of a column of an action.", "falls", when="in tether bc"),
    "bc/held_out_loss": MetricInfo("The same of held-out episodes, without learning.", "falls", when="in tether bc"),
    "bc/best_held_out_loss": MetricInfo("The best so far, whose weights are kept.", "falls", when="in tether bc"),
    "actor/epochs": MetricInfo("Passes over the rollout before target_kl ended them.", "actor.ppo_epochs"),
    "group/kept_fraction": MetricInfo(
        "Embodied runs: share of episodes whose group is within the bounds of algorithm.filter_rewards.",
        "above 0",
        when="with algorithm.filter_rewards",
    ),
    "perf/env_steps": MetricInfo("Steps of all environments so far."),
    "perf/sps": MetricInfo("Environment steps a second: sampling, advantages and update together."),
}

REWARD_MODELS: Mapping[str, MetricInfo] = {
    "rm/loss": MetricInfo("Bradley-Terry loss of a step's pairs.", "falls from 0.693", when="in tether rm train"),
    "rm/accuracy": MetricInfo(
        "Share of the step's pairs that are ranked as labelled.", "rises", when="in tether rm train"
    ),
    "rm/margin": MetricInfo("Mean score of chosen minus rejected sides.", "rises", when="in tether rm train"),
    "rm/held_out_accuracy": MetricInfo(
        "Share of the held-out pairs that are ranked as labelled.", "well above 0.5", when="in tether rm train"
    ),
    "rm/<figure>": MetricInfo("Learning rate, norm of the gradient and skipped updates.", when="in tether rm train"),
}

FINE_TUNING: Mapping[str, MetricInfo] = {
    "train/loss": MetricInfo(
        "Minus the mean log-probability of the assistant's tokens, in nats, before the update.",
        "falls",
        when="in tether sft",
    ),
    "train/learned_tokens": MetricInfo("Tokens of the assistant in the step.", when="in tether sft"),
    "val/loss": MetricInfo(
        "The same loss on held-out conversations.",
        "falls; a rise while train/loss falls is overfitting",
        when="in tether sft",
    ),
}

TIMING: Mapping[str, MetricInfo] = {
    "timing_s/step": MetricInfo("Seconds of the training step, without validation and saving."),
    "timing_s/gen": MetricInfo("Seconds of generating responses; with `trainer.async_mode`, of waiting for them."),
    "timing_s/sampling": MetricInfo(
        "Seconds of generating and scoring the batch, while earlier steps learned.", when=AHEAD
    ),
    "timing_s/env": MetricInfo("Embodied runs: seconds of timing_s/gen in the environments' own code."),
    "timing_s/gen_max": MetricInfo("Seconds of generating and scoring the greedy responses of `remax`."),
    "timing_s/reward": MetricInfo("Seconds of waiting for rewards after generation."),
    "timing_s/rows_to_ranks": MetricInfo("Seconds of packing data for other processes.", when="on several devices"),
    "timing_s/rows_from_ranks": MetricInfo(
        "Seconds of unpacking data from other processes.", when="on several devices"
    ),
    "timing_s/old_log_prob": MetricInfo(
        "Seconds of recomputing the log-probabilities.", when="where the update does not give them"
    ),
    "timing_s/ref": MetricInfo("Seconds of the reference policy."),
    "timing_s/values": MetricInfo("Seconds of the critic's values."),
    "timing_s/adv": MetricInfo("Seconds of estimating advantages."),
    "timing_s/dump_rollout_generations": MetricInfo("Seconds of writing the samples to trainer.rollout_data_dir."),
    "timing_s/update_critic": MetricInfo("Seconds of updating the critic."),
    "timing_s/update_actor": MetricInfo("Seconds of updating the actor."),
    "timing_s/record": MetricInfo("Seconds of recording samples or episodes for `tether view`."),
    "timing_s/update_weights": MetricInfo("Seconds of handing new weights to the sampler."),
    "timing_s/testing": MetricInfo("Seconds of validation."),
    "timing_s/save_checkpoint": MetricInfo("Seconds of saving a checkpoint."),
    "timing_s/<phase>": MetricInfo("Seconds of this phase of the step.", when="in loops of your own"),
    "timing_per_token_ms/gen": MetricInfo("Milliseconds of generation per response token."),
    "timing_per_token_ms/<phase>": MetricInfo("Milliseconds of this phase per token of prompts and responses."),
}

VALIDATION: Mapping[str, MetricInfo] = {
    "val-core/<source>/<variable>/<metric>": MetricInfo(
        "Validation result to watch: `acc` if the reward returns it with every score, else `reward`, over all samples "
        "of a prompt.",
        "rises over the run",
    ),
    "val-aux/<source>/<variable>/mean@<n>": MetricInfo("Mean over the n samples of a prompt."),
    "val-aux/<source>/<variable>/std@<n>": MetricInfo("Standard deviation over the n samples of a prompt."),
    "val-aux/<source>/<variable>/best@<n>/<moment>": MetricInfo("Best of n samples: bootstrap mean and std."),
    "val-aux/<source>/<variable>/worst@<n>/<moment>": MetricInfo("Worst of n samples: bootstrap mean and std."),
    "val-aux/<source>/<variable>/maj@<n>/<moment>": MetricInfo(
        "Value of the most frequent answer among n samples: bootstrap mean and std."
    ),
    "val-aux/<source>/<variable>/missing_fraction": MetricInfo(
        "Share of scored responses for which the reward did not return this variable.", "0", when="where there are any"
    ),
    "val-aux/<source>/num_distinct": MetricInfo("Distinct questions among the validation prompts."),
    "val-aux/<source>/distinct_mean": MetricInfo(
        "Mean of the variable to watch over distinct questions, each counted once.", "rises over the run"
    ),
    "val-aux/<source>/majority_answer": MetricInfo(
        "Share of the distinct questions with the most frequent answer: the score of always giving that answer. "
        "Absent where scores are not 0 or 1.",
        "well below the score",
    ),
    "val-aux/<source>/num_unscored": MetricInfo("Validation responses without a score.", "0"),
}

METRICS: Mapping[str, MetricInfo] = {
    **REWARD_AND_CRITIC,
    **ACTOR,
    **LENGTHS,
    **MISMATCH,
    **SELECTION,
    **PROGRESS,
    **EMBODIED,
    **REWARD_MODELS,
    **FINE_TUNING,
    **TIMING,
    **VALIDATION,
}


def describe(key: str) -> MetricInfo | None:
    """Return the entry of a logged key, or None; exact entries take precedence over those with ``<...>``."""
    if key in METRICS:
        return METRICS[key]
    matching = (info for template, info in METRICS.items() if _pattern(template).fullmatch(key))
    return next(matching, None)


def _pattern(template: str) -> re.Pattern[str]:
    literals = re.split(r"<\w+>", template)
    return re.compile(".+".join(re.escape(literal) for literal in literals))

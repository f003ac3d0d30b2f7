"""Every public function of `tether.algorithms` with a right call of it: its tensors, their shapes, and the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.algorithms.cases import make_case
from tether import algorithms
from tether.algorithms import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, TOKEN_SELECTIONS

ROWS, WIDTH, WORDS, COMPONENTS = 7, 5, 11, 2
CASE = make_case(0, ROWS, WIDTH)
LOGITS = torch.randn(ROWS, WIDTH, WORDS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BOUNDS = {"token_k1": (0.5, 2.0), "seq_mean_k3": (-1.0, 0.1)}
SIZES = {"num_tokens": 20, "num_sequences": 6, "max_length": WIDTH}


@dataclass(frozen=True)
class Call:
    """A right call: ``shapes`` holds the dimensions of each tensor, by name; a name stands for one size."""

    function: Callable[..., Any]
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[str, ...]]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, **changed: Any) -> Any:
        return self.function(**self.tensors | self.keywords | changed)


SHAPES = {
    "uid": ("B",),
    "reward_baselines": ("B",),
    "bootstrap_values": ("B",),
    "reward_components": ("B", "R"),
    "component_weights": ("R",),
    "scores": ("B",),
    "valid": ("B",),
    "before": ("B",),
    "response_length": ("B",),
    "sample_version": ("B",),
    "logits": ("B", "T", "V"),
    "ref_logits": ("B", "T", "V"),
    "lam": ("B",),
}
"""Of the tensors that hold no number for each token."""


def call(function: Callable[..., Any], tensors: Mapping[str, Tensor], **keywords: Any) -> Call:
    shapes = {name: SHAPES.get(name, ("B", "T")) for name in tensors}
    if tensors.get("valid") is not None and tensors["valid"].ndim == 2:
        shapes["valid"] = ("B", "T")
    return Call(function, tensors, shapes, keywords)


def estimator_calls() -> dict[str, Call]:
    optional = {
        "gae": {"bootstrap_values": CASE.bootstrap_values, "lam": torch.full((ROWS,), 0.9)},
        "gdpo": {"component_weights": torch.tensor([1.0, 0.5])},
        "optimal_token_baseline": {"rollout_is_weights": CASE.rollout_is_weights},
        "tir_optimal_token_baseline": {"rollout_is_weights": CASE.rollout_is_weights},
    }
    calls = {}
    for name, function in ADVANTAGE_ESTIMATORS.items():
        given = {key: CASE.estimator_inputs[key] for key in sorted(algorithms.needs(function))} | optional.get(name, {})
        calls[name] = call(function, {"token_level_rewards": CASE.rewards, "response_mask": CASE.mask, **given})
    return calls


def loss_calls() -> dict[str, Call]:
    batch = {
        "log_probs": CASE.log_probs,
        "old_log_probs": CASE.old_log_probs,
        "advantages": CASE.advantages,
        "response_mask": CASE.mask,
    }
    calls = {}
    for name, function in POLICY_LOSSES.items():
        given = {key: CASE.loss_inputs[key] for key in sorted(algorithms.needs(function))}
        if name not in ("bypass_mode", "decoupled"):
            given["rollout_is_weights"] = CASE.rollout_is_weights
        calls[f"{name} loss"] = call(function, batch | given)
    for name, function in TOKEN_SELECTIONS.items():
        calls[f"select_{name}"] = call(function, batch, generator=torch.Generator())
    return calls


def correction_calls() -> dict[str, Call]:
    batch = {
        "log_probs": CASE.log_probs,
        "rollout_log_probs": CASE.rollout_log_probs,
        "response_mask": CASE.mask,
    }
    return {
        "importance_weights": call(algorithms.importance_weights, batch, level="token"),
        "importance_metrics": call(algorithms.importance_metrics, batch, level="sequence"),
        "rejection_mask": call(algorithms.rejection_mask, batch, bounds=BOUNDS),
        "rejection_metrics": call(algorithms.rejection_metrics, batch, bounds=BOUNDS),
        "veto_mask": call(algorithms.veto_mask, batch, threshold=1e-4),
        "off_policy_metrics": call(algorithms.off_policy_metrics, batch),
        "interpolate_proximal": call(
            algorithms.interpolate_proximal,
            {"log_probs": CASE.log_probs, "rollout_log_probs": CASE.rollout_log_probs, "sample_version": CASE.uid},
            current_version=50,
        ),
    }


def kl_calls() -> dict[str, Call]:
    pair = {"log_probs": CASE.log_probs, "ref_log_probs": CASE.ref_log_probs}
    logits = {"logits": LOGITS, "ref_logits": LOGITS.flip(0)}
    calls = {f"KL {kind}": call(function, pair) for kind, function in KL_ESTIMATORS.items() if kind != "full"}
    return calls | {
        "KL full": call(KL_ESTIMATORS["full"], logits),
        "full_kl": call(algorithms.full_kl, logits),
        "entropy_from_logits": call(algorithms.entropy_from_logits, {"logits": LOGITS}),
        "sum_pi_squared": call(algorithms.sum_pi_squared, {"logits": LOGITS}),
        "forward_kl_topk": call(algorithms.forward_kl_topk, logits, topk=3),
        "distillation_loss": call(
            algorithms.distillation_loss,
            {
                "kl": CASE.log_probs - CASE.ref_log_probs,
                "log_probs": CASE.log_probs,
                "old_log_probs": CASE.old_log_probs,
                "response_mask": CASE.mask,
                "rollout_is_weights": CASE.rollout_is_weights,
            },
            use_policy_gradient=True,
        ),
        "kl_penalty": call(algorithms.kl_penalty, pair | {"response_mask": CASE.mask}, kind="k3"),
        "apply_kl_penalty": call(
            algorithms.apply_kl_penalty,
            {
                "token_level_scores": CASE.rewards,
                "kl": CASE.old_log_probs - CASE.ref_log_probs,
                "response_mask": CASE.mask,
            },
            kl_coef=0.1,
        ),
    }


def statistic_calls() -> dict[str, Call]:
    pair = {"values": CASE.values, "mask": CASE.mask}
    whole = {name: getattr(algorithms, name) for name in ("masked_var", "masked_whiten", "masked_mean", "masked_sum")}
    return {name: call(function, pair) for name, function in whole.items()} | {
        "masked_mean of rows": call(algorithms.masked_mean, pair, dim=-1),
        "masked_sum of rows": call(algorithms.masked_sum, pair, dim=-1),
        "select": call(algorithms.select, pair),
        "Mean.of": call(algorithms.Mean.of, pair),
        "Max.of": call(algorithms.Max.of, pair),
        "Min.of": call(algorithms.Min.of, pair),
        "count_valid": call(algorithms.count_valid, {"response_mask": CASE.mask}),
    }


def reward_calls() -> dict[str, Call]:
    rows = {"scores": CASE.reward_baselines, "valid": CASE.mask.any(dim=-1)}
    running = algorithms.RunningRewardNormalizer()
    return {
        "normalize_rewards_per_batch": call(algorithms.normalize_rewards_per_batch, rows),
        "RunningRewardNormalizer.update": call(running.update, rows),
        "RunningRewardNormalizer.normalize": call(running.normalize, rows),
        "overlong_penalty": call(
            algorithms.overlong_penalty, {"response_length": CASE.mask.sum(dim=-1)}, max_length=5, buffer_length=2
        ),
        "pf_ppo_indices": call(
            algorithms.pf_ppo_indices, rows, reweight_method="pow", generator=torch.Generator().manual_seed(0)
        ),
        "informative_rows": call(
            algorithms.informative_rows,
            {"scores": CASE.reward_baselines, "response_mask": CASE.mask, "uid": CASE.uid},
        ),
    }


def other_calls() -> dict[str, Call]:
    loss = {"loss": CASE.values, "response_mask": CASE.mask}
    critic = {"values": CASE.values, "returns": CASE.rewards, "response_mask": CASE.mask}
    episodes = {
        "rewards": CASE.rewards,
        "values": CASE.values,
        "next_values": CASE.advantages,
        "ends": CASE.selected,
        "valid": CASE.mask,
    }
    ratio = Call(
        algorithms.masked_mean_ratio,
        loss | {"episode_length": CASE.mask.sum(dim=-1, keepdim=True)},
        {"loss": ("B", "T"), "response_mask": ("B", "T"), "episode_length": ("B", "#T")},
        {"max_episode_length": WIDTH, "num_elements": ROWS * WIDTH},
    )
    return {
        **{f"aggregate_loss {mode}": call(algorithms.aggregate_loss, loss, mode=mode, **SIZES) for mode in
           algorithms.AGGREGATIONS},
        "masked_mean_ratio": ratio,
        "value_loss": call(algorithms.value_loss, critic | {"old_values": CASE.advantages}, cliprange_value=0.5),
        "explained_variance": call(algorithms.explained_variance, critic),
        "episodic_gae": call(algorithms.episodic_gae, episodes, gamma=0.9, lam=0.8),
        "discounted_sums": call(
            algorithms.discounted_sums,
            {"rewards": CASE.rewards, "starts": CASE.selected, "before": CASE.reward_baselines},
            gamma=0.9,
        ),
        "length_adaptive_lambda": call(algorithms.length_adaptive_lambda, {"response_mask": CASE.mask}, alpha=0.05),
    }  # fmt: skip


CALLS: dict[str, Call] = {
    **estimator_calls(),
    **loss_calls(),
    **correction_calls(),
    **kl_calls(),
    **statistic_calls(),
    **reward_calls(),
    **other_calls(),
}

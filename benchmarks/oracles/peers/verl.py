"""Checks against verl: every function that both have, called as verl's own trainer calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from benchmarks.oracles import ours
from benchmarks.oracles.cases import WIDTH, Case
from benchmarks.oracles.compare import ESTIMATOR_SCENARIOS, LOSS_SCENARIOS, Check, Outputs
from tether.algorithms import (
    AGGREGATIONS,
    TOKEN_SELECTIONS,
    AdaptiveKLController,
    FixedKLController,
    aggregate_loss,
    apply_kl_penalty,
    entropy_from_logits,
    importance_metrics,
    importance_weights,
    kl_penalty,
    masked_whiten,
    off_policy_metrics,
    parse_rejection,
    pf_ppo_indices,
    rejection_mask,
    sum_pi_squared,
)

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}

NAN = "tether: values at masked positions must not matter; verl multiplies them by the mask, and NaN x 0 is NaN"
NO_TOKEN = "tether: an answer without tokens (rejected or failed) was not sampled; verl keeps its score in the group"
LONE_PASSK = "a choice: verl raises for a group of one; tether gives 0, because there is no second best"
HIDDEN = "tether: k3_kl of log r clamped to +-20, which stays finite; verl does not clamp it"
EMPTY_ROW_WEIGHT = "tether: a row without tokens has no weight; verl counts it as 0"
EMPTY_ROW = "tether: a row without tokens has no perplexity; verl's means count it as 1"
UNBOUNDED = "tether: log r is clamped to +-20, as in verl's own vanilla loss; here verl does not clamp it"


def estimate(name: str, rewards: str = "rewards", **keywords: Any) -> Callable[[Case], Outputs]:
    def call(case: Case) -> Outputs:
        given = {k: getattr(case, v) if isinstance(v, str) else v for k, v in keywords.items()}
        function = core_algos.get_adv_estimator_fn(name)
        if "values" not in given and name not in ("reinforce_plus_plus", "remax"):
            given["index"] = np.array(case.uid_names, dtype=object)
        advantages, returns = function(getattr(case, rewards), response_mask=case.mask.long(), **given)
        return {"advantages": advantages, "returns": returns}

    return call


def gdpo(case: Case) -> Outputs:
    lengths = (case.mask * torch.arange(1, WIDTH + 1)).amax(dim=-1)
    attention = (torch.arange(WIDTH) < lengths[:, None]).long()
    names = ["format", "accuracy", "length"]
    advantages, returns = core_algos.compute_gdpo_outcome_advantage(
        case.rewards,
        case.mask.long(),
        np.array(case.uid_names, dtype=object),
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": [1.0, 0.5, 2.0]},
        non_tensor_batch=dict(zip(names, case.components.T.numpy(), strict=True)),
        batch={
            "prompts": torch.zeros(len(case.uid), 1),
            "attention_mask": torch.nn.functional.pad(attention, (1, 0), value=1),
        },
    )
    return {"advantages": advantages, "returns": returns}


def estimators() -> list[Check]:
    grouped = {"poison": NAN, "empty": NO_TOKEN}
    table: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
        "grpo": ({}, {}, grouped),
        "grpo without std": (
            {"norm_adv_by_std_in_grpo": False},
            {"norm_adv_by_std_in_grpo": False},
            grouped,
        ),
        "grpo_passk": ({}, {"config": AlgoConfig()}, grouped),
        "rloo": ({}, {}, grouped),
        "rloo_vectorized": ({}, {}, grouped),
        "reinforce_plus_plus_baseline": ({}, {}, grouped),
        "opo": ({}, {}, {"poison": NAN}),
        "gpg": ({}, {}, grouped),
    }
    checks = [
        Check(
            name,
            ours.estimate(name.split()[0], uid="uid", **mine),
            estimate(name.split()[0], **theirs),
            ESTIMATOR_SCENARIOS,
            differs,
            {"lone": LONE_PASSK} if name == "grpo_passk" else {},
        )
        for name, (mine, theirs, differs) in table.items()
    ]
    return [
        Check(
            "gae",
            ours.estimate("gae", "dense_rewards", values="values", gamma=0.97, lam=0.9),
            estimate("gae", "dense_rewards", values="values", gamma=0.97, lam=0.9),
            ESTIMATOR_SCENARIOS,
            {"poison": NAN},
        ),
        *checks,
        Check(
            "grpo_vectorized",
            ours.estimate("grpo_vectorized", uid="uid"),
            estimate("grpo_vectorized"),
            ESTIMATOR_SCENARIOS,
            grouped,
            dtype=torch.float32,
        ),
        Check(
            "gdpo",
            lambda case: ours.estimate(
                "gdpo", uid="uid", reward_components="components", component_weights=torch.tensor([1.0, 0.5, 2.0])
            )(case),
            gdpo,
            ESTIMATOR_SCENARIOS,
            {"empty": NO_TOKEN},
            dtype=torch.float32,
        ),
        Check(
            "reinforce_plus_plus",
            ours.estimate("reinforce_plus_plus", "dense_rewards", gamma=0.9),
            estimate("reinforce_plus_plus", "dense_rewards", config=AlgoConfig(gamma=0.9)),
            ESTIMATOR_SCENARIOS,
            {"poison": NAN},
        ),
        Check(
            "remax",
            ours.estimate("remax", "dense_rewards", reward_baselines="scores"),
            estimate("remax", "dense_rewards", reward_baselines="scores"),
            ESTIMATOR_SCENARIOS,
            {"poison": NAN},
        ),
        *token_baselines(),
    ]


def token_baselines() -> list[Check]:
    inputs = {"old_log_probs": "old_log_probs", "sum_pi_squared": "sum_pi_squared", "rollout_is_weights": "weights"}
    tail = "tether: a row alone at a position is its own baseline; verl detects it by a token count, not by column"
    return [
        Check(
            f"{name}, handle_zero_tail={zero_tail}",
            ours.estimate(name, "dense_rewards", uid="uid", handle_zero_tail=zero_tail, **inputs),
            estimate(name, "dense_rewards", handle_zero_tail=zero_tail, **inputs),
            ESTIMATOR_SCENARIOS,
            {"poison": NAN} | ({"tools": tail} if zero_tail and name == "optimal_token_baseline" else {}),
        )
        for name in ("optimal_token_baseline", "tir_optimal_token_baseline")
        for zero_tail in (False, True)
    ]


def actor_config(case: Case, policy: PolicyLossConfig) -> ActorConfig:
    rows = case.mask.any(dim=-1)
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=policy,
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": case.mask.sum(),
            "global_batch_size": rows.sum(),
            "loss_scale_factor": None,
        },
        **CLIP,
    )


def policy_loss(name: str, mode: str, weights: bool = False, **policy: Any) -> Callable[[Case], Outputs]:
    def call(case: Case) -> Outputs:
        config = actor_config(case, PolicyLossConfig(**policy))

        def loss(log_probs: Tensor) -> Tensor:
            return core_algos.get_policy_loss_fn(name)(
                case.old_log_probs,
                log_probs,
                case.advantages,
                case.mask.long(),
                loss_agg_mode=mode,
                config=config,
                rollout_is_weights=case.weights if weights else None,
            )[0]

        return ours.with_gradient(loss, case.log_probs)

    return call


def select_then(name: str, **keywords: Any) -> Callable[[Case], Outputs]:
    """tether's clip_cov and kl_cov, whose tokens are selected over the whole mini-batch first."""

    def call(case: Case) -> Outputs:
        select = TOKEN_SELECTIONS[name]
        generator = torch.Generator().manual_seed(0)
        batch = (case.log_probs, case.old_log_probs, case.advantages, case.mask)
        selected = select(*batch, generator=generator, **CLIP, **keywords)
        return ours.policy_loss(name, "token-mean", selected=selected, ppo_kl_coef=0.1, **CLIP)(case)

    return call


def policy_losses() -> list[Check]:
    by_row, bounded = "seq-mean-token-mean", {"far": UNBOUNDED}
    empty_rows = (
        "tether: a row without tokens does not count; verl's mean includes it (verl's other aggregations do not)"
    )
    plain = {"vanilla": "token-mean", "gspo": by_row, "sapo": by_row, "gpg": "token-mean", "cispo": "token-mean"}
    checks = [
        Check(
            name,
            ours.policy_loss(name, mode, rollout_is_weights="weights", **CLIP),
            policy_loss(name, mode, weights=True),
            LOSS_SCENARIOS,
            {"poison": NAN} if mode == by_row else {},
        )
        for name, mode in plain.items()
    ]
    # A ratio of 1 draws every candidate, so that the two generators cannot differ.
    clip_cov = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
    return [
        *checks,
        Check(
            "clip_cov",
            select_then("clip_cov", **clip_cov),
            policy_loss("clip_cov", "token-mean", **clip_cov),
            LOSS_SCENARIOS,
            bounded,
        ),
        Check(
            "kl_cov",
            select_then("kl_cov", kl_cov_ratio=0.2),
            policy_loss("kl_cov", "token-mean", kl_cov_ratio=0.2),
            LOSS_SCENARIOS,
            bounded,
        ),
        Check(
            "geo_mean",
            ours.policy_loss("geo_mean", by_row, **CLIP),
            policy_loss("geo_mean", by_row),
            LOSS_SCENARIOS,
            bounded | {"empty": empty_rows, "poison": NAN},
        ),
        *bypass_modes(),
    ]


def bypass_modes() -> list[Check]:
    rejection = "token_k1,seq_mean_k3"
    bounds = parse_rejection(rejection, "0.6_1.6,0.2")
    correction = {"rollout_rs": rejection, "rollout_rs_threshold": "0.6_1.6,0.2", "rollout_is": "token"}
    return [
        Check(
            f"bypass_mode, {kind}",
            ours.policy_loss(
                "bypass_mode", "token-mean", loss_type=kind, rollout_is="token", rollout_rs=bounds, **CLIP
            ),
            policy_loss("bypass_mode", "token-mean", rollout_correction=correction | {"loss_type": kind}),
            LOSS_SCENARIOS,
        )
        for kind in ("ppo_clip", "reinforce")
    ]


def value_losses() -> list[Check]:
    def theirs(case: Case) -> Outputs:
        return ours.with_gradient(
            lambda values: core_algos.compute_value_loss(
                values, case.returns, case.old_values, case.mask.long(), cliprange_value=0.5
            )[0],
            case.values,
        )

    return [Check("value_loss", ours.critic_loss(cliprange_value=0.5), theirs, LOSS_SCENARIOS)]


def aggregations() -> list[Check]:
    scenarios = ("ragged", "tools", "empty", "poison")

    def mine(mode: str) -> Callable[[Case], Outputs]:
        return lambda case: {"loss": aggregate_loss(case.values, case.mask, mode, **ours.sizes(case), max_length=WIDTH)}

    def theirs(mode: str) -> Callable[[Case], Outputs]:
        return lambda case: {"loss": core_algos.agg_loss(case.values, case.mask.long(), mode)}

    def differs(mode: str) -> dict[str, str]:
        return {} if mode == "token-mean" else {"poison": NAN}

    return [
        Check(mode, mine(mode), theirs(mode), scenarios, differs(mode))
        for mode in AGGREGATIONS
        if mode != "token-sum-norm"
    ]


def kl_kinds() -> list[Check]:
    kinds = [f"{kind}{plus}" for kind in ("k1", "abs", "k2", "k3") for plus in ("", "+")]

    def theirs(kind: str) -> Callable[[Case], Outputs]:
        return lambda case: ours.per_token(
            lambda log_probs: core_algos.kl_penalty(log_probs, case.ref_log_probs, kind), case
        )

    return [Check(f"KL {kind}", ours.kl(kind), theirs(kind), ("ragged", "far", "poison")) for kind in kinds]


def kl_in_reward() -> list[Check]:
    def mine(case: Case) -> Outputs:
        kl = kl_penalty(case.old_log_probs, case.ref_log_probs, "kl", case.mask)
        made = apply_kl_penalty(case.dense_rewards, kl, case.mask, kl_coef=0.3)
        return {"rewards": made.token_level_rewards}

    def theirs(case: Case) -> Outputs:
        return {"rewards": core_algos.compute_rewards(case.dense_rewards, case.old_log_probs, case.ref_log_probs, 0.3)}

    adaptive = {"target_kl": 0.1, "horizon": 1000}
    return [
        Check("KL in the reward", mine, theirs, ("ragged", "tools", "far", "poison")),
        Check(
            "AdaptiveKLController",
            ours.controller(lambda: AdaptiveKLController(init_kl_coef=0.2, **adaptive)),
            ours.controller(lambda: core_algos.AdaptiveKLController(init_kl_coef=0.2, **adaptive)),
            ("ragged",),
        ),
        Check(
            "FixedKLController",
            ours.controller(lambda: FixedKLController(0.2)),
            ours.controller(lambda: core_algos.FixedKLController(0.2)),
            ("ragged",),
        ),
    ]


def pf_ppo() -> list[Check]:
    """Both draw from a generator seeded alike, so that the very rows can be compared."""

    def mine(method: str, case: Case) -> Tensor:
        generator = torch.Generator().manual_seed(case.seed)
        valid = torch.ones_like(case.scores, dtype=torch.bool)
        return pf_ppo_indices(case.scores, valid, reweight_method=method, generator=generator)

    def theirs(method: str, case: Case) -> Tensor:
        tensors = {"token_level_scores": case.rewards, "rows": torch.arange(len(case.uid))}
        torch.manual_seed(case.seed)
        data = core_algos.compute_pf_ppo_reweight_data(DataProto.from_dict(tensors=tensors), method, 2.0)
        return data.batch["rows"]

    methods = ("pow", "max_min", "max_random")
    return [Check("pf_ppo, 3 methods", each(methods, mine), each(methods, theirs), ("ragged",), dtype=torch.float32)]


def each(names: Iterable[str], function: Callable[[str, Case], Tensor]) -> Callable[[Case], Outputs]:
    """Call a function with each name: one result a name."""
    return lambda case: {name: function(name, case) for name in names}


def corrections() -> list[Check]:
    def mine(level: str, normalize: bool, case: Case) -> Tensor:
        batch = (case.old_log_probs, case.rollout_log_probs, case.mask)
        return importance_weights(*batch, level=level, batch_normalize=normalize)

    def theirs(level: str, normalize: bool, case: Case) -> Tensor:
        log_ratio = case.old_log_probs - case.rollout_log_probs
        return rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, case.mask.long(), level, 2.0, normalize
        )[0]

    def both(function: Callable[[str, bool, Case], Tensor], level: str) -> Callable[[Case], Outputs]:
        return lambda case: {"plain": function(level, False, case), "normalized": function(level, True, case)}

    return [
        Check("rollout_is token", both(mine, "token"), both(theirs, "token"), LOSS_SCENARIOS),
        Check("rollout_is sequence", both(mine, "sequence"), both(theirs, "sequence"), LOSS_SCENARIOS),
        rejection(),
    ]


def rejection() -> Check:
    thresholds = {"token_k1": "0.9_1.1", "token_k2": "0.01", "token_k3": "0.01"}
    thresholds |= {"seq_sum_k1": "0.5_2", "seq_sum_k2": "0.1", "seq_sum_k3": "0.1", "seq_mean_k1": "0.9_1.1"}
    thresholds |= {"seq_mean_k2": "0.02", "seq_mean_k3": "0.02", "seq_max_k2": "0.04", "seq_max_k3": "0.04"}

    def mine(mode: str, case: Case) -> Tensor:
        bounds = parse_rejection(mode, thresholds[mode])
        return rejection_mask(case.old_log_probs, case.rollout_log_probs, case.mask, bounds)

    def theirs(mode: str, case: Case) -> Tensor:
        log_ratio = case.old_log_probs - case.rollout_log_probs
        mask = case.mask.long()
        return rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, mode, thresholds[mode])[0]

    name = f"rollout_rs, {len(thresholds)} modes"
    return Check(name, each(thresholds, mine), each(thresholds, theirs), LOSS_SCENARIOS)


def metrics() -> list[Check]:
    def numbers(found: dict[str, float]) -> Outputs:
        return {name.removeprefix("rollout_corr/"): torch.tensor(value) for name, value in found.items()}

    def off_policy(case: Case) -> Outputs:
        return numbers(off_policy_metrics(case.old_log_probs, case.rollout_log_probs, case.mask))

    def their_off_policy(case: Case) -> Outputs:
        return numbers(
            rollout_corr_helper.compute_offpolicy_metrics(case.old_log_probs, case.rollout_log_probs, case.mask.long())
        )

    def weights(case: Case) -> Outputs:
        return numbers(importance_metrics(case.old_log_probs, case.rollout_log_probs, case.mask, level="token"))

    def their_weights(case: Case) -> Outputs:
        log_ratio = case.old_log_probs - case.rollout_log_probs
        _, found = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, case.mask.long(), "token", 2.0, rollout_is_batch_normalize=True
        )
        return numbers(found)

    return [
        Check(
            "off-policy metrics",
            off_policy,
            their_off_policy,
            LOSS_SCENARIOS,
            {"far": HIDDEN, "empty": EMPTY_ROW},
        ),
        Check("importance metrics", weights, their_weights, LOSS_SCENARIOS, {"empty": EMPTY_ROW_WEIGHT}),
    ]


def statistics() -> list[Check]:
    return [
        Check(
            "masked_whiten",
            lambda case: {"whitened": masked_whiten(case.values, case.mask)},
            lambda case: {"whitened": torch_functional.masked_whiten(case.values, case.mask.long())},
            ("ragged", "tools", "empty", "poison"),
        ),
        Check(
            "masked_whiten of one value",
            lambda case: {"whitened": masked_whiten(case.values[0, :1], case.mask[0, :1])},
            lambda case: {"whitened": torch_functional.masked_whiten(case.values[0, :1], case.mask[0, :1].long())},
            ("ragged",),
            raises={"ragged": "tether: one value is its own mean, so 0; verl raises, which ends the run"},
        ),
        Check(
            "entropy_from_logits",
            lambda case: {"entropy": entropy_from_logits(case.logits)},
            lambda case: {"entropy": torch_functional.entropy_from_logits(case.logits)},
            ("ragged",),
        ),
        Check(
            "sum_pi_squared",
            lambda case: {"sum": sum_pi_squared(case.logits)},
            lambda case: {"sum": torch_functional.calculate_sum_pi_squared_from_logits(case.logits)},
            ("ragged",),
        ),
    ]


CHECKS = [
    *estimators(),
    *policy_losses(),
    *value_losses(),
    *aggregations(),
    *kl_kinds(),
    *kl_in_reward(),
    *pf_ppo(),
    *corrections(),
    *metrics(),
    *statistics(),
]

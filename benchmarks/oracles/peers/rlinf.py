"""Checks against RLinf: its reasoning path for advantages, its losses, KL and aggregations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rlinf.algorithms.losses import (
    compute_decoupled_ppo_actor_loss,
    compute_ppo_actor_loss,
    compute_ppo_critic_loss,
)
from rlinf.algorithms.registry import calculate_adv_and_returns
from rlinf.algorithms.utils import kl_penalty
from rlinf.utils.utils import get_loss_agg_func
from rlinf.utils.utils import masked_mean_ratio as rlinf_masked_mean_ratio
from torch import Tensor

from benchmarks.oracles import ours
from benchmarks.oracles.cases import Case
from benchmarks.oracles.compare import LOSS_SCENARIOS, Check, Outputs
from tether.algorithms import aggregate_loss, interpolate_proximal, masked_mean_ratio

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
GROUPED = ("ragged", "tools", "empty", "equal", "poison")

NAN = "tether: values at masked positions must not matter; RLinf multiplies them by the mask, and NaN x 0 is NaN"
NO_TOKEN = "tether: an answer without tokens (rejected or failed) was not sampled; RLinf keeps its score in the group"
PADDING = (
    "tether: the score belongs to the last token; RLinf puts it at the padded end, discounts every pad, reads V there"
)
SCATTER = "tether: RLinf raises IndexError: its rewards lose a dimension when the baseline is subtracted"
POPULATION = "a choice: RLinf whitens by the std of the population (n), tether and verl by the unbiased one (n - 1)"
EMPTY_ROW = "tether: a row without tokens does not count; RLinf divides 0 by 0, or includes it"


def estimate(name: str, outputs: tuple[str, ...] = ("advantages",), **keywords: Any) -> Callable[[Case], Outputs]:
    def call(case: Case) -> Outputs:
        case = case.with_equal_groups()
        values = {"values": case.values} if name == "gae" else {}
        found = calculate_adv_and_returns(
            task_type="reasoning",
            adv_type=name,
            rewards=case.scores.clone(),
            loss_mask=case.mask,
            group_size=7,
            **values,
            **keywords,
        )
        return dict(zip(outputs, found, strict=False))

    return call


def advantages_only(call: Callable[[Case], Outputs]) -> Callable[[Case], Outputs]:
    return lambda case: {"advantages": call(case.with_equal_groups())["advantages"]}


def gae(gamma: float, lam: float, differs: dict[str, str]) -> Check:
    keywords = {"gamma": gamma, "normalize_advantages": False}
    return Check(
        f"gae, gamma={gamma:g}, lam={lam:g}",
        lambda case: ours.estimate("gae", values="values", lam=lam, **keywords)(case.with_equal_groups()),
        estimate("gae", ("advantages", "returns"), gae_lambda=lam, **keywords),
        GROUPED,
        differs,
    )


def estimators() -> list[Check]:
    grouped = {"empty": NO_TOKEN}
    return [
        gae(1.0, 1.0, {"poison": NAN}),
        gae(0.97, 0.9, dict.fromkeys(("ragged", "tools", "empty", "equal"), PADDING) | {"poison": NAN}),
        Check(
            "grpo",
            advantages_only(ours.estimate("grpo", uid="uid")),
            estimate("grpo"),
            GROUPED,
            grouped,
        ),
        Check(
            "reinforce_plus_plus",
            advantages_only(ours.estimate("reinforce_plus_plus")),
            estimate("reinpp"),
            ("ragged", "tools"),
            dict.fromkeys(("ragged", "tools"), POPULATION),
            dtype=torch.float32,
        ),
        Check(
            "reinforce_plus_plus_baseline",
            advantages_only(ours.estimate("reinforce_plus_plus_baseline", uid="uid")),
            estimate("reinpp", use_reinpp_baseline=True),
            ("ragged", "tools"),
            raises=dict.fromkeys(("ragged", "tools"), SCATTER),
            dtype=torch.float32,
        ),
        Check("raw", advantages_only(ours.estimate("raw")), estimate("raw"), GROUPED),
    ]


def losses() -> list[Check]:
    def actor(log_probs: Tensor, case: Case) -> Tensor:
        return compute_ppo_actor_loss(
            logprobs=log_probs,
            old_logprobs=case.old_log_probs,
            advantages=case.advantages,
            loss_mask=case.mask,
            clip_ratio_c=3.0,
            clip_log_ratio_min=-20.0,
            clip_log_ratio_max=20.0,
            **CLIP,
        )[0]

    def critic(values: Tensor, case: Case) -> Tensor:
        return compute_ppo_critic_loss(
            values=values,
            returns=case.returns,
            prev_values=case.old_values,
            value_clip=0.2,
            huber_delta=0.5,
            loss_mask=case.mask,
        )[0]

    return [
        Check(
            "vanilla",
            ours.policy_loss("vanilla", "token-mean", **CLIP),
            lambda case: ours.with_gradient(lambda log_probs: actor(log_probs, case), case.log_probs),
            LOSS_SCENARIOS,
            {"poison": NAN},
            dtype=torch.float32,
        ),
        Check(
            "value_loss, Huber",
            ours.critic_loss(cliprange_value=0.2, huber_delta=0.5),
            lambda case: ours.with_gradient(lambda values: critic(values, case), case.values),
            LOSS_SCENARIOS,
            {"poison": NAN},
            dtype=torch.float32,
        ),
        *decoupled_losses(),
    ]


def decoupled_losses() -> list[Check]:
    """RLinf's old_logprobs are those of the sampler."""
    dropped = "tether: RLinf divides by the tokens that this micro-batch keeps, so the gradient changes with its size"
    unbounded = "tether: log ratios are clamped to +-20; RLinf does not clamp, here up to e^60, and float32 overflows"

    def theirs(**keywords: Any) -> Callable[[Case], Outputs]:
        def call(case: Case) -> Outputs:
            given = {k: v(case) for k, v in keywords.items()}

            def loss(log_probs: Tensor) -> Tensor:
                return compute_decoupled_ppo_actor_loss(
                    logprobs=log_probs,
                    old_logprobs=case.rollout_log_probs,
                    advantages=case.advantages,
                    loss_mask=case.mask,
                    clip_ratio_c=3.0,
                    **CLIP,
                    **given,
                )[0]

            return ours.with_gradient(loss, case.log_probs)

        return call

    def interpolated(case: Case) -> Outputs:
        proximal = interpolate_proximal(
            case.log_probs, case.rollout_log_probs, sample_version=versions(case), current_version=4
        )
        case = replace(case, old_log_probs=proximal)
        return ours.policy_loss("decoupled", "token-mean", rollout_log_probs="rollout_log_probs", **CLIP)(case)

    def versions(case: Case) -> Tensor:
        return torch.arange(len(case.uid)) % 6

    def threshold(limit: float | None) -> Callable[[Case], Outputs]:
        return ours.policy_loss(
            "decoupled",
            "token-mean",
            rollout_log_probs="rollout_log_probs",
            behave_weight_threshold=limit,
            **CLIP,
        )

    scenarios = ("ragged", "tools", "empty", "far", "poison")
    known = {"poison": NAN, "far": unbounded}
    proximal = {"proximal_logprobs": lambda case: case.old_log_probs}
    return [
        Check("decoupled", threshold(None), theirs(**proximal), scenarios, known, dtype=torch.float32),
        Check(
            "decoupled, behave_weight_threshold",
            threshold(1.1),
            theirs(**proximal, behave_weight_threshold=lambda _: 1.1),
            ("ragged", "tools"),
            dict.fromkeys(("ragged", "tools"), dropped),
            dtype=torch.float32,
        ),
        Check(
            "decoupled, interpolate_proximal",
            interpolated,
            theirs(versions=lambda case: versions(case)[:, None].expand_as(case.mask), current_version=lambda _: 4),
            ("ragged", "tools"),
            {},
            dtype=torch.float32,
        ),
    ]


def kl_kinds() -> list[Check]:
    def theirs(kind: str) -> Callable[[Case], Outputs]:
        return lambda case: ours.per_token(lambda log_probs: kl_penalty(log_probs, case.ref_log_probs, kind), case)

    return [
        Check(f"KL {kind}", ours.kl(kind), theirs(kind), ("ragged", "far", "poison"))
        for kind in ("k1", "abs", "k2", "k3")
    ]


def aggregations() -> list[Check]:
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")

    def mine(mode: str) -> Callable[[Case], Outputs]:
        return lambda case: {"loss": aggregate_loss(case.values, case.mask, mode, **ours.sizes(case))}

    def theirs(mode: str) -> Callable[[Case], Outputs]:
        return lambda case: {"loss": get_loss_agg_func(mode)(case.values, case.mask)}

    def differs(mode: str) -> dict[str, str]:
        return {"poison": NAN} | ({} if mode == "token-mean" else {"empty": EMPTY_ROW})

    def episode(case: Case) -> dict[str, Tensor]:
        return {"length": case.mask.sum(dim=-1, keepdim=True).expand_as(case.mask).to(case.values.dtype)}

    def mine_by_episode(case: Case) -> Outputs:
        return {
            "loss": masked_mean_ratio(
                case.values,
                case.mask,
                episode_length=episode(case)["length"],
                max_episode_length=20,
                num_elements=case.mask.numel(),
            )
        }

    def theirs_by_episode(case: Case) -> Outputs:
        return {"loss": rlinf_masked_mean_ratio(case.values, case.mask, episode(case)["length"] / 20)}

    scenarios = ("ragged", "tools", "empty", "poison")
    return [
        *(Check(mode, mine(mode), theirs(mode), scenarios, differs(mode)) for mode in modes),
        Check("masked_mean_ratio", mine_by_episode, theirs_by_episode, scenarios, {"poison": NAN, "empty": EMPTY_ROW}),
    ]


CHECKS = [*estimators(), *losses(), *kl_kinds(), *aggregations()]

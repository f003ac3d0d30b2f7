"""Checks against OpenRLHF.

Its modules import packages that need a GPU build or a cluster (deepspeed, flash_attn, ray and what starts workers with
it). None of the functions compared here calls them, so empty stand-ins take their place in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

for absent in (
    "deepspeed",
    "deepspeed.runtime.zero.partition_parameters",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils.distributed",
    "ray",
    "transformers.integrations.deepspeed",
    "openrlhf.trainer.ray",
    "openrlhf.trainer.ray.launcher",
):
    sys.modules[absent] = MagicMock(__spec__=ModuleSpec(absent, None))

from openrlhf.models.loss import PolicyLoss, ValueLoss, aggregate_loss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController  # noqa: E402
from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty  # noqa: E402

from benchmarks.oracles import ours  # noqa: E402
from benchmarks.oracles.cases import Case  # noqa: E402
from benchmarks.oracles.compare import LOSS_SCENARIOS, Check, Outputs  # noqa: E402
from tether import algorithms  # noqa: E402

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
GROUPED = ("ragged", "tools", "empty", "equal")

NAN = "tether: values at masked positions must not matter; OpenRLHF multiplies them by the mask, and NaN x 0 is NaN"
NO_TOKEN = (
    "tether: an answer without tokens (rejected or failed) was not sampled; OpenRLHF keeps its score in the group"
)
POPULATION = "a choice: OpenRLHF whitens by the std of the population (n), tether and verl by the unbiased one (n - 1)"
OBSERVATION = (
    "tether: an observation is not an action; OpenRLHF gives it value 0 and a discount, which breaks the recursion"
)
STD = "a choice: OpenRLHF adds 1e-9 to the std, tether and verl 1e-6"
CLAMP = "a choice: OpenRLHF clamps every kind to +-10, without + its gradient too; tether and verl clamp k3 only"


def estimate(name: str, outputs: tuple[str, ...], **advantage: Any) -> Callable[[Case], Outputs]:
    """Call the experience maker on one batch without a KL penalty; `outputs` are fields of its experience."""

    def call(case: Case) -> Outputs:
        case = case.with_equal_groups()
        settings = {"estimator": name, "gamma": 1.0, "lambd": 1.0, "no_std_norm": False} | advantage
        args = SimpleNamespace(
            algo=SimpleNamespace(advantage=SimpleNamespace(**settings)),
            reward=SimpleNamespace(clip_range=None),
            rollout=SimpleNamespace(n_samples_per_prompt=7),
        )
        maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
        maker.strategy, maker.advantage_estimator = SimpleNamespace(args=args), name
        maker.kl_ctl = SimpleNamespace(value=0.0)
        experience = SimpleNamespace(
            rewards=case.scores.clone(),
            values=case.values,
            kl=torch.zeros_like(case.values),
            action_mask=case.mask,
            index=list(range(14)),
            info={},
        )
        maker.compute_advantages_and_returns([experience])
        return {field: getattr(experience, field) for field in outputs}

    return call


def mine(name: str, outputs: tuple[str, ...], population: bool = False, **keywords: Any) -> Callable[[Case], Outputs]:
    """Return tether's call on the same groups; `population` brings its whitening to the std of the population."""

    def call(case: Case) -> Outputs:
        case = case.with_equal_groups()
        found = ours.estimate(name, **keywords)(case)
        tokens = case.mask.sum()
        scale = (tokens / (tokens - 1)).sqrt() if population else 1.0
        return {field: found[field] * (scale if field == "advantages" else 1.0) for field in outputs}

    return call


def estimators() -> list[Check]:
    only, both, grouped = ("advantages",), ("advantages", "returns"), {"empty": NO_TOKEN}
    return [
        Check(
            "gae",
            mine("gae", both, population=True, values="values", gamma=0.97, lam=0.9),
            estimate("gae", both, gamma=0.97, lambd=0.9),
            GROUPED,
            {"tools": OBSERVATION},
        ),
        Check(
            "gae, whitening",
            mine("gae", only, values="values", gamma=0.97, lam=0.9),
            estimate("gae", only, gamma=0.97, lambd=0.9),
            ("ragged",),
            {"ragged": POPULATION},
        ),
        Check(
            "reinforce_plus_plus",
            mine("reinforce_plus_plus", both, population=True, gamma=0.97),
            estimate("reinforce", both, gamma=0.97),
            GROUPED,
            {"tools": OBSERVATION},
        ),
        Check(
            "reinforce_plus_plus_baseline",
            mine("reinforce_plus_plus_baseline", only, population=True, uid="uid"),
            estimate("reinforce_baseline", only),
            GROUPED,
            grouped,
        ),
        Check("rloo", mine("rloo", only, uid="uid"), estimate("rloo", only), GROUPED, grouped),
        Check(
            "grpo",
            mine("grpo", only, uid="uid"),
            estimate("group_norm", only),
            GROUPED,
            grouped | dict.fromkeys(("ragged", "tools"), STD),
        ),
        Check(
            "grpo without std",
            mine("grpo", only, uid="uid", norm_adv_by_std_in_grpo=False),
            estimate("dr_grpo", only),
            GROUPED,
            grouped,
        ),
    ]


def losses() -> list[Check]:
    def policy(token_level: bool, kind: str, dual_clip: float | None) -> Callable[[Case], Outputs]:
        function = PolicyLoss(0.2, 0.28, dual_clip, token_level_loss=token_level, policy_loss_type=kind)
        return lambda case: ours.with_gradient(
            lambda log_probs: function(log_probs, case.old_log_probs, case.advantages, case.mask)[0], case.log_probs
        )

    def by_row(call: Callable[[Case], Outputs]) -> Callable[[Case], Outputs]:
        return lambda case: call(replace(case, advantages=case.scores[:, None].expand(case.mask.shape)))

    def critic(case: Case) -> Outputs:
        function = ValueLoss(clip_eps=0.5)
        return ours.with_gradient(
            lambda values: function(values, case.old_values, case.returns, case.mask), case.values
        )

    token = "a choice: tether has GSPO-token, for one advantage per token; OpenRLHF has GSPO, for one per row"
    far = "tether: it clamps log s to at most 10; OpenRLHF does not, so the loss of a negative advantage is unbounded"
    return [
        Check(
            "vanilla",
            ours.policy_loss("vanilla", "token-mean", **CLIP),
            policy(True, "ppo", 3.0),
            LOSS_SCENARIOS,
            {"poison": NAN},
        ),
        Check(
            "gspo",
            by_row(ours.policy_loss("gspo", "seq-mean-token-mean", **CLIP)),
            by_row(policy(False, "gspo", None)),
            LOSS_SCENARIOS,
            {"poison": NAN, "far": far},
        ),
        Check(
            "gspo, an advantage a token",
            ours.policy_loss("gspo", "seq-mean-token-mean", **CLIP),
            policy(False, "gspo", None),
            ("ragged",),
            {"ragged": token},
        ),
        Check("value_loss", ours.critic_loss(cliprange_value=0.5), critic, LOSS_SCENARIOS, {"poison": NAN}),
    ]


def aggregations() -> list[Check]:
    def mine_in(mode: str) -> Callable[[Case], Outputs]:
        return lambda case: {"loss": algorithms.aggregate_loss(case.values, case.mask, mode, **ours.sizes(case))}

    def theirs(token_level: bool) -> Callable[[Case], Outputs]:
        return lambda case: {"loss": aggregate_loss(case.values, case.mask, token_level)}

    return [
        Check(
            mode, mine_in(mode), theirs(mode == "token-mean"), ("ragged", "tools", "empty", "poison"), {"poison": NAN}
        )
        for mode in ("token-mean", "seq-mean-token-mean")
    ]


def kl_kinds() -> list[Check]:
    def theirs(kind: str) -> Callable[[Case], Outputs]:
        def value(log_probs: Tensor, case: Case) -> Tensor:
            return compute_approx_kl(
                log_probs, case.ref_log_probs, kl_estimator=kind.rstrip("+"), unbiased_gradient=kind.endswith("+")
            )

        return lambda case: ours.per_token(lambda log_probs: value(log_probs, case), case)

    def differs(kind: str) -> dict[str, str]:
        return {} if kind.startswith("k3") else {"far": CLAMP}

    return [
        Check(
            f"KL {kind}", ours.kl(kind), theirs(kind), ("ragged", "far", "poison"), differs(kind), dtype=torch.float32
        )
        for kind in ("k1", "k2", "k3", "k1+", "k2+", "k3+")
    ]


def others() -> list[Check]:
    settings = {"horizon": 1000}

    def overlong(case: Case) -> Outputs:
        length = case.mask.sum(dim=-1)
        penalty = algorithms.overlong_penalty(length, max_length=10, buffer_length=4, penalty_factor=0.5)
        return {"penalty": penalty}

    def their_overlong(case: Case) -> Outputs:
        length = case.mask.sum(dim=-1)
        experience = SimpleNamespace(response_length=length, rewards=torch.zeros(len(length)))
        apply_overlong_penalty([experience], 10, 4, 0.5)
        return {"penalty": experience.rewards}

    return [
        Check(
            "AdaptiveKLController",
            ours.controller(lambda: algorithms.AdaptiveKLController(0.2, target_kl=0.1, **settings)),
            ours.controller(lambda: AdaptiveKLController(0.2, target=0.1, **settings)),
            ("ragged",),
        ),
        Check(
            "FixedKLController",
            ours.controller(lambda: algorithms.FixedKLController(0.2)),
            ours.controller(lambda: FixedKLController(0.2)),
            ("ragged",),
        ),
        Check("overlong_penalty", overlong, their_overlong, ("ragged", "empty"), dtype=torch.float32),
    ]


CHECKS = [*estimators(), *losses(), *aggregations(), *kl_kinds(), *others()]

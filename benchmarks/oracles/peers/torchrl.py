"""Checks against TorchRL, which knows no mask: an answer is an episode, done at its last token, of its own length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.utils import _clip_value_loss, distance_loss
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    reward2go,
    vec_generalized_advantage_estimate,
    vec_td_lambda_return_estimate,
)

from benchmarks.oracles import ours
from benchmarks.oracles.cases import Case
from benchmarks.oracles.compare import Check, Outputs
from tether.algorithms import POLICY_LOSSES, aggregate_loss

GAMMA, LAM = 0.97, 0.9
NAN = "tether: values at masked positions must not matter; TorchRL has no mask, so NaN in padding spreads"


def episodes(case: Case) -> dict[str, Tensor]:
    """Shift the values, and end each row with its last token; [B, T, 1] as TorchRL wants it."""
    last = case.mask & ~torch.nn.functional.pad(case.mask[:, 1:], (0, 1))
    shifted = torch.nn.functional.pad(case.values[:, 1:], (0, 1))
    given = {"next_state_value": shifted, "reward": case.dense_rewards, "done": last, "terminated": last}
    return {name: tensor[..., None] for name, tensor in given.items()}


def gae(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Case], Outputs]:
    def call(case: Case) -> Outputs:
        advantages, returns = function(GAMMA, LAM, case.values[..., None], **episodes(case))
        return {"advantages": advantages[..., 0], "returns": returns[..., 0]}

    return call


def td_lambda(case: Case) -> Outputs:
    return {"returns": vec_td_lambda_return_estimate(GAMMA, LAM, **episodes(case))[..., 0]}


def discounted(case: Case) -> Outputs:
    given = episodes(case)
    return {"returns": reward2go(given["reward"], given["done"], GAMMA)[..., 0]}


def returns_only(call: Callable[[Case], Outputs]) -> Callable[[Case], Outputs]:
    return lambda case: {"returns": call(case)["returns"]}


def log_probs_of(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1).gather(-1, actions[..., None])[..., 0]


def clipped(case: Case) -> Outputs:
    """tether's vanilla loss without dual clip; its gradient is taken to the logits."""
    actions = case.ref_logits.argmax(dim=-1)

    def loss(logits: Tensor) -> Tensor:
        term = POLICY_LOSSES["vanilla"](
            log_probs_of(logits, actions),
            log_probs_of(case.ref_logits, actions),
            case.advantages,
            case.mask,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=None,
        )
        return aggregate_loss(term.loss, case.mask, "token-mean", **ours.sizes(case))

    return ours.with_gradient(loss, case.logits)


def clipped_by_torchrl(case: Case) -> Outputs:
    actions = case.ref_logits.argmax(dim=-1)
    policy = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(policy, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(nn.Linear(case.logits.shape[-1], 1).double(), in_keys=["observation"])
    ppo = ClipPPOLoss(actor, critic, clip_epsilon=(0.2, 0.28), entropy_bonus=False, critic_coeff=None)

    def loss(logits: Tensor) -> Tensor:
        tokens: dict[str, Any] = {
            "observation": logits[case.mask],
            "action": actions[case.mask],
            "advantage": case.advantages[case.mask][:, None],
            ppo.tensor_keys.sample_log_prob: log_probs_of(case.ref_logits, actions)[case.mask],
            "value_target": case.returns[case.mask][:, None],
        }
        return ppo(TensorDict(tokens, batch_size=[int(case.mask.sum())]))["loss_objective"]

    return ours.with_gradient(loss, case.logits)


def critic(case: Case) -> Outputs:
    """TorchRL's squared error has no factor 1/2; it is put here."""

    def loss(values: Tensor) -> Tensor:
        plain = distance_loss(case.returns, values, loss_function="l2")
        clip = torch.tensor(0.5, dtype=values.dtype)
        both = _clip_value_loss(case.old_values, values, clip, case.returns, plain, "l2")[0]
        return 0.5 * both[case.mask].mean()

    return ours.with_gradient(loss, case.values)


def mine(normalize: bool = False) -> Callable[[Case], Outputs]:
    return ours.estimate("gae", "dense_rewards", values="values", gamma=GAMMA, lam=LAM, normalize_advantages=normalize)


SCENARIOS = ("ragged", "equal", "poison")
CHECKS = [
    Check("gae", mine(), gae(generalized_advantage_estimate), SCENARIOS, {"poison": NAN}),
    Check("gae (vectorised there)", mine(), gae(vec_generalized_advantage_estimate), SCENARIOS, {"poison": NAN}),
    Check("gae: returns are TD(lambda)", returns_only(mine()), td_lambda, SCENARIOS, {"poison": NAN}),
    Check(
        "reinforce_plus_plus: returns",
        returns_only(ours.estimate("reinforce_plus_plus", "dense_rewards", gamma=GAMMA)),
        discounted,
        SCENARIOS,
    ),
    Check("vanilla", clipped, clipped_by_torchrl, ("ragged", "tools", "empty", "poison")),
    Check("value_loss", ours.critic_loss(cliprange_value=0.5), critic, ("ragged", "tools", "empty", "poison")),
]

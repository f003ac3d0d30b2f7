"""User-defined advantage estimators and policy losses, configured as ``FILE.py:NAME`` instead of a built-in name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Advantages, TokenLoss
from tether.algorithms.registry import uniform
from tether.runtime.user_files import import_python_file
from tether.spelling import did_you_mean

ESTIMATOR_KEY, LOSS_KEY = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
ESTIMATOR_ARGUMENTS = ("token_level_rewards", "response_mask")
LOSS_ARGUMENTS = ("log_probs", "old_log_probs", "advantages", "response_mask")
CHOSEN_FOR_ONE_LOSS = {"selected"}


def advantage_estimator(name: str) -> Callable[..., Advantages]:
    """Return the built-in estimator of this name, or the user's function, with the keywords that all estimators accept.

    Raises:
        ValueError: there is no such file or function, it requires arguments that a run does not have, or a test call
            does not return finite `Advantages`.
    """
    return ADVANTAGE_ESTIMATORS.get(name) or _own_estimator(name)


def policy_loss(name: str) -> Callable[..., TokenLoss]:
    """Return the built-in policy loss of this name, or the user's function, with the keywords that all losses accept.

    Raises:
        ValueError: there is no such file or function, it requires arguments that a run does not have, or a test call
            does not return a finite `TokenLoss` with a gradient.
    """
    return POLICY_LOSSES.get(name) or _own_loss(name)


@cache
def _own_estimator(name: str) -> Callable[..., Advantages]:
    function = _load(name, ESTIMATOR_KEY, ESTIMATOR_ARGUMENTS, ADVANTAGE_ESTIMATORS)
    toy = _example_inputs()
    keywords = {key: toy[key] for key in _required(function, ESTIMATOR_ARGUMENTS)}
    result = _call_checked(function, ESTIMATOR_KEY, name, [toy["rewards"], toy["response_mask"]], keywords)
    if not isinstance(result, Advantages):
        raise ValueError(
            f"{ESTIMATOR_KEY}={name}: returns {type(result).__name__}; expected tether.algorithms.Advantages"
        )
    for field in ("advantages", "returns"):
        _check_tokens(getattr(result, field), toy["response_mask"], f"{ESTIMATOR_KEY}={name}: {field}")
    return function


@cache
def _own_loss(name: str) -> Callable[..., TokenLoss]:
    function = _load(name, LOSS_KEY, LOSS_ARGUMENTS, POLICY_LOSSES)
    toy = _example_inputs()
    keywords = {key: toy[key] for key in _required(function, LOSS_ARGUMENTS)}
    log_probs = toy["log_probs"].requires_grad_()
    tensors = [log_probs, toy["old_log_probs"], toy["advantages"], toy["response_mask"]]
    result = _call_checked(function, LOSS_KEY, name, tensors, keywords)
    if not isinstance(result, TokenLoss):
        raise ValueError(f"{LOSS_KEY}={name}: returns {type(result).__name__}; expected tether.algorithms.TokenLoss")
    _check_tokens(result.loss, toy["response_mask"], f"{LOSS_KEY}={name}: loss")
    if not result.loss.requires_grad:
        raise ValueError(f"{LOSS_KEY}={name}: the loss has no gradient by log_probs, so nothing would be learned")
    return function


def _load(
    name: str, key: str, arguments: tuple[str, ...], registry: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Load the function from its file and wrap it so that it can be called like a built-in one."""
    path, _, attribute = name.rpartition(":")
    module = import_python_file(path, key)
    function = vars(module).get(attribute)
    if not inspect.isfunction(function):
        names = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{key}={name}: {path} has no function {attribute}.{did_you_mean(attribute, names)}")
    signature = inspect.signature(function)
    keywords = {each for one in registry.values() for each in inspect.signature(one).parameters} - CHOSEN_FOR_ONE_LOSS
    positional = [each for each, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [each for each in signature.parameters if each not in arguments]
    if tuple(positional[: len(arguments)]) != arguments or (
        unknown := [each for each in others if each not in keywords]
    ):
        wanted = f"({', '.join(arguments)}, *, KEYWORDS)"
        allowed = ", ".join(sorted(keywords - set(arguments)))
        wrong = f"; {unknown[0]} is none of them" if tuple(positional[: len(arguments)]) == arguments else ""
        raise ValueError(f"{key}={name}: takes {signature}; expected {wanted} with keywords among {allowed}{wrong}")
    meaning = dict.fromkeys(others, "what a run has by this name")
    learns = "log_probs" if "log_probs" in arguments else None
    functions: dict[str, Callable[..., Any]] = {**registry, name: function}
    return uniform(functions, meaning=meaning, learns=learns)[name]


def _required(function: Callable[..., Any], arguments: tuple[str, ...]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.name not in arguments and p.default is p.empty]


def _call_checked(
    function: Callable[..., Any], key: str, name: str, tensors: list[Tensor], keywords: Mapping[str, Any]
) -> Any:
    try:
        return function(*tensors, **keywords)
    except Exception as error:  # a user's function can raise anything
        raise ValueError(
            f"{key}={name}: a call on 4 rows of 3 tokens raised {type(error).__name__}: {error}"
        ) from error


def _check_tokens(value: object, mask: Tensor, what: str) -> None:
    if not isinstance(value, Tensor) or value.shape != mask.shape or not value.is_floating_point():
        shape = f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{what} is {shape}; expected floating-point numbers of shape {list(mask.shape)} on 4 rows")
    if not value[mask].isfinite().all():
        raise ValueError(f"{what} has a number that is not finite on a batch of finite ones")


def _example_inputs() -> dict[str, Any]:
    """Return inputs for a test call: two groups, with one row without tokens and one with a tool's output inside."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, True, True], [True, False, True], [True, True, False], [False, False, False]])
    names = ("rewards", "values", "advantages", "log_probs", "old_log_probs", "rollout_log_probs")
    tokens = {name: torch.randn(4, 3, generator=generator) for name in names}
    tokens |= {name: -tokens[name].abs() for name in names[3:]}
    rows = {name: torch.randn(4, generator=generator) for name in ("reward_baselines", "bootstrap_values")}
    return tokens | rows | {
        "response_mask": mask,
        "uid": torch.tensor([0, 0, 1, 1]),
        "sum_pi_squared": torch.full((4, 3), 0.5),
        "rollout_is_weights": torch.ones(4, 3),
        "reward_components": torch.randn(4, 2, generator=generator),
        "component_weights": torch.ones(2),
        **dict.fromkeys(("gamma", "lam", "critic_lam"), 0.9),
        **dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), 0.2),
        **{"clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, "ppo_kl_coef": 0.1, "behave_weight_threshold": None},
        **dict.fromkeys(("norm_adv_by_std_in_grpo", "normalize_advantages"), True),
    }  # fmt: skip

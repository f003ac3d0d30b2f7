"""A wrong shape, type or number is refused by name: broadcasting would make a plausible result of it."""

import inspect
import itertools
import math
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.surface import CALLS, CASE, ROWS, Call
from tether import algorithms
from tether.config.keys import keys


def wrong_shapes(tensor: Tensor, shape: tuple[str, ...]) -> dict[str, Tensor]:
    """The mistakes that people make with a tensor."""
    if len(shape) == 1:
        found = {"[B, 1]": tensor[:, None], "[1]": tensor[:1], "[B+1]": torch.cat([tensor, tensor[:1]])}
        return found | {"[1, B]": tensor[None], "[]": tensor[0]}
    return {
        "[B, 1]": tensor[:, :1],
        "[T]": tensor[0],
        "[B]": tensor[:, 0],
        "[1, T]": tensor[:1],
        "[B, T+1]": torch.cat([tensor, tensor[:, :1]], dim=1),
        "[B-1, T]": tensor[1:],
        "transposed": tensor.transpose(0, 1),
        "[]": tensor.flatten()[0],
    }


def fits(call: Call, tensors: dict[str, Tensor]) -> bool:
    """Whether every name of a dimension stands for one size; ``#T`` may be 1 instead, ``mask``-like pairs any shape."""
    if set(tensors) in ({"values", "mask"}, {"logits"}, {"logits", "ref_logits"}):  # of any shape, but the same
        shapes = {tuple(x.shape) for x in tensors.values()}
        return len(shapes) == 1 and ("values" in tensors or () not in shapes)
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != len(call.shapes[name]):
            return False
        for dim, size in zip(call.shapes[name], tensor.shape, strict=True):
            if dim.startswith("#") and size == 1:
                continue
            if sizes.setdefault(dim.lstrip("#"), size) != size:
                return False
    return True


def wrong_calls(call: Call) -> Iterator[tuple[str, tuple[str, ...], dict[str, Tensor]]]:
    """One argument, all but one, and all of them, with every mistake that they can have, where sizes no longer fit."""
    mistakes = {name: wrong_shapes(tensor, call.shapes[name]) for name, tensor in call.tensors.items()}
    for count in {1, len(mistakes) - 1, len(mistakes)} - {0}:
        for chosen in itertools.combinations(mistakes, count):
            kinds = dict.fromkeys(kind for name in chosen for kind in mistakes[name])
            for kind in kinds:
                if all(kind in mistakes[name] for name in chosen):
                    tensors = {name: mistakes[name][kind] for name in chosen}
                    if not fits(call, {**call.tensors, **tensors}):
                        yield kind, chosen, tensors


def refusal(call: Call, **changed: object) -> str:
    """The message of the ValueError that a call raises; empty if it raises none."""
    try:
        call(**changed)
    except ValueError as error:
        return str(error)
    return ""


def test_every_wrong_shape_is_refused_by_name() -> None:
    failures, count = [], 0
    for name, call in CALLS.items():
        assert refusal(call) == "", f"{name}: the right call is refused"
        for kind, chosen, tensors in wrong_calls(call):
            count += 1
            message = refusal(call, **tensors)
            shapes = [str(list(tensor.shape)) for tensor in tensors.values()]
            is_named = any(re.search(rf"\b{wrong}\b", message) for wrong in chosen)
            if "expected" not in message or not is_named or not any(shape in message for shape in shapes):
                failures.append(f"{name}: {', '.join(chosen)} as {kind}: {message}")
    assert failures == []
    assert count > 20 * len(CALLS), "too few wrong calls were made"


def test_every_public_function_is_called() -> None:
    names = {getattr(call.function, "__name__", "") for call in CALLS.values()}
    functions = {name for name in algorithms.__all__ if inspect.isfunction(getattr(algorithms, name))}
    assert functions - names == {
        "merge_metrics",
        "needs",
        "parse_rejection",
        "parse_weight_bounds",
    }  # which take no tensor


def wrong_types(tensor: Tensor) -> dict[str, object]:
    found: dict[str, object] = {"a list": tensor.tolist(), "an array": tensor.numpy(), "a string": "1", "no tensor": 1j}
    if tensor.is_floating_point():
        found |= {"integers": tensor.long(), "complex": tensor.to(torch.complex128)}
    return found


def test_every_wrong_type_is_refused_by_name() -> None:
    accepted = [
        (name, key, kind)
        for name, call in CALLS.items()
        for key, tensor in call.tensors.items()
        if key != "uid" and not name.endswith(".of")  # any labels, see below; a metric takes booleans and numbers
        for kind, wrong in wrong_types(tensor).items()
        if not re.search(rf"\b{key} is .*; expected .*(tensor|number)", refusal(call, **{key: wrong}))
    ]
    assert accepted == []


def test_rows_are_not_chosen_by_numbers() -> None:
    """``scores[valid]`` would take row 1 and row 0 where ``valid`` is not boolean."""
    for name in ("normalize_rewards_per_batch", "RunningRewardNormalizer.update", "pf_ppo_indices"):
        with pytest.raises(ValueError, match=r"valid is a tensor \[7\] of int64; expected a tensor of booleans \[B\]"):
            CALLS[name](valid=CALLS[name].tensors["valid"].long())


def test_every_wrong_device_is_refused_by_name() -> None:
    message = r"(\w+) is on (meta|cpu); expected (cpu|meta), as the other tensors"
    accepted = [
        (name, key)
        for name, call in CALLS.items()
        if len(call.tensors) > 1 and not name.endswith(".of")
        for key, tensor in call.tensors.items()
        if not re.search(message, refusal(call, **{key: tensor.to("meta")}))
    ]
    assert accepted == []


def numbers(call: Call) -> Iterator[tuple[str, object]]:
    """The parameters of a function that take a number, with their annotations."""
    for key, parameter in inspect.signature(call.function, eval_str=True).parameters.items():
        options = get_args(parameter.annotation) if get_origin(parameter.annotation) in (Union, UnionType) else ()
        for option in options or (parameter.annotation,):
            if option in (float, int) or (get_origin(option) is Annotated and get_args(option)[0] in (float, int)):
                yield key, option


def test_every_number_that_is_none_is_refused_by_name() -> None:
    accepted = [
        (name, key, wrong)
        for name, call in CALLS.items()
        for key, _ in numbers(call)
        for wrong in (math.nan, math.inf, -math.inf, "0.2", True, [0.2], torch.tensor([0.2, 0.3]), 1j)
        if not re.search(rf"\b{key} (is|has) .*; expected", refusal(call, **{key: wrong}))
    ]
    assert accepted == []


KEYS = {
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "critic_lam": "algorithm.lam_critic",
    "alpha": "algorithm.lam_actor_alpha",
    "clip_ratio_high": "actor_rollout_ref.actor.clip_ratio_high",
    "clip_ratio_c": "actor_rollout_ref.actor.clip_ratio_c",
    "tau_pos": "actor_rollout_ref.actor.tau_pos",
    "tau_neg": "actor_rollout_ref.actor.tau_neg",
    "clip_cov_ratio": "actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
    "kl_cov_ratio": "actor_rollout_ref.actor.policy_loss.kl_cov_ratio",
    "ppo_kl_coef": "actor_rollout_ref.actor.policy_loss.ppo_kl_coef",
    "m2_threshold": "actor_rollout_ref.actor.policy_loss.m2_threshold",
    "dro_beta": "actor_rollout_ref.actor.policy_loss.dro_beta",
    "behave_weight_threshold": "actor_rollout_ref.actor.policy_loss.behave_weight_threshold",
    "rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "veto_threshold": "algorithm.rollout_correction.rollout_token_veto_threshold",
    "max_length": "actor_rollout_ref.actor.loss_scale_factor",
    "max_episode_length": "actor_rollout_ref.actor.loss_scale_factor",
    "cliprange_value": "critic.cliprange_value",
    "huber_delta": "critic.huber_delta",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "log_prob_min_clamp": "distillation.distillation_loss.log_prob_min_clamp",
    "loss_max_clamp": "distillation.distillation_loss.loss_max_clamp",
    "weight_pow": "algorithm.pf_ppo.weight_pow",
    "penalty_factor": "reward_model.overlong_buffer.penalty_factor",
}
"""The number of a function and the key that sets it."""


def test_numbers_have_the_bounds_of_the_configuration() -> None:
    different = [
        (name, key)
        for name, call in CALLS.items()
        for key, annotation in numbers(call)
        if key in KEYS and (name, key) != ("overlong_penalty", "max_length")
        if str(get_args(annotation)[1]) != keys()[KEYS[key]].type_text.removesuffix(" or null").partition(";")[0]
    ]
    assert different == []


def test_every_number_has_bounds_and_they_are_kept() -> None:
    failures = []
    for name, call in CALLS.items():
        for key, annotation in numbers(call):
            bounds = get_args(annotation)[1] if get_origin(annotation) is Annotated else None
            if bounds is None and key not in ("dim", "current_version", "clip_cov_lb", "clip_cov_ub"):
                failures.append((name, key, "has no bounds"))
            for number in (-1.0, -1e-9, 0.0, 1.0 + 1e-9, 2.5) if bounds else ():
                message = refusal(call, **{key: number}) if number not in bounds else ""
                expected = (f"{key} is {number}; expected", str(bounds).removeprefix("a number"))
                if number not in bounds and not all(words in message for words in expected):
                    failures.append((name, key, number))
    assert failures == []


def test_the_mask_is_believed_where_two_tensors_disagree() -> None:
    call = CALLS["reinforce_plus_plus"]
    message = r"token_level_rewards has shape \[7, 1\]; expected \[B, T\] = \[7, 5\], as in response_mask \[7, 5\]"
    with pytest.raises(ValueError, match=message):
        call(token_level_rewards=CASE.rewards.sum(dim=-1, keepdim=True))


def test_a_buffer_is_the_end_of_a_response() -> None:
    with pytest.raises(ValueError, match="buffer_length is 6; expected a whole number from 1 to max_length=5"):
        CALLS["overlong_penalty"](buffer_length=6)


def test_flags_and_names_are_no_other_values() -> None:
    with pytest.raises(ValueError, match="grpo: norm_adv_by_std_in_grpo is 'False'; expected True or False"):
        CALLS["grpo"](norm_adv_by_std_in_grpo="False")
    with pytest.raises(ValueError, match="kl_penalty: kind is None; expected a string"):
        CALLS["kl_penalty"](kind=None)
    with pytest.raises(ValueError, match=r"rejection_mask: bounds is of type list; expected a Mapping"):
        CALLS["rejection_mask"](bounds=["token_k1"])
    with pytest.raises(ValueError, match="pf_ppo_indices: generator is 0; expected a Generator"):
        CALLS["pf_ppo_indices"](generator=0)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"token_k4": (0.5, 2.0)}, "rollout_rs: unknown mode 'token_k4'. Use any of: token_k1"),
        ({"token_k1": (0.0, 2.0)}, r"rollout_rs: bounds \(0.0, 2.0\) of token_k1; expected 0 < lower <= upper"),
        ({"seq_max_k2": (0.5, 0.1)}, r"rollout_rs: bounds \(0.5, 0.1\) of seq_max_k2; expected lower <= upper"),
        ({"seq_max_k2": (0.5, math.nan)}, r"rollout_rs: bounds \(0.5, nan\) of seq_max_k2; expected lower <= upper"),
    ],
)
def test_bounds_of_a_rejection_are_checked(bounds: dict, message: str) -> None:
    for name, key in (
        ("rejection_mask", "bounds"),
        ("rejection_metrics", "bounds"),
        ("bypass_mode loss", "rollout_rs"),
    ):
        with pytest.raises(ValueError, match=message):
            CALLS[name](**{key: bounds})


GROUPED = sorted(name for name, call in CALLS.items() if "uid" in call.tensors)
LABELS = {
    "strings": [f"prompt {n}" for n in CASE.uid.tolist()],
    "a tuple": tuple(CASE.uid.tolist()),
    "tensors": list(CASE.uid),
    "numpy integers": CASE.uid.numpy(),
    "numpy objects": np.array([f"prompt {n}" for n in CASE.uid.tolist()], dtype=object),
    "pairs": [(n, str(n)) for n in CASE.uid.tolist()],
    "32 bits": CASE.uid.int(),
}


def test_groups_may_have_any_labels() -> None:
    def numbers_of(result: object) -> list[Tensor]:
        return [result] if isinstance(result, Tensor) else [result.advantages, result.returns]  # type: ignore[attr-defined]

    different = [
        (name, kind)
        for name in GROUPED
        for kind, labels in LABELS.items()
        if not all(map(torch.equal, numbers_of(CALLS[name](uid=labels)), numbers_of(CALLS[name]())))
    ]
    assert different == []


def test_labels_that_group_nothing_are_refused() -> None:
    accepted = [
        (name, message)
        for name in GROUPED
        for wrong, message in (
            (np.array([[1], *range(1, ROWS)], dtype=object), r"uid: row 0 is \[1\]; expected a hashable value"),
            ([math.nan] * ROWS, "uid: row 0 is nan"),
            (["a"] * (ROWS - 1), r"uid has shape \[6\]; expected \[B\] = \[7\]"),
            (np.zeros((ROWS, 1)), r"uid has shape \[7, 1\]; expected \[B\]"),
            ("abcdefg", "uid is 'abcdefg'; expected"),
            ({1, 2}, "uid is of type set; expected"),
            (CASE.uid.double(), r"uid is a tensor \[7\] of float64; expected a tensor of integers \[B\]"),
        )
        if not re.search(message, refusal(CALLS[name], uid=wrong))
    ]
    assert accepted == []

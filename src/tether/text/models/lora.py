"""LoRA with peft: low-rank adapters inside the linear layers; with adapters disabled, the model is its own reference.

The adapters are inserted into the model itself, without a wrapper, so everything that accepts a transformers model
(layouts, log-probs, the critic's head, generation) accepts one with LoRA. peft is called directly: methods of
transformers such as ``model.add_adapter`` check peft's version, and transformers 5.24 requires one that is not
released.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import (
    LoraConfig,
    TaskType,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.config import ADAPTER_CONFIG
from tether.text.models.output import value_head_of
from tether.text.models.save import write_model

_ADAPTER = "default"
_PREFIX = "base_model.model."
"""Prefix that peft adds to the names of weights in a file."""
_HEADS = ("classifier", "score")
"""The heads that peft trains fully in a classifier."""
_OF_PLAIN_LORA = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    "fan_in_fan_out",
)
"""Entries of an adapter's config that determine what it computes."""
_UNREAD = {
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version"),
    *("inference_mode", "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_config", "megatron_core", "runtime_config"),
}
"""Entries that only describe an adapter, or only affect training in peft."""
_CHANGE_NO_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the base model; PiSSA and others move part of it to the adapter."""


@dataclass(frozen=True)
class LoraOptions:
    """The layers that get an adapter, ``W x + (alpha / rank) B A x``, and its size."""

    rank: int
    alpha: int = 16
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of linear layers (``q_proj``, ...), a regular expression of full names, or all except the output head.
    Experts in one fused tensor and routers are not linear layers and stay frozen; so do layers whose names peft
    mistakes for experts (the shared experts of DeepSeek)."""
    exclude_modules: str | tuple[str, ...] = ()
    """Names, or a regular expression of full names, of layers to exclude."""


def names_or_pattern(named: tuple[str, ...]) -> str | tuple[str, ...]:
    """Convert configured module names for `LoraOptions`: a single entry that is not a plain name is a pattern."""
    return named[0] if len(named) == 1 and not re.fullmatch(r"(?!all-linear$)[\w.]+", named[0]) else named


def add_lora(model: PreTrainedModel, options: LoraOptions) -> None:
    """Freeze the model and insert trainable adapters that initially change nothing; a critic's head stays trainable.

    The initial adapters are drawn from torch's global random state.

    Raises:
        ValueError: the rank is below 1, or a name or pattern matches no linear layer, or matches one of another type
            that peft would adapt.
    """
    if options.rank < 1:
        raise ValueError(f"lora_rank={options.rank}: must be at least 1 (0 in the config means no LoRA at all).")
    _check_modules(model, "target_modules", options.target_modules)
    _check_modules(model, "exclude_modules", options.exclude_modules)
    config = _config_of(
        model,
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=_as_list(options.target_modules),
        exclude_modules=_as_list(options.exclude_modules) or None,
    )
    linear, other = _layers_with_adapter(model, config)
    if other and options.target_modules == "all-linear":
        config.target_modules = linear
    elif other:
        raise ValueError(
            f"target_modules={options.target_modules}: peft puts an adapter on {other[0]} of {type(model).__name__}, "
            "which is no linear layer, so that it could not be merged into the saved weights. Name linear layers that "
            f"it takes as such: {_last_names(linear) or 'all-linear'}."
        )
    _insert(model, config)


def _config_of(model: PreTrainedModel, **options: Any) -> LoraConfig:
    name = model.name_or_path or ""
    base = Path(name)
    return LoraConfig(
        # Absolute, so that peft can load it from any folder; a hub id is not a path, and a model of this process has no
        # name.
        base_model_name_or_path=str(base.resolve()) if name and base.exists() else name,
        # With all-linear, SEQ_CLS excludes the value head, CAUSAL_LM the output head.
        task_type=TaskType.SEQ_CLS if _is_critic(model) else TaskType.CAUSAL_LM,
        **options,
    )


def _insert(model: PreTrainedModel, config: LoraConfig) -> None:
    inject_adapter_in_model(config, model, _ADAPTER)
    if _is_critic(model):
        value_head_of(model).requires_grad_(True)


def _is_critic(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is None


def _layers_with_adapter(model: PreTrainedModel, config: LoraConfig) -> tuple[list[str], list[str]]:
    """Return the names of linear and of other modules that peft would adapt, determined on a copy without weights.

    In some mixtures peft interprets layer names as those of fused experts and routers.
    """
    empty = copy.deepcopy(model, {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()})
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about ranks of experts without an adapter
            inject_adapter_in_model(copy.deepcopy(config), empty, _ADAPTER)
    except ValueError as error:
        raise ValueError(f"target_modules={config.target_modules}: {error}") from error
    adapted = {name: layer for name, layer in empty.named_modules() if isinstance(layer, BaseTunerLayer)}
    linear = [name for name, layer in adapted.items() if isinstance(layer, LoraLinear)]
    return linear, [name for name in adapted if name not in linear]


def _last_names(layers: list[str]) -> str:
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))


def load_lora(model: PreTrainedModel, directory: Path) -> None:
    """Insert adapters as `add_lora` does, and load them and a critic's head from a directory of `save_adapter` or peft.

    A directory without a head leaves the critic's unchanged. Dropout is off.

    Raises:
        ValueError: there is no adapter, it is not plain LoRA, or it belongs to another model.
    """
    if not (directory / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{directory}: holds no LoRA adapter (looked for {ADAPTER_CONFIG}).")
    config = _plain_config(model, directory)
    misfit = f"{directory}: the adapter does not fit {type(model).__name__}"
    try:
        other = _layers_with_adapter(model, config)[1]
    except ValueError as error:
        raise ValueError(f"{misfit} ({error}).") from error
    if other:
        raise ValueError(f"{misfit}: it adapts {other[0]}, which is no linear layer.")
    weights = load_peft_weights(str(directory), device="cpu")
    if _is_critic(model):
        _load_head(model, weights)
    _insert(model, config)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    adapters = {name for name in shapes if f".{_ADAPTER}." in name}
    for name, value in weights.items():
        mine = shapes.get(name.removeprefix(_PREFIX).replace(".weight", f".{_ADAPTER}.weight"), list(value.shape))
        if mine != list(value.shape):
            raise ValueError(f"{misfit}: {name} has the shape {list(value.shape)}, and the model asks for {mine}.")
    info: Any = set_peft_model_state_dict(model, weights, _ADAPTER)  # peft annotates it as the function `namedtuple`
    wrong = sorted(adapters.intersection(info.missing_keys)) + sorted(info.unexpected_keys)
    if wrong:
        raise ValueError(f"{misfit}: {wrong[0]} has no counterpart.")


def _plain_config(model: PreTrainedModel, directory: Path) -> LoraConfig:
    """Return the config of the adapter in a directory, without entries that only affect training in peft."""
    given = LoraConfig.from_pretrained(str(directory))
    plain = _config_of(model, **{name: getattr(given, name) for name in _OF_PLAIN_LORA})
    found, expected = given.to_dict(), plain.to_dict()
    found["init_lora_weights"] = given.init_lora_weights not in _CHANGE_NO_BASE and given.init_lora_weights
    expected["init_lora_weights"] = False
    if _is_critic(model):
        found["modules_to_save"] = sorted({*(given.modules_to_save or ())}.difference(_HEADS)) or None
    # peft writes an empty list for some entries whose default is None.
    unlike = [name for name in found.keys() - _UNREAD if (found[name] or None) != (expected.get(name) or None)]
    if unlike:
        name = min(unlike)
        raise ValueError(
            f"{directory}: has {name}={found[name]}, and adapters here are plain LoRA. Merge it into its base model, "
            "and start from the result."
        )
    return plain


def _load_head(critic: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Move the weights of a head from those of an adapter into a critic."""
    head = value_head_of(critic)
    names = {name: f"{_PREFIX}{_head_name(critic)}.{name}" for name in head.state_dict()}
    if weights.keys() >= set(names.values()):
        # Copied to align them like other weights; the critic's own may still be lazy.
        state = {name: weights.pop(key).to(critic.device, critic.dtype, copy=True) for name, key in names.items()}
        head.load_state_dict(state, assign=True)


def _head_name(critic: PreTrainedModel) -> str:
    head = value_head_of(critic)
    return next(name for name, module in critic.named_modules() if module is head)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters within the context: the model is then exactly what it was before `add_lora`, the
    reference."""
    adapted = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in adapted:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in adapted:
            layer.enable_adapters(enabled=True)


def save_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Write only the adapters and a critic's head, in peft's format; weights on the meta device are left out."""
    config: Any = copy.copy(model.peft_config[_ADAPTER])  # transformers declares few of its fields
    state = get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    if _is_critic(model):
        of_tokens = type(model).__name__.endswith("ForTokenClassification")
        config.task_type = TaskType.TOKEN_CLS if of_tokens else TaskType.SEQ_CLS
        config.modules_to_save = list(_HEADS)
        head = value_head_of(model).state_dict()
        state = state | {f"{_head_name(model)}.{name}": value for name, value in head.items()}
    config.save_pretrained(directory)
    loaded = {f"{_PREFIX}{name}": value for name, value in state.items() if value.device.type != "meta"}
    save_file(loaded, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def save_merged(model: PreTrainedModel, directory: Path) -> None:
    """Write the model with its adapters merged into the weights, as a plain Hugging Face directory.

    Weights on the meta device are left out, as in `tether.text.models.save.write_model`. The model itself is unchanged,
    because merging in place and unmerging would not restore the same floats. This needs memory for one more copy of the
    adapted layers.
    """
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(merged_state_dict(model), assign=True)
    if model.can_generate():
        plain.generation_config = model.generation_config
    write_model(plain, directory)


def merged_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict of the class without LoRA, with adapters merged; layers without an adapter share memory
    with the model."""
    state = model.state_dict()
    for name, layer in _adapted(model).items():
        of_layer = {key: state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
        base = {key.replace(".base_layer.", "."): value for key, value in of_layer.items() if ".base_layer." in key}
        if base[f"{name}.weight"].device.type != "meta":
            base[f"{name}.weight"] = base[f"{name}.weight"] + layer.get_delta_weight(_ADAPTER)
        state |= base
    return state


def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the class without LoRA, for `merge_adapters`; weights without an adapter share memory with the
    model."""
    own = {id(layer.base_layer.weight) for layer in _adapted(model).values()}
    parameters = {
        id(p): nn.Parameter(p.detach().clone(), requires_grad=False) if id(p) in own else p for p in model.parameters()
    }
    plain = copy.deepcopy(model, parameters)
    for name, layer in _adapted(plain).items():
        plain.set_submodule(name, layer.base_layer)
    del plain.peft_config
    return plain


@torch.no_grad()
def merge_adapters(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Set the adapted layers of a `merged_copy` to the model's current weights with adapters merged.

    Sums are computed in at least float32, and rounded once to the dtype of the weights.
    """
    for name, layer in _adapted(model).items():
        weight = plain.get_parameter(f"{name}.weight")
        exact = torch.promote_types(weight.dtype, torch.float32)
        linears = (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER], layer.base_layer)
        down, up, base = (cast(Tensor, linear.weight) for linear in linears)
        delta = (up.to(exact) @ down.to(exact)).mul_(layer.scaling[_ADAPTER])
        weight.copy_(delta.add_(base))


def _adapted(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


def _check_modules(model: PreTrainedModel, key: str, named: str | tuple[str, ...]) -> None:
    """Refuse names and patterns that peft would silently ignore."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if named == "all-linear":
        return
    if isinstance(named, str):
        try:
            matches = any(re.fullmatch(named, name) for name in linear)
        except re.error as error:
            raise ValueError(f"{key}: {named!r} is no regular expression ({error}).") from error
        if not matches:
            raise ValueError(
                f"{key}: the pattern {named!r} matches the full name of no linear layer of {type(model).__name__}. It "
                f"has: {linear[0]} and others, which end in {_last_names(linear)}."
            )
        return
    for name in named:
        if not any(f".{layer}".endswith(f".{name}") for layer in linear):
            raise ValueError(
                f"{key}: {name!r} is no linear layer of {type(model).__name__}. It has: {_last_names(linear)}."
            )


def _as_list(names: str | tuple[str, ...]) -> str | list[str]:
    return list(names) if isinstance(names, tuple) else names

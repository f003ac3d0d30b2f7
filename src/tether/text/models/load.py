"""Loads causal language models and tokenizers, prepared for packed training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tether.runtime.disk import is_content_error, summarize_error
from tether.runtime.objects import is_object, registered_object
from tether.spelling import did_you_mean
from tether.text.models.layers import use_tether_attention
from tether.text.models.lazy_weights import has_lazy_weights, lazy_model
from tether.text.models.model_path import check_is_text
from tether.text.models.packing_check import disable_dropout, prepare_for_packing

CRITIC_CLASSES = ("ForTokenClassification", "ForSequenceClassification")
"""Suffixes of the class names of saved critics."""
_ALIGNMENT = 64  # bytes; the alignment of PyTorch's allocator


def load_tokenizer(path: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model; if it has no padding token, the end-of-sequence token is used.

    Args:
        path: result of `tether.text.models.model_path.resolve_model_path`.
        trust_remote_code: whether to run Python code of the model's repository.

    Raises:
        ValueError: there is no tokenizer, or it has no end-of-sequence token.
    """
    if is_object(path):
        tokenizer = registered_object(str(path))
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"tokenizer: {type(tokenizer).__name__} is no tokenizer of transformers; give tokenizer=")
    else:
        fix = "Copy the tokenizer's files (tokenizer.json, tokenizer_config.json) into the model's directory."
        with _loading(f"{path}: no tokenizer could be loaded", fix, own_code=trust_remote_code):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{path}: its tokenizer names no end-of-sequence token. Set eos_token in tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: Path | str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    override_config: Mapping[str, object] | None = None,
    auto_class: object = AutoModelForCausalLM,
    lazy_device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal LM in eval mode with every dropout at 0, and compare packed with separate sequences.

    Args:
        path: result of `tether.text.models.model_path.resolve_model_path`.
        dtype: dtype of the weights.
        trust_remote_code: whether to run Python code of the model's repository.
        override_config: entries of the model's config to replace.
        auto_class: class that loads the weights, possibly user-defined.
        lazy_device: if set, leave the weights in their files, for use on this device, where
            `tether.text.models.lazy_weights` supports it; the caller then compares packing after reading them.

    Raises:
        ValueError: the model does not exist, the checkpoint lacks weights, an entry to override is unknown, the model
            is a saved critic, or packing does not work with its class.
    """
    if is_object(path):
        model = _copied(path, dtype, override_config)
    else:
        config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
        architecture = architecture_of(config)
        if architecture.endswith(CRITIC_CLASSES):
            raise ValueError(f"{path}: is a critic or classifier ({architecture}), not a causal LM.")
        model = from_checkpoint(
            auto_class, path, config, dtype, trust_remote_code=trust_remote_code, lazy_device=lazy_device
        )
    return prepare_model(model)


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Disable dropout, enable tether's attention, and compare packing if the weights are loaded."""
    disable_dropout(model)
    model.eval()
    if has_lazy_weights(model):
        use_tether_attention(model)
    else:
        prepare_for_packing(model)
    return model


def load_config(
    path: Path | str,
    *,
    trust_remote_code: bool = False,
    override_config: Mapping[str, object] | None = None,
    own_class: bool = False,
) -> PreTrainedConfig:
    """Load the config of a directory or hub id, with entries replaced.

    Args:
        path: result of `tether.text.models.model_path.resolve_model_path`.
        trust_remote_code: whether to run Python code of the model's repository.
        override_config: entries to replace.
        own_class: prefer transformers' class to the one in the repository, if transformers has one for this model
            type.

    Raises:
        ValueError: there is no config, or an entry to replace does not exist.
    """
    if is_object(path):
        return copy.deepcopy(_own_model(path).config)
    fix = (
        "Looked for a local directory of that name, and for a model of that id on the hub and in its cache. Write the "
        "path of a model's directory."
    )
    with _loading(f"{path}: no model config could be loaded", fix, own_code=trust_remote_code, more=(ImportError,)):
        use_remote_code = trust_remote_code and not (own_class and _kind(path) in CONFIG_MAPPING)
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=use_remote_code)
    check_is_text(path, config.to_dict())
    if not use_remote_code:
        config.__dict__.pop("auto_map", None)  # otherwise checkpoints would refer to code that they do not include
    override(config, override_config or {}, path)
    return config


def _kind(path: Path | str) -> object:
    """Return the model_type in the config.json of a directory or hub id."""
    return PreTrainedConfig.get_config_dict(path)[0].get("model_type")


def override(config: PreTrainedConfig, entries: Mapping[str, object], path: Path | str) -> None:
    """Replace entries of a config in place; refuse unknown entries and those without effect.

    Raises:
        ValueError: the message names the entry, and a similar one or the setting to use instead.
    """
    entries_of_config = config.to_dict()
    kinds, layers = entries_of_config.get("layer_types"), entries.get("num_hidden_layers")
    if kinds and isinstance(layers, int):  # the kind of attention of each layer
        entries = {"layer_types": kinds[:layers]} | dict(entries)
    for key, value in entries.items():
        if key not in entries_of_config:
            raise ValueError(
                f"override_config.{key}: the config of {path} ({type(config).__name__}) has no {key}."
                f"{did_you_mean(key, entries_of_config)}"
            )
        if "drop" in key and value:
            raise ValueError(
                f"override_config.{key}={value}: dropout is always off, or sampler and trainer would not agree on the "
                "probability of a token. Leave it out."
            )
        if key == "dtype":
            raise ValueError("override_config.dtype: set fsdp_config.dtype of the model, and rollout.dtype, instead.")
        try:
            setattr(config, key, value)
        except StrictDataclassError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ValueError(f"override_config.{key}={value!r}: {reason}. Write it as in config.json.") from error


def from_checkpoint(
    auto_class: Any,
    path: Path | str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    lazy_device: torch.device | None = None,
) -> PreTrainedModel:
    """Load weights, and refuse a checkpoint that lacks some, which transformers would silently initialise at random.

    Raises:
        ValueError: weights are missing or have another shape, or the files cannot be read.
    """
    _check_kind(auto_class, path, config)
    broken = f"{path}: its weights could not be loaded"
    with (
        _explain_import_errors(path, config, trusted=trust_remote_code),
        _loading(broken, "Copy the model's files again.", own_code=trust_remote_code),
    ):
        if lazy_device is not None:
            lazy = lazy_model(auto_class, path, config, dtype, lazy_device, trust_remote_code=trust_remote_code)
            if lazy is not None:
                return lazy
        model, report = auto_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below
        )
    for name, shape, expected_shape in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{path}: {name} has the shape {tuple(shape)}, and its config asks for {tuple(expected_shape)}. An entry "
            "of override_config or of config.json does not fit the weights; leave it out."
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{path}: the checkpoint lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}. "
            "It was saved from another model class or is incomplete."
        )
    loaded: PreTrainedModel = model
    _align(loaded)
    return loaded


def _check_kind(auto_class: Any, path: Path | str, config: PreTrainedConfig) -> None:
    """Refuse quantized weights, and models for which transformers has no class of this kind."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization.quant_method
        raise ValueError(
            f"{path}: its weights are quantized ({method}), and quantized weights are not trained. Name the "
            "plain model."
        )
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is not None and type(config) not in mapping and not hasattr(config, "auto_map"):
        architecture = (config.architectures or [config.model_type])[0]
        raise ValueError(
            f"{path}: is a {architecture}; {auto_class.__name__} of transformers has no class for "
            f"{config.model_type}. Name a language model for text alone."
        )


@contextmanager
def _explain_import_errors(path: Path | str, config: PreTrainedConfig, *, trusted: bool) -> Iterator[None]:
    """Explain the setting to change if a repository's code needs an older transformers, which by now has its own
    class."""
    try:
        yield
    except ImportError as error:
        if not trusted or config.model_type not in CONFIG_MAPPING:
            raise
        raise ValueError(
            f"{path}: the code that its author ships does not run ({_first_line(error)}). transformers has a "
            f"class of its own for {config.model_type}: leave model.trust_remote_code out "
            "(data.trust_remote_code=True still lets the tokenizer have code)."
        ) from error


def _own_model(name: Path | str) -> PreTrainedModel:
    model = registered_object(str(name))
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: {type(model).__name__} is no transformers.PreTrainedModel")
    return model


def _copied(name: Path | str, dtype: torch.dtype, override_config: Mapping[str, object] | None) -> PreTrainedModel:
    """Return a copy of a model that is an object of this process; the original is unchanged."""
    if override_config:
        raise ValueError("override_config: the model is an object, whose config is its own. Leave it out.")
    model = _own_model(name)
    # Buffers keep their dtype: rotary frequencies in bfloat16 would change the angles of distant tokens.
    weights = {id(p): nn.Parameter(p.detach().to(dtype, copy=True), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, weights)


def _align(model: PreTrainedModel) -> None:
    """Copy float32 weights that are not aligned, because a file determines their addresses, to aligned memory.

    On some processors, the rounding of MKL's products of a single row or column depends on the address, so a model's
    results would not be bitwise the same after saving and loading.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


@contextmanager
def _loading(what: str, fix: str, *, own_code: bool, more: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert an error that a library raises for broken model files to a ValueError with one sentence.

    An error in a repository's own code may be a bug, so it keeps its traceback.
    """
    expected: tuple[Any, ...] = (OSError, ValueError, SafetensorError, *more)
    try:
        yield
    except Exception as error:
        broken = isinstance(error, StrictDataclassError) or is_content_error(error)
        if not isinstance(error, expected) and (own_code or not broken):
            raise
        if not own_code and "trust_remote_code" in str(error):
            fix = (
                "Its class is in code that the model's author ships: read that code, and trust it with "
                "actor_rollout_ref.model.trust_remote_code=True (critic.model..., --trust-remote-code of generate)."
            )
        raise ValueError(f"{what} ({_first_line(error)}). {fix}") from error


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the first model class that a config names; empty if it names none."""
    named = config.architectures
    return str(named[0]) if isinstance(named, list) and named else ""


def _first_line(error: Exception) -> str:
    if isinstance(error, StrictDataclassError):  # its first line is a heading
        return " ".join(str(error).split())
    if isinstance(error, OSError | ImportError) or type(error) is ValueError:
        return str(error).strip().splitlines()[0].rstrip(".")
    return summarize_error(error)

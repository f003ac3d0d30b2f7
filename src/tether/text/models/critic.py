"""The critic: a language model's backbone with a scalar head, saved as a class that transformers can load.

The head is initialised to zero, so the first values are exactly 0 and the first advantages are the discounted rewards.
The first values of a random head would be proportional to the norm of hidden states, which training would have to undo
first. A zero head does learn: its own gradient is the value error times the hidden state, which is not zero; only the
backbone, whose gradient passes through the head, starts one step later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from tether.text.models.load import (
    CRITIC_CLASSES,
    architecture_of,
    from_checkpoint,
    load_causal_lm,
    load_config,
    prepare_model,
)
from tether.text.models.output import value_head_of

_CLASS_OF_CONFIG = (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)


def load_critic(
    path: Path | str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    override_config: Mapping[str, object] | None = None,
    lazy_device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a critic from a causal LM (zero head) or from a saved critic or reward model with one label (its own head).

    The arguments, and how the model is prepared, are those of `tether.text.models.load.load_causal_lm`.
    ``critic.save_pretrained`` writes a directory that ``AutoModelForTokenClassification`` loads
    (``AutoModelForSequenceClassification`` for families that have no class for tokens).

    Raises:
        ValueError: as for `load_causal_lm`; the saved head has more than one label; the family has neither class.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    architecture = architecture_of(config)
    if architecture.endswith(CRITIC_CLASSES):
        _check_one_label(config, path)
        for_tokens = architecture.endswith(CRITIC_CLASSES[0])
        auto_class = AutoModelForTokenClassification if for_tokens else AutoModelForSequenceClassification
        return prepare_model(
            from_checkpoint(
                auto_class, path, config, dtype, trust_remote_code=trust_remote_code, lazy_device=lazy_device
            )
        )
    model = load_causal_lm(
        path, dtype=dtype, trust_remote_code=trust_remote_code, override_config=override_config, lazy_device=lazy_device
    )
    return prepare_model(critic_from(model))


def load_reward_model(path: Path | str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a sequence classifier with one output, as `load_critic` does, but refuse a causal LM, which has no such
    head.

    Raises:
        ValueError: as for `load_critic` and `check_reward_model`.
    """
    check_reward_model(path, load_config(path, trust_remote_code=trust_remote_code))
    return load_critic(path, dtype=dtype, trust_remote_code=trust_remote_code)


def new_reward_model(path: Path | str, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load a sequence classifier with one output for training: a saved one, or a causal LM with a zero head.

    Raises:
        ValueError: as for `load_critic`, or a saved classifier with another head.
    """
    if architecture_of(load_config(path)).endswith(CRITIC_CLASSES):
        return load_reward_model(path, dtype=dtype)
    return prepare_model(critic_from(load_causal_lm(path, dtype=dtype), (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,)))


def check_reward_model(path: Path | str, config: PreTrainedConfig) -> None:
    """Check that a model returns one number for a sequence.

    Raises:
        ValueError: the model is not a classifier, has several outputs, or is not a decoder.
    """
    architecture = architecture_of(config)
    if not architecture.endswith(CRITIC_CLASSES):
        raise ValueError(
            f"{path}: {architecture or type(config).__name__} has no head that scores a sequence, so it is no reward "
            "model. Name a sequence classifier with one output; `tether rm train` makes one of this model."
        )
    if config.num_labels != 1:
        raise ValueError(
            f"{path}: its head has {config.num_labels} outputs, and a reward model has 1. Name a sequence classifier "
            "with num_labels=1."
        )
    if architecture.endswith(CRITIC_CLASSES[1]) and type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        with torch.device("meta"):
            reads_last_token = hasattr(_empty_critic(config, (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,)), "score")
        if not reads_last_token:  # encoders pool differently and use bidirectional attention
            raise ValueError(
                f"{path}: {architecture} does not read its score at the last token, as decoders do, and is not "
                "supported as a reward model. Name a sequence classifier of a decoder family."
            )


def critic_from(model: PreTrainedModel, classes: Sequence[Any] = _CLASS_OF_CONFIG) -> PreTrainedModel:
    """Combine a causal LM's backbone with a scalar zero head; the causal LM must not be used afterwards.

    Args:
        model: the causal LM.
        classes: transformers' mappings from config to class; the first one that has the family is used.

    Raises:
        ValueError: transformers has no class for the family.
    """
    config = model.config  # not a copy: transformers below 5.23 selects the layers' attention by this object
    config.num_labels = 1
    with torch.device("meta"):  # only the shape of the head is needed
        critic = _empty_critic(config, classes)
    setattr(critic, critic.base_model_prefix, model.base_model)
    head = value_head_of(critic)
    head.to_empty(device=model.device).to(model.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return critic


def empty_critic(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a new critic of the class that `load_critic` returns for a model with this config.

    Raises:
        ValueError: transformers has no class for it.
    """
    config.num_labels = 1
    for_sequences = architecture_of(config).endswith(CRITIC_CLASSES[1])
    return _empty_critic(config, _CLASS_OF_CONFIG[1:] if for_sequences else _CLASS_OF_CONFIG)


def _empty_critic(config: PreTrainedConfig, classes: Sequence[Any]) -> PreTrainedModel:
    for class_of in classes:
        if type(config) in class_of:
            critic_class: Any = class_of[type(config)]
            critic: PreTrainedModel = critic_class(config)
            return critic
    raise ValueError(
        f"{type(config).__name__}: transformers has no classification model of this family, so no critic and no "
        "reward model can be built on it. Name a model of another family: of a critic, one with the policy's tokens in "
        "critic.model.path; algorithm.adv_estimator=grpo and others need no critic."
    )


def _check_one_label(config: PreTrainedConfig, path: Path | str) -> None:
    if config.num_labels != 1:
        raise ValueError(
            f"{path}: its head has {config.num_labels} labels, a critic's has 1. Name a causal LM instead."
        )

"""The learned reward model of a run: checks of its config and tokenizer, and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tether.assembly.groups import RankGroups
from tether.assembly.loading import on_device
from tether.assembly.named_inputs import NO_TEMPLATE
from tether.assembly.number_formats import DTYPES, number_format
from tether.batch import TrainBatch
from tether.config import RunConfig
from tether.config.schema import ScoringServerConfig
from tether.data.chat import dated_template
from tether.execution import Replicas, ShardedEngine
from tether.models.language.critic import check_reward_model, load_reward_model
from tether.models.language.load import is_gguf, load_config, load_tokenizer
from tether.models.language.model_path import resolve_model_path
from tether.rewards.service import Endpoint, ModelRewards, RemoteRewards, Rewards, ServedRewardModel
from tether.runtime.cache import cache_dir
from tether.runtime.http import check_listening, secret_from
from tether.runtime.machine import resolve_device
from tether.training import Engine
from tether.training.division import balanced, in_order
from tether.training.engines.local import LocalEngine
from tether.training.text import ConversationReader, MicroBatching, RewardModel, ScoreOutputs

SCORER = "reward_model"
"""Name of the rank component that runs it."""


def reward_model_path(config: RunConfig) -> Path | str | None:
    """Return the path of the reward model; None if the run has none."""
    model = config.reward_model
    return resolve_model_path(str(model.model.path), cache_dir()) if model.enable else None


def check_scoring(config: RunConfig, policy_tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a reward model that cannot read the run's responses, without loading weights.

    Args:
        config: configuration of the run, possibly without a reward model.
        policy_tokenizer: its ids are the model's input if ``input_tokenizer`` is null.

    Raises:
        ValueError: it is not a classifier with one output, has no chat template, or its vocabulary is smaller than the
            tokenizer's.
    """
    path, model = reward_model_path(config), config.reward_model.model
    if path is None:
        return
    if is_gguf(path):
        raise ValueError(f"reward_model.model.path={path}: a GGUF file holds no reward model; name a directory")
    settings = load_config(path, trust_remote_code=model.trust_remote_code)
    check_reward_model(f"reward_model.model.path={path}", settings)
    tokenizer = policy_tokenizer if model.input_tokenizer is None else _tokenizer(config, path)
    if model.input_tokenizer is not None and not tokenizer.chat_template:
        raise ValueError(f"reward_model.model.path={path}: {NO_TEMPLATE}")
    whose = "the policy's tokenizer" if model.input_tokenizer is None else "its tokenizer"
    check_vocabulary(f"reward_model.model.path={path}", settings, tokenizer, whose)
    if model.input_tokenizer is None:
        _check_same_tokens(config, path, policy_tokenizer)


def check_vocabulary(what: str, settings: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, whose: str) -> None:
    """Refuse a model whose vocabulary is smaller than the tokenizer's.

    Args:
        what: key and path of the model, for the message.
        settings: config of the model.
        tokenizer: tokenizer of the ids.
        whose: name of the tokenizer in the message.

    Raises:
        ValueError: the vocabulary is smaller.
    """
    vocabulary = settings.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"{what}: its vocabulary has {vocabulary} tokens, and {whose} {len(tokenizer)}. Take the tokenizer that it "
            "was trained with, or resize its embeddings."
        )


def build_reward_model(config: RunConfig, groups: RankGroups | None = None) -> Rewards:
    """Build the reward model of a run, on its devices or behind a server.

    Args:
        config: configuration of the run.
        groups: processes of several devices, which load it as `SCORER`; None: load it in this process.

    Raises:
        ValueError: it cannot be loaded, or the server does not answer.
    """
    path = reward_model_path(config)
    assert path is not None
    if config.reward_model.server.url is not None:
        return _served(config, path, config.reward_model.server)
    engine: Engine[TrainBatch, ScoreOutputs]
    if groups is None:
        engine = reward_engine(config, resolve_device(config.trainer.device))
    else:
        assign = balanced if config.trainer.balance_batch else in_order
        group = groups.of[SCORER]
        engine = ShardedEngine(group, SCORER, Replicas.contiguous(group.size, 1), assign)
    return ModelRewards(RewardModel(engine, _reader(config, path)))


def reward_engine(config: RunConfig, device: torch.device, make: Callable[..., Any] = LocalEngine) -> Any:
    """Build the engine that runs the reward model.

    Raises:
        ValueError: the model cannot be loaded.
    """
    settings, path = config.reward_model, reward_model_path(config)
    assert path is not None
    dtype = DTYPES[number_format(settings.model.fsdp_config.dtype, device)]
    model = on_device(load_reward_model(path, dtype=dtype, trust_remote_code=settings.model.trust_remote_code), device)
    if settings.use_dynamic_bsz:
        tokens, key = settings.forward_max_token_len_per_gpu, "reward_model.forward_max_token_len_per_gpu"
        micro = MicroBatching(max_tokens=tokens, key=key)
    else:
        micro = MicroBatching(settings.micro_batch_size_per_gpu, key="reward_model.micro_batch_size_per_gpu")
    return make(model, micro)


def _served(config: RunConfig, path: Path | str, server: ScoringServerConfig) -> RemoteRewards:
    key = "reward_model.server"
    assert server.url is not None
    check_listening(server.url, f"{key}.url")
    secret = secret_from(server.api_key_env, f"{key}.api_key_env")
    endpoint = Endpoint(f"{server.url.rstrip('/')}/classify", secret, server.timeout, server.attempts)
    name = server.model or str(config.reward_model.model.path)
    return RemoteRewards(
        ServedRewardModel(_reader(config, path).written, endpoint, server.api, name), server.max_concurrent
    )


def _reader(config: RunConfig, path: Path | str) -> ConversationReader:
    settings = load_config(path, trust_remote_code=config.reward_model.model.trust_remote_code)
    text = settings.get_text_config()
    tokenizer = None if config.reward_model.model.input_tokenizer is None else _tokenizer(config, path)
    return ConversationReader(
        tokenizer=tokenizer,
        pad_id=settings.pad_token_id,
        vocabulary=text.vocab_size,
        max_length=config.reward_model.max_length or text.max_position_embeddings,
        chat_template=None if tokenizer is None else dated_template(tokenizer, None, config.data.chat_template_date),
    )


def _check_same_tokens(config: RunConfig, path: Path | str, policy_tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse the policy's token ids if the reward model has its own tokenizer and that maps them to other texts."""
    try:
        tokenizer = _tokenizer(config, path)
    except ValueError:  # it does not need a tokenizer
        return
    theirs, policys = _texts(tokenizer), _texts(policy_tokenizer)
    added = (
        policy_tokenizer.get_added_vocab().keys() | tokenizer.get_added_vocab().keys()
    )  # an added token, such as padding, may differ
    for id_ in sorted(theirs.keys() | policys.keys()):
        has, writes = theirs.get(id_), policys.get(id_)
        ends = has is not None and id_ == policy_tokenizer.eos_token_id  # it occurs in each complete response
        if has != writes and (ends or not {has, writes} & added):
            model_text, policy_text = (f"{text!r}" if text is not None else "none" for text in (has, writes))
            raise ValueError(
                f"reward_model.model.input_tokenizer=null: {path} has another tokenizer than the policy (token {id_} "
                f"is {model_text}, the policy's {policy_text}), so it would not read what the policy wrote. Leave the "
                "key out: responses are then decoded, and written by its own tokenizer and chat template."
            )


def _texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {id_: token for token, id_ in tokenizer.get_vocab().items()}


def _tokenizer(config: RunConfig, path: Path | str) -> PreTrainedTokenizerBase:
    return load_tokenizer(path, trust_remote_code=config.reward_model.model.trust_remote_code)

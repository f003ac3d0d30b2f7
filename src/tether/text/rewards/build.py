"""Builds the rewards of a run: rules, functions, a learned reward model, judges, or a combination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tether.batch import TrainBatch
from tether.config import RunConfig, integration_config
from tether.distributed.groups import RankGroups
from tether.distributed.handles import Replicas
from tether.integrations import integration
from tether.loop.engine import Engine
from tether.runtime.cache import cache_dir
from tether.runtime.http import check_listening, read_secret
from tether.runtime.machine import resolve_device
from tether.runtime.objects import is_object
from tether.runtime.threads import usable_cores
from tether.spelling import did_you_mean
from tether.text.data.config import DataConfig
from tether.text.data.prompts import ControlTokens, PromptDataset, dated_template, decode, write_conversation
from tether.text.data.rows import Row
from tether.text.input_checks import NO_TEMPLATE, judge_of, row_agent
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.packing import MicroBatching, balanced, in_order
from tether.text.learning.scoring import ConversationReader, RewardModel, ScoreOutputs
from tether.text.loading import DTYPES, load_engine, number_format, on_device
from tether.text.models.critic import check_reward_model, load_reward_model
from tether.text.models.layers import context_length
from tether.text.models.load import load_config, load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.rewards.config import (
    RewardModelConfig,
    ScoringModelConfig,
    ScoringServerConfig,
)
from tether.text.rewards.config_parts import (
    FunctionPart,
    IntegrationPart,
    JudgePart,
    RewardPart,
    RulesPart,
    check_has_part,
    read_parts,
)
from tether.text.rewards.custom import CustomReward, load_reward_function
from tether.text.rewards.judge import BatchJudge, Judge, RemoteJudge, last_words
from tether.text.rewards.outcome import RewardError
from tether.text.rewards.router import check_sources, check_truth
from tether.text.rewards.sandbox import Limits, ProgramOptions, Server
from tether.text.rewards.service import (
    BatchedRewards,
    CombinedRewards,
    Endpoint,
    LocalRewards,
    ModelRewards,
    RemoteRewards,
    RewardPool,
    Rewards,
    ServedRewardModel,
    WeightedReward,
)
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.text.sharded import ShardedEngine

SCORER = "reward_model"
"""Name of the rank component that runs the reward model."""


def reward_model_path(reward: RewardModelConfig) -> Path | str | None:
    """Return the path of the reward model; None if the run has none."""
    return resolve_model_path(str(reward.model.path), cache_dir()) if reward.enable else None


def check_scoring(reward: RewardModelConfig, policy_tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a reward model that cannot score the run's responses, without loading weights.

    Args:
        reward: section of the reward, possibly without a model.
        policy_tokenizer: its ids are the model's input if ``input_tokenizer`` is null.

    Raises:
        ValueError: it is not a classifier with one output, has no chat template, or its vocabulary is smaller than the
            tokenizer's.
    """
    path, model = reward_model_path(reward), reward.model
    if path is None:
        return
    settings = load_config(path, trust_remote_code=model.trust_remote_code)
    check_reward_model(f"reward_model.model.path={path}", settings)
    tokenizer = policy_tokenizer if model.input_tokenizer is None else _tokenizer(model, path)
    if model.input_tokenizer is not None and not tokenizer.chat_template:
        raise ValueError(f"reward_model.model.path={path}: {NO_TEMPLATE}")
    whose = "the policy's tokenizer" if model.input_tokenizer is None else "its tokenizer"
    check_vocabulary(f"reward_model.model.path={path}", settings, tokenizer, whose)
    if model.input_tokenizer is None:
        _check_same_tokens(model, path, policy_tokenizer)


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
    """Build the reward model of a run, on its devices or on a server.

    Args:
        config: configuration of the run.
        groups: processes of several devices, which load it as `SCORER`; None: load it in this process.

    Raises:
        ValueError: it cannot be loaded, or the server does not respond.
    """
    reward, path = config.reward_model, reward_model_path(config.reward_model)
    assert path is not None
    reader = _reader(reward, path, config.data.chat_template_date)
    if reward.server.url is not None:
        return _served(reward.server, reader, str(reward.model.path))
    engine: Engine[TrainBatch, ScoreOutputs]
    if groups is None:
        engine = reward_engine(reward, resolve_device(config.trainer.device))
    else:
        assign = balanced if config.trainer.balance_batch else in_order
        group = groups.of[SCORER]
        engine = ShardedEngine(group, SCORER, Replicas.contiguous(group.size, 1), assign)
    return ModelRewards(RewardModel(engine, reader))


def reward_engine(reward: RewardModelConfig, device: torch.device, make: Callable[..., Any] = LocalEngine) -> Any:
    """Build the engine that runs the reward model.

    Raises:
        ValueError: the model cannot be loaded.
    """
    path = reward_model_path(reward)
    assert path is not None
    dtype = DTYPES[number_format(reward.model.fsdp_config.dtype, device)]
    model = on_device(load_reward_model(path, dtype=dtype, trust_remote_code=reward.model.trust_remote_code), device)
    if reward.use_dynamic_bsz:
        tokens, key = reward.forward_max_token_len_per_gpu, "reward_model.forward_max_token_len_per_gpu"
        micro = MicroBatching(max_tokens=tokens, key=key)
    else:
        micro = MicroBatching(reward.micro_batch_size_per_gpu, key="reward_model.micro_batch_size_per_gpu")
    return make(model, micro)


def _served(server: ScoringServerConfig, reader: ConversationReader, model: str) -> RemoteRewards:
    key = "reward_model.server"
    assert server.url is not None
    check_listening(server.url, f"{key}.url")
    secret = read_secret(server.api_key_env, f"{key}.api_key_env")
    endpoint = Endpoint(f"{server.url.rstrip('/')}/classify", secret, server.timeout, server.attempts)
    name = server.model or model
    return RemoteRewards(ServedRewardModel(reader.written, endpoint, server.api, name), server.max_concurrent)


def _reader(reward: RewardModelConfig, path: Path | str, template_date: str | None) -> ConversationReader:
    settings = load_config(path, trust_remote_code=reward.model.trust_remote_code)
    text = settings.get_text_config()
    tokenizer = None if reward.model.input_tokenizer is None else _tokenizer(reward.model, path)
    return ConversationReader(
        tokenizer=tokenizer,
        pad_id=settings.pad_token_id,
        vocabulary=text.vocab_size,
        max_length=reward.max_length or text.max_position_embeddings,
        chat_template=None if tokenizer is None else dated_template(tokenizer, None, template_date),
    )


def _check_same_tokens(model: ScoringModelConfig, path: Path | str, policy_tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse the policy's token ids if the reward model has its own tokenizer, and it maps them to different text."""
    try:
        tokenizer = _tokenizer(model, path)
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


def _tokenizer(model: ScoringModelConfig, path: Path | str) -> PreTrainedTokenizerBase:
    return load_tokenizer(path, trust_remote_code=model.trust_remote_code)


def check_judge(key: str, section: JudgePart) -> None:
    """Refuse an unusable judge, without loading a model.

    Raises:
        ValueError: the template, parser, endpoint, key or model is invalid; the message begins with `key`.
    """
    judge_of(key, section)
    if section.base_url is not None:
        read_secret(section.api_key_env, f"{key}.api_key_env")
        check_listening(section.base_url, f"{key}.base_url")
    else:
        path = resolve_model_path(str(section.path), cache_dir())
        if not load_tokenizer(path).chat_template:
            raise ValueError(f"{key}.path={path}: its tokenizer has no chat template, by which a judge is asked")


def build_judge(
    key: str, section: JudgePart, device: torch.device, template_date: str | None
) -> RemoteRewards | ModelRewards:
    """Build a judge, whose model, if it runs in this process, is on `device`.

    Raises:
        ValueError: as in `check_judge`, or the model cannot be loaded.
    """
    judge = judge_of(key, section)
    if section.path is not None:
        path = resolve_model_path(section.path, cache_dir())
        engine = load_engine(path, device, section.dtype)
        context = context_length(load_config(path))
        tokenizer = load_tokenizer(path)
        template = dated_template(tokenizer, None, template_date)
        return ModelRewards(model_judge(judge, EngineAnswers(engine, tokenizer, section.max_tokens, context, template)))
    endpoint = Endpoint(
        f"{str(section.base_url).rstrip('/')}/chat/completions",
        read_secret(section.api_key_env, f"{key}.api_key_env"),
        section.timeout,
        section.attempts,
    )
    options = {
        "model": section.model,
        "temperature": section.temperature,
        "max_tokens": section.max_tokens,
        **section.extra_body,
    }
    sent = {name: value for name, value in options.items() if value is not None}
    return RemoteRewards(RemoteJudge(judge, endpoint, sent), section.max_concurrent)


def model_judge(judge: Judge, answers: EngineAnswers) -> BatchJudge:
    """Return a judge in this process; control tokens in a response are plain text to it."""
    return BatchJudge(judge, answers, answers.control.as_text)


class EngineAnswers:
    """Generates greedy answers with a model in this process.

    Args:
        engine: engine of the model.
        tokenizer: tokenizer of the model.
        max_tokens: maximum number of tokens of an answer; a longer one is an error.
        context: maximum number of positions of the model; None: no limit.
        chat_template: replaces the tokenizer's template.
    """

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        context: int | None,
        chat_template: str | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._max_tokens, self._context = engine, tokenizer, max_tokens, context
        self._chat_template = chat_template
        self.control = ControlTokens(tokenizer)

    def __call__(self, conversations: Sequence[Sequence[dict[str, str]]]) -> list[str | RewardError]:
        """Return the answer to each conversation, or an error."""
        read = [self._read(messages) for messages in conversations]
        prompts = [ids for ids in read if not isinstance(ids, RewardError)]
        answers = iter(self._answer(prompts) if prompts else [])
        return [ids if isinstance(ids, RewardError) else next(answers) for ids in read]

    def _read(self, messages: Sequence[dict[str, str]]) -> Any:
        """Return the token ids of a conversation, or an error if it is not a valid prompt."""
        try:
            arguments = {"chat_template": self._chat_template, "add_generation_prompt": True}
            text = write_conversation(messages, self._tokenizer, **arguments)
        except ValueError as error:
            return RewardError(f"of the judge, {error}")
        ids = self.control.tokenize(text)
        if self._context is not None and len(ids) + self._max_tokens > self._context:
            room = f"{len(ids)} tokens to read and {self._max_tokens} to answer"
            return RewardError(f"the judge has {self._context} positions, and {room} are more")
        return ids

    def _answer(self, prompts: Sequence[Any]) -> list[str | RewardError]:
        sampling = SamplingParams(self._max_tokens, temperature=0.0, record_kept=False)
        drawn = self._engine.generate(prompts, sampling, NoiseKey(0, 0))
        rows = zip(drawn.response_ids, drawn.response_length.tolist(), drawn.truncated.tolist(), strict=True)
        answers: list[str | RewardError] = []
        for ids, length, truncated in rows:
            text = decode(self._tokenizer, ids[:length].tolist(), skip_special_tokens=True)
            answers.append(self._cut(text) if truncated else text)
        return answers

    def _cut(self, text: str) -> RewardError:
        """Return the error for a truncated answer; any score in it might have been revised later."""
        what = f"the judge did not end its answer within {self._max_tokens} tokens"
        return RewardError(f"{what}; it ends in {last_words(text)!r}")


PARTS = "reward_model.parts"


def check_rewards(config: RunConfig, prompts: PromptDataset) -> None:
    """Refuse prompts whose responses cannot be scored, and unusable judges.

    Raises:
        ValueError: a data source has no rule or reward, tests cannot be read, programs cannot be run, or a judge's
            template, endpoint or key is invalid.
    """
    sections = read_parts(config.reward_model.parts)
    for name, section in sections.items():
        if isinstance(section, JudgePart):
            check_judge(f"{PARTS}.{name}", section)
    if sections:
        prompts.check_rows(lambda row: check_has_part(sections, row.data_source))
    rules = next((section for section in sections.values() if isinstance(section, RulesPart)), None)
    asks_rules = rules is not None if sections else not config.reward_model.enable
    if config.actor_rollout_ref.rollout.agent.program_scores:
        return
    if not asks_rules or config.custom_reward_function.path is not None:
        return
    sources: set[str] = set()

    def by_rule(row: Row) -> bool:
        in_part = rules is None or rules.data_sources is None or row.data_source in rules.data_sources
        return (
            in_part and row_agent(config.actor_rollout_ref.rollout.agent, row).environment is None
        )  # an environment scores its own rows

    def look_at_truth(row: Row) -> None:
        if by_rule(row):
            sources.add(row.data_source)
            check_truth(row.data_source, row.ground_truth, row.extra_info, from_columns=row.from_columns)

    prompts.check_rows(look_at_truth)
    check_sources(sources, program_options(config.reward_model))


def check_reward_parts_are_used(data: DataConfig, reward: RewardModelConfig, datasets: Sequence[PromptDataset]) -> None:
    """Refuse a reward for a data source that no row has.

    A run on a subset of the rows (`data.train_max_samples`, `data.val_max_samples`) is not checked, because other rows
    may have the source.

    Raises:
        ValueError: the message names the reward and the source.
    """
    if data.train_max_samples != -1 or data.val_max_samples != -1:
        return
    sections = read_parts(reward.parts)
    if all(section.data_sources is None for section in sections.values()):
        return  # avoids reading every row
    present: set[str] = set()
    for prompts in datasets:
        prompts.check_rows(lambda row: present.add(row.data_source))
    for name, section in sections.items():
        for source in section.data_sources or ():
            if source not in present:
                raise ValueError(
                    f"{PARTS}.{name}.data_sources: no row has {source!r} as its `data_source`, so nothing would be "
                    f"scored for it. Correct it, or leave it out.{did_you_mean(source, sorted(present))}"
                )


def program_options(reward: RewardModelConfig) -> ProgramOptions:
    """Return the options for running programs in responses."""
    sandbox, fusion = reward.sandbox, reward.sandbox_fusion
    server = None
    if fusion.url is not None:
        server = Server(fusion.url, fusion.memory_limit_mb, fusion.max_concurrent // _num_workers(reward))
    limits = Limits(sandbox.timeout, sandbox.memory_limit_mb, sandbox.max_processes)
    return ProgramOptions(sandbox.languages, sandbox.max_tests, limits, sandbox.unconfined, server)


def _num_workers(reward: RewardModelConfig) -> int:
    """Return the number of reward processes; the default is one per core, or the concurrency of a program server."""
    fusion = reward.sandbox_fusion
    limit = fusion.max_concurrent if fusion.url is not None else usable_cores()
    return reward.num_workers or min(usable_cores(), limit)


def build_rewards(config: RunConfig, groups: RankGroups | None = None) -> Rewards:
    """Build and start the rewards.

    Args:
        config: configuration of the run.
        groups: processes of several devices, which share the reward model.

    Raises:
        ValueError: a function, a reward model or a judge cannot be loaded.
    """
    sections = read_parts(config.reward_model.parts)
    if not sections:
        return build_reward_model(config, groups) if config.reward_model.enable else _build_rules(config)
    # Models are built first, so that their errors leave no process behind.
    order = sorted(sections, key=lambda name: isinstance(sections[name], RulesPart | FunctionPart | IntegrationPart))
    with ExitStack() as stack:
        built = {name: stack.enter_context(_build_part(config, name, sections[name], groups)) for name in order}
        stack.pop_all()
    return CombinedRewards({name: _weighted(section, built[name]) for name, section in sections.items()})


def _weighted(section: RewardPart, rewards: Rewards) -> WeightedReward:
    sources = frozenset(section.data_sources) if section.data_sources is not None else None
    return WeightedReward(rewards, section.weight, section.optional, sources)


def _build_part(config: RunConfig, name: str, section: RewardPart, groups: RankGroups | None) -> Rewards:
    if isinstance(section, FunctionPart):
        return _pool(
            config.reward_model, CustomReward(section.path, section.name, section.reward_kwargs, key=f"{PARTS}.{name}")
        )
    if isinstance(section, JudgePart):
        return build_judge(
            f"{PARTS}.{name}", section, resolve_device(config.trainer.device), config.data.chat_template_date
        )
    if isinstance(section, IntegrationPart):
        module, keys = integration(section.kind, "rewards"), integration_config(config.integrations, section.kind)
        rewards: Rewards = module.build_rewards(keys, _num_workers(config.reward_model), config.reward_model.timeout)
        return rewards
    if isinstance(section, RulesPart):
        return _build_rules(config)
    return build_reward_model(config, groups)


def _build_rules(config: RunConfig) -> RewardPool | LocalRewards | BatchedRewards:
    """Build the reward by rules or a function. A function from a file runs in worker processes, an object in this
    one."""
    custom, reward = config.custom_reward_function, config.reward_model
    if reward.reward_manager == "batch":
        if is_object(custom.path):
            raise ValueError("reward_model.reward_manager=batch: its function has to be in a file, and not an object")
        named = CustomReward(str(custom.path), custom.name, custom.reward_kwargs)
        return BatchedRewards(named, timeout=reward.timeout)
    if is_object(custom.path):
        function = load_reward_function(str(custom.path), custom.name, custom.reward_kwargs)
        return LocalRewards(function, reward.timeout, in_thread=config.trainer.async_mode != "off")
    return _pool(reward, CustomReward(custom.path, custom.name, custom.reward_kwargs) if custom.path else None)


def _pool(reward: RewardModelConfig, function: CustomReward | None) -> RewardPool:
    return RewardPool(
        function, num_workers=_num_workers(reward), timeout=reward.timeout, programs=program_options(reward)
    )

"""Components of a run on their own: to evaluate a checkpoint, try a reward, or pretrain a critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tether.batch import Prompt
from tether.config import LoadedConfig, RunConfig, with_values
from tether.runtime.cache import cache_dir
from tether.runtime.global_rng import seed_rng
from tether.runtime.machine import resolve_device, set_threads
from tether.text.data.prompts import decode
from tether.text.input_checks import is_scored_by_models, row_agent, scoring_reads_only_texts
from tether.text.inputs import build_dataset, build_tokenizer
from tether.text.learning.build import build_critic, critic_engine, load_value_model, update_plan
from tether.text.learning.build_collector import build_collector
from tether.text.learning.collector import Collector, ScoredResponses
from tether.text.learning.critic_pretraining import explained_variance_metrics, split_by_prompt, value_batch
from tether.text.learning.evaluation import Evaluation
from tether.text.learning.losses import CriticLoss
from tether.text.learning.pretraining import Pretraining
from tether.text.learning.rollout_files import read_rollouts
from tether.text.loading import decided_formats, load_engine
from tether.text.models.load import load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.models.saved_adapter import check_adapter
from tether.text.rewards.audit import ProbeScores
from tether.text.rewards.build import build_rewards, check_rewards, check_scoring
from tether.text.rewards.outcome import RewardRequest
from tether.text.rewards.service import Rewards
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.text.turns.build import build_tool_pool, check_agents, scored_by_environments
from tether.text.turns.tools import ToolPool


@contextmanager
def build_evaluator(loaded: LoadedConfig, model: Path | str) -> Iterator[tuple[Evaluation, Collector]]:
    """Build the validation of a model (a directory, a GGUF file or a hub id) from a configuration.

    Raises:
        ValueError: ``data.val_files`` is empty, or inputs are invalid.
    """
    config = loaded.config
    if not config.data.val_files:
        raise ValueError(
            "data.val_files: nothing to evaluate on. Give held-out prompts, for example data.val_files=FILE"
        )
    set_threads(config.trainer.num_threads)
    tokenizer = build_tokenizer(config.data, config.actor_rollout_ref.model, model)
    with ExitStack() as resources:
        tools = _tools(config, resources)
        data = config.data
        agent = config.actor_rollout_ref.rollout.agent.default_agent_loop
        dataset = build_dataset(
            data, agent, tokenizer, data.val_files, data.val_max_samples, shuffle=False, tools=tools
        )
        check_agents(config.actor_rollout_ref.rollout, dataset, tools)
        check_rewards(config, dataset)
        check_scoring(config.reward_model, tokenizer)
        dtype, trusted = config.actor_rollout_ref.rollout.dtype, config.actor_rollout_ref.model.trust_remote_code
        engine = load_engine(model, resolve_device(config.trainer.device), dtype, trust_remote_code=trusted)
        evaluation = Evaluation(
            dataset, SamplingParams.for_validation(config.actor_rollout_ref.rollout), data.val_batch_size
        )
        rewards = resources.enter_context(build_rewards(config))
        yield evaluation, build_collector(config, engine, rewards, tokenizer, [dataset], tools, resources)


def _tools(config: RunConfig, resources: ExitStack) -> ToolPool | None:
    tools = build_tool_pool(config.actor_rollout_ref.rollout, config.data)
    return resources.enter_context(tools) if tools else None


@dataclass(frozen=True)
class RewardTrial:
    """The inputs of a reward trial."""

    prompts: list[Prompt]
    rewards: Rewards
    sampled: ProbeScores | None
    """Responses of the policy, possibly conversations: `group_size` to each of the first prompts."""
    group_size: int
    in_turns: bool
    """Whether the reward receives conversations."""
    cut: Callable[[str], str]
    """Truncates a response to ``data.max_response_length`` tokens if a model with a limited context scores it."""


@contextmanager
def build_reward_trial(
    config: RunConfig, *, rows: int, samples: int, on_sampled: Callable[[int], None] = lambda done: None
) -> Iterator[RewardTrial]:
    """Build the reward of a configuration, and the samples to try it on.

    Args:
        config: configuration of data, reward and policy.
        rows: number of rows, spread over the training data.
        samples: number of responses to sample from the untrained policy; 0 loads no weights, and no tokenizer if only
            texts are scored.
        on_sampled: called with the number of responses so far.

    Raises:
        ValueError: inputs are invalid.
    """
    if config.reward_model.enable and config.reward_model.model.input_tokenizer is None:
        raise ValueError(
            "reward_model.model.input_tokenizer=null: the replies that are tried are texts, not the policy's tokens; "
            "leave it out"
        )
    set_threads(config.trainer.num_threads)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    tokenizer = None
    if samples or not scoring_reads_only_texts(config):
        tokenizer = build_tokenizer(config.data, model, resolve_model_path(model.tokenizer_path, cache_dir()))
    with ExitStack() as resources:
        tools = _tools(config, resources)
        data = config.data
        agent = rollout.agent.default_agent_loop
        dataset = build_dataset(
            data, agent, tokenizer, data.train_files, data.train_max_samples, shuffle=False, tools=tools
        )
        check_agents(config.actor_rollout_ref.rollout, dataset, tools)
        if (
            tools
            and scored_by_environments(config.custom_reward_function, config.reward_model)
            and all(row_agent(rollout.agent, prompt).environment for prompt in dataset)
        ):
            raise ValueError("every row is scored by its environment alone, so there is no reward to check")
        if rollout.agent.program_scores:
            raise ValueError("the program scores its episodes, so there is no reward to check")
        check_rewards(config, dataset)
        if tokenizer:
            check_scoring(config.reward_model, tokenizer)
        count = min(rows, len(dataset))
        prompts = [dataset[i * len(dataset) // count] for i in range(count)]
        with build_rewards(config) as rewards:
            sampled = None
            if samples and tokenizer:
                path = resolve_model_path(model.path, cache_dir())
                device, trusted = resolve_device(config.trainer.device), model.trust_remote_code
                engine = load_engine(path, device, rollout.dtype, trust_remote_code=trusted)
                collector = build_collector(config, engine, rewards, tokenizer, [dataset], tools, resources)
                collector = replace(collector, max_error_rate=1.0)
                sampled_prompts = prompts[: max(1, samples // rollout.n)]
                key = NoiseKey(config.trainer.seed, step=0)
                scored = collector.collect(
                    sampled_prompts, SamplingParams.from_config(rollout), key, lambda done, _: on_sampled(done)
                )
                sampled = _probe(scored, list(rewards.durations) or [0.0])
            cut: Callable[[str], str] = str
            if tokenizer and is_scored_by_models(config.reward_model):
                cut = partial(_cut, tokenizer, data.max_response_length)
            in_turns = tools is not None or rollout.agent.plays_endpoint
            yield RewardTrial(prompts, rewards, sampled, rollout.n, in_turns, cut)


def _cut(tokenizer: PreTrainedTokenizerBase, limit: int, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if len(ids) <= limit else decode(tokenizer, ids[:limit], skip_special_tokens=True)


def _probe(scored: ScoredResponses, seconds: list[float]) -> ProbeScores:
    """Return sampled responses for the audit, with the full text of conversations."""
    requests = [
        RewardRequest(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
        for prompt, text in ((scored.prompt_of(row), text) for row, text in enumerate(scored.texts))
    ]
    return ProbeScores("sampled", requests, scored.outcomes, seconds)


def build_critic_pretraining(config: RunConfig, rollouts: Path, *, epochs: int, held_out: float) -> Pretraining:
    """Build the pretraining of a configuration's critic on stored rollouts.

    Args:
        config: its ``critic`` section, ``algorithm.gamma`` and seed are used.
        rollouts: folder written by ``trainer.rollout_data_dir``.
        epochs: number of passes over the rollouts.
        held_out: share of the prompts on which the critic is validated.

    Raises:
        ValueError: the configuration has no text critic, or the rollouts are invalid.
    """
    if config.env.train.id is not None:
        raise ValueError("env.train.id: embodied runs store no rollouts, so no critic can be trained on them")
    if not config.critic.enable:
        raise ValueError("critic.enable: there is no critic to train; use algorithm.adv_estimator=gae")
    responses = read_rollouts(rollouts)  # before a model is loaded
    learned, kept_apart = split_by_prompt(responses, held_out, config.trainer.seed)
    set_threads(config.trainer.num_threads)
    seed_rng(config.trainer.seed)
    device, gamma = resolve_device(config.trainer.device), config.algorithm.gamma
    config = with_values(config, decided_formats(config, device))
    plan = replace(update_plan(config.critic, config.actor_rollout_ref.rollout.n, config.trainer.seed), epochs=epochs)
    steps = epochs * math.ceil(len(learned) / plan.mini_batch_rows)
    path = resolve_model_path(config.critic.model.path, cache_dir())
    tokenizer_path = resolve_model_path(config.actor_rollout_ref.model.tokenizer_path, cache_dir())
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
    if config.critic.model.lora_adapter_path is not None:
        check_adapter("critic.model", config.critic.model, path)
    model = load_value_model(config.critic.model, path, device, None, seed=config.trainer.seed)
    learner = build_critic(config, critic_engine(config, model, tokenizer, steps, incidents=None))
    assert isinstance(learner.loss.function, CriticLoss)
    unclipped = replace(learner.loss.function, cliprange_value=None)
    learner = replace(learner, loss=replace(learner.loss, function=unclipped))
    learned_batch, held_out_batch = (value_batch(split, gamma) for split in (learned, kept_apart))
    return Pretraining(learner, learned_batch, held_out_batch, plan, explained_variance_metrics, role="critic")
